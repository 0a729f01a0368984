"""The steps in which nothing special happens, one after the other: the short way of `sim/leaping_process.py`.

Nearly all of a simulation is of few kinds of step: those of sleeping rows alone, many at once; those in which everybody
who waits comes in whole, or as many as there is room for; and those in which sleeping rows lose their blocks to others.
This knows no other. Who comes in, which blocks are taken and what is found in the prefix cache is said by the scheduler
(`sim/plain_scheduler.py`) and its KV cache, as ever; where more is going on the ordinary step decides. The loop is long
and in local variables on purpose: it is what a simulated day consists of.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import simpy

from servetwin.sim.contract import StepShape
from servetwin.sim.leap_times import even_steps_until
from servetwin.sim.light_frames import NO_LOOKUP
from servetwin.sim.plain_newcomers import NewcomerStep, all_come_in, row_of, some_come_in
from servetwin.sim.plain_way import PlainWay
from servetwin.sim.request import Request


class PlainSteps(PlainWay):
    """One step at a time. Arguments as for `PlainWay`."""

    def __init__(self, *engine: Any, leaps: bool) -> None:
        super().__init__(*engine, leaps=leaps)
        self.in_the_air: int | None = None
        """When the step ends that has begun and whose tokens are not out."""
        self._came_in: list[Request] = []
        """Those with their whole prompt in the step that has begun."""
        self._steps = 0
        """That have begun, and whose tokens are not out."""

    def run(self) -> Generator[simpy.Event, Any, int]:
        """Each is over before the next one begins."""
        env, scheduler, client = self._env, self._scheduler, self._client
        arrivals, waiting, ends = client.arrivals, scheduler.waiting, scheduler.calendar.ends
        take_in, interrupts, on_progress = client.take_in, client.interrupts, client.on_progress
        log, now = self._log, int(env.now)
        others_ns, total = env.peek(), 0
        while True:
            due_ns = arrivals.due_ns
            if due_ns is not None and due_ns <= now:
                take_in(now)
                due_ns = arrivals.due_ns
                if interrupts():
                    break
                if scheduler.stuck_blocks is not None:
                    log.queued_behind()
            end_ns = 0
            if not waiting or scheduler.stuck_blocks is not None:
                end_ns = self._leap(now, due_ns)
            if not end_ns and waiting and scheduler.stuck_blocks is None:
                if scheduler.all_come_in_whole():
                    end_ns = self._admit(now)
                elif self._is_kept_out(now):
                    end_ns = self._leap(now, due_ns)
                elif scheduler.can_let_in():
                    end_ns = self._admit_some(now)
            if not end_ns and scheduler.has_to_preempt():
                end_ns = self._preempt(now)
            if not end_ns:
                break
            steps = self._steps
            total += steps
            if end_ns >= others_ns:
                self.in_the_air = end_ns
                yield env.timeout(end_ns - int(env.now))
                self.in_the_air, others_ns = None, env.peek()
            now = end_ns
            ended = 0
            if self._came_in or scheduler.number - 1 in ends:
                ended = self.land(now)
            if on_progress is not None:
                on_progress(steps, ended, now)
        self._core.skip(total)
        if now > env.now:
            yield env.timeout(now - int(env.now))
        return total

    def land(self, now: int) -> int:
        """First and last tokens of the steps that have begun are out. Returns how many requests ended with them."""
        scheduler, log, came_in = self._scheduler, self._log, self._came_in
        last = scheduler.number - 1
        ending = scheduler.calendar.ends.pop(last, None) or []
        if came_in:
            for request in came_in:
                if request.num_tokens + 1 < request.length_limit:
                    scheduler.fall_asleep(request)
                else:
                    ending.append(request)
            came_in.clear()
        for request in ending:
            log.slept_to_its_end(request, scheduler.end_sleeper(request), now)
        log.flush_if_due()
        if not ending:
            return 0
        ended = self._client.ended
        for request in ending:
            ended(request.request_id, now)
        return len(ending)

    def settle(self) -> None:
        """What has begun is over."""
        if self.in_the_air is not None:
            self.land(self.in_the_air)

    # ------------------------------------------------------------ decodes alone

    def _leap(self, now: int, due_ns: int | None) -> int:
        """Steps of sleeping rows alone, up to an arrival; their end, 0 where there is no such step."""
        scheduler, timer = self._scheduler, self._timer
        steps = scheduler.leap_length()
        if not steps:
            return 0
        if not self._leaps:
            steps = 1
        calendar = scheduler.calendar
        rows = calendar.num_rows
        context, longest = calendar.context(scheduler.number)
        each_ns: Sequence[int] = ()
        if timer.decode_ns is not None:
            first_ns, growth_ns = timer.decode_ns(rows, context), timer.context_ns * rows
            duration_ns = steps * first_ns + growth_ns * (steps * (steps - 1) // 2)
            if steps > 1 and due_ns is not None and now + duration_ns > due_ns:
                steps = even_steps_until(first_ns, growth_ns, due_ns - now, steps)
                duration_ns = steps * first_ns + growth_ns * (steps * (steps - 1) // 2)
        else:
            shape = StepShape(rows, rows, rows, rows, context, longest, 0, 0, 0, 0, 0, 0, 0)
            left_ns = None if due_ns is None else due_ns - now
            costs = timer.leap_costs(shape, steps, left_ns)
            times, steps = costs.times(0), costs.num_steps
            if left_ns is not None:
                steps = times.steps_until(left_ns, steps)
            first_ns, growth_ns, each_ns = costs.first.device_ns, costs.growth_ns, costs.each_ns[:steps]
            duration_ns = times.duration_ns(steps)
        used, cached_free, free, evictions, begun_at, evictions_at = scheduler.take_blocks(steps)
        end_ns = now + duration_ns
        # As DECODES and DECODE_LISTS of `sim/step_rows.py` want it.
        num_waiting = len(scheduler.waiting)
        row = (
            now, now, first_ns, rows, len(scheduler.running), num_waiting, used, cached_free, free, evictions,
            *(scheduler.stuck_lookup if num_waiting else NO_LOOKUP), context, longest, steps, growth_ns,
            begun_at, evictions_at, each_ns,
        )  # fmt: skip
        self._log.ran(timer.source, row, steps, end_ns)
        self._steps = steps
        scheduler.skip(steps)
        return end_ns

    # ------------------------------------------------------------ newcomers

    def _admit(self, now: int) -> int:
        """A step of all who wait, whole, beside the rows that sleep; its end."""
        log, step = self._log, all_come_in(self._scheduler, now)
        end_ns = now + self._timer.device_ns(step.shape)
        for request, hit_tokens, _ in step.came_in:
            log.came_in(request.request_id, hit_tokens, len(request.block_ids), now, end_ns)
            self._came_in.append(request)
        self._ran(step, now, end_ns)
        return end_ns

    def _admit_some(self, now: int) -> int:
        """The same for those that there is room for, some of whom have run before, the last one perhaps in part."""
        log, step = self._log, some_come_in(self._scheduler, now)
        end_ns = now + self._timer.device_ns(step.shape)
        for request, hit_tokens, again in step.came_in:
            log.let_in(request, hit_tokens, again, now)
            if not request.is_prefill_chunk:
                self._came_in.append(request)
        log.sampled(self._came_in, end_ns)
        if self._scheduler.waiting:
            log.kept_out(self._scheduler.waiting.peek(now).request_id, step.reason, now)
        self._ran(step, now, end_ns)
        return end_ns

    def _preempt(self, now: int) -> int:
        """A step of the rows that sleep for which there are blocks, at the cost of others; its end."""
        scheduler, log = self._scheduler, self._log
        calendar, evictions = scheduler.calendar, scheduler.kv.pool.num_evictions
        record, woken = scheduler.preempt(now)
        log.woke(woken)
        log.decided(record, now)
        rows = calendar.num_rows
        context, longest = calendar.context(scheduler.number)
        shape = StepShape(rows, rows, rows, rows, context, longest, 0, 0, 0, 0, 0, 0, 0)
        end_ns = now + self._timer.device_ns(shape)
        step = NewcomerStep([], shape, rows, NO_LOOKUP, evictions, 0, None)
        self._ran(step, now, end_ns, len(record.preempted))
        return end_ns

    def _ran(self, step: NewcomerStep, now: int, end_ns: int, preempted: int = 0) -> None:
        row = row_of(self._scheduler, step, (now, now, end_ns), preempted)
        self._log.ran(self._timer.source, row, 1, end_ns)
        self._steps = 1
        self._scheduler.skip(1)
