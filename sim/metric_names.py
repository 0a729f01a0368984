"""Figures of a run by name, as `compare --fail-on` spells them: `p99_ttft`, `mean_tpot`, `request_throughput`, ..."""

from __future__ import annotations

import re
from typing import NamedTuple

LATENCIES = ("ttft", "tpot", "itl", "e2el", "queue", "prefill", "decode", "inference")
"""Of single requests (itl: of the pooled gaps), in ms; what each means is said by the set of definitions."""
STATISTICS = ("mean", "median", "std", "p90", "p95", "p99", "max")
"""Those that are shown unless others are asked for."""
TIME_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}

RUN_FIGURES = {
    "completed": "requests",
    "failed": "requests",
    "duration": "s",
    "busy_time_s": "s",
    "request_throughput": "requests/s",
    "output_throughput": "tokens/s",
    "total_token_throughput": "tokens/s",
    "total_input_tokens": "tokens",
    "total_output_tokens": "tokens",
    "max_output_tokens_per_s": "tokens/s",
    "max_concurrent_requests": "requests",
    "steps": "steps",
    "preemptions": "preemptions",
    "evictions": "blocks",
    "recomputed_tokens": "tokens",
    "recomputed_fraction": "1",
    "cached_prompt_fraction": "1",
    "prefix_hit_rate": "1",
    "kv_peak_used_fraction": "1",
}
"""Of a run as a whole, with their units: keys of its summary."""

_ALIASES = {"e2e": "e2el", "request_rate": "request_throughput"}
_LATENCY = re.compile(rf"(mean|median|std|max|p\d+(?:\.\d+)?)_({'|'.join((*LATENCIES, 'e2e'))})(?:_ms)?")


class MetricName(NamedTuple):
    """One figure: a statistic of a latency, or a figure of the run as a whole (`statistic` is None)."""

    statistic: str | None
    quantity: str

    def __str__(self) -> str:
        return self.quantity if self.statistic is None else f"{self.statistic}_{self.quantity}"

    @property
    def unit(self) -> str:
        return RUN_FIGURES[self.quantity] if self.statistic is None else "ms"

    @property
    def percentile(self) -> float | None:
        """0..100, of a statistic that is one."""
        if self.statistic == "median":
            return 50.0
        if self.statistic is None or not self.statistic.startswith("p"):
            return None
        return float(self.statistic[1:])


def metric_name(text: str) -> MetricName:
    """Reads a name; ValueError that lists the allowed ones."""
    text = text.strip()
    if _ALIASES.get(text, text) in RUN_FIGURES:
        return MetricName(None, _ALIASES.get(text, text))
    match = _LATENCY.fullmatch(text)
    if match is None:
        raise ValueError(
            f"metric {text!r} is not known; allowed: (mean, median, std, max, or pN such as p99 or p99.9)_"
            f"({', '.join(LATENCIES)}), {', '.join(RUN_FIGURES)}"
        )
    name = MetricName(match[1], _ALIASES.get(match[2], match[2]))
    if name.percentile is not None and not 0 <= name.percentile <= 100:
        raise ValueError(f"metric {text!r}: a percentile lies between 0 and 100")
    return name


def default_names() -> list[MetricName]:
    """What `compare` says unless it is asked for more."""
    latencies = [MetricName(statistic, quantity) for quantity in LATENCIES for statistic in STATISTICS]
    return [*latencies, *(MetricName(None, name) for name in RUN_FIGURES)]
