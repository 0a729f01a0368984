"""What holds an engine back: where its requests waited, and how full it was meanwhile.

Told from one run, in three steps.

1. What the waiting was for: seats (`max_num_seqs` ran already), KV (no blocks for the next request, or a preempted one
   waits to come back), or the token budget of a step. Whoever stood behind the head of the queue waited for what the
   head waited for.
2. Where little waiting stands against the latency that missed its limit, the steps themselves take too long: compute.
3. Where it was seats or the budget, more of them help only if a fuller step is worth it. The steps of the run say how
   their time grows with their rows (tokens): where one percent more takes nearly one percent longer, it is compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from servetwin.sim.planning.steady import Window
from servetwin.sim.records import WaitReason
from servetwin.sim.tables import Tables, ns_array
from servetwin.sim.units import NS_PER_S

if TYPE_CHECKING:
    import pandas as pd

    from servetwin.sim.config import EngineConfig

SEATS, KV, BUDGET, COMPUTE = "seats", "kv", "token budget", "compute"
CONSTRAINTS = {
    WaitReason.SEATS: SEATS,
    WaitReason.BLOCKS: KV,
    WaitReason.GATE: KV,
    WaitReason.PREEMPTION: KV,
    WaitReason.BUDGET: BUDGET,
}
MOSTLY_WAITING = 0.25
"""Waiting counts as the cause from this part of the time to the first token (of the whole time, for E2E) on."""
PROPORTIONAL = 0.8
"""From this elasticity on a fuller step is no better than two."""


@dataclass(frozen=True)
class Pressure:
    """Of one window of a run."""

    waiting: dict[str, float]
    """Constraint -> share of the time that requests waited."""
    wait_s: float
    """Mean time a request waited until its first step ..."""
    resume_s: float
    """... and to come back after preemptions."""
    time_s: float
    """Mean time in the system, of those that ended."""
    seats_used: float
    """Mean part of max_num_seqs that ran, weighted with time."""
    kv_used: float
    budget_used: float
    elasticity: dict[str, float]
    """seats and token budget -> percent that a step takes longer for one percent more rows (tokens)."""

    def to_json(self) -> dict[str, Any]:
        return {
            "waiting_for": self.waiting,
            "mean_wait_s": self.wait_s,
            "mean_wait_after_preemption_s": self.resume_s,
            "mean_time_in_system_s": self.time_s,
            "seats_used": self.seats_used,
            "kv_used": self.kv_used,
            "token_budget_used": self.budget_used,
            "elasticity": self.elasticity,
        }


def pressure(log: Tables, window: Window, engine: EngineConfig) -> Pressure:
    """What the run says of its window."""
    import pandas as pd

    waits = _waits(log.events, window)
    sent = ns_array(log.requests.sent_s.fillna(log.requests.arrival_s))
    inside = window.holds(sent)
    first = ns_array(log.requests.first_scheduled_s)
    times = ns_array(log.requests.finish_s) - sent
    wait_s, time_s = _mean_s((first - sent)[inside]), _mean_s(times[inside])
    begun = (
        pd.Series(first, index=log.requests.request_id).reindex(waits.request_id).to_numpy(dtype=np.float64)
    )
    back = waits[waits.start.to_numpy() >= begun]
    direct = waits[waits.constraint.notna()]
    shares = direct.groupby("constraint").length.sum()
    total = float(shares.sum())
    steps = log.steps
    starts = ns_array(steps.start_s)
    steps = steps[window.holds(starts) & (steps.rows > 0)]
    weights = (steps.prepare_s + steps.device_s).to_numpy(dtype=np.float64)
    usable = engine.cache.num_gpu_blocks - 1
    tokens = steps.prefill_tokens + steps.decode_tokens
    return Pressure(
        waiting={str(k): float(v) / total for k, v in shares.items()} if total > 0 else {},
        wait_s=wait_s,
        resume_s=float(back.length.sum()) / NS_PER_S / max(int(inside.sum()), 1),
        time_s=time_s,
        seats_used=_weighted(steps.running, weights) / engine.scheduler.max_num_seqs,
        kv_used=_weighted(steps.used_blocks, weights) / usable,
        budget_used=_weighted(tokens, weights) / engine.scheduler.token_budget,
        elasticity=_elasticities(steps, weights),
    )


def binding(found: Pressure, missed: str | None, elasticity: Mapping[str, float]) -> tuple[str, str]:
    """The constraint, and a sentence that says why.

    `missed`: ttft, tpot, e2e, attainment, or None (the queue grew). `elasticity`: of the engine, from whatever run.
    """
    cause = max(found.waiting, key=lambda name: found.waiting[name]) if found.waiting else COMPUTE
    waited = found.resume_s if missed == "tpot" else found.wait_s + found.resume_s
    whole = found.time_s or 1.0
    if missed == "tpot" and waited < MOSTLY_WAITING * whole:
        return COMPUTE, (
            f"steps take too long: after their first token requests waited {_part(waited, whole)} of their time"
        )
    if missed == "tpot":
        return KV, f"preempted requests waited {_part(waited, whole)} of their time to come back"
    if cause == COMPUTE or (missed in ("e2e", "attainment") and waited < MOSTLY_WAITING / 5 * whole):
        return COMPUTE, f"steps take too long: requests waited {_part(waited, whole)} of their time"
    growth = elasticity.get(cause)
    share = f"{100 * found.waiting[cause]:.0f} % of the waiting was for {_named(cause)}"
    if growth is not None and growth >= PROPORTIONAL:
        return COMPUTE, (
            f"{share}, but a step with 1 % more {'rows' if cause == SEATS else 'tokens'} takes {growth:.2f} % longer: "
            "more of them would not help"
        )
    return cause, share


def _named(constraint: str) -> str:
    return {SEATS: "seats", KV: "KV blocks", BUDGET: "the token budget of a step"}[constraint]


def _part(value: float, whole: float) -> str:
    return f"{100 * value / whole:.0f} %"


def _waits(events: pd.DataFrame, window: Window) -> pd.DataFrame:
    """Waits as far as they lie in the window: request_id, start, length in ns, constraint (None: behind another)."""
    import pandas as pd

    waits = events[events.kind == "wait"]
    start, end = ns_array(waits.time_s), ns_array(waits.until_s)
    inside = np.minimum(end, window.end_ns) - np.maximum(start, window.start_ns)
    frame = pd.DataFrame(
        {
            "request_id": waits.request_id.to_numpy(),
            "start": start,
            "length": inside,
            "constraint": [CONSTRAINTS.get(reason) for reason in waits.reason],
        }
    )
    return frame[frame.length > 0]


def _elasticities(steps: pd.DataFrame, weights: np.ndarray[Any, Any]) -> dict[str, float]:
    tokens = (steps.prefill_tokens + steps.decode_tokens).to_numpy(dtype=np.float64)
    decodes = (steps.prefill_tokens == 0).to_numpy()
    rows = steps.decode_rows.to_numpy(dtype=np.float64)
    found = {BUDGET: _elasticity(tokens, weights), SEATS: _elasticity(rows[decodes], weights[decodes])}
    return {name: value for name, value in found.items() if value is not None}


def _elasticity(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float | None:
    """Of the line through (x, y), at the 95th percentile of x; None where x does not vary."""
    if len(x) < 10 or np.ptp(x) < 0.05 * max(float(x.max()), 1.0):
        return None
    slope, intercept = np.polyfit(x, y, 1)
    full = float(np.percentile(x, 95))
    at_full = float(intercept + slope * full)
    return float(slope * full / at_full) if at_full > 0 else None


def _weighted(values: pd.Series[Any], weights: np.ndarray[Any, Any]) -> float:
    return float(values.to_numpy(dtype=np.float64) @ weights / weights.sum()) if weights.sum() > 0 else 0.0


def _mean_s(ns: np.ndarray[Any, Any]) -> float:
    known = ns[~np.isnan(ns)]
    return float(known.mean()) / NS_PER_S if len(known) else 0.0
