"""Sweeps over configurations, and what can be planned with them.

The names below are imported when they are asked for: whoever reads results only does not load the simulator.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from servetwin.sim.planning.answer import Plan, plan
    from servetwin.sim.planning.results import Results, read_results
    from servetwin.sim.planning.spec import RunSpec
    from servetwin.sim.planning.study import Study

__all__ = ["Plan", "Results", "RunSpec", "Study", "plan", "read_results"]

_PLACES = {
    "Plan": "answer",
    "Results": "results",
    "RunSpec": "spec",
    "Study": "study",
    "plan": "answer",
    "read_results": "results",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
