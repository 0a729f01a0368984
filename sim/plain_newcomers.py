"""Steps in which requests come in beside rows that sleep, for the short ways (`sim/plain_way.py`).

Who comes in is said by the scheduler (`sim/plain_scheduler.py`); here is what the step's duration and its row in the
log need to know of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from servetwin.sim.columns import NEVER
from servetwin.sim.contract import StepShape
from servetwin.sim.light_frames import NO_LOOKUP
from servetwin.sim.plain_scheduler import PlainScheduler
from servetwin.sim.records import WaitReason
from servetwin.sim.request import Request
from servetwin.sim.step_rows import Row
from servetwin.sim.steptime.features import shape_of
from servetwin.sim.steptime.plan_rows import PlanRow


class NewcomerStep(NamedTuple):
    """A step as it has been decided; its blocks are taken."""

    came_in: list[tuple[Request, int, int]]
    """Each with the tokens that it found in the prefix cache, and those that it computes anew."""
    shape: StepShape
    sleeping: int
    """Rows that slept before it: each had a token with the step in front of it, too."""
    look_ups: Sequence[int]
    """In the prefix cache, as `NO_LOOKUP` has them."""
    evictions: int
    """Of all steps before it."""
    recomputed: int
    """Tokens computed anew, of all."""
    reason: WaitReason | None
    """What whoever is left waits for."""


def all_come_in(scheduler: PlainScheduler, now: int) -> NewcomerStep:
    """All who wait come in whole (`PlainScheduler.all_come_in_whole`)."""
    calendar, evictions = scheduler.calendar, scheduler.kv.pool.num_evictions
    sleeping = calendar.num_rows
    context, longest = calendar.context(scheduler.number)
    scheduler.take_blocks(1)
    tokens = pairs = contexts = hits = 0
    largest = (0, 0)
    came_in: list[tuple[Request, int, int]] = []
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
        came_in.append((request, hit_tokens, 0))
    count = len(came_in)
    rows = sleeping + count
    shape = StepShape(
        sleeping + tokens, rows, rows, sleeping, context, longest, tokens, count, pairs, contexts, *largest, count
    )  # fmt: skip
    look_ups = (contexts, hits, 0, 0) if scheduler.kv.enable_caching else NO_LOOKUP
    return NewcomerStep(came_in, shape, sleeping, look_ups, evictions, 0, None)


def some_come_in(scheduler: PlainScheduler, now: int) -> NewcomerStep:
    """Those for whom there are tokens, seats and blocks, some of whom have run before, the last one perhaps in part."""
    calendar, evictions = scheduler.calendar, scheduler.kv.pool.num_evictions
    sleeping = calendar.num_rows
    context, longest = calendar.context(scheduler.number)
    scheduler.take_blocks(1)
    budget, size = scheduler.token_budget - sleeping, scheduler.kv.block_size
    came_in: list[tuple[Request, int, int]] = []
    rows: list[PlanRow] = []
    look_ups, reason, recomputed = [0, 0, 0, 0], None, 0
    while scheduler.waiting and budget > 0:
        request, hits, verdict = scheduler.let_in(now, budget)
        found = len(hits) * size
        if scheduler.counts_lookup(verdict):
            place = 2 if request.num_preemptions else 0
            look_ups[place] += request.num_tokens
            look_ups[place + 1] += found
        if not isinstance(verdict, int):
            reason = verdict
            break
        budget -= verdict
        row = PlanRow(request.request_id, verdict, found, request.num_tokens, request.num_output_tokens)
        again = _computed_again(request, row)
        recomputed += again
        rows.append(row)
        came_in.append((request, found, again))
    if reason is None:
        reason = WaitReason.SEATS if scheduler.is_full else WaitReason.BUDGET
    shape = shape_of(
        rows,
        len(rows),
        decode_rows=sleeping,
        decode_context_tokens=context,
        decode_context_max_tokens=longest,
    )
    return NewcomerStep(came_in, shape, sleeping, look_ups, evictions, recomputed, reason)


def _computed_again(request: Request, row: PlanRow) -> int:
    """Tokens of a newcomer that it had computed before it was preempted."""
    if row.is_decode:
        return 0
    again = min(row.num_scheduled_tokens, request.num_tokens_ever_computed - row.num_computed_tokens)
    return max(again, 0)


def row_of(
    scheduler: PlainScheduler, step: NewcomerStep, times_ns: tuple[int, int, int], preempted: int = 0
) -> Row:
    """For the log, of a step that has just been decided: INTEGERS and RUN_INTEGERS of `sim/step_rows.py`.

    `times_ns`: when it is scheduled, when the device begins with it, when it is over. `preempted`: who lost blocks.
    """
    pool, shape = scheduler.kv.pool, step.shape
    free, cached_free = pool.num_free, pool.num_cached_free
    now, device_start_ns, end_ns = times_ns
    return (
        now, 0, end_ns - device_start_ns, 0,
        shape.prefill_tokens, shape.new_tokens - shape.prefill_tokens, shape.rows, shape.decode_rows,
        len(scheduler.running), len(scheduler.waiting),
        pool.num_gpu_blocks - 1 - free, cached_free, free - cached_free, preempted, pool.num_evictions - step.evictions,
        *step.look_ups, step.recomputed, 0, 0, 0,
        0, now, device_start_ns, end_ns, NEVER, 0,
        shape.logits_rows, shape.decode_context_tokens, shape.decode_context_max_tokens, *shape[7:],
        1, 0, step.sleeping, 0,
    )  # fmt: skip
