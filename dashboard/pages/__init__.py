"""The pages: one module each with a function `page(state)`, named here in the order of the menu."""

from __future__ import annotations

PAGES = {
    "runs": "Runs",
    "overview": "Overview",
    "requests": "Requests",
    "kv_cache": "KV cache",
    "latency": "Latency and SLO",
    "step_time": "Step-time model",
    "compare": "Compare",
    "capacity": "Capacity",
    "live": "Live",
}
"""Module (and path in the address) -> title."""
FIRST_PAGE = "overview"
