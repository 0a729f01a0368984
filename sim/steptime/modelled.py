"""Step timers that compute durations instead of measuring them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


class ModelledStepTimer:
    """A StepTimer made of a step model, a source of tokens and, with speculative decoding, a model of its drafts.

    Raises ValueError for a step of no duration.
    """

    def __init__(
        self, model: StepModel, tokens: TokenSource, source: str, drafts: DraftModel | None = None
    ) -> None:
        self._model = model
        self._outside: Callable[[StepFeatures], Bools] | None = getattr(model, "outside", None)
        self._graph_tokens: Callable[[StepFeatures], Ints] | None = getattr(model, "graph_tokens", None)
        self._drafts = drafts
        self._tokens = tokens
        self._source = source
        self._reader = PlanReader()

    def run(self, plan: SchedulerOutput) -> StepResult:
        rows = self._reader.rows(plan)
        shape = shape_of(rows, num_admitted(plan))
        duration, outside, graph_tokens = self._duration(shape) if rows else (0, False, None)
        output, draft_token_ids = sampled_output(plan, rows, self._tokens, self._drafts)
        return StepResult(
            0,
            duration,
            output,
            self._source,
            graph_tokens=graph_tokens,
            draft_token_ids=draft_token_ids,
            shape=shape,
            outside=outside,
        )

    def _duration(self, shape: StepShape) -> tuple[int, bool, int | None]:
        """(ns, whether that is extrapolated, padded size where a graph runs)"""
        features = StepFeatures.of([shape])
        duration = int(self._model.durations_ns(features)[0])
        if duration < 1:
            raise ValueError(
                f"the step model {self._source!r} gives {duration} ns for a step of {shape.new_tokens} tokens; "
                "a step with tokens must take at least 1 ns"
            )
        outside = self._outside is not None and bool(self._outside(features)[0])
        graph_tokens = None if self._graph_tokens is None else int(self._graph_tokens(features)[0]) or None
        return duration, outside, graph_tokens
