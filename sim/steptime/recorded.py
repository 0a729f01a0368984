"""Step times of a run that was, replayed step by step: the same requests and decisions then take the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from servetwin.sim.contract import SchedulerOutput, StepResult, StepShape
from servetwin.sim.steptime.drafting import DraftModel
from servetwin.sim.steptime.features import shape_of
from servetwin.sim.steptime.host_times import overlaps_preparation, turnaround_ns
from servetwin.sim.steptime.plan_rows import PlanReader, num_admitted
from servetwin.sim.steptime.sampled import sampled_output
from servetwin.sim.token_source import TokenSource
from servetwin.sim.units import NS_PER_S

if TYPE_CHECKING:
    import pandas as pd

COMPARED = {"rows": "requests", "prefill_tokens": "prefill tokens", "decode_tokens": "decode tokens"}
"""Columns of steps/ that a plan must agree with."""


class RecordingError(ValueError):
    """The run takes another course than the recorded one; the message says from which step on."""


@dataclass(frozen=True)
class RecordedSteps:
    """Durations of the steps of one run, in integer ns, and what was in them. All of shape [steps]."""

    schedule_ns: Sequence[int]
    prepare_ns: Sequence[int]
    device_ns: Sequence[int]
    update_ns: Sequence[int]
    graph_tokens: Sequence[int | None]
    shapes: Sequence[tuple[int, ...]]
    """As COMPARED."""
    overlaps_preparation: bool
    """The worker was seen preparing a step while the device ran the one before."""
    turnaround_ns: int
    """What it took between two steps otherwise."""

    @classmethod
    def of(cls, steps: pd.DataFrame) -> RecordedSteps:
        """From the table steps/ of a run folder."""

        def ns(name: str) -> Any:
            return np.rint(steps[name].to_numpy(dtype=np.float64) * NS_PER_S).astype(np.int64)

        graphs = [None if np.isnan(x) else int(x) for x in steps["graph_tokens"].to_numpy(dtype=np.float64)]
        return cls(
            schedule_ns=ns("schedule_s").tolist(),
            prepare_ns=ns("prepare_s").tolist(),
            device_ns=ns("device_s").tolist(),
            update_ns=(ns("host_s") - ns("schedule_s")).tolist(),
            graph_tokens=graphs,
            shapes=list(zip(*(steps[name].tolist() for name in COMPARED), strict=True)),
            overlaps_preparation=overlaps_preparation(steps),
            turnaround_ns=turnaround_ns([steps]),
        )

    def __len__(self) -> int:
        return len(self.device_ns)


class RecordedStepTimer:
    """A StepTimer that gives each step the time of the recorded one in its place.

    Raises RecordingError for a plan that holds something else than the recorded step did.
    """

    def __init__(self, steps: RecordedSteps, tokens: TokenSource, drafts: DraftModel | None = None) -> None:
        self._steps, self._tokens, self._drafts = steps, tokens, drafts
        self.overlaps_preparation, self.turnaround_ns = steps.overlaps_preparation, steps.turnaround_ns
        self._reader = PlanReader()
        self._next = 0

    def run(self, plan: SchedulerOutput) -> StepResult:
        rows = self._reader.rows(plan)
        shape = shape_of(rows, num_admitted(plan))
        place = self._next
        self._check(place, shape)
        self._next += 1
        output, draft_token_ids = sampled_output(plan, rows, self._tokens, self._drafts)
        return StepResult(
            self._steps.prepare_ns[place],
            self._steps.device_ns[place],
            output,
            "recorded",
            graph_tokens=self._steps.graph_tokens[place],
            draft_token_ids=draft_token_ids,
            shape=shape,
        )

    def _check(self, place: int, shape: StepShape) -> None:
        if place >= len(self._steps):
            raise RecordingError(
                f"step {place}: the recorded run ended after {len(self._steps):,} steps, this one goes on: it has "
                "other requests or another engine"
            )
        ours = (shape.rows, shape.prefill_tokens, shape.new_tokens - shape.prefill_tokens)
        for what, here, there in zip(COMPARED.values(), ours, self._steps.shapes[place], strict=True):
            if here != there:
                raise RecordingError(
                    f"step {place}: {here} {what} here, {there} in the recorded run: its times fit the same requests "
                    "on the same engine only"
                )


class RecordedHostModel:
    """The host's time around each step, as it was recorded. Steps are scheduled and completed in one order."""

    def __init__(self, steps: RecordedSteps) -> None:
        self._steps = steps
        self._scheduled = self._updated = 0

    def schedule_ns(self, plan: SchedulerOutput) -> int:
        self._scheduled += 1
        return self._at(self._steps.schedule_ns, self._scheduled - 1)

    def update_ns(self, plan: SchedulerOutput) -> int:
        self._updated += 1
        return self._at(self._steps.update_ns, self._updated - 1)

    def _at(self, times_ns: Sequence[int], place: int) -> int:
        # Beyond the end the timer says what is wrong.
        return times_ns[place] if place < len(times_ns) else 0
