"""What a step's duration depends on: the shape of its batch, as arrays over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.contract import StepShape
from servetwin.sim.steptime.plan_rows import PlanRow

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
REGIMES = ("prefill", "decode", "mixed")
"""What a step holds: prompts, decode rows, or both."""


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """Shapes of n steps: the fields of `StepShape`, which says what they are, as int64 of shape [n]."""

    new_tokens: Ints
    rows: Ints
    logits_rows: Ints
    decode_rows: Ints
    decode_context_tokens: Ints
    decode_context_max_tokens: Ints
    prefill_tokens: Ints
    prefill_rows: Ints
    prefill_pairs: Ints
    prefill_context_tokens: Ints
    largest_chunk_tokens: Ints
    largest_chunk_context_tokens: Ints
    new_requests: Ints

    @classmethod
    def of(cls, shapes: Sequence[StepShape]) -> Self:
        """Of steps one by one."""
        return cls(*np.array(shapes, dtype=np.int64).reshape(-1, len(StepShape._fields)).T)

    @classmethod
    def growing(cls, shape: StepShape, num_steps: int) -> Self:
        """Of a step of decode rows alone, and of those that follow it with the same rows."""
        steps = np.arange(num_steps, dtype=np.int64)
        columns = {name: np.full(num_steps, value, dtype=np.int64) for name, value in shape._asdict().items()}
        columns["decode_context_tokens"] += shape.rows * steps
        columns["decode_context_max_tokens"] += steps
        return cls(**columns)

    def where(self, chosen: Bools) -> StepFeatures:
        """Some of the steps."""
        return StepFeatures(*(getattr(self, name)[chosen] for name in StepShape._fields))

    def __len__(self) -> int:
        return len(self.new_tokens)


class StepModel(Protocol):
    """Durations from shapes: pure, vectorised, and the same for one step as for many at once."""

    def durations_ns(self, features: StepFeatures) -> Ints:
        """Integer nanoseconds, shape [n]; 0 exactly for steps without tokens.

        Optional: `outside(features) -> bool [n]` says which of them lie beyond what was measured,
        `prepare_ns(features) -> int [n]` how long the worker prepares them, `graph_tokens(features) -> int [n]` the
        padded size of those that run as a CUDA graph (0: it does not), and `overlaps_preparation = False` that the
        worker prepares none of them before the one in front of it is through, and `turnaround_ns` after that.

        A model that says something else of the same shape another time declares `pure = False`.

        For speed, also optional: `duration_ns(shape) -> int` is the same for one step with tokens, and `context_ns`
        says that a step of decode rows takes f(rows) + context_ns x decode_context_tokens, to the ns.
        `decode_durations_ns(shape, num_steps) -> int [num_steps]` is the same for a step of decode rows alone and those
        that follow it, each row a token longer than before.
        """
        ...


def regimes_of(features: StepFeatures) -> NDArray[np.str_]:
    """One of REGIMES for each step, [n]."""
    prefill, decode = features.prefill_rows > 0, features.decode_rows > 0
    return np.where(prefill & decode, "mixed", np.where(prefill, "prefill", "decode"))


def shape_of(
    rows: Sequence[PlanRow],
    new_requests: int = 0,
    *,
    decode_rows: int = 0,
    decode_context_tokens: int = 0,
    decode_context_max_tokens: int = 0,
) -> StepShape:
    """The shape of one step from the rows of its plan, `new_requests` of which were admitted.

    The others: of plain decode rows (one token each) beside these.
    """
    new_tokens = logits_rows = decode_rows
    decode_context, decode_longest = decode_context_tokens, decode_context_max_tokens
    prefill_tokens = prefill_rows = pairs = prefill_context = 0
    largest = (0, 0)
    for row in rows:
        new = row.num_scheduled_tokens
        context = row.num_computed_tokens + new
        new_tokens += new
        logits_rows += row.samples
        if row.is_decode:
            decode_rows += 1
            decode_context += context
            decode_longest = max(decode_longest, context)
        else:
            prefill_rows += 1
            prefill_tokens += new
            pairs += new * context
            prefill_context += context
            largest = max(largest, (new, context))
    return StepShape(
        new_tokens,
        decode_rows + prefill_rows,
        logits_rows,
        decode_rows,
        decode_context,
        decode_longest,
        prefill_tokens,
        prefill_rows,
        pairs,
        prefill_context,
        *largest,
        new_requests,
    )
