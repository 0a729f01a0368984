"""A scheduler that does not look at its plain decodes in every step: the same decisions, for a modelled step time.

The rules are those of `sim/scheduler.py` and `sim/async_scheduler.py`, which this only feeds: plain decodes sleep in a
calendar (`sim/decode_calendar.py`), a step serves those of them that begin or fill a block, and the few rows that are
awake (prompts in chunks, newcomers). Where that is not enough - blocks or budget are short - all rows wake and the
ordinary passes decide. No plan is written: nobody runs it.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from servetwin.sim.config import EngineConfig
from servetwin.sim.contract import StepShape
from servetwin.sim.decode_calendar import DecodeCalendar
from servetwin.sim.kv_cache_manager import cdiv
from servetwin.sim.light_frames import (
    NO_LOOKUP,
    AwakeRow,
    Ended,
    Leap,
    LightFrame,
    LightOutputs,
    Woken,
)
from servetwin.sim.policy import SchedulingPolicy, inherits
from servetwin.sim.records import Finish, PrefixCacheStats, ScheduleRecord, WaitReason
from servetwin.sim.request import FINISH_REASONS, Request, RequestStatus
from servetwin.sim.request_queue import FIFOQueue
from servetwin.sim.scheduler import Scheduler
from servetwin.sim.step import Step
from servetwin.sim.steptime.features import shape_of
from servetwin.sim.steptime.plan_rows import PlanRow
from servetwin.sim.token_source import TokenSource

_in_order = attrgetter("place")
_NONE: list[tuple[Request, int]] = []
NO_STEPS: list[int] = []
_NO_STOP = -1
_UNKNOWN = [0]
"""A token that nobody will ask for."""
_ENDED_BY_LENGTH = Finish(FINISH_REASONS[RequestStatus.FINISHED_LENGTH_CAPPED], None)


class LeapingScheduler(Scheduler):
    """Arguments as for `Scheduler`; `tokens`: where outputs come from. For policies that `may_leap` allows."""

    def __init__(
        self,
        config: EngineConfig,
        policy: SchedulingPolicy | None = None,
        *,
        tokens: TokenSource,
        journal: bool = False,
    ) -> None:
        super().__init__(config, policy, plan_tokens=False, journal=journal)
        self.calendar = DecodeCalendar(config.cache.block_size)
        self.in_flight: deque[LightFrame] = deque()
        """The steps begun and not complete, oldest first (kept by the core)."""
        self.awake: list[Request] = []
        """The running requests that do not sleep, in running order."""
        self._tokens = tokens
        self._num_placed = 0
        self.number = 0
        """Of the next step."""
        self._woken: list[Woken] = []
        self.stuck_blocks: int | None = None
        """Not None: the head of the queue cannot come in before somebody ends, as long as so many blocks are free (with
        fewer it would wait for another reason)."""
        self.stuck_lookup = NO_LOOKUP
        """What every step counts that tries it: tokens looked up in the prefix cache, tokens found; the same of a
        request that was preempted before."""
        self._stuck_hits: list[int] = []
        """Free blocks that it finds, while nobody takes them."""
        self._tried_at = -1
        """The step that `try_head` was asked for last ..."""
        self._found: tuple[list[int], int] | None = None
        """... and the hits and the tokens with which the head of the queue comes in with it, if it does."""
        self._num_special = 0
        """Requests that wait and are not plain."""
        self.num_keeping = 0
        """Unfinished requests whose output tokens somebody may want to know."""
        self._resumed_are_new = config.scheduler.use_v2_model_runner
        self._order_changes = bool(getattr(self.policy, "dynamic_order", False))
        self._is_fifo = isinstance(self.waiting, FIFOQueue)
        self._takes_last = inherits(self.policy, "choose_victim")

    # ------------------------------------------------------------ schedule

    def light(self, number: int, now: int) -> LightFrame:
        """Decides step `number` at simulated time `now` (ns)."""
        self.number = number
        self.calendar.leave_batch(number)
        step = Step(self.token_budget)
        evictions, reports = self.kv.pool.num_evictions, bool(self.finished_req_ids)
        self._decide(step, now)
        self._count(step, evictions)
        sleeping = self.calendar.num_rows
        step.record.decode_tokens += sleeping
        step.record.decode_rows += sleeping
        requests = [self.requests[request_id] for request_id in step.num_scheduled_tokens]
        shape = self._shape(step, requests)
        self._advance(step)
        frame = LightFrame(
            number,
            now,
            step.record,
            [AwakeRow(r.place, r, not r.is_prefill_chunk) for r in requests],
            sleeping,
            shape,
            len(step.new) + (len(step.resumed) if self._resumed_are_new else 0),
            self._woken,
            reports,
        )
        self._woken = []
        self.number = number + 1
        self.stuck_blocks = self._found = None
        if self._counts_ahead:
            self._lull(requests, number + 1)
        return frame

    def add_request(self, request: Request, now: int) -> None:
        if not (self._is_fifo and self.waiting):
            # It may be the head now.
            self.stuck_blocks = self._found = None
        super().add_request(request, now)
        shares = self.kv.enable_caching and not request.is_private
        # Private contents are entered when the blocks are given back.
        request.fills_blocks = shares or (self.kv.enable_caching and not self.kv.hides_private)
        if shares or request.stop_tokens:
            request.keeps_tokens = True
        self.num_keeping += request.keeps_tokens
        request.is_plain = self._will_be_plain(request)
        self._num_special += not request.is_plain

    def _will_be_plain(self, request: Request) -> bool:
        """Once its known tokens are computed it will be a plain decode to its end."""
        return (
            not request.keeps_tokens
            and request.num_tokens < request.length_limit
            and request.sampling_params.min_tokens <= request.length_limit - request.num_prompt_tokens
            and not 0 < self._threshold < request.num_tokens
            and not request.num_external_tokens
        )

    def _end(self, request: Request, status: RequestStatus) -> None:
        self.stuck_blocks = self._found = None
        self.num_keeping -= request.keeps_tokens
        if not request.is_plain and request.status != RequestStatus.RUNNING:
            self._num_special -= 1
        super()._end(request, status)

    def _preempt(self, request: Request, unscheduled: bool, step: Step, now: int) -> None:
        super()._preempt(request, unscheduled, step, now)
        request.is_plain = self._will_be_plain(request)
        self._num_special += not request.is_plain

    @property
    def is_full(self) -> bool:
        """There is no seat left."""
        return len(self.running) == self._max_num_seqs

    def try_head(self, now: int) -> WaitReason | None:
        """Why the head of the queue stays out of the next step, where that is one of sleeping rows alone.

        Then nothing but tokens comes until somebody ends, as `stuck_blocks` says; None where it may come in, or where
        the ordinary step has to decide.
        """
        if self._tried_at == self.number:
            return None
        self._tried_at, self._found = self.number, None
        calendar, kv = self.calendar, self.kv
        budget = self.token_budget - calendar.num_rows
        if self.awake or self._order_changes or budget <= 0 or not calendar.num_rows:
            return None
        # Rows take their blocks first.
        due = len(calendar.beginning_block(self.number))
        free = kv.pool.num_free - due
        request = self.waiting.peek(now)
        if free < 0 or calendar.next_end() < self.number or request.num_external_tokens:
            return None
        if request.num_output_placeholders:
            # Asynchronous scheduling: it was preempted, and a token of it is still to come.
            return None
        if self.is_full:
            self.stuck_blocks, self.stuck_lookup, self._stuck_hits = 0, NO_LOOKUP, NO_STEPS
            return WaitReason.SEATS
        if kv.enable_caching and calendar.num_filling:
            # What it finds may become more with every block that is filled.
            return None
        found = kv.get_computed_blocks(request)
        hits = kv.pool.hits_after(found, due) if found and due else found
        if hits is None:
            return None
        verdict = self._verdict(request, hits, budget, free)
        if isinstance(verdict, int):
            self._found = hits, verdict
        elif verdict is not WaitReason.BUDGET:
            self._stick(verdict, request, hits, budget)
            return verdict
        return None

    def _verdict(self, request: Request, hits: list[int], budget: int, free: int) -> int | WaitReason:
        """Tokens of the first chunk of the head of the queue where so much is left, or why it stays out."""
        verdict = self._first_chunk(request, hits, budget, free)
        fits = not isinstance(verdict, int) or self.kv.blocks_for(request, verdict, hits) <= free
        return verdict if fits else WaitReason.BLOCKS

    def _stick(self, reason: WaitReason, request: Request, hits: list[int], budget: int) -> None:
        """The head of the queue is kept out of a step with so many tokens left, having found these hits."""
        kv = self.kv
        hit_tokens = len(hits) * kv.block_size
        self._stuck_hits = kv.pool.free_of(hits) if hits else hits
        self.stuck_blocks, self.stuck_lookup = 0, NO_LOOKUP
        if kv.enable_caching and self._counts_refused_lookups:
            found = request.num_tokens, hit_tokens
            self.stuck_lookup = (0, 0, *found) if request.num_preemptions else (*found, 0, 0)
        if reason is WaitReason.GATE:
            # With fewer blocks it is those that are short.
            chunk = self._first_tokens(request, hit_tokens, budget)
            assert chunk is not None, "its first chunk would find room"
            self.stuck_blocks = kv.blocks_for(request, chunk, hits)

    # ------------------------------------------------------------ leaps

    def leap_length(self) -> int:
        """Steps, from the next one on, that are nothing but tokens of the rows that sleep, up to one's last, and that
        there are blocks for.

        0 where the next step may be more than that; the head of the queue has to be tried anew then (`try_head`).
        """
        calendar = self.calendar
        rows = calendar.num_rows
        if not rows or self.awake or rows > self.token_budget:
            return 0
        spare = self.kv.pool.num_free
        if self.waiting:
            if self.stuck_blocks is None:
                return 0
            spare -= self.stuck_blocks
        steps = calendar.next_end() - self.number + 1
        # A block for each row and each block's worth of steps begun.
        most = rows * (-(-steps // self.kv.block_size))
        if self.waiting and self._stuck_hits:
            spare = min(spare, self.kv.pool.num_before(self._stuck_hits, most))
        if most <= spare:
            return steps
        steps = self._steps_with_blocks(steps, spare)
        if not steps:
            # What it found is taken now, or it waits for another reason.
            self.stuck_blocks = None
        return steps

    def leap_shape(self) -> StepShape:
        """Of the next step, where it is one of a leap."""
        rows = self.calendar.num_rows
        context, longest = self.calendar.context(self.number)
        return StepShape(rows, rows, rows, rows, context, longest, 0, 0, 0, 0, 0, 0, 0)

    def blocks_begun(self, num_steps: int) -> int:
        """Blocks that so many steps of a leap from the next one on take."""
        return sum(len(self.calendar.beginning_block(self.number + i)) for i in range(num_steps))

    def _steps_with_blocks(self, most: int, blocks: int) -> int:
        """So many steps from the next one on, or those before the first that these blocks are too few for."""
        for steps in range(most):
            blocks -= len(self.calendar.beginning_block(self.number + steps))
            if blocks < 0:
                return steps
        return most

    def leap(self, num_steps: int, shape: StepShape, begun: Callable[[int], None] | None) -> Leap:
        """Takes so many steps, for which there are blocks.

        `shape`: of the first. `begun`: told of every step (0, 1, ...) when its blocks are taken.
        """
        leap = Leap(num_steps, shape, len(self.running), len(self.waiting))
        leap.lookup = self.stuck_lookup if self.waiting else NO_LOOKUP
        self.finished_req_ids = set()
        if self.kv.enable_caching or begun is not None:
            self._leap_step(0, leap)
            if begun is not None:
                begun(0)
            for i in self._steps_with_blocks_to_do(num_steps):
                self._leap_step(i, leap)
                if begun is not None:
                    begun(i)
        else:
            self._leap_uncached(leap)
        self.number += num_steps
        return leap

    def _steps_with_blocks_to_do(self, num_steps: int) -> Iterator[int]:
        """The steps of a leap (from its second, 1, on) in which some row begins or fills a block."""
        phases, size = self.calendar.phases, self.kv.block_size
        # Of a step: those that begin a block, and those of the next one, which fill theirs in this.
        begins = [bool(phase) for phase in phases]
        fills = self.calendar.num_filling > 0
        busy = [begins[i] or (fills and begins[(i + 1) % size]) for i in range(size)]
        number = self.number
        for i in range(1, num_steps):
            if busy[(number + i) % size]:
                yield i

    def _leap_step(self, i: int, leap: Leap) -> None:
        pool, number = self.kv.pool, self.number + i
        beginning = self.calendar.beginning_block(number)
        due = self._due(beginning, number) if self.kv.enable_caching else beginning
        evictions = pool.num_evictions
        if due:
            self._serve_sleepers(due, number)
        if not i:
            self._count_leap(leap, pool.num_evictions - evictions)
        elif due:
            leap.blocks_begun_at += [i] * len(beginning)
            leap.evictions_at += [i] * (pool.num_evictions - evictions)

    def _leap_uncached(self, leap: Leap) -> None:
        """All steps of a leap, where blocks have no content: in each, one for every row that begins one."""
        phases, size = self.calendar.phases, self.kv.block_size
        phase = self.number % size
        if phases[phase]:
            self.kv.begin_blocks(phases[phase])
        self._count_leap(leap, 0)
        for i in range(1, leap.num_steps):
            phase += 1
            if phase == size:
                phase = 0
            if beginning := phases[phase]:
                self.kv.begin_blocks(beginning)
                leap.blocks_begun_at.extend([i] * len(beginning))

    def last_of(self, leap: Leap, start_ns: int) -> LightFrame:
        """The last step of a leap, as if it had been scheduled by itself at `start_ns`."""
        rows, ahead = leap.shape.rows, leap.num_steps - 1
        pool = self.kv.pool
        queries, hits, again, again_hits = leap.lookup
        record = ScheduleRecord(
            prefix=PrefixCacheStats(int(queries > 0), queries, hits, int(again > 0), again, again_hits),
            decode_tokens=rows,
            decode_rows=rows,
            running=leap.running,
            waiting=leap.waiting,
            used_blocks=self._usable_blocks - pool.num_free,
            cached_free_blocks=pool.num_cached_free,
            free_blocks=pool.num_free - pool.num_cached_free,
            evictions=leap.evictions_at.count(ahead) if ahead else leap.evictions,
        )
        shape = leap.shape._replace(
            decode_context_tokens=leap.shape.decode_context_tokens + rows * ahead,
            decode_context_max_tokens=leap.shape.decode_context_max_tokens + ahead,
        )
        return LightFrame(self.number - 1, start_ns, record, [], rows, shape, 0, [], reports=False)

    def _count_leap(self, leap: Leap, evictions: int) -> None:
        """The counts after the schedule call of a leap's first step."""
        pool = self.kv.pool
        leap.cached_free_blocks = pool.num_cached_free
        leap.free_blocks = pool.num_free - pool.num_cached_free
        leap.used_blocks = self._usable_blocks - pool.num_free
        leap.evictions = evictions

    # ------------------------------------------------------------ one step

    def _running_pass(self, step: Step, now: int) -> None:
        """The calendar's way where it leads to the same end, else the ordinary one."""
        if not self._calendar_pass(step) and not self._pass_with_victims(step, now):
            self._wake_all()
            super()._running_pass(step, now)
            self.awake = list(self.running)

    def _calendar_pass(self, step: Step) -> bool:
        """Serves the sleepers that are due and the rows that are awake; False, with nothing changed, if it cannot."""
        calendar, number = self.calendar, self.number
        budget = step.budget - calendar.num_rows
        if budget < 0:
            return False
        shares = self._shares(step.budget, budget) if self.awake else _NONE
        if shares is None:
            return False
        due = calendar.beginning_block(number)
        needed = len(due)
        if shares:
            needed += sum(self.kv.blocks_for(request, n) for request, n in shares)
        if needed > self.kv.pool.num_free:
            return False
        if self.kv.enable_caching:
            due = self._due(due, number)
        self._serve(due, shares, step)
        step.budget -= calendar.num_rows
        return True

    def _pass_with_victims(self, step: Step, now: int) -> bool:
        """Serves the sleepers at the cost of the last ones in running order; False, with nothing changed, if it cannot.

        It is a row at the end or behind it that loses its blocks, so none that has got its token of this step.
        """
        calendar, number = self.calendar, self.number
        if self.awake or self._counts_ahead or not self._takes_last:
            return False
        if calendar.num_filling or step.budget < calendar.num_rows:
            return False
        for request in calendar.beginning_block(number).copy():
            while request.asleep and not self.kv.pool.num_free:
                victim = self.running.pop()
                self._woken.append(self._wake(victim))
                self._preempt(victim, False, step, now)
            if request.asleep:
                self._serve_sleepers([request], number)
        step.budget -= calendar.num_rows
        return True

    def _due(self, beginning: list[Request], number: int) -> list[Request]:
        """The sleepers that have to do with blocks in this step, in running order."""
        # Asynchronous scheduling hashes a block in the step that begins the next one: its tokens are known then.
        filling = [] if self._counts_ahead else self.calendar.filling_block(number)
        if not beginning or beginning is filling:
            return filling
        return sorted([*beginning, *filling], key=_in_order) if filling else beginning

    def _shares(self, budget: int, left: int) -> list[tuple[Request, int]] | None:
        """Tokens for the rows that are awake, of `left`; None where it matters who comes first."""
        wants = [(r, n) for r in self.awake if (n := self._next_tokens(r, budget)) > 0]
        total = sum(n for _, n in wants)
        if total <= left:
            return wants
        request, n = wants[-1]
        rest = left - (total - n)
        if request is self.running[-1] and rest > 0:
            return [*wants[:-1], (request, rest)]
        return None

    def _serve(self, due: list[Request], shares: list[tuple[Request, int]], step: Step) -> None:
        """Blocks, in running order; there are enough."""
        step_number = self.number
        if not shares:
            if due:
                self._serve_sleepers(due, step_number)
            return
        turns = sorted([(r.place, r, 0) for r in due] + [(r.place, r, n) for r, n in shares])
        for _, request, num_tokens in turns:
            if not num_tokens:
                self._serve_sleepers([request], step_number)
                continue
            blocks = self.kv.allocate_slots(request, num_tokens)
            assert blocks is not None, "counted before"
            step.give(request, num_tokens, blocks)
            step.running.append(request)

    def _serve_sleepers(self, due: list[Request], number: int) -> None:
        """Blocks for the sleepers that begin or fill one in a step."""
        kv = self.kv
        if not kv.enable_caching and kv.pool.journal is None:
            kv.begin_blocks(due)
            return
        # What was sampled last is known a step later with asynchronous scheduling.
        known = number if self._counts_ahead else number + 1
        for request in due:
            if request.keeps_tokens:
                self._catch_up(request, number)
            kv.grow_decode(request, request.base + number, request.base + known)

    def _admit(self, request: Request, num_tokens: int, hits: list[int], step: Step, now: int) -> None:
        super()._admit(request, num_tokens, hits, step, now)
        self._num_special -= not request.is_plain
        self._num_placed += 1
        request.place = self._num_placed
        self.awake.append(request)

    def _shape(self, step: Step, requests: list[Request]) -> StepShape:
        """What the step's duration depends on; progress has not been advanced yet."""
        rows = [
            PlanRow(
                r.request_id,
                step.num_scheduled_tokens[r.request_id],
                r.num_computed_tokens,
                r.num_tokens + r.num_output_placeholders,
                r.num_output_tokens + r.num_output_placeholders,
            )
            for r in requests
        ]
        context, longest = self.calendar.context(self.number)
        return shape_of(
            rows,
            len(step.new) + len(step.resumed),
            decode_rows=self.calendar.num_rows,
            decode_context_tokens=context,
            decode_context_max_tokens=longest,
        )

    # ------------------------------------------------------------ update

    def take_in(self, frame: LightFrame) -> LightOutputs:
        """Takes in the tokens of the oldest step in flight."""
        outputs = LightOutputs(regular=frame.sleeping)
        ending = self.calendar.ending(frame.step)
        if not ending:
            for row in frame.rows:
                self._take_row(row, outputs)
        elif not frame.rows:
            for request in ending:
                self._take_last(request, outputs)
        else:
            turns = [*frame.rows, *(AwakeRow(r.place, r, True) for r in ending)]
            for row in sorted(turns, key=_in_order):
                if row.request.asleep and row.request.last_step == frame.step:
                    self._take_last(row.request, outputs)
                else:
                    self._take_row(row, outputs)
        if ending:
            self.calendar.forget(frame.step)
        # Until now: what sleeps goes by what is in flight.
        self.in_flight.popleft()
        if frame.rows:
            if self._counts_ahead:
                self._forget_asleep()
            else:
                self._lull([row.request for row in frame.rows], frame.step + 1)
        return outputs

    def _take_row(self, row: AwakeRow, outputs: LightOutputs) -> None:
        """The token of a row that was looked at; none for one that was aborted while the step ran."""
        request = row.request
        if request.asleep:
            if row.samples:
                # Asynchronous scheduling: it sleeps since the next step, where this token is counted.
                outputs.new_token_ids[request.request_id] = _UNKNOWN
        elif request.finished:
            pass
        elif not row.samples:
            self._brought_nothing(request)
        elif request.keeps_tokens or request.num_tokens + 1 >= request.length_limit:
            self._take_token(request, outputs)
        else:
            # Nearly all such rows: the first token of a request that nobody asks for its tokens.
            request.num_tokens += 1
            outputs.new_token_ids[request.request_id] = _UNKNOWN
            if self._counts_ahead:
                self._tokens_arrived(request, 1)

    def _take_token(self, request: Request, outputs: LightOutputs) -> None:
        request_id, token = request.request_id, 0
        if request.keeps_tokens:
            token = self._tokens.output_id(request_id, request.num_output_tokens)
        runs, blocks = request.status == RequestStatus.RUNNING, self.kv.num_blocks(request)
        outputs.new_token_ids[request_id] = self._take_tokens(request, [token], outputs)
        if request.finished:
            outputs.ended.append(Ended(request, blocks, slept=False))
            if runs:
                self.running.remove(request)

    def _take_last(self, request: Request, outputs: LightOutputs) -> None:
        """The last token of a sleeper: it ends by its length, as it went to sleep for."""
        self.calendar.leave(request)
        request.asleep = False
        self._catch_up(request, self.number)
        request.num_tokens += 1
        if self._counts_ahead:
            request.num_output_placeholders = 1
            self._tokens_arrived(request, 1)
        if request.keeps_tokens:
            last = request.num_output_tokens - 1
            request.output_token_ids.append(self._tokens.output_id(request.request_id, last))
        outputs.ended.append(Ended(request, len(request.block_ids), slept=True))
        assert self._stop_status(request, _NO_STOP) is RequestStatus.FINISHED_LENGTH_CAPPED, (
            "it slept for that"
        )
        outputs.finished[request.request_id] = _ENDED_BY_LENGTH
        self._end(request, RequestStatus.FINISHED_LENGTH_CAPPED)
        self.running.remove(request)

    def rouse_all(self) -> list[Woken]:
        """All that slept, and those whose waking nobody was told of: the run ends here."""
        woken = [*self._woken, *(self._wake(request) for request in [*self.calendar])]
        self._woken = []
        return woken

    def rouse(self, request: Request) -> Woken:
        """A row that sleeps is looked at from now on, as long as it has no reason to fall asleep again."""
        woken = self._wake(request)
        insort(self.awake, request, key=_in_order)
        return woken

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        request_ids = list(request_ids)
        for request in filter(None, map(self.requests.get, request_ids)):
            if request.asleep:
                self.rouse(request)
        ended = super().finish_requests(request_ids, status)
        self._forget_asleep()
        return ended

    # ------------------------------------------------------------ falling asleep, waking up

    def _lull(self, requests: list[Request], number: int) -> None:
        """Rows that are plain decodes from step `number` on fall asleep."""
        for request in requests:
            if self._is_plain(request):
                request.base = request.num_computed_tokens - number
                request.last_step = request.length_limit - 2 - request.base
                if request.last_step >= number:
                    request.joined_step = number
                    request.since_step = number - request.num_output_placeholders
                    self.calendar.add(request)
        if self.awake:
            self._forget_asleep()

    def _is_plain(self, request: Request) -> bool:
        """One token to compute in every step until its length ends it, and blocks as its tokens say."""
        ahead, size = request.num_output_placeholders, self.kv.block_size
        hashed = request.num_tokens if self._counts_ahead else request.num_computed_tokens
        return (
            request.status == RequestStatus.RUNNING
            and request.quiet_until > 0
            and not request.is_prefill_chunk
            and request.num_computed_tokens == request.num_tokens + ahead - 1
            and request.num_tokens < request.length_limit
            and len(request.block_ids) == cdiv(request.num_computed_tokens, size)
            and (not self.kv.enable_caching or request.num_hashed_blocks == hashed // size)
            and not request.stop_tokens
            and request.sampling_params.min_tokens <= request.length_limit - request.num_prompt_tokens
        )

    def _forget_asleep(self) -> None:
        self.awake = [r for r in self.awake if not r.asleep and r.status == RequestStatus.RUNNING]

    def _wake_all(self) -> None:
        for request in self.running:
            if request.asleep:
                self._woken.append(self._wake(request))

    def _wake(self, request: Request) -> Woken:
        """Its fields say again what they should; in the steps in flight it is a row that is looked at."""
        self.calendar.remove(request)
        self._catch_up(request, self.number)
        if self._counts_ahead:
            request.num_output_placeholders = self._num_in_flight(request)
        self.kv.note_quiet(request)
        for frame in self.in_flight:
            if request.joined_step <= frame.step <= request.last_step:
                frame.sleeping -= 1
                insort(frame.rows, AwakeRow(request.place, request, samples=True), key=_in_order)
        return Woken(request.request_id, request.since_step, request.num_output_tokens)

    def _catch_up(self, request: Request, number: int) -> None:
        """Computed and known tokens of a sleeper as the schedule call of that step finds them."""
        computed = request.base + min(number, request.last_step + 1)
        request.num_computed_tokens = computed
        request.num_tokens = computed + 1 - self._num_in_flight(request)
        if self.kv.enable_caching and not request.fills_blocks:
            self._catch_up_hashes(request)
        if request.keeps_tokens:
            outputs = request.output_token_ids
            outputs.extend(
                self._tokens.output_id(request.request_id, i)
                for i in range(len(outputs), request.num_output_tokens)
            )

    def _catch_up_hashes(self, request: Request) -> None:
        """The blocks that are full by now, of tokens that are known: the last sampled one may be in flight."""
        known = request.num_computed_tokens
        if self._counts_ahead and request.num_tokens <= known:
            known -= 1
        # It may have come with more: a prompt is known as a whole.
        request.num_hashed_blocks = max(request.num_hashed_blocks, known // self.kv.block_size)

    def _num_in_flight(self, request: Request) -> int:
        """Steps in flight that bring it a token."""
        count = 0
        for frame in self.in_flight:
            if request.since_step <= frame.step <= request.last_step:
                count += 1
        return count
