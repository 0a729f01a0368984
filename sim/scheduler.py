"""The scheduler: a pure state machine that decides, step by step, which tokens of which requests are computed.

Semantics of `vllm/v1/core/sched/scheduler.py` 0.22.0 for one full-attention KV group (asynchronous scheduling adds
to it in `sim/async_scheduler.py`). There are no phases: a step gives each request some of the tokens by which its
computed tokens lag behind its known tokens. Time comes in as an argument; a plan goes out.

Reading order: `schedule` (running pass, waiting pass, plan), then `update_from_output`, then `finish_requests`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import islice

from servetwin.sim.config import EngineConfig
from servetwin.sim.contract import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from servetwin.sim.kv_cache_manager import KVCacheManager
from servetwin.sim.policy import AdmissionState, SchedulingPolicy, inherits, load_policy
from servetwin.sim.records import (
    Admission,
    EngineCoreOutputs,
    Finish,
    Preemption,
    ScheduleRecord,
    WaitReason,
)
from servetwin.sim.request import FINISH_REASONS, Request, RequestStatus
from servetwin.sim.request_queue import make_queue
from servetwin.sim.rules import StopCheck
from servetwin.sim.step import PlanWriter, Step


def make_kv_cache_manager(config: EngineConfig, *, journal: bool = False) -> KVCacheManager:
    """The KV cache that a configuration describes."""
    speculative = config.speculative
    return KVCacheManager(
        block_size=config.cache.block_size,
        num_gpu_blocks=config.cache.num_gpu_blocks,
        max_model_len=config.model.max_model_len,
        enable_caching=config.cache.enable_prefix_caching,
        speculative=speculative is not None,
        drops_last_hit=speculative is not None and speculative.drops_last_hit,
        free_order=config.rules.free_order,
        journal=journal,
    )


class Scheduler:
    """Waiting queue, running list and KV cache of one engine.

    `plan_tokens`: put token ids into the plans (an executor or a recorder needs them); without them a prompt is
    known by its length only. `journal`: keep the changes of every block in `kv.pool.journal` until somebody
    drains it. `kv`: another manager than the configuration's.
    """

    _counts_ahead = False
    """Tokens of steps in flight are counted before they are there: `_tokens_arrived` wants to know."""

    def __init__(
        self,
        config: EngineConfig,
        policy: SchedulingPolicy | None = None,
        *,
        kv: KVCacheManager | None = None,
        plan_tokens: bool = True,
        journal: bool = False,
    ) -> None:
        self.config = config
        self.rules = config.rules
        # Looked at in every step, so not dug up each time.
        limits = config.scheduler
        self.token_budget, self._max_num_seqs = limits.token_budget, limits.max_num_seqs
        self._threshold = limits.long_prefill_token_threshold
        self._chunks, self._gate = limits.enable_chunked_prefill, limits.scheduler_reserve_full_isl
        self._max_model_len, self._usable_blocks = config.model.max_model_len, config.cache.usable_blocks
        self._lookahead = config.num_lookahead_tokens
        self._admission_lookahead = self._lookahead if config.rules.lookahead_at_admission else 0
        self._counts_refused_lookups = config.rules.count_refused_lookups
        self.policy = policy or load_policy(config.scheduler.policy)
        self.kv = kv or make_kv_cache_manager(config, journal=journal)
        self.waiting = make_queue(self.policy)
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        """Every unfinished request."""
        self.finished_req_ids: set[str] = set()
        """Requests that ended since the last plan: the next one tells the worker."""
        self._prev_step_ids: frozenset[str] = frozenset()
        self._plans = PlanWriter(
            plan_tokens,
            config.scheduler.use_v2_model_runner,
            config.cache.block_size if config.cache.zero_fresh_blocks else None,
        )
        self._asks_policy = not inherits(self.policy, "may_admit")
        self._on_queued = getattr(self.policy, "on_queued", None)
        self._on_scheduled = getattr(self.policy, "on_scheduled", None)
        self._on_ended = getattr(self.policy, "on_ended", None)

    # ------------------------------------------------------------ requests in

    def add_request(self, request: Request, now: int) -> None:
        """Queues a request. Raises ValueError when its id is in use."""
        if request.request_id in self.requests:
            raise ValueError(f"request_id {request.request_id!r} is in use by an unfinished request")
        self.requests[request.request_id] = request
        if self.kv.enable_caching:
            # On arrival, as in vLLM: not while a step is waited for.
            request.hash_prompt(self.kv.known_runs)
        if self._on_queued is not None:
            self._on_queued(request, now)
        self.waiting.add(request, now)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """Ends requests from outside (aborts), in the given order; unknown and finished ids are ignored.

        Returns the requests that were ended, already with their new status.
        """
        ended = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.status == RequestStatus.RUNNING:
                self.running.remove(request)
            self._end(request, status)
            ended.append(request)
        return ended

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False, with nothing changed, while any request holds a block."""
        return self.kv.reset_prefix_cache()

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def has_finished_requests(self) -> bool:
        """Some ended request has not been reported to the worker yet."""
        return bool(self.finished_req_ids)

    # ------------------------------------------------------------ schedule

    def schedule(self, now: int) -> tuple[SchedulerOutput, ScheduleRecord]:
        """Decides one step at simulated time `now` (ns)."""
        step = Step(self.token_budget)
        evictions = self.kv.pool.num_evictions
        self._decide(step, now)
        shared = self.kv.num_common_prefix_blocks(self.running[0]) if self.running else 0
        plan = self._plans.plan(step, self._prev_step_ids, shared, self.finished_req_ids)
        self._count(step, evictions)
        self._advance(step)
        return plan, step.record

    def _decide(self, step: Step, now: int) -> None:
        """Who gets which tokens: first the running requests, then those that wait."""
        self._running_pass(step, now)
        if self._on_scheduled is not None:
            for request in step.running:
                self._on_scheduled(request, step.num_scheduled_tokens[request.request_id], now)
        if step.record.preempted:
            self._note_wait(step, WaitReason.PREEMPTION, now)
        else:
            self._waiting_pass(step, now)

    def _running_pass(self, step: Step, now: int) -> None:
        """Gives every running request its next tokens, preempting where blocks are short."""
        index = 0
        while (index := self._plain_decodes(step, index)) < len(self.running) and step.budget > 0:
            request = self.running[index]
            num_tokens = self._next_tokens(request, step.budget)
            if num_tokens == 0:
                index += 1
                continue
            blocks, index = self._grow(request, num_tokens, index, step, now)
            if blocks is None:
                # The requests behind it idle in this step even if they hold enough blocks.
                break
            step.give(request, num_tokens, blocks)
            step.running.append(request)
            self._give_drafts(request, num_tokens, step)
            index += 1

    def _plain_decodes(self, step: Step, index: int) -> int:
        """Schedules one token each for the requests from `index` on that need no more; returns where they end.

        Nearly all rows are such: decodes far from every limit, most of them inside a block (`Request.quiet_until`).
        """
        scheduled, rows = step.num_scheduled_tokens, step.running
        stop = min(len(self.running), index + step.budget)
        first = len(rows)
        for request in islice(self.running, index, stop):
            if request.num_computed_tokens >= request.quiet_until:
                blocks = self.kv.next_slot(request)
                if blocks is None:
                    break
                if blocks:
                    step.new_blocks[request.request_id] = (blocks,)
            scheduled[request.request_id] = 1
            rows.append(request)
        count = len(rows) - first
        step.budget -= count
        return index + count

    def _next_tokens(self, request: Request, budget: int) -> int:
        """Tokens, drafts included, that a running request gets if there is room for them."""
        ahead = len(request.spec_token_ids) + request.num_output_placeholders
        num_tokens = self._clamp_long_prefill(request.num_tokens + ahead - request.num_computed_tokens)
        room = self._max_model_len - 1 - request.num_computed_tokens
        return min(num_tokens, budget, room)

    def _clamp_long_prefill(self, num_tokens: int) -> int:
        return self._threshold if 0 < self._threshold < num_tokens else num_tokens

    def _grow(
        self, request: Request, num_tokens: int, index: int, step: Step, now: int
    ) -> tuple[list[int] | None, int]:
        """Blocks for a running request, at the cost of victims; None when it became a victim itself.

        Also returns the request's place in `running`, which moves when a victim before it is removed. The number of
        tokens stays although victims may have given tokens back.
        """
        lookahead = self._lookahead
        while (blocks := self.kv.allocate_slots(request, num_tokens, num_lookahead_tokens=lookahead)) is None:
            victim = self.policy.choose_victim(self.running, now)
            place = self._place(victim)
            del self.running[place]
            unscheduled = step.take_back(victim)
            # 0.22.0 moves the cursor only for a victim that had been scheduled; after another one it skips a request.
            if unscheduled or (place < index and self.rules.keep_cursor):
                index -= 1
            self._preempt(victim, unscheduled, step, now)
            if victim is request:
                return None, index
        return blocks, index

    def _place(self, victim: Request) -> int:
        """Where the victim stands in `running`: as a rule at the end."""
        if victim is self.running[-1]:
            return len(self.running) - 1
        try:
            return self.running.index(victim)
        except ValueError:
            raise ValueError(f"choose_victim returned {victim!r}, which is not running") from None

    def _preempt(self, request: Request, unscheduled: bool, step: Step, now: int) -> None:
        """Recompute preemption: the request loses its blocks, keeps its outputs, and waits again."""
        step.record.preempted.append(
            Preemption(
                request.request_id, request.num_computed_tokens, self.kv.num_blocks(request), unscheduled
            )
        )
        if unscheduled and self.rules.forget_uncomputed_blocks:
            self.kv.forget_uncomputed(request)
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        known = min(request.num_computed_tokens, request.num_tokens)
        request.num_tokens_ever_computed = max(request.num_tokens_ever_computed, known)
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self.waiting.put_back(request, now)

    def _give_drafts(self, request: Request, num_tokens: int, step: Step) -> None:
        """Schedules the drafts for which there is room in `num_tokens`; the others are dropped."""
        if not request.spec_token_ids:
            return
        known = request.num_tokens + request.num_output_placeholders
        num_drafts = num_tokens + request.num_computed_tokens - known
        if num_drafts > 0:
            step.spec_tokens[request.request_id] = request.spec_token_ids[:num_drafts]
        request.spec_token_ids = []

    def _waiting_pass(self, step: Step, now: int) -> None:
        """Admits from the head of the queue until something is short; nothing is ever skipped or preempted for it."""
        waiting, running, seats = self.waiting, self.running, self._max_num_seqs
        while waiting and step.budget > 0:
            if len(running) == seats:
                return self._note_wait(step, WaitReason.SEATS, now)
            request = waiting.peek(now)
            reason = self._try_to_admit(request, step, now)
            if reason is not None:
                return self._note_wait(step, reason, now)
        return self._note_wait(step, WaitReason.SEATS if len(running) == seats else WaitReason.BUDGET, now)

    def _try_to_admit(self, request: Request, step: Step, now: int) -> WaitReason | None:
        """Admits the head of the queue, or says why not."""
        if self._asks_policy and not self.policy.may_admit(request, self._admission_state(step, now)):
            return WaitReason.POLICY
        hits = self.kv.get_computed_blocks(request)
        if self._counts_refused_lookups:
            self._count_lookup(request, hits, step)
        num_tokens = self._first_chunk(request, hits, step.budget, self.kv.pool.num_free)
        if not isinstance(num_tokens, int):
            return num_tokens
        brought, lookahead = self._brought(request, hits), self._admission_lookahead
        room = brought + num_tokens
        if self.kv.allocate_slots(request, room, hits, num_lookahead_tokens=lookahead) is None:
            return WaitReason.BLOCKS
        if not self._counts_refused_lookups:
            self._count_lookup(request, hits, step)
        self._admit(request, num_tokens, hits, step, now)
        if request.num_external_tokens:
            # A preemption loses it.
            request.num_computed_tokens += brought
            request.num_external_tokens = 0
        return None

    def _first_chunk(
        self, request: Request, hits: Sequence[int], budget: int, free_blocks: int
    ) -> int | WaitReason:
        """Tokens of the first chunk of the head of the queue where so much is left, or why it stays out.

        For a chunk there need not be blocks: `allocate_slots` sees to that.
        """
        kv, brought = self.kv, self._brought(request, hits)
        num_tokens = self._first_tokens(request, len(hits) * kv.block_size + brought, budget)
        if num_tokens is None:
            return WaitReason.BUDGET
        if self._gate and kv.blocks_for_all(request, hits) > free_blocks:
            # What keeps it out is the gate only where its first chunk would find room.
            fits = kv.blocks_for(request, brought + num_tokens, hits) <= free_blocks
            return WaitReason.GATE if fits else WaitReason.BLOCKS
        return num_tokens

    def _brought(self, request: Request, hits: Sequence[int]) -> int:
        """Tokens that another engine has computed: as with vLLM's KV connectors they need blocks, and no step."""
        return max(request.num_external_tokens - len(hits) * self.kv.block_size, 0)

    def _first_tokens(self, request: Request, hit_tokens: int, budget: int) -> int | None:
        """Tokens of a request's first chunk; None when it may not be chunked and does not fit the step."""
        whole = request.num_tokens - hit_tokens
        chunk = self._clamp_long_prefill(whole)
        if not self._chunks:
            asked = chunk if self.rules.threshold_before_chunk_check else whole
            if asked > budget:
                return None
        return min(chunk, budget)

    def _admission_state(self, step: Step, now: int) -> AdmissionState:
        return AdmissionState(now, self.running, len(self.waiting), self.kv.pool.num_free, step.budget)

    def _count_lookup(self, request: Request, hits: list[int], step: Step) -> None:
        """Prefix-cache statistics of the head of the queue, counted in every step that tries it (0.22.0)."""
        if not self.kv.enable_caching:
            return
        stats, tokens = step.record.prefix, len(hits) * self.kv.block_size
        if request.num_preemptions:
            stats.preempted_requests += 1
            stats.preempted_queries += request.num_tokens
            stats.preempted_hits += tokens
        else:
            stats.requests += 1
            stats.queries += request.num_tokens
            stats.hits += tokens

    def _admit(self, request: Request, num_tokens: int, hits: list[int], step: Step, now: int) -> None:
        self.waiting.remove(request)
        resumed = request.status == RequestStatus.PREEMPTED
        (step.resumed if resumed else step.new).append(request)
        table = self.kv.block_ids(request)
        step.give(request, num_tokens, table)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = len(hits) * self.kv.block_size
        self.running.append(request)
        step.record.admitted.append(
            Admission(request.request_id, resumed, request.num_computed_tokens, len(table))
        )
        if self._on_scheduled is not None:
            self._on_scheduled(request, num_tokens, now)

    def _note_wait(self, step: Step, reason: WaitReason, now: int) -> None:
        if self.waiting:
            step.record.head = self.waiting.peek(now).request_id
            step.record.head_reason = reason

    def _count(self, step: Step, evictions_before: int) -> None:
        """Fills in the record's counts; progress has not been advanced yet."""
        record, pool = step.record, self.kv.pool
        step.count()
        record.running, record.waiting = len(self.running), len(self.waiting)
        record.cached_free_blocks = pool.num_cached_free
        record.free_blocks = pool.num_free - pool.num_cached_free
        record.used_blocks = self._usable_blocks - pool.num_free
        record.evictions = pool.num_evictions - evictions_before

    def _advance(self, step: Step) -> None:
        """Computed tokens run ahead of the execution; ended requests have now been reported."""
        scheduled = step.num_scheduled_tokens
        # Running requests were scheduled before the admitted ones.
        for request, num_tokens in zip(step.running, scheduled.values(), strict=False):
            request.num_computed_tokens += num_tokens
        for request in step.admitted():
            request.num_computed_tokens += scheduled[request.request_id]
        for request in step.asked.values():
            left = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
            request.is_prefill_chunk = left > 0
            if left > 0:
                step.record.unfinished[request.request_id] = left
        self._prev_step_ids = frozenset(scheduled)
        self.finished_req_ids = set()

    # ------------------------------------------------------------ update

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput, gone: Set[str] = frozenset()
    ) -> EngineCoreOutputs:
        """Takes in what a step produced: new tokens, and the requests that end with them.

        `gone`: requests of the plan that ended before, whose tokens are dropped (as those of unknown ones are).
        """
        ids, sampled = _in_plan_order(plan, output)
        new_token_ids = dict(zip(ids, sampled, strict=True))
        outputs = EngineCoreOutputs(new_token_ids)
        drafts_of, counts_ahead = plan.scheduled_spec_decode_tokens, self._counts_ahead
        for request, request_id, tokens in zip(map(self.requests.get, ids), ids, sampled, strict=True):
            if request is None or not tokens or (gone and request_id in gone):
                self._brought_nothing(None if request_id in gone else request)
                del new_token_ids[request_id]
                continue
            if drafts_of and (drafts := drafts_of.get(request_id)):
                outputs.draft_rows += 1
                outputs.draft_tokens += len(drafts)
                outputs.accepted_draft_tokens += len(tokens) - 1
                self._reject(request, len(drafts) + 1 - len(tokens))
            token, num_tokens = tokens[0], request.num_tokens + 1
            if len(tokens) == 1 and num_tokens < request.length_limit and token not in request.stop_tokens:
                # Nearly all rows: one token that ends nothing.
                request.output_token_ids.append(token)
                request.num_tokens = num_tokens
                if counts_ahead:
                    self._tokens_arrived(request, 1)
            else:
                new_token_ids[request_id] = self._take_tokens(request, tokens, outputs)
        if outputs.finished:
            self.running = [r for r in self.running if r.request_id not in outputs.finished]
        return outputs

    def _brought_nothing(self, request: Request | None) -> None:
        """A chunk of a prompt, or a request that was aborted while the step ran (None)."""
        if request is not None:
            # No plain decode may follow.
            request.quiet_until = 0

    def update_draft_token_ids(self, drafts: DraftTokenIds) -> None:
        """Takes in what was drafted after a step: to be verified in the next one. Ended requests are ignored."""
        for request_id, token_ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            request = self.requests.get(request_id)
            if request is not None:
                request.spec_token_ids = [] if request.is_prefill_chunk else list(token_ids)

    def _reject(self, request: Request, num_rejected: int) -> None:
        """Rolls back drafts that turned out wrong; their slots are written again, surplus blocks stay."""
        if request.num_computed_tokens > 0:
            request.num_computed_tokens -= num_rejected

    def _take_tokens(self, request: Request, tokens: list[int], outputs: EngineCoreOutputs) -> list[int]:
        """Appends a step's tokens one by one; what comes after a stop is dropped. Returns the tokens kept."""
        for count, token in enumerate(tokens, start=1):
            request.output_token_ids.append(token)
            request.num_tokens += 1
            if token in request.stop_tokens or request.num_tokens >= request.length_limit:
                status = self._stop_status(request, token)
                if status is not None:
                    self._tokens_arrived(request, count)
                    self._end(request, status)
                    outputs.finished[request.request_id] = Finish(FINISH_REASONS[status], request.stop_reason)
                    return tokens[:count]
        self._tokens_arrived(request, len(tokens))
        return tokens

    def _tokens_arrived(self, request: Request, num_tokens: int) -> None:
        """For schedulers that had counted on them (asynchronous scheduling)."""

    def _stop_status(self, request: Request, token: int) -> RequestStatus | None:
        """What ends the request with this token; below min_tokens nothing does (not even the length, in 0.22.0)."""
        too_short = request.num_output_tokens < request.sampling_params.min_tokens
        if too_short and not self.rules.length_outranks_min_tokens:
            return None
        for check in self.rules.stop_order:
            if check is StopCheck.LENGTH:
                if request.num_tokens >= request.length_limit:
                    return RequestStatus.FINISHED_LENGTH_CAPPED
            elif too_short:
                continue
            elif check is StopCheck.EOS:
                if token == request.eos_token_id:
                    return RequestStatus.FINISHED_STOPPED
            elif token in request.sampling_params.stop_token_ids:
                request.stop_reason = token
                return RequestStatus.FINISHED_STOPPED
        return None

    def _end(self, request: Request, status: RequestStatus) -> None:
        if request.status != RequestStatus.RUNNING:
            self.waiting.remove(request)
        request.status = status
        self.kv.free(request)
        self.finished_req_ids.add(request.request_id)
        del self.requests[request.request_id]
        if self._on_ended is not None:
            self._on_ended(request)

    # ------------------------------------------------------------ the books

    def check_integrity(self) -> None:
        """Raises AssertionError when queues, requests and block tables disagree."""
        running, waiting = list(self.running), list(self.waiting)
        self.kv.check_integrity(running + waiting)
        assert {id(r) for r in running + waiting} == {id(r) for r in self.requests.values()}, (
            "a request is lost"
        )
        assert len(running) + len(waiting) == len(self.requests), "a request stands twice"
        assert len(running) <= self.config.scheduler.max_num_seqs, "more requests run than there are seats"
        assert all(self.kv.num_blocks(r) == 0 for r in waiting), "a waiting request holds blocks"
        # Blocks of rejected drafts are kept, and a drafter's slots lie ahead.
        speculative = self.config.speculative
        surplus = 2 * speculative.num_speculative_tokens if speculative else 0
        for request in running:
            slots = self.kv.num_blocks(request) * self.kv.block_size
            assert slots >= request.num_computed_tokens, f"{request} has no room for its computed tokens"
            assert slots - request.num_computed_tokens < self.kv.block_size + surplus, (
                f"{request} holds blocks it does not need"
            )


def _in_plan_order(plan: SchedulerOutput, output: ModelRunnerOutput) -> tuple[list[str], list[list[int]]]:
    """The requests of a plan and their sampled tokens, in the plan's order whatever the executor's was."""
    ids = list(plan.num_scheduled_tokens)
    sampled = output.sampled_token_ids
    if output.req_ids != ids:
        sampled = [sampled[output.req_id_to_index[request_id]] for request_id in ids]
    return ids, sampled
