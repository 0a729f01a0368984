"""What TTFT, TPOT, ITL and E2E mean to whom: named sets of formulas over raw timestamps.

The same word names different quantities in different tools, so every number goes with its formula. All sets
are applied to completed requests (finish reason length or stop). Sources: vLLM 0.22.0 `v1/metrics/stats.py`
and `benchmarks/serve.py`; the metric pages of GuideLLM and inference-perf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    Times = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Timestamps:
    """Completed requests as arrays [requests]: instants in ns, lengths in tokens."""

    arrival: Times
    sent: Times
    """When the client sent it: at its arrival, unless it held it back (`--max-concurrency`)."""
    queued: Times
    first_scheduled: Times
    first_token: Times
    last_token: Times
    finish: Times
    output_tokens: Times


@dataclass(frozen=True, slots=True)
class Metric:
    """One quantity in nanoseconds, of the pooled gaps between outputs unless a subclass says otherwise."""

    formula: str

    def words(self, *, held_back: bool) -> str:
        """The formula for people: where the client held nothing back, `sent` is the arrival."""
        return self.formula if held_back else self.formula.replace("sent", "arrival")


@dataclass(frozen=True, slots=True)
class RequestMetric(Metric):
    """One sample per request."""

    of: Callable[[Timestamps], Times]
    """Array [requests] of ns, NaN where a request has none."""


@dataclass(frozen=True, slots=True)
class MetricDefinitions:
    """How one tool defines its latencies."""

    name: str
    ttft: RequestMetric
    tpot: RequestMetric
    itl: Metric
    e2e: RequestMetric
    ntpot: RequestMetric | None = None
    """Normalized time per output token, where the tool has one."""

    def metrics(self) -> dict[str, Metric]:
        """Metric name -> what it means here."""
        named = {name: getattr(self, name) for name in ("ttft", "tpot", "itl", "e2e", "ntpot")}
        return {name: metric for name, metric in named.items() if metric is not None}

    def formulas(self, *, held_back: bool = False) -> dict[str, str]:
        """Metric name -> formula, to stand wherever the numbers stand."""
        return {name: metric.words(held_back=held_back) for name, metric in self.metrics().items()}


def _mean_gap(r: Timestamps) -> Times:
    import numpy as np

    gaps = np.where(r.output_tokens > 1, r.output_tokens - 1, np.nan)
    return (r.last_token - r.first_token) / gaps


def _mean_gap_or_zero(r: Timestamps) -> Times:
    import numpy as np

    return np.nan_to_num(_mean_gap(r), nan=0.0)


MEAN_GAP = "(last_token - first_token) / (output_tokens - 1)"
TTFT = RequestMetric("first_token - sent", lambda r: r.first_token - r.sent)
TPOT = RequestMetric(f"{MEAN_GAP}, output_tokens > 1", _mean_gap)
TPOT_OR_ZERO = RequestMetric(f"{MEAN_GAP}, 0 for one token", _mean_gap_or_zero)
PER_OUTPUT_TOKEN = RequestMetric(
    "(last_token - sent) / output_tokens, which includes TTFT",
    lambda r: (r.last_token - r.sent) / r.output_tokens,
)
POOLED_ITL = Metric("gaps between successive outputs of a request, pooled over all requests")
MEAN_ITL = RequestMetric(f"per request: {TPOT.formula}", _mean_gap)
CLIENT_E2E = RequestMetric("last_token - sent", lambda r: r.last_token - r.sent)
SERVER_E2E = RequestMetric("finish - sent", lambda r: r.finish - r.sent)

DEFINITIONS: dict[str, MetricDefinitions] = {
    d.name: d
    for d in (
        MetricDefinitions("vllm-server", TTFT, TPOT_OR_ZERO, POOLED_ITL, SERVER_E2E),
        MetricDefinitions("vllm-bench", TTFT, TPOT, POOLED_ITL, CLIENT_E2E),
        MetricDefinitions("guidellm", TTFT, PER_OUTPUT_TOKEN, MEAN_ITL, SERVER_E2E),
        MetricDefinitions("inference-perf", TTFT, TPOT, POOLED_ITL, CLIENT_E2E, PER_OUTPUT_TOKEN),
    )
}

ENGINE_INTERVALS: dict[str, RequestMetric] = {
    "queue": RequestMetric("first_scheduled - queued", lambda r: r.first_scheduled - r.queued),
    "prefill": RequestMetric("first_token - first_scheduled", lambda r: r.first_token - r.first_scheduled),
    "decode": RequestMetric("last_token - first_token", lambda r: r.last_token - r.first_token),
    "inference": RequestMetric("last_token - first_scheduled", lambda r: r.last_token - r.first_scheduled),
}
"""The engine's view of a request, as in vLLM; waits after a preemption fall into prefill or decode."""

CLIENT_INTERVALS: dict[str, RequestMetric] = {
    "client_queue_time": RequestMetric("sent - arrival", lambda r: r.sent - r.arrival),
    "ttft_including_client_queue": RequestMetric(
        "first_token - arrival", lambda r: r.first_token - r.arrival
    ),
    "e2el_including_client_queue": RequestMetric("last_token - arrival", lambda r: r.last_token - r.arrival),
}
"""Where a client held requests back: its part of the wait, which the latencies since `sent` leave out (names as in
vLLM's #54136)."""


RATES: dict[str, str] = {
    "duration": "last finish of a completed request - first arrival",
    "request_throughput": "completed requests / duration",
    "output_throughput": "output tokens of completed requests / duration",
    "total_token_throughput": "prompt and output tokens of completed requests / duration",
}
"""The same in every set. What requests that did not complete had got until then counts nowhere."""


def formulas_in_words() -> str:
    """Every metric with its formulas, for help texts; where the sets differ, each is followed by those that mean it."""
    sets_of: dict[str, dict[str, list[str]]] = {}
    for chosen in DEFINITIONS.values():
        for metric, formula in chosen.formulas(held_back=True).items():
            sets_of.setdefault(metric, {}).setdefault(formula, []).append(chosen.name)

    def in_words(meanings: dict[str, list[str]]) -> str:
        if list(meanings.values()) == [[*DEFINITIONS]]:
            return next(iter(meanings))
        return " | ".join(f"{formula} ({', '.join(sets)})" for formula, sets in meanings.items())

    return "; ".join(f"{metric.upper()} = {in_words(meanings)}" for metric, meanings in sets_of.items())


def definitions(name: str) -> MetricDefinitions:
    """The set of that name; ValueError naming the allowed ones otherwise."""
    if name not in DEFINITIONS:
        raise ValueError(f"metric definitions {name!r} are not known; allowed: {', '.join(DEFINITIONS)}")
    return DEFINITIONS[name]
