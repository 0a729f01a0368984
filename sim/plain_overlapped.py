"""The same steps as in `sim/plain_steps.py` with asynchronous scheduling: the short way of `sim/leaping_process.py`.

A step is scheduled while the one in front of it runs, and the device begins with it when that is over; then the one
behind it is scheduled. So a request that ends keeps its seat and its blocks for one step of others, and no step knows
of the tokens of the one in front of it. Steps in which rows lose their blocks are taken by the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import simpy

from servetwin.sim.contract import StepShape
from servetwin.sim.leap_times import LeapTimes
from servetwin.sim.light_frames import NO_LOOKUP, AwakeRow, LightFrame, StepCost, Submitted
from servetwin.sim.plain_newcomers import NewcomerStep, all_come_in, row_of, some_come_in
from servetwin.sim.plain_way import PlainWay
from servetwin.sim.records import PrefixCacheStats, ScheduleRecord
from servetwin.sim.request import Request
from servetwin.sim.step_rows import Row, first_of, last_of
from servetwin.sim.timeline import StepTimes


class Pipeline(NamedTuple):
    """The steps in flight, as the engine's process has them."""

    device_free_ns: Callable[[], int]
    """When the device is through with them."""
    enter: Callable[[Submitted], None]
    """One more is in flight."""
    land: Callable[[], None]
    """The oldest is over at this instant of SimPy's."""


class Begun(NamedTuple):
    """Steps that have been scheduled; the last one will be in flight when the next one is."""

    row: Row
    """As the log wants it."""
    num_steps: int
    end_ns: int
    """When the last one is over."""
    next_ns: int
    """When the next one is scheduled."""
    newcomers: NewcomerStep | None
    """The requests that come in, if any do."""


class OverlappedPlainSteps(PlainWay):
    """One step behind the other. Arguments as for `PlainWay`; `pipeline`: where the ordinary way goes on."""

    def __init__(self, *engine: Any, pipeline: Pipeline, leaps: bool) -> None:
        super().__init__(*engine, leaps=leaps)
        self._pipeline = pipeline
        self._held: tuple[Begun | None, Begun, list[Request]] | None = None
        """While SimPy is asked: what is in flight, what has been scheduled behind it, and who ends with the former."""

    def run(self) -> Generator[simpy.Event, Any, int]:
        """Each begins on the device when the one in front of it is over."""
        env, scheduler, client, pipeline = self._env, self._scheduler, self._client, self._pipeline
        calendar, arrivals, log = scheduler.calendar, client.arrivals, self._log
        now, others_ns, total = int(env.now), env.peek(), 0
        # Of the ordinary way; what is in flight afterwards has `begun`.
        in_flight = bool(self._core.in_flight)
        begun: Begun | None = None
        free_ns = max(pipeline.device_free_ns(), now)
        try:
            while True:
                due_ns = arrivals.due_ns
                if due_ns is not None and due_ns <= now:
                    client.take_in(now)
                    due_ns = arrivals.due_ns
                    if client.interrupts():
                        break
                    if scheduler.stuck_blocks is not None:
                        log.queued_behind()
                if scheduler.num_keeping:
                    # What is in flight counts for what is known of their tokens.
                    break
                number = scheduler.number
                leaving = calendar.take_ending(number - 1)
                single = begun is None or bool(leaving)
                following = self._begin(now, free_ns, due_ns, single)
                if following is None:
                    calendar.put_back(number - 1, leaving)
                    break
                total += following.num_steps
                landed, begun, free_ns = begun, following, following.end_ns
                if landed is None and not in_flight:
                    # Another one may be scheduled at once.
                    continue
                now = following.next_ns
                if in_flight or now >= others_ns:
                    self._held = landed, begun, leaving
                    yield env.timeout(now - int(env.now))
                    self._held, others_ns = None, env.peek()
                if landed is not None:
                    self._land(landed, following.num_steps, leaving, now)
                else:
                    calendar.put_back(number - 1, leaving)
                    in_flight = False
                    pipeline.land()
        finally:
            if self._held is None:
                self._hand_over(begun)
            self._core.skip(total)
        if now > env.now:
            yield env.timeout(now - int(env.now))
        return total

    def settle(self) -> None:
        """What has begun is over, but for the step in flight. `run` is not asked for more."""
        if self._held is None:
            return
        landed, begun, leaving = self._held
        if landed is not None:
            self._land(landed, begun.num_steps, leaving, begun.next_ns)
        else:
            self._scheduler.calendar.put_back(self._core.in_flight[0].step, leaving)
        self._hand_over(begun)

    # ------------------------------------------------------------ steps begin

    def _begin(self, now: int, free_ns: int, due_ns: int | None, single: bool) -> Begun | None:
        """The next steps, scheduled from `now` on, for a device that is free at `free_ns`; None: not in this way.

        `single`: one at most.
        """
        scheduler = self._scheduler
        begun, waiting = None, scheduler.waiting
        if not waiting or scheduler.stuck_blocks is not None:
            begun = self._leap(now, free_ns, due_ns, single)
        if begun is None and waiting and scheduler.stuck_blocks is None:
            if scheduler.all_come_in_whole():
                begun = self._admit(now, free_ns, all_come_in(scheduler, now))
            elif self._is_kept_out(now):
                begun = self._leap(now, free_ns, due_ns, single)
            elif scheduler.can_let_in():
                begun = self._admit(now, free_ns, some_come_in(scheduler, now))
        return begun

    def _leap(self, now: int, free_ns: int, due_ns: int | None, single: bool) -> Begun | None:
        """Steps of sleeping rows alone, up to an arrival, if there are any."""
        scheduler, timer = self._scheduler, self._timer
        steps = scheduler.leap_length()
        if not steps:
            return None
        if single or not self._leaps or (due_ns is not None and due_ns <= free_ns):
            steps = 1
        calendar = scheduler.calendar
        rows = calendar.num_rows
        context, longest = calendar.context(scheduler.number)
        # The step behind the first is scheduled at `free_ns`.
        left_ns = None if due_ns is None or steps == 1 else due_ns - free_ns
        first_ns, growth_ns = 0, 0
        each_ns: Sequence[int] = ()
        if timer.decode_ns is not None:
            first_ns, growth_ns = timer.decode_ns(rows, context), timer.context_ns * rows
        else:
            shape = StepShape(rows, rows, rows, rows, context, longest, 0, 0, 0, 0, 0, 0, 0)
            if steps == 1:
                first_ns = timer.device_ns(shape)
            else:
                costs = timer.leap_costs(shape, steps, left_ns)
                first_ns, growth_ns, each_ns = costs.first.device_ns, costs.growth_ns, costs.each_ns
                steps = costs.num_steps
        times = LeapTimes(first_ns, growth_ns, each_ns)
        if left_ns is not None and steps > 1:
            steps = times.steps_until(left_ns, steps - 1) + 1
        next_ns = free_ns + times.duration_ns(steps - 1)
        end_ns = next_ns + (each_ns[steps - 1] if each_ns else first_ns + growth_ns * (steps - 1))
        used, cached_free, free, evictions, begun_at, evictions_at = scheduler.take_blocks(steps)
        # As DECODES and DECODE_LISTS of `sim/step_rows.py` want it.
        num_waiting = len(scheduler.waiting)
        row = (
            now, free_ns, first_ns, rows, len(scheduler.running), num_waiting, used, cached_free, free, evictions,
            *(scheduler.stuck_lookup if num_waiting else NO_LOOKUP), context, longest, steps, growth_ns,
            begun_at, evictions_at, each_ns[:steps],
        )  # fmt: skip
        scheduler.skip(steps)
        return Begun(row, steps, end_ns, next_ns, None)

    def _admit(self, now: int, free_ns: int, step: NewcomerStep) -> Begun:
        """A step of those that come in beside the rows that sleep."""
        scheduler, log = self._scheduler, self._log
        end_ns = free_ns + self._timer.device_ns(step.shape)
        for request, hit_tokens, again in step.came_in:
            log.let_in(request, hit_tokens, again, now)
            if not request.is_prefill_chunk:
                scheduler.fall_asleep(request)
        if scheduler.waiting:
            log.kept_out(scheduler.waiting.peek(now).request_id, step.reason, now)
        row = row_of(scheduler, step, (now, free_ns, end_ns))
        scheduler.skip(1)
        return Begun(row, 1, end_ns, free_ns, step)

    # ------------------------------------------------------------ steps are over

    def _land(self, landed: Begun, num_steps: int, leaving: list[Request], now: int) -> None:
        """The last of these steps is over, and some requests end with it; so many more are over `now` in all."""
        scheduler, log = self._scheduler, self._log
        if landed.newcomers is not None:
            log.sampled([r for r, _, _ in landed.newcomers.came_in if not r.is_prefill_chunk], landed.end_ns)
        log.ran(self._timer.source, landed.row, landed.num_steps, landed.end_ns)
        for request in leaving:
            log.slept_to_its_end(request, scheduler.end_sleeper(request), landed.end_ns)
        log.flush_if_due()
        for request in leaving:
            self._client.ended(request.request_id, landed.end_ns)
        if self._client.on_progress is not None:
            self._client.on_progress(num_steps, len(leaving), now)

    def _hand_over(self, begun: Begun | None) -> None:
        """The ordinary way goes on, with the last of these steps in flight."""
        if begun is None:
            return
        number, source, newcomers = self._scheduler.number - 1, self._timer.source, begun.newcomers
        if begun.num_steps > 1:
            before = first_of(begun.row, begun.num_steps - 1)
            self._log.ran(source, before, begun.num_steps - 1, begun.next_ns)
        said = last_of(begun.row)
        start_ns, device_start_ns, duration_ns = said["start_s"], said["device_start_s"], said["device_s"]
        rows = said["rows"]
        if newcomers is None:
            shape, sleeping, awake = _decodes(said), rows, []
        else:
            shape, sleeping = newcomers.shape, newcomers.sleeping
            awake = [AwakeRow(r.place, r, not r.is_prefill_chunk) for r, _, _ in newcomers.came_in]
        frame = LightFrame(
            number, start_ns, _record(said, newcomers), awake, sleeping, shape, 0, [], reports=False
        )
        times = StepTimes(0, start_ns, device_start_ns, begun.end_ns)
        self._pipeline.enter(Submitted(frame, StepCost(0, duration_ns), times))


def _decodes(said: dict[str, Any]) -> StepShape:
    """Of a step of sleeping rows alone, of which the log says this."""
    rows, context, longest = (
        said[name] for name in ("rows", "decode_context_tokens", "decode_context_max_tokens")
    )
    return StepShape(rows, rows, rows, rows, context, longest, 0, 0, 0, 0, 0, 0, 0)


def _record(said: dict[str, Any], newcomers: NewcomerStep | None) -> ScheduleRecord:
    """What the log wants to know once more of a step when it is over, of what it says of it."""
    queries, hits, again, again_hits = (
        said[f"{name}_tokens"] for name in ("prefix_query", "prefix_hit", "preempted_query", "preempted_hit")
    )
    return ScheduleRecord(
        prefix=PrefixCacheStats(int(queries > 0), queries, hits, int(again > 0), again, again_hits),
        recomputed={} if newcomers is None else {r.request_id: n for r, _, n in newcomers.came_in if n},
        prefill_tokens=said.get("prefill_tokens", 0),
        decode_tokens=said.get("decode_tokens", said["rows"]),
        decode_rows=said.get("decode_rows", said["rows"]),
        running=said["running"],
        waiting=said["waiting"],
        used_blocks=said["used_blocks"],
        cached_free_blocks=said["cached_free_blocks"],
        free_blocks=said["free_blocks"],
        evictions=said["evictions"],
    )
