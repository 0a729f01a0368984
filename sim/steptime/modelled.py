"""Step timers that compute durations instead of measuring them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from servetwin.sim.contract import SchedulerOutput, StepResult, StepShape
from servetwin.sim.leap_times import LeapTimes
from servetwin.sim.light_frames import StepCost
from servetwin.sim.step_check import check_times
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

    def duration_ns(self, shape: StepShape) -> int:
        """The same for one step with tokens."""
        return self.step_ns

    def decode_ns(self, rows: int, context_tokens: int) -> int:
        """The same for a step of so many decode rows alone."""
        return self.step_ns

    @property
    def context_ns(self) -> int:
        """What a token more of context costs."""
        return 0


@dataclass(frozen=True, slots=True)
class LinearStepModel:
    """A step takes so many ns, and so many more for each token of a prompt, decode row and token that these read."""

    base_ns: int
    prefill_token_ns: int = 0
    decode_row_ns: int = 0
    context_ns: int = 0

    def __post_init__(self) -> None:
        if self.base_ns < 1 or min(self.prefill_token_ns, self.decode_row_ns, self.context_ns) < 0:
            raise ValueError(f"base_ns must be at least 1 and the others 0 or more, got {self}")

    def durations_ns(self, features: StepFeatures) -> Ints:
        ns = (
            self.base_ns
            + self.prefill_token_ns * features.prefill_tokens
            + self.decode_row_ns * features.decode_rows
            + self.context_ns * features.decode_context_tokens
        )
        return np.where(features.new_tokens > 0, ns, np.int64(0))

    def duration_ns(self, shape: StepShape) -> int:
        """The same for one step with tokens."""
        return (
            self.base_ns
            + self.prefill_token_ns * shape.prefill_tokens
            + self.decode_row_ns * shape.decode_rows
            + self.context_ns * shape.decode_context_tokens
        )

    def decode_ns(self, rows: int, context_tokens: int) -> int:
        """The same for a step of so many decode rows alone."""
        return self.base_ns + self.decode_row_ns * rows + self.context_ns * context_tokens


LEAP_AT_MOST = 256
"""Steps of a leap whose times are computed one by one."""


@dataclass(slots=True)
class LeapCosts:
    """What the steps of a leap cost."""

    first: StepCost
    num_steps: int
    growth_ns: int
    """By which device time grows from one to the next, where `each_ns` is empty."""
    each_ns: Sequence[int] = ()

    def device_ns(self, step: int) -> int:
        """Of one of them (0, 1, ...)."""
        return self.each_ns[step] if self.each_ns else self.first.device_ns + self.growth_ns * step

    def cost(self, step: int) -> StepCost:
        """Of one of them."""
        first = self.first
        return StepCost(first.prepare_ns, self.device_ns(step), first.outside, first.graph_tokens)

    def times(self, around_ns: int) -> LeapTimes:
        """With so much time around each step on the device."""
        if self.each_ns:
            return LeapTimes(0, 0, [around_ns + ns for ns in self.each_ns] if around_ns else self.each_ns)
        return LeapTimes(around_ns + self.first.device_ns, self.growth_ns)


NO_COST = StepCost(0, 0)


class ModelledStepTimer:
    """A StepTimer made of a step model, a source of tokens and, with speculative decoding, a model of its drafts.

    Raises ValueError for a step of no duration.
    """

    def __init__(
        self, model: StepModel, tokens: TokenSource, source: str, drafts: DraftModel | None = None
    ) -> None:
        self.model = model
        self._duration: Callable[[StepShape], int] = getattr(model, "duration_ns", None) or self._one_of_many
        self._outside: Callable[[StepFeatures], Bools] | None = getattr(model, "outside", None)
        self._prepare: Callable[[StepFeatures], Ints] | None = getattr(model, "prepare_ns", None)
        self.overlaps_preparation = bool(getattr(model, "overlaps_preparation", True))
        self.turnaround_ns = int(getattr(model, "turnaround_ns", 0))
        self._graph_tokens: Callable[[StepFeatures], Ints] | None = getattr(model, "graph_tokens", None)
        self._context_ns: int | None = getattr(model, "context_ns", None)
        self._decode_durations: Callable[[StepShape, int], Ints] | None = getattr(
            model, "decode_durations_ns", None
        )
        self.is_bare = self._outside is self._prepare is self._graph_tokens is None
        """The model says how long a step takes, and nothing else."""
        self.context_ns = self._context_ns or 0
        self.decode_ns: Callable[[int, int], int] | None = None
        """Of a step of so many decode rows alone, with so many tokens of context."""
        if type(model) is ConstantStepModel or type(model) is LinearStepModel:
            self.decode_ns = model.decode_ns
        self._usual_ns = 0
        """What a step of decodes took last."""
        self.drafts = drafts
        self._tokens = tokens
        self.source = source
        self._reader = PlanReader()

    def another(self) -> ModelledStepTimer:
        """One like it for another engine."""
        drafts = None if self.drafts is None else self.drafts.another()
        other = ModelledStepTimer(self.model, self._tokens, self.source, drafts)
        other.overlaps_preparation, other.turnaround_ns = self.overlaps_preparation, self.turnaround_ns
        return other

    def run(self, plan: SchedulerOutput) -> StepResult:
        rows = self._reader.rows(plan)
        shape = shape_of(rows, num_admitted(plan))
        times = self.cost(shape)
        output, draft_token_ids = sampled_output(plan, rows, self._tokens, self.drafts)
        return StepResult(
            times.prepare_ns,
            times.device_ns,
            output,
            self.source,
            graph_tokens=times.graph_tokens,
            draft_token_ids=draft_token_ids,
            shape=shape,
            outside=times.outside,
        )

    def cost(self, shape: StepShape) -> StepCost:
        """What the model says of one step."""
        if not shape.rows:
            return NO_COST
        duration = self._duration(shape)
        if duration < 1:
            raise ValueError(
                f"the step model {self.source!r} gives {duration} ns for a step of {shape.new_tokens} tokens; "
                "a step with tokens must take at least 1 ns"
            )
        if self.is_bare:
            check_times(self.source, 0, duration)
            return StepCost(0, duration)
        features = StepFeatures.of([shape])
        prepare_ns = 0 if self._prepare is None else int(self._prepare(features)[0])
        check_times(self.source, prepare_ns, duration)
        return StepCost(
            prepare_ns,
            duration,
            self._outside is not None and bool(self._outside(features)[0]),
            None if self._graph_tokens is None else int(self._graph_tokens(features)[0]) or None,
        )

    def device_ns(self, shape: StepShape) -> int:
        """The same where the model says nothing else (`is_bare`)."""
        duration = self._duration(shape)
        # With anything else `cost` says what is wrong.
        return duration if type(duration) is int and duration > 0 else self.cost(shape).device_ns

    def _one_of_many(self, shape: StepShape) -> int:
        return int(self.model.durations_ns(StepFeatures.of([shape]))[0])

    def leap_costs(self, shape: StepShape, most: int, wanted_ns: int | None) -> LeapCosts:
        """Of the steps of a leap whose first has this shape: `most`, or fewer that take `wanted_ns` or cannot be told.

        Fewer also where the model says of a later one anything else than its duration.
        """
        if self.is_bare and self._decode_durations is not None:
            steps = min(most, LEAP_AT_MOST)
            if wanted_ns is not None and self._usual_ns:
                # No leap need be as long as it could be.
                steps = min(steps, max(wanted_ns, 0) // self._usual_ns + 2)
            durations = np.asarray(self._decode_durations(shape, steps))
            each: list[int] = durations.astype(np.int64, copy=False).tolist()
            if min(each) > 0:
                self._usual_ns = each[0]
                return LeapCosts(StepCost(0, each[0]), steps, 0, each)
        first = self.cost(shape)
        if self._context_ns is not None and self.is_bare:
            check_times(self.source, 0, self._context_ns)
            return LeapCosts(first, most, self._context_ns * shape.rows)
        steps = min(most, LEAP_AT_MOST)
        if wanted_ns is not None:
            # As if they grew no longer: a few more than needed.
            steps = min(steps, max(wanted_ns, 0) // first.device_ns + 2)
        durations, steps = self._durations(shape, steps)
        return LeapCosts(first, steps, 0, durations[:steps].tolist())

    def _durations(self, shape: StepShape, steps: int) -> tuple[Ints, int]:
        """Of a step of decode rows and those that follow, and how many of these are otherwise like it."""
        if self.is_bare and self._decode_durations is not None:
            durations = self._decode_durations(shape, steps)
        else:
            features = StepFeatures.growing(shape, steps)
            durations = self.model.durations_ns(features)
            for name in ("outside", "prepare_ns", "graph_tokens"):
                ask = getattr(self.model, name, None)
                if ask is not None:
                    said = ask(features)[:steps]
                    other = said != said[0]
                    steps = int(other.argmax()) if other.any() else steps
        # To whole numbers as for one step; one that takes no time is found out when it is taken by itself.
        durations = np.asarray(durations).astype(np.int64)
        too_short = durations[:steps] < 1
        return durations, max(int(too_short.argmax()), 1) if too_short.any() else steps
