"""The steps in which nothing special happens, one after the other: the short way of `sim/leaping_process.py`.

Nearly all of a simulation is of few kinds of step: those of sleeping rows alone, many at once; those in which everybody
who waits comes in whole, or as many as there is room for; and those in which sleeping rows lose their blocks to others.
This knows no other. Who comes in, which blocks are taken and what is found in the prefix cache is said by the scheduler
(`sim/plain_scheduler.py`) and its KV cache, as ever; where more is going on the ordinary step decides. The loop is long
and in local variables on purpose: it is what a simulated day consists of.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import simpy

from servetwin.sim.arrivals import Arrivals
from servetwin.sim.columns import NEVER
from servetwin.sim.contract import StepShape
from servetwin.sim.events import EventLog
from servetwin.sim.leap_times import even_steps_until
from servetwin.sim.leaping_core import LeapingCore
from servetwin.sim.light_frames import NO_LOOKUP
from servetwin.sim.plain_scheduler import PlainScheduler
from servetwin.sim.records import WaitReason
from servetwin.sim.request import Request
from servetwin.sim.steptime.features import shape_of
from servetwin.sim.steptime.modelled import ModelledStepTimer
from servetwin.sim.steptime.plan_rows import PlanRow


class Client(NamedTuple):
    """What goes on outside of the engine, as its process has it."""

    arrivals: Arrivals
    take_in: Callable[[int], object]
    """Takes in who has arrived at this instant."""
    ended: Callable[[str, int], object]
    """This request got its last token at this instant."""
    interrupts: Callable[[], bool]
    """Something is due that no step here knows of: aborts, resets."""
    on_progress: Callable[[int, int, int], object] | None
    """Steps, requests that ended with them, instant."""


class _LetIn(NamedTuple):
    """What a look at the queue led to."""

    rows: list[tuple[Request, PlanRow]]
    """Of those that came in."""
    look_ups: list[int]
    """In the prefix cache, as `NO_LOOKUP` has them."""
    reason: WaitReason
    """What whoever is left waits for."""


class PlainSteps:
    """Of one engine with a host that takes no time, and steps one at a time. `leaps`: many at once."""

    def __init__(
        self,
        env: simpy.Environment,
        core: LeapingCore,
        timer: ModelledStepTimer,
        log: EventLog,
        client: Client,
        *,
        leaps: bool,
    ) -> None:
        self._env, self._core, self._timer, self._log, self._client = env, core, timer, log, client
        assert isinstance(core.leaping, PlainScheduler), "steps that do not overlap"
        self._scheduler, self._leaps = core.leaping, leaps
        self.in_the_air: int | None = None
        """When the step ends that has begun and whose tokens are not out."""
        self._came_in: list[Request] = []
        """Those with their whole prompt in the step that has begun."""
        self._steps = 0
        """That have begun, and whose tokens are not out."""

    def run(self) -> Generator[simpy.Event, Any, int]:
        """Takes steps until one is anything else; the clock stands at its beginning then. Returns their number.

        SimPy need not be asked for every step: while nothing else is due there, nobody looks.
        """
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

    def _is_kept_out(self, now: int) -> bool:
        """The head of the queue cannot come in before somebody ends."""
        reason = self._scheduler.try_head(now)
        if reason is None:
            return False
        self._log.kept_out(self._scheduler.waiting.peek(now).request_id, reason, now)
        return True

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
        """The run breaks off: what has begun is over."""
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
            now, first_ns, rows, len(scheduler.running), num_waiting, used, cached_free, free, evictions,
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
        scheduler, log = self._scheduler, self._log
        calendar, evictions = scheduler.calendar, scheduler.kv.pool.num_evictions
        number, sleeping = scheduler.number, calendar.num_rows
        context, longest = calendar.context(number)
        scheduler.take_blocks(1)
        tokens = pairs = contexts = hits = 0
        largest = (0, 0)
        came_in: list[tuple[Request, int]] = []
        waiting = scheduler.waiting
        while waiting:
            request, hit_tokens = scheduler.come_in_whole(now)
            known = request.num_tokens
            new = known - hit_tokens
            tokens += new
            pairs += new * known
            contexts += known
            hits += hit_tokens
            if (new, known) > largest:
                largest = new, known
            came_in.append((request, hit_tokens))
        count = len(came_in)
        rows = sleeping + count
        shape = StepShape(
            sleeping + tokens, rows, rows, sleeping, context, longest, tokens, count, pairs, contexts, *largest, count
        )  # fmt: skip
        end_ns = now + self._timer.device_ns(shape)
        for request, hit_tokens in came_in:
            log.came_in(request.request_id, hit_tokens, len(request.block_ids), now, end_ns)
            self._came_in.append(request)
        look_ups = (contexts, hits, 0, 0) if scheduler.kv.enable_caching else NO_LOOKUP
        self._ran(now, end_ns, shape, sleeping, evictions, look_ups=look_ups)
        return end_ns

    def _admit_some(self, now: int) -> int:
        """The same for those that there is room for, some of whom have run before, the last one perhaps in part."""
        scheduler, log = self._scheduler, self._log
        calendar, evictions = scheduler.calendar, scheduler.kv.pool.num_evictions
        number, sleeping = scheduler.number, calendar.num_rows
        context, longest = calendar.context(number)
        scheduler.take_blocks(1)
        rows, look_ups, reason = self._let_in(now, scheduler.token_budget - sleeping)
        shape = shape_of(
            [row for _, row in rows],
            len(rows),
            decode_rows=sleeping,
            decode_context_tokens=context,
            decode_context_max_tokens=longest,
        )
        end_ns = now + self._timer.device_ns(shape)
        recomputed = 0
        for request, row in rows:
            again = _computed_again(request, row)
            recomputed += again
            log.let_in(request, row, again, now, end_ns)
            if row.samples:
                self._came_in.append(request)
        if scheduler.waiting:
            log.kept_out(scheduler.waiting.peek(now).request_id, reason, now)
        self._ran(now, end_ns, shape, sleeping, evictions, look_ups=look_ups, recomputed=recomputed)
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
        self._ran(now, end_ns, shape, rows, evictions, preempted=len(record.preempted))
        return end_ns

    def _ran(
        self,
        now: int,
        end_ns: int,
        shape: StepShape,
        regular: int,
        evictions: int,
        *,
        preempted: int = 0,
        look_ups: Sequence[int] = NO_LOOKUP,
        recomputed: int = 0,
    ) -> None:
        """Tells the log of one step; `regular` of its rows had a token with the step before, too.

        `evictions`: of all steps before it.
        """
        scheduler, pool = self._scheduler, self._scheduler.kv.pool
        free, cached_free, prefill_tokens = pool.num_free, pool.num_cached_free, shape.prefill_tokens
        # As INTEGERS and RUN_INTEGERS of `sim/step_rows.py` want it.
        row = (
            now, 0, end_ns - now, 0, prefill_tokens, shape.new_tokens - prefill_tokens, shape.rows, shape.decode_rows,
            len(scheduler.running), len(scheduler.waiting),
            pool.num_gpu_blocks - 1 - free, cached_free, free - cached_free, preempted, pool.num_evictions - evictions,
            *look_ups, recomputed, 0, 0, 0,
            0, now, now, end_ns, NEVER, 0,
            shape.logits_rows, shape.decode_context_tokens, shape.decode_context_max_tokens, *shape[7:],
            1, 0, regular,
        )  # fmt: skip
        self._log.ran(self._timer.source, row, 1, end_ns)
        self._steps = 1
        scheduler.skip(1)

    def _let_in(self, now: int, budget: int) -> _LetIn:
        """Lets in whom so many tokens, the seats and the blocks are enough for."""
        scheduler, kv = self._scheduler, self._scheduler.kv
        rows: list[tuple[Request, PlanRow]] = []
        look_ups, reason = [0, 0, 0, 0], None
        while scheduler.waiting and budget > 0:
            request, hits, verdict = scheduler.let_in(now, budget)
            found = len(hits) * kv.block_size
            if scheduler.counts_lookup(verdict):
                place = 2 if request.num_preemptions else 0
                look_ups[place] += request.num_tokens
                look_ups[place + 1] += found
            if not isinstance(verdict, int):
                reason = verdict
                break
            budget -= verdict
            known, outputs = request.num_tokens, request.num_output_tokens
            rows.append((request, PlanRow(request.request_id, verdict, found, known, outputs)))
        if reason is None:
            reason = WaitReason.SEATS if scheduler.is_full else WaitReason.BUDGET
        return _LetIn(rows, look_ups, reason)


def _computed_again(request: Request, row: PlanRow) -> int:
    """Tokens of a newcomer that it had computed before it was preempted."""
    if row.is_decode:
        return 0
    again = min(row.num_scheduled_tokens, request.num_tokens_ever_computed - row.num_computed_tokens)
    return max(again, 0)
