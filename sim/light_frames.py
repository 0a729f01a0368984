"""Steps without plans: what a scheduler whose plain decodes sleep (`sim/leaping_scheduler.py`) says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from servetwin.sim.contract import StepShape
from servetwin.sim.records import EngineCoreOutputs, ScheduleRecord
from servetwin.sim.request import Request
from servetwin.sim.timeline import StepTimes


@dataclass(slots=True)
class AwakeRow:
    """A row of a step that is looked at."""

    place: int
    """Its place in running order when it was scheduled."""
    request: Request
    samples: bool
    """The step brings it a token."""


class Woken(NamedTuple):
    """A row that slept until now."""

    request_id: str
    since_step: int
    """It had a token in every step from this one to the last complete one."""
    num_output_tokens: int


@dataclass(slots=True)
class LightFrame:
    """A step between schedule and update."""

    step: int
    """0-based number of the schedule call."""
    start_ns: int
    record: ScheduleRecord
    rows: list[AwakeRow]
    """In scheduling order."""
    sleeping: int
    """Rows of the step that sleep: each computes one token and gets one."""
    shape: StepShape
    num_new: int
    """Requests of which a plan would say everything."""
    woken: list[Woken]
    """Rows that slept until this step."""
    reports: bool
    """The worker hears of requests that ended."""

    @property
    def has_tokens(self) -> bool:
        return self.shape.rows > 0

    @property
    def is_idle(self) -> bool:
        """Nothing scheduled and nothing to tell the worker."""
        return not self.shape.rows and not self.reports and not self.record.preempted


@dataclass(slots=True)
class Ended:
    """A request that got its last token."""

    request: Request
    blocks: int
    """Blocks it held until then."""
    slept: bool


@dataclass(slots=True)
class LightOutputs(EngineCoreOutputs):
    """What one update gave out; `new_token_ids` are those of rows that were awake, `finished` has all that ended."""

    regular: int = 0
    """Sleeping rows that got a token: each got one in the step before, too."""
    ended: list[Ended] = field(default_factory=list)
    """In scheduling order."""


@dataclass(slots=True)
class StepCost:
    """What a step model says of one step."""

    prepare_ns: int
    device_ns: int
    outside: bool = False
    """It is extrapolated."""
    graph_tokens: int | None = None
    """Padded size where a graph runs."""


class Submitted(NamedTuple):
    """A step in flight."""

    frame: LightFrame
    cost: StepCost
    times: StepTimes


TakenBlocks = tuple[int, int, int, int, list[int], list[int]]
"""What steps of sleeping rows did to the pool: blocks used, cached and free, free without content, and evictions, after
the schedule call of the first; then as `Leap.blocks_begun_at` and `evictions_at`."""


NO_LOOKUP = (0, 0, 0, 0)
"""Nobody is looked up in the prefix cache."""


@dataclass(slots=True)
class Leap:
    """Steps of the same sleeping rows and nothing else. Counts of requests and blocks are those of the first step."""

    num_steps: int
    shape: StepShape
    running: int
    waiting: int
    used_blocks: int = 0
    cached_free_blocks: int = 0
    free_blocks: int = 0
    evictions: int = 0
    lookup: tuple[int, int, int, int] = NO_LOOKUP
    """Look-ups in the prefix cache in each step (`LeapingScheduler.stuck_lookup`)."""
    growth_ns: int = 0
    """By which device time grows from one step to the next, where `each_device_ns` is empty."""
    each_device_ns: Sequence[int] = ()
    each_start_ns: Sequence[int] = ()
    """When each step is scheduled, and so on, where steps overlap."""
    each_prepare_start_ns: Sequence[int] = ()
    each_device_start_ns: Sequence[int] = ()
    each_end_ns: Sequence[int] = ()
    blocks_begun_at: list[int] = field(default_factory=list)
    """Steps of the leap after its first (1, 2, ...) in which a block is begun, once for each."""
    evictions_at: list[int] = field(default_factory=list)
    """The same for cached contents dropped."""
