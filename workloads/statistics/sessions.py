"""Sessions of a trace in figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from servetwin.workloads.columns import RequestColumns
from servetwin.workloads.statistics.summary import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFigures:
    sessions: int
    requests: int
    """Those that belong to a session."""
    turns: Summary
    """Requests of a session."""
    max_turns: int
    rate_per_s: float | None
    """Sessions / span of their first arrivals; None: they have no times, or all begin at one."""
    think_time_s: Summary | None
    """Between the end of a turn and the next one; None: not known of any."""
    context_token_percent: float | None
    """Prompt tokens that are the previous turn's prompt and answer, over all prompt tokens; None: not known."""

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "turns": self.turns.to_json() | {"max": self.max_turns},
            "rate_per_s": self.rate_per_s,
            "think_time_s": None if self.think_time_s is None else self.think_time_s.to_json(),
            "context_token_percent": self.context_token_percent,
        }


def session_figures(requests: RequestColumns, *, timed: bool = True) -> SessionFigures | None:
    """None where no request belongs to a session. `timed`: whether the arrivals of first turns are known."""
    if not requests.has("session_id"):
        return None
    import pyarrow.compute as pc

    table = requests.table
    sessions = table.select(["session_id", "arrival_s"]).filter(pc.is_valid(table["session_id"]))
    sessions = sessions.group_by("session_id").aggregate([("arrival_s", "count"), ("arrival_s", "min")])
    turns, starts_s = (sessions[f"arrival_s_{name}"].to_numpy() for name in ("count", "min"))
    span_s = float(np.ptp(starts_s)) if timed else 0.0
    think_s = table["think_time_s"].drop_null().to_numpy() if requests.has("think_time_s") else np.empty(0)
    context = pc.sum(table["context_tokens"]).as_py() if requests.has("context_tokens") else None
    return SessionFigures(
        sessions=len(turns),
        requests=int(turns.sum()),
        turns=Summary.of(turns),
        max_turns=int(turns.max()),
        rate_per_s=len(turns) / span_s if span_s > 0 else None,
        think_time_s=Summary.of(think_s) if think_s.size else None,
        context_token_percent=None if context is None else 100 * context / int(requests.prompt_tokens.sum()),
    )
