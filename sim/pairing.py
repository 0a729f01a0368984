"""The requests of two runs side by side, by their ids; what has no counterpart is counted, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from servetwin.sim.columns import COMPLETED

if TYPE_CHECKING:
    import pandas as pd

OPEN = "open"
"""Not ended when the log was written."""


@dataclass(frozen=True)
class Pairs:
    """Requests that completed in both runs, row by row in the order of A's arrivals, and those that did not."""

    a: pd.DataFrame
    b: pd.DataFrame
    only_in_a: int
    only_in_b: int
    not_completed: Mapping[str, int]
    """Requests of both runs that did not complete in both: "A length, B abort" -> how many."""
    different_lengths: int
    """Pairs whose prompts or outputs are not equally long."""
    different_arrivals: int
    """Pairs that were sent at different times: closed loops, a client's limit, a scaled trace."""

    def __len__(self) -> int:
        return len(self.a)

    def to_json(self) -> dict[str, Any]:
        return {
            "paired": len(self),
            "only_in_a": self.only_in_a,
            "only_in_b": self.only_in_b,
            "not_completed_in_both": dict(self.not_completed),
            "different_lengths": self.different_lengths,
            "different_arrivals": self.different_arrivals,
        }


def pair(a: pd.DataFrame, b: pd.DataFrame) -> Pairs:
    """From two tables of requests. Raises ValueError where an id stands twice in one of them."""
    import pandas as pd

    same = a.request_id.equals(b.request_id)
    for side, frame in (("A", a), *(() if same else (("B", b),))):
        twice = frame.request_id[frame.request_id.duplicated()]
        if len(twice):
            raise ValueError(f"{side} has request {twice.iloc[0]!r} twice; requests are paired by their ids")
    # The same workload as a rule, in the same order: no need to look each id up.
    place = np.arange(len(a)) if same else pd.Index(b.request_id).get_indexer(pd.Index(a.request_id))
    both_a = _some(a, place >= 0)
    both_b = b if same else b.iloc[place[place >= 0]]
    done_a = both_a.finish_reason.isin(COMPLETED).to_numpy()
    done_b = both_b.finish_reason.isin(COMPLETED).to_numpy()
    done = done_a & done_b
    paired_a, paired_b = (_some(both, done).reset_index(drop=True) for both in (both_a, both_b))
    lengths = [
        paired_a[name].to_numpy() != paired_b[name].to_numpy()
        for name in ("num_prompt_tokens", "num_output_tokens")
    ]
    return Pairs(
        paired_a,
        paired_b,
        int((place < 0).sum()),
        len(b) - len(both_a),
        _reasons(both_a[~done], both_b[~done]),
        int((lengths[0] | lengths[1]).sum()),
        int((~np.isclose(paired_a.arrival_s, paired_b.arrival_s, rtol=0, atol=1e-9)).sum()),
    )


def _some(frame: pd.DataFrame, rows: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> pd.DataFrame:
    """These rows; the frame itself where they are all: a copy of a million rows has its price."""
    return frame if rows.all() else frame[rows]


def _reasons(a: pd.DataFrame, b: pd.DataFrame) -> dict[str, int]:
    first, second = (
        frame.finish_reason.astype(object).fillna(OPEN).reset_index(drop=True) for frame in (a, b)
    )
    reasons = "A " + first + ", B " + second
    return {str(words): int(count) for words, count in reasons.value_counts().sort_index().items()}
