"""What a scheduler whose plain decodes sleep does in steps in which nothing special happens (`sim/plain_way.py`).

The decisions are those of `sim/scheduler.py`; here is what is written down of them where nobody asks for more.
"""

from __future__ import annotations

from servetwin.sim.async_scheduler import AsyncScheduler
from servetwin.sim.leaping_scheduler import NO_STEPS, LeapingScheduler
from servetwin.sim.light_frames import TakenBlocks, Woken
from servetwin.sim.records import ScheduleRecord, WaitReason
from servetwin.sim.request import Request, RequestStatus
from servetwin.sim.step import Step


class PlainScheduler(LeapingScheduler):
    """Arguments as for `LeapingScheduler`."""

    def skip(self, num_steps: int) -> None:
        """So many steps have been begun without `light`: all their rows sleep, or are about to."""
        self.number += num_steps
        self.finished_req_ids.clear()

    def all_come_in_whole(self) -> bool:
        """The next step is one token of each row and the whole prompt of each request that waits.

        There are seats, tokens and blocks enough for that whatever is found in the prefix cache, and each of them is
        a plain decode from its first token on.
        """
        waiting, calendar = self.waiting, self.calendar
        if self.awake or len(self.running) + len(waiting) > self._max_num_seqs:
            return False
        tokens, blocks = self.token_budget - calendar.num_rows, self.kv.pool.num_free
        blocks -= len(calendar.beginning_block(self.number))
        size = self.kv.block_size
        for request in waiting:
            tokens -= request.num_tokens
            blocks -= -(-request.num_tokens // size)
            if tokens < 0 or blocks < 0 or not request.is_plain or request.num_preemptions:
                return False
        return True

    def can_let_in(self) -> bool:
        """Whoever waits is a plain decode once it is computed, and the rows that sleep find room in the next step."""
        calendar = self.calendar
        return (
            not (self.awake or self._num_special)
            and 0 < calendar.num_rows <= self.token_budget
            and len(calendar.beginning_block(self.number)) <= self.kv.pool.num_free
        )

    def has_to_preempt(self) -> bool:
        """Rows that sleep lose their blocks to others in the next step, and one of them at least stays."""
        calendar = self.calendar
        return (
            len(calendar.beginning_block(self.number)) > self.kv.pool.num_free
            and not self.awake
            and self._takes_last
            and not calendar.num_filling
            and 1 < calendar.num_rows <= self.token_budget
        )

    def preempt(self, now: int) -> tuple[ScheduleRecord, list[Woken]]:
        """The next step's blocks for those that stay; what becomes of the others."""
        step = Step(self.token_budget)
        served = self._pass_with_victims(step, now)
        assert served, "`has_to_preempt`"
        self._note_wait(step, WaitReason.PREEMPTION, now)
        woken, self._woken = self._woken, []
        return step.record, woken

    def counts_lookup(self, verdict: int | WaitReason) -> bool:
        """A look at the head of the queue that ended so counts in the statistics of the prefix cache."""
        if not self.kv.enable_caching or verdict is WaitReason.SEATS:
            return False
        return self._counts_refused_lookups or isinstance(verdict, int)

    def let_in(self, now: int, budget: int) -> tuple[Request, list[int], int | WaitReason]:
        """The head of the queue comes in with some of so many tokens; also its hits, and its tokens or why it stays."""
        if self.is_full:
            return self.waiting.peek(now), NO_STEPS, WaitReason.SEATS
        request = self.waiting.peek(now)
        verdict: int | WaitReason
        if self._found is not None:
            (hits, verdict), self._found = self._found, None
        else:
            hits = self.kv.get_computed_blocks(request)
            verdict = self._verdict(request, hits, budget, self.kv.pool.num_free)
        if isinstance(verdict, int):
            self._come_in(request, hits, verdict)
        return request, hits, verdict

    def _come_in(self, request: Request, hits: list[int], num_tokens: int) -> None:
        blocks = self.kv.allocate_slots(request, num_tokens, hits)
        assert blocks is not None, "counted before"
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = len(hits) * self.kv.block_size + num_tokens
        self._num_placed += 1
        request.place = self._num_placed
        self.running.append(request)
        if request.num_computed_tokens < request.num_tokens:
            self.awake.append(request)
            request.is_prefill_chunk = True
        else:
            request.is_prefill_chunk = False

    def serve_due(self, number: int) -> None:
        """Blocks for the sleepers of one step; there are enough."""
        due = self.calendar.beginning_block(number)
        if self.kv.enable_caching:
            due = self._due(due, number)
        if due:
            self._serve_sleepers(due, number)

    def come_in_whole(self, now: int) -> tuple[Request, int]:
        """The head of the queue comes in with its whole prompt, for which there is room; also the tokens hit."""
        request, kv = self.waiting.peek(now), self.kv
        hits, hit_tokens = NO_STEPS, 0
        if kv.enable_caching:
            hits = kv.get_computed_blocks(request)
            hit_tokens = len(hits) * kv.block_size
        self._come_in(request, hits, request.num_tokens - hit_tokens)
        return request, hit_tokens

    def fall_asleep(self, request: Request) -> None:
        """A request that came in whole is a row of every step from now on."""
        number = self.number
        request.num_tokens += 1
        request.base = request.num_computed_tokens - number
        request.last_step = request.length_limit - 2 - request.base
        request.joined_step = request.since_step = number
        self.calendar.add(request)

    def end_sleeper(self, request: Request) -> int:
        """The last token of a row is out; returns the blocks that it held. (`calendar.forget` tells the calendar.)"""
        self.calendar.leave(request)
        request.asleep = False
        blocks = len(request.block_ids)
        # Entered when they are given back, if they are private.
        request.num_hashed_blocks = (request.length_limit - 1) // self.kv.block_size
        if request.keeps_tokens:
            self._catch_up(request, self.number)
        self._end(request, RequestStatus.FINISHED_LENGTH_CAPPED)
        self.running.remove(request)
        return blocks

    def take_blocks(self, num_steps: int) -> TakenBlocks:
        """Blocks for so many steps of the rows that sleep, of which there are enough; see `leap`."""
        if self.kv.enable_caching:
            simple = not self.calendar.num_filling and self.kv.pool.is_in_order
            return self._take_cached(num_steps) if simple else self._take_blocks_one_by_one(num_steps)
        pool, phases, size, number = self.kv.pool, self.calendar.phases, self.kv.block_size, self.number
        # Who begins one in the first step, and in each after it: a block for each, in this order.
        phase = number % size
        begun_at: list[int] = []
        if num_steps == 1:
            if beginning := phases[phase]:
                self.kv.begin_blocks(beginning)
            free = pool.num_free
            return self._usable_blocks - free, 0, free, 0, begun_at, NO_STEPS
        next_blocks = pool.next_blocks(self.calendar.num_rows * -(-num_steps // size))
        count = 0
        for request in phases[phase]:
            request.block_ids.append(next_blocks[count])
            count += 1
        free = pool.num_free - count
        for i in range(1, num_steps):
            phase += 1
            if phase == size:
                phase = 0
            if beginning := phases[phase]:
                for request in beginning:
                    request.block_ids.append(next_blocks[count])
                    begun_at.append(i)
                    count += 1
        pool.take_next(count)
        return self._usable_blocks - free, 0, free, 0, begun_at, NO_STEPS

    def _take_cached(self, num_steps: int) -> TakenBlocks:
        """The same where blocks have contents that are dropped, and none that is entered before a row ends."""
        pool, phases, size, number = self.kv.pool, self.calendar.phases, self.kv.block_size, self.number
        phase = number % size
        turns = phases[phase:] + phases[:phase]
        if num_steps > size:
            turns *= -(-num_steps // size)
        next_blocks = pool.next_blocks(self.calendar.num_rows * -(-num_steps // size))
        has_content = pool.contents
        begun_at: list[int] = []
        evictions_at: list[int] = []
        count = evictions = 0
        for request in turns[0]:
            block = next_blocks[count]
            request.block_ids.append(block)
            count += 1
            evictions += has_content[block] is not None
        used = self._usable_blocks - pool.num_free + count
        cached_free = pool.num_cached_free - evictions
        for i in range(1, num_steps):
            for request in turns[i]:
                block = next_blocks[count]
                request.block_ids.append(block)
                begun_at.append(i)
                count += 1
                if has_content[block] is not None:
                    evictions_at.append(i)
        pool.take_next(count)
        return used, cached_free, self._usable_blocks - used - cached_free, evictions, begun_at, evictions_at

    def _take_blocks_one_by_one(self, num_steps: int) -> TakenBlocks:
        begun_at: list[int] = []
        evictions_at: list[int] = []
        pool, number = self.kv.pool, self.number
        evictions = pool.num_evictions
        self.serve_due(number)
        used, cached_free, free, first_evictions = self._pool_figures(evictions)
        for i in self._steps_with_blocks_to_do(num_steps):
            evictions = pool.num_evictions
            self.serve_due(number + i)
            begun_at += [i] * len(self.calendar.beginning_block(number + i))
            evictions_at += [i] * (pool.num_evictions - evictions)
        return used, cached_free, free, first_evictions, begun_at, evictions_at

    def _pool_figures(self, evictions_before: int) -> tuple[int, int, int, int]:
        pool = self.kv.pool
        free, cached_free = pool.num_free, pool.num_cached_free
        return (
            self._usable_blocks - free,
            cached_free,
            free - cached_free,
            pool.num_evictions - evictions_before,
        )


class PlainAsyncScheduler(PlainScheduler, AsyncScheduler):
    """The same with asynchronous scheduling."""

    def _will_be_plain(self, request: Request) -> bool:
        """Nor is its first token its last, nor one of it in flight."""
        return (
            super()._will_be_plain(request)
            and request.num_tokens + 1 < request.length_limit
            and not request.num_output_placeholders
        )

    def fall_asleep(self, request: Request) -> None:
        """A request comes in whole with the step that is being decided, and is a row of every step after that."""
        number = self.number
        request.num_output_placeholders = 1
        request.base = request.num_computed_tokens - number - 1
        request.last_step = request.length_limit - 2 - request.base
        request.joined_step, request.since_step = number + 1, number
        self.calendar.add(request)
