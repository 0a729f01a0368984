"""Step timers that compute durations instead of measuring them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from servetwin.sim.contract import SchedulerOutput, StepResult, StepShape
from servetwin.sim.steptime.drafting import DraftModel
from servetwin.sim.steptime.features import Bools, Ints, StepFeatures, StepModel, shape_of
from servetwin.sim.steptime.plan_rows import PlanReader, num_admitted
from servetwin.sim.steptime.sampled import sampled_output
from servetwin.sim.token_source import TokenSource


@dataclass(frozen=True, slots=True)
class ConstantStepModel:
    """Every step with tokens takes the same time."""

    step_ns: int

    def __post_init__(self) -> None:
        if self.step_ns < 1:
            raise ValueError(
                f"step time must be at least 1 ns, got {self.step_ns} ns: time could stand still"
            )

    def durations_ns(self, features: StepFeatures) -> Ints:
        return np.where(features.new_tokens > 0, np.int64(self.step_ns), np.int64(0))


class _Times(NamedTuple):
    """What a step model says of one step."""

    prepare_ns: int
    device_ns: int
    outside: bool
    """It is extrapolated."""
    graph_tokens: int | None
    """Padded size where a graph runs."""


_NONE = _Times(0, 0, outside=False, graph_tokens=None)


class ModelledStepTimer:
    """A StepTimer made of a step model, a source of tokens and, with speculative decoding, a model of its drafts.

    Raises ValueError for a step of no duration.
    """

    def __init__(
        self, model: StepModel, tokens: TokenSource, source: str, drafts: DraftModel | None = None
    ) -> None:
        self._model = model
        self._outside: Callable[[StepFeatures], Bools] | None = getattr(model, "outside", None)
        self._prepare: Callable[[StepFeatures], Ints] | None = getattr(model, "prepare_ns", None)
        self.overlaps_preparation = bool(getattr(model, "overlaps_preparation", True))
        self.turnaround_ns = int(getattr(model, "turnaround_ns", 0))
        self._graph_tokens: Callable[[StepFeatures], Ints] | None = getattr(model, "graph_tokens", None)
        self._drafts = drafts
        self._tokens = tokens
        self._source = source
        self._reader = PlanReader()

    def run(self, plan: SchedulerOutput) -> StepResult:
        rows = self._reader.rows(plan)
        shape = shape_of(rows, num_admitted(plan))
        times = self._times(shape) if rows else _NONE
        output, draft_token_ids = sampled_output(plan, rows, self._tokens, self._drafts)
        return StepResult(
            times.prepare_ns,
            times.device_ns,
            output,
            self._source,
            graph_tokens=times.graph_tokens,
            draft_token_ids=draft_token_ids,
            shape=shape,
            outside=times.outside,
        )

    def _times(self, shape: StepShape) -> _Times:
        features = StepFeatures.of([shape])
        duration = int(self._model.durations_ns(features)[0])
        if duration < 1:
            raise ValueError(
                f"the step model {self._source!r} gives {duration} ns for a step of {shape.new_tokens} tokens; "
                "a step with tokens must take at least 1 ns"
            )
        return _Times(
            0 if self._prepare is None else int(self._prepare(features)[0]),
            duration,
            self._outside is not None and bool(self._outside(features)[0]),
            None if self._graph_tokens is None else int(self._graph_tokens(features)[0]) or None,
        )
