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
    think_time_s: Summary | None
    """Between the end of a turn and the next one; None: not known of any."""
    context_token_percent: float | None
    """Prompt tokens that are the previous turn's prompt and answer, over all prompt tokens; None: not known."""

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "turns": self.turns.to_json() | {"max": self.max_turns},
            "think_time_s": None if self.think_time_s is None else self.think_time_s.to_json(),
            "context_token_percent": self.context_token_percent,
        }


def session_figures(requests: RequestColumns) -> SessionFigures | None:
    """None where no request belongs to a session."""
    if not requests.has("session_id"):
        return None
    import pyarrow.compute as pc

    table = requests.table
    names = table["session_id"].drop_null()
    turns = pc.value_counts(names).field("counts").to_numpy()
    think_s = table["think_time_s"].drop_null().to_numpy() if requests.has("think_time_s") else np.empty(0)
    context = pc.sum(table["context_tokens"]).as_py() if requests.has("context_tokens") else None
    return SessionFigures(
        sessions=len(turns),
        requests=len(names),
        turns=Summary.of(turns),
        max_turns=int(turns.max()),
        think_time_s=Summary.of(think_s) if think_s.size else None,
        context_token_percent=None if context is None else 100 * context / int(requests.prompt_tokens.sum()),
    )
