"""The SimPy driver of one engine with modelled step times: steps without plans, and leaps over those that are alike."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

import simpy

from servetwin.sim.arrivals import Arrivals, Feed
from servetwin.sim.contract import StepShape
from servetwin.sim.driver import Driver, SamplingOf
from servetwin.sim.events import EventLog
from servetwin.sim.host_model import LinearHostModel
from servetwin.sim.leap_times import LeapTimes
from servetwin.sim.leaping_core import LeapingCore
from servetwin.sim.light_frames import Leap, LightFrame, LightOutputs, StepCost, Submitted
from servetwin.sim.overlap import Overlap
from servetwin.sim.plain_overlapped import OverlappedPlainSteps, Pipeline
from servetwin.sim.plain_steps import PlainSteps
from servetwin.sim.plain_way import Client, PlainWay
from servetwin.sim.request import Request
from servetwin.sim.steptime.modelled import LeapCosts, ModelledStepTimer
from servetwin.sim.timeline import StepTimes
from servetwin.sim.token_source import TokenSource
from servetwin.workloads.spec import RequestSpec, Workload

OnProgress = Callable[[int, int, int], None]
"""Takes steps, requests that ended with them, and the simulated time in ns."""


class _InTheAir(NamedTuple):
    """A leap that has begun."""

    leap: Leap
    start_ns: int
    cost: StepCost
    """Of its first step."""
    times: StepTimes
    """Of its first step."""
    last: LightFrame
    """Its last step."""
    end_ns: int


class _OverlappedInTheAir(NamedTuple):
    """The same with asynchronous scheduling: its last step will be in flight."""

    leap: Leap
    costs: LeapCosts
    overlap: Overlap


class _EvenPlan(NamedTuple):
    """A leap that may begin."""

    num_steps: int
    start_ns: int
    shape: StepShape
    costs: LeapCosts
    times: LeapTimes
    schedule_ns: int
    update_ns: int

    def end_ns(self, steps: int) -> int:
        """When so many of its steps are over."""
        return self.start_ns + self.times.duration_ns(steps)

    def steps_until(self, time_ns: int) -> int:
        """Its steps up to the first boundary at or after an instant, one at least."""
        return max(self.times.steps_until(time_ns - self.start_ns, self.num_steps), 1)

    def begun_before(self, time_ns: int) -> int:
        """Its steps that begin before an instant that it is in the air at."""
        return self.steps_until(time_ns)


class _OverlappedPlan(NamedTuple):
    """The same with asynchronous scheduling."""

    num_steps: int
    start_ns: int
    shape: StepShape
    costs: LeapCosts
    overlap: Overlap

    def end_ns(self, steps: int) -> int:
        return self.overlap.ends[steps - 1]

    def steps_until(self, time_ns: int) -> int:
        return min(bisect_left(self.overlap.ends, time_ns) + 1, self.num_steps)

    def begun_before(self, time_ns: int) -> int:
        return max(bisect_left(self.overlap.starts, time_ns), 1)


LeapPlan = _EvenPlan | _OverlappedPlan


class LeapingProcess(Driver[LightFrame]):
    """Arguments as for `Driver`. `leaps`: take many steps at once; without it the log is the same."""

    def __init__(
        self,
        env: simpy.Environment,
        core: LeapingCore,
        timer: ModelledStepTimer,
        workload: Workload | Feed,
        log: EventLog,
        *,
        tokens: TokenSource,
        sampling: SamplingOf,
        host: LinearHostModel | None = None,
        on_request: Callable[[RequestSpec], None] | None = None,
        on_progress: OnProgress | None = None,
        cache_resets_ns: Iterable[int] = (),
        max_concurrency: int | None = None,
        leaps: bool = True,
    ) -> None:
        super().__init__(
            env,
            core,
            timer,
            workload,
            log,
            tokens=tokens,
            sampling=sampling,
            on_request=on_request,
            cache_resets_ns=cache_resets_ns,
            max_concurrency=max_concurrency,
        )
        self._engine, self._scheduler = core, core.leaping
        self._timer = timer
        self._host = host or LinearHostModel()
        self._host_is_free = self._host == LinearHostModel()
        self._overlaps = core.batch_queue_size > 1
        self._on_progress = on_progress
        self._leaps = leaps
        self._submitted: deque[Submitted] = deque()
        self._in_the_air: _InTheAir | _OverlappedInTheAir | None = None
        self._plain = self._plain_steps()

    # ------------------------------------------------------------ the short way

    def _plain_steps(self) -> PlainWay | None:
        """Where steps follow each other and take what the model says and no more."""
        timer = self._timer
        waits = not timer.overlaps_preparation and (self._overlaps or timer.turnaround_ns > 0)
        if not isinstance(self._arrivals, Arrivals):
            # What comes is not known ahead.
            return None
        if not self._host_is_free or not timer.is_bare or waits or self._logs_blocks:
            return None
        client = Client(self._arrivals, self._take_in, self._ended, self._interrupts, self._on_progress)
        engine = self.env, self._engine, timer, self.log, client
        if not self._overlaps:
            return PlainSteps(*engine, leaps=self._leaps)
        pipeline = Pipeline(lambda: self._timeline.device_free_ns, self._enter, self._land_oldest)
        return OverlappedPlainSteps(*engine, pipeline=pipeline, leaps=self._leaps)

    def _enter(self, submitted: Submitted) -> None:
        """A step that the short way has begun is in flight."""
        self._engine.in_flight.append(submitted.frame)
        self._submitted.append(submitted)
        self._timeline.go_on_after(submitted.times, submitted.cost.prepare_ns)

    def _land_oldest(self) -> None:
        """What was in flight when the short way began is over."""
        frame, cost, times = self._submitted.popleft()
        self._take_out(frame, cost, times, self.now)

    def _interrupts(self) -> bool:
        return bool(self._aborts or self._cache_resets)

    def _short_way(self) -> Generator[simpy.Event, Any, None]:
        if self._plain is not None and not self._interrupts():
            steps = yield from self._plain.run()
            if steps:
                self._guard.progress()

    # ------------------------------------------------------------ one step

    def _submit(self, frame: LightFrame) -> Generator[simpy.Event, Any, None]:
        if frame.woken:
            self.log.woke(frame.woken)
        self.log.decided(frame.record, frame.start_ns)
        self._log_blocks()
        schedule_ns, now = 0, frame.start_ns
        if not self._host_is_free:
            schedule_ns = self._host.schedule_of(frame.shape.rows, frame.num_new)
            if schedule_ns:
                yield self.env.timeout(schedule_ns)
                now += schedule_ns
        cost = self._timer.cost(frame.shape)
        times = self._timeline.submit(now, schedule_ns, cost.prepare_ns, cost.device_ns)
        self._submitted.append(Submitted(frame, cost, times))

    def _complete(self) -> Generator[simpy.Event, Any, None]:
        frame, cost, times = self._submitted.popleft()
        if not self._host_is_free:
            times.update_ns = self._host.update_of(frame.shape.rows)
        now = self.now
        end_ns = max(times.device_end_ns, now) + times.update_ns
        if end_ns > now:
            yield self.env.timeout(end_ns - now)
        if self._aborts:
            self._abort_due()
        self._take_out(frame, cost, times, end_ns)

    def _take_out(self, frame: LightFrame, cost: StepCost, times: StepTimes, end_ns: int) -> None:
        """A step is over, and its tokens are out."""
        outputs = self._engine.complete(frame)
        self.log.stepped_lightly(frame, cost, self._timer.source, times, end_ns, outputs)
        self._finish(1, outputs)
        if outputs.regular or outputs.new_token_ids:
            self._guard.progress()
        else:
            tokens, preemptions = frame.shape.new_tokens, len(frame.record.preempted)
            self._guard.no_output(frame.step, tokens, preemptions, self.core.scheduler.requests.values())

    def _finish(self, num_steps: int, outputs: LightOutputs) -> None:
        """After an update: whoever ended is gone."""
        if self._logs_blocks:
            self._log_blocks()
        for request_id in outputs.finished:
            self._ended(request_id, self.now)
        if self._on_progress is not None:
            self._on_progress(num_steps, len(outputs.finished), self.now)

    def _abort(self, request: Request) -> None:
        if request.asleep:
            self.log.woke([self._scheduler.rouse(request)])
        super()._abort(request)

    # ------------------------------------------------------------ leaps

    def _leap(self) -> simpy.Event | None:
        plan = self._plan_leap(self._next_event_ns())
        if plan is None:
            return None
        self._take_off(plan, plan.num_steps)
        return self.env.timeout(plan.end_ns(plan.num_steps) - plan.start_ns)

    def _plan_leap(self, event_ns: int | None, most: int = sys.maxsize) -> LeapPlan | None:
        """The leap that can begin now, of at most so many steps; nothing has changed yet."""
        scheduler, in_flight = self._scheduler, len(self._submitted)
        if not self._leaps or in_flight != self._overlaps:
            return None
        length = scheduler.leap_length()
        if not length and scheduler.waiting and scheduler.stuck_blocks is None:
            reason = scheduler.try_head(self.now)
            if reason is None:
                return None
            self.log.kept_out(scheduler.waiting.peek(self.now).request_id, reason, self.now)
            length = scheduler.leap_length()
        most = min(length, most)
        if not most:
            return None
        if scheduler.stuck_blocks is not None:
            self.log.queued_behind()
        if in_flight:
            return self._plan_overlapped(most, event_ns)
        now, timeline = self.now, self._timeline
        shape = scheduler.leap_shape()
        schedule_ns = update_ns = 0
        if not self._host_is_free:
            schedule_ns, update_ns = self._host.schedule_of(shape.rows, 0), self._host.update_of(shape.rows)
        between_ns = timeline.between_steps_ns(schedule_ns, update_ns)
        if timeline.prepare_start(now + schedule_ns) != now + between_ns:
            # The worker is not ready yet: the first step would be longer than its like.
            return None
        costs = self._timer.leap_costs(shape, most, None if event_ns is None else event_ns - now)
        times = costs.times(between_ns + costs.first.prepare_ns + update_ns)
        steps = self._num_steps(times, costs.num_steps, event_ns, now)
        return _EvenPlan(steps, now, shape, costs, times, schedule_ns, update_ns) if steps else None

    def _take_off(self, plan: LeapPlan, steps: int) -> None:
        """Takes so many steps of a planned leap."""
        if isinstance(plan, _OverlappedPlan):
            self._take_off_overlapped(plan, steps)
            return
        start_ns, times, costs = plan.start_ns, plan.times, plan.costs
        block_log = (
            self._block_log(lambda i: start_ns + times.duration_ns(i), start_ns)
            if self._logs_blocks
            else None
        )
        leap = self._scheduler.leap(steps, plan.shape, block_log)
        leap.growth_ns, leap.each_device_ns = costs.growth_ns, costs.each_ns[:steps]
        end_ns, cost, timeline = plan.end_ns(steps), costs.first, self._timeline
        first = timeline.submit(
            start_ns + plan.schedule_ns, plan.schedule_ns, cost.prepare_ns, cost.device_ns
        )
        first.update_ns = plan.update_ns
        timeline.skip_to(end_ns - plan.update_ns)
        last = self._engine.leapt(leap, start_ns)
        self._in_the_air = _InTheAir(leap, start_ns, cost, first, last, end_ns)

    def _land(self) -> None:
        landed, self._in_the_air = self._in_the_air, None
        assert landed is not None, "what takes off lands"
        if isinstance(landed, _OverlappedInTheAir):
            self._land_overlapped(landed)
            return
        leap, start_ns, cost, times, last, end_ns = landed
        outputs = self._engine.complete(last)
        self.log.leapt(leap, cost, self._timer.source, start_ns, times, end_ns, outputs)
        self._finish(leap.num_steps, outputs)
        self._guard.progress()

    def settle(self) -> None:
        """The run breaks off: tells the log what it has not been told of those that sleep."""
        self._on_progress = None
        if self._plain is not None:
            self._plain.settle()
        if self._in_the_air is not None:
            self._land()
        self.log.woke(self._scheduler.rouse_all())

    def _plan_overlapped(self, most: int, event_ns: int | None) -> _OverlappedPlan | None:
        """Asynchronous scheduling: a leap that ends with its last step in flight."""
        now = self.now
        shape = self._scheduler.leap_shape()
        costs = self._timer.leap_costs(shape, most, None if event_ns is None else event_ns - now)
        before = self._submitted[0]
        before.times.update_ns = self._host.update_of(before.frame.shape.rows)
        overlap = Overlap(self._timeline, self._host, shape.rows, costs)
        steps = overlap.run(now, before.times, event_ns, self._abort_ns())
        return _OverlappedPlan(steps, now, shape, costs, overlap) if steps else None

    def _take_off_overlapped(self, plan: _OverlappedPlan, steps: int) -> None:
        overlap = plan.overlap
        overlap.settle(steps)
        block_log = self._block_log(overlap.starts.__getitem__, plan.start_ns) if self._logs_blocks else None
        leap = self._scheduler.leap(steps, plan.shape, block_log)
        last = self._engine.leapt_over(leap, overlap.starts[-1])
        self._submitted.append(Submitted(last, plan.costs.cost(steps - 1), overlap.times_of(steps - 1)))
        self._in_the_air = _OverlappedInTheAir(leap, plan.costs, overlap)

    def _land_overlapped(self, landed: _OverlappedInTheAir) -> None:
        leap, costs, overlap = landed
        before, cost, times = self._submitted.popleft()
        outputs = self._engine.complete(before)
        self.log.stepped_lightly(before, cost, self._timer.source, times, overlap.ends[0], outputs)
        steps = leap.num_steps
        if steps > 1:
            self._log_overlapped(leap, costs, overlap)
        if self._on_progress is not None:
            self._on_progress(steps, 0, overlap.ends[-1])
        self._guard.progress()

    def _log_overlapped(self, leap: Leap, costs: LeapCosts, overlap: Overlap) -> None:
        """All steps of a leap but the last, which is in flight."""
        steps = leap.num_steps - 1
        leap.num_steps = steps
        leap.blocks_begun_at = [i for i in leap.blocks_begun_at if i < steps]
        leap.evictions_at = [i for i in leap.evictions_at if i < steps]
        leap.each_start_ns = overlap.starts[:steps]
        leap.each_prepare_start_ns = overlap.prepare_starts[:steps]
        leap.each_device_start_ns = overlap.device_starts[:steps]
        leap.each_device_ns = overlap.device_ns[:steps]
        # A step is over when the boundary after its successor's schedule call has come.
        leap.each_end_ns = overlap.ends[1 : steps + 1]
        outputs = LightOutputs(regular=leap.shape.rows)
        first, end_ns = overlap.times_of(0), leap.each_end_ns[-1]
        self.log.leapt(leap, costs.first, self._timer.source, overlap.starts[0], first, end_ns, outputs)

    def _block_log(self, start_of: Callable[[int], int], start_ns: int) -> Callable[[int], None]:
        """Tells the log what became of blocks in a step of a leap that begins at `start_ns`."""
        if changes := self.core.drain_block_changes():
            self.log.block_changes(changes, start_ns)

        def begun(step: int) -> None:
            changes = self.core.drain_block_changes()
            if changes:
                self.log.block_changes(changes, start_of(step))

        return begun

    def _next_event_ns(self) -> int | None:
        """When something comes that a step boundary has to take notice of."""
        due_ns = self._arrivals.due_ns
        if not self._cache_resets:
            return due_ns
        return self._cache_resets[0] if due_ns is None else min(due_ns, self._cache_resets[0])

    def _num_steps(self, times: LeapTimes, most: int, event_ns: int | None, now: int) -> int:
        """Up to the first boundary at or after the next event; aborts must lie behind the last boundary."""
        steps = most if event_ns is None else times.steps_until(event_ns - now, most)
        abort_ns = self._abort_ns()
        if abort_ns is not None and times.duration_ns(steps) >= abort_ns - now:
            steps = times.steps_until(abort_ns - now, steps) - 1
        return steps

    def _abort_ns(self) -> int | None:
        """Before this instant every leap must be over."""
        return self._aborts[0][0] if self._aborts else None
