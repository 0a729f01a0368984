"""What a step's duration depends on: the shape of its batch, as arrays over steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.steptime.plan_rows import PlanRow

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """Shapes of n steps; every field is int64 of shape [n]."""

    new_tokens: Ints
    """Tokens computed."""
    rows: Ints
    """Scheduled requests."""
    logits_rows: Ints
    """Requests that sample a token."""
    decode_rows: Ints
    decode_context_tokens: Ints
    """Sum over decode rows of the tokens their attention reads, the new ones included."""
    decode_context_max_tokens: Ints
    """Largest of these (0 without decode rows)."""
    prefill_tokens: Ints
    prefill_rows: Ints
    prefill_pairs: Ints
    """Sum over prefill rows of query tokens x tokens read: the attention work of chunks."""
    prefill_context_tokens: Ints
    """Sum over prefill rows of the tokens their attention reads, the new ones included."""
    largest_chunk_tokens: Ints
    """New tokens of the prefill row that has most (0 without one) ..."""
    largest_chunk_context_tokens: Ints
    """... and the tokens its attention reads, the new ones included."""
    new_requests: Ints
    """Requests that are scheduled for the first time, or again after a preemption."""

    def __len__(self) -> int:
        return len(self.new_tokens)


class StepModel(Protocol):
    """Durations from shapes: pure, vectorised, and the same for one step as for many at once."""

    def durations_ns(self, features: StepFeatures) -> Ints:
        """Integer nanoseconds, shape [n]; 0 exactly for steps without tokens."""
        ...


def features_of(rows: list[PlanRow], new_requests: int = 0) -> StepFeatures:
    """The features of one step (n = 1)."""
    decode = [r for r in rows if r.is_decode]
    prefill = [r for r in rows if not r.is_decode]
    contexts = [r.num_computed_tokens + r.num_scheduled_tokens for r in decode]
    largest = max(((r.num_scheduled_tokens, r.num_computed_tokens) for r in prefill), default=(0, 0))
    return StepFeatures(
        new_tokens=_one(sum(r.num_scheduled_tokens for r in rows)),
        rows=_one(len(rows)),
        logits_rows=_one(sum(r.samples for r in rows)),
        decode_rows=_one(len(decode)),
        decode_context_tokens=_one(sum(contexts)),
        decode_context_max_tokens=_one(max(contexts, default=0)),
        prefill_tokens=_one(sum(r.num_scheduled_tokens for r in prefill)),
        prefill_rows=_one(len(prefill)),
        prefill_pairs=_one(
            sum(r.num_scheduled_tokens * (r.num_computed_tokens + r.num_scheduled_tokens) for r in prefill)
        ),
        prefill_context_tokens=_one(sum(r.num_computed_tokens + r.num_scheduled_tokens for r in prefill)),
        largest_chunk_tokens=_one(largest[0]),
        largest_chunk_context_tokens=_one(sum(largest)),
        new_requests=_one(new_requests),
    )


def _one(value: int) -> Ints:
    return np.array([value], dtype=np.int64)
