"""The scheduler: a pure state machine that decides, step by step, which tokens of which requests are computed.

Semantics of `vllm/v1/core/sched/scheduler.py` 0.22.0, synchronous, one full-attention KV group. There are no
phases: a step gives each request some of the tokens by which its computed tokens lag behind its known tokens.
Time comes in as an argument; a plan goes out.

Reading order: `schedule` (running pass, waiting pass, plan), then `update_from_output`, then `finish_requests`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from servetwin.sim.config import EngineConfig
from servetwin.sim.contract import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from servetwin.sim.kv_cache_manager import KVCacheManager
from servetwin.sim.policy import POLICIES, SchedulingPolicy, make_queue
from servetwin.sim.records import (
    Admission,
    EngineCoreOutput,
    EngineCoreOutputs,
    Preemption,
    ScheduleRecord,
    WaitReason,
)
from servetwin.sim.request import Request, RequestStatus


@dataclass(slots=True)
class _Step:
    """A step being put together."""

    budget: int
    """Tokens left to give."""
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    """In order of scheduling; the order of everything derived from the step."""
    new_blocks: dict[str, list[int]] = field(default_factory=dict)
    """Running requests: blocks appended now. Admitted requests: the whole table."""
    running: list[Request] = field(default_factory=list)
    new: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    record: ScheduleRecord = field(default_factory=ScheduleRecord)

    def give(self, request: Request, num_tokens: int, blocks: list[int]) -> None:
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.new_blocks[request.request_id] = blocks
        self.budget -= num_tokens

    def take_back(self, request: Request) -> bool:
        """Undoes `give` for a running request that becomes a victim later in the same step."""
        if request.request_id not in self.num_scheduled_tokens:
            return False
        self.budget += self.num_scheduled_tokens.pop(request.request_id)
        del self.new_blocks[request.request_id]
        self.running.remove(request)
        return True


class Scheduler:
    """Waiting queue, running list and KV cache of one engine.

    `plan_tokens`: put token ids into the plans (an executor or a recorder needs them); without them a prompt is
    known by its length only. `journal`: keep the changes of every block in `kv.pool.journal` until somebody
    drains it.
    """

    def __init__(
        self,
        config: EngineConfig,
        policy: SchedulingPolicy | None = None,
        *,
        plan_tokens: bool = True,
        journal: bool = False,
    ) -> None:
        self.config = config
        self.policy = policy or POLICIES[config.scheduler.policy]()
        self.kv = KVCacheManager(
            block_size=config.cache.block_size,
            num_gpu_blocks=config.cache.num_gpu_blocks,
            max_model_len=config.model.max_model_len,
            enable_caching=config.cache.enable_prefix_caching,
            journal=journal,
        )
        self.waiting = make_queue(self.policy)
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        """Every unfinished request."""
        self.finished_req_ids: set[str] = set()
        """Requests that ended since the last plan: the next one tells the worker."""
        self._prev_step_ids: set[str] = set()
        self._plan_tokens = plan_tokens

    # ------------------------------------------------------------ requests in

    def add_request(self, request: Request, now: int) -> None:
        """Queues a request. Raises ValueError when its id is in use."""
        if request.request_id in self.requests:
            raise ValueError(f"request_id {request.request_id!r} is in use by an unfinished request")
        self.requests[request.request_id] = request
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
            else:
                self.waiting.remove(request)
            self._end(request, status)
            ended.append(request)
        return ended

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def has_finished_requests(self) -> bool:
        """Some ended request has not been reported to the worker yet."""
        return bool(self.finished_req_ids)

    # ------------------------------------------------------------ schedule

    def schedule(self, now: int) -> tuple[SchedulerOutput, ScheduleRecord]:
        """Decides one step at simulated time `now` (ns)."""
        step = _Step(budget=self.config.scheduler.token_budget)
        evictions = self.kv.pool.num_evictions
        self._running_pass(step, now)
        if step.record.preempted:
            self._note_wait(step, WaitReason.PREEMPTION)
        else:
            self._waiting_pass(step)
        plan = self._plan(step)
        self._count(step, evictions)
        self._advance(step)
        return plan, step.record

    def _running_pass(self, step: _Step, now: int) -> None:
        """Gives every running request its next tokens, preempting where blocks are short."""
        index = 0
        while index < len(self.running) and step.budget > 0:
            request = self.running[index]
            num_tokens = self._next_tokens(request, step)
            if num_tokens == 0:
                index += 1
                continue
            blocks, index = self._grow(request, num_tokens, index, step, now)
            if blocks is None:
                # The requests behind it idle in this step even if they hold enough blocks.
                break
            step.give(request, num_tokens, blocks)
            step.running.append(request)
            index += 1

    def _next_tokens(self, request: Request, step: _Step) -> int:
        num_tokens = self._clamp_long_prefill(request.num_tokens - request.num_computed_tokens)
        room = self.config.model.max_model_len - 1 - request.num_computed_tokens
        return min(num_tokens, step.budget, room)

    def _clamp_long_prefill(self, num_tokens: int) -> int:
        threshold = self.config.scheduler.long_prefill_token_threshold
        return threshold if 0 < threshold < num_tokens else num_tokens

    def _grow(
        self, request: Request, num_tokens: int, index: int, step: _Step, now: int
    ) -> tuple[list[int] | None, int]:
        """Blocks for a running request, at the cost of victims; None when it became a victim itself.

        Also returns the request's place in `running`, which moves when a victim that had been scheduled before it
        is removed. (0.22.0 does not move it for a victim that had not been scheduled.) The number of tokens stays
        although victims may have given tokens back.
        """
        while (blocks := self.kv.allocate_slots(request, num_tokens)) is None:
            victim = self.policy.choose_victim(self.running, now)
            if victim is self.running[-1]:
                self.running.pop()
            else:
                self.running.remove(victim)
            unscheduled = step.take_back(victim)
            if unscheduled:
                index -= 1
            self._preempt(victim, unscheduled, step, now)
            if victim is request:
                return None, index
        return blocks, index

    def _preempt(self, request: Request, unscheduled: bool, step: _Step, now: int) -> None:
        """Recompute preemption: the request loses its blocks, keeps its outputs, and waits again."""
        step.record.preempted.append(
            Preemption(
                request.request_id, request.num_computed_tokens, self.kv.num_blocks(request), unscheduled
            )
        )
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_tokens_ever_computed = max(request.num_tokens_ever_computed, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.put_back(request, now)

    def _waiting_pass(self, step: _Step) -> None:
        """Admits from the head of the queue until something is short; nothing is ever skipped or preempted for it."""
        while self.waiting and step.budget > 0:
            if len(self.running) == self.config.scheduler.max_num_seqs:
                return self._note_wait(step, WaitReason.SEATS)
            request = self.waiting.peek()
            hits = self._look_up(request, step)
            num_tokens = self._clamp_long_prefill(request.num_tokens - len(hits) * self.kv.block_size)
            if num_tokens > step.budget and not self.config.scheduler.enable_chunked_prefill:
                return self._note_wait(step, WaitReason.BUDGET)
            num_tokens = min(num_tokens, step.budget)
            if self.config.scheduler.scheduler_reserve_full_isl and not self.kv.full_sequence_fits(
                request, hits
            ):
                return self._note_wait(step, WaitReason.GATE)
            if self.kv.allocate_slots(request, num_tokens, hits) is None:
                return self._note_wait(step, WaitReason.BLOCKS)
            self._admit(self.waiting.pop(), num_tokens, hits, step)
        return self._note_wait(step, WaitReason.BUDGET)

    def _look_up(self, request: Request, step: _Step) -> list[int]:
        """Prefix hits of the head of the queue, counted in every step that tries it, also when it is refused."""
        hits = self.kv.get_computed_blocks(request)
        if self.kv.enable_caching:
            stats, tokens = step.record.prefix, len(hits) * self.kv.block_size
            if request.num_preemptions:
                stats.preempted_requests += 1
                stats.preempted_queries += request.num_tokens
                stats.preempted_hits += tokens
            else:
                stats.requests += 1
                stats.queries += request.num_tokens
                stats.hits += tokens
        return hits

    def _admit(self, request: Request, num_tokens: int, hits: list[int], step: _Step) -> None:
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

    def _note_wait(self, step: _Step, reason: WaitReason) -> None:
        if self.waiting:
            step.record.head = self.waiting.peek().request_id
            step.record.head_reason = reason

    # ------------------------------------------------------------ the plan

    def _plan(self, step: _Step) -> SchedulerOutput:
        return SchedulerOutput(
            scheduled_new_reqs=[self._new_request_data(r, step) for r in step.new],
            scheduled_cached_reqs=self._cached_request_data(step),
            num_scheduled_tokens=step.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(step.num_scheduled_tokens.values()),
            scheduled_spec_decode_tokens={},
            num_common_prefix_blocks=[
                self.kv.num_common_prefix_blocks(self.running[0]) if self.running else 0
            ],
            finished_req_ids=self.finished_req_ids,
            preempted_req_ids={p.request_id for p in step.record.preempted},
        )

    def _new_request_data(self, request: Request, step: _Step) -> NewRequestData:
        return NewRequestData(
            req_id=request.request_id,
            prompt_token_ids=request.prompt.token_ids() if self._plan_tokens else None,
            sampling_params=request.sampling_params,
            block_ids=(step.new_blocks[request.request_id],),
            num_computed_tokens=request.num_computed_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
        )

    def _cached_request_data(self, step: _Step) -> CachedRequestData:
        data = CachedRequestData()
        for request in step.running + step.resumed:
            blocks = step.new_blocks[request.request_id]
            data.req_ids.append(request.request_id)
            data.new_block_ids.append((blocks,) if blocks else None)
            data.num_computed_tokens.append(request.num_computed_tokens)
            data.num_output_tokens.append(request.num_output_tokens)
            if self._plan_tokens and request.request_id not in self._prev_step_ids:
                data.all_token_ids[request.request_id] = request.all_token_ids()
        data.resumed_req_ids = {r.request_id for r in step.resumed}
        return data

    def _count(self, step: _Step, evictions_before: int) -> None:
        """Fills in the record's counts; progress has not been advanced yet."""
        record, pool = step.record, self.kv.pool
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            request = self.requests[request_id]
            if request.is_decoding:
                record.decode_tokens += num_tokens
                record.decode_rows += 1
            else:
                record.prefill_tokens += num_tokens
            again = min(num_tokens, request.num_tokens_ever_computed - request.num_computed_tokens)
            if again > 0:
                record.recomputed[request_id] = again
        record.running, record.waiting = len(self.running), len(self.waiting)
        record.cached_free_blocks = pool.num_cached_free
        record.free_blocks = pool.num_free - pool.num_cached_free
        record.used_blocks = self.config.cache.usable_blocks - pool.num_free
        record.evictions = pool.num_evictions - evictions_before

    def _advance(self, step: _Step) -> None:
        """Computed tokens run ahead of the execution; ended requests have now been reported."""
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += num_tokens
        self._prev_step_ids = set(step.num_scheduled_tokens)
        self.finished_req_ids = set()

    # ------------------------------------------------------------ update

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> EngineCoreOutputs:
        """Takes in what a step produced: new tokens, and the requests that end with them.

        Raises ValueError for a token of a request that still has known tokens to compute: an executor must not
        sample there.
        """
        outputs = EngineCoreOutputs()
        for request_id in plan.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:
                # Aborted while the step ran.
                continue
            tokens = output.sampled_token_ids[output.req_id_to_index[request_id]]
            if tokens and request.num_computed_tokens < request.num_tokens:
                left = request.num_tokens - request.num_computed_tokens
                raise ValueError(
                    f"the executor sampled for request {request_id!r}, which has {left} known tokens left to compute"
                )
            kept = self._append_until_stop(request, tokens)
            if request.finished:
                outputs.finished.append(request_id)
            if kept:
                outputs.outputs.append(
                    EngineCoreOutput(request_id, kept, request.finish_reason, request.stop_reason)
                )
        if outputs.finished:
            self.running = [r for r in self.running if not r.finished]
        return outputs

    def _append_until_stop(self, request: Request, tokens: list[int]) -> list[int]:
        """Appends a step's tokens one by one; what comes after a stop is dropped. Returns the tokens kept."""
        for count, token in enumerate(tokens, start=1):
            request.append_output_token(token)
            status = self._stop_status(request, token)
            if status is not None:
                self._end(request, status)
                return tokens[:count]
        return tokens

    def _stop_status(self, request: Request, token: int) -> RequestStatus | None:
        """min_tokens, end-of-sequence, stop ids, length: in this order (so an EOS on the last token is a stop)."""
        params = request.sampling_params
        if request.num_output_tokens < params.min_tokens:
            return None
        if token == request.eos_token_id:
            return RequestStatus.FINISHED_STOPPED
        if token in params.stop_token_ids:
            request.stop_reason = token
            return RequestStatus.FINISHED_STOPPED
        full = request.num_tokens >= self.config.model.max_model_len
        if full or request.num_output_tokens >= request.max_tokens:
            return RequestStatus.FINISHED_LENGTH_CAPPED
        return None

    def _end(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        self.kv.free(request)
        self.finished_req_ids.add(request.request_id)
        del self.requests[request.request_id]

    # ------------------------------------------------------------ the books

    def check_integrity(self) -> None:
        """Raises AssertionError when queues, requests and block tables disagree."""
        self.kv.check_integrity()
        running, waiting = list(self.running), list(self.waiting)
        assert {id(r) for r in running + waiting} == {id(r) for r in self.requests.values()}, (
            "a request is lost"
        )
        assert len(running) + len(waiting) == len(self.requests), "a request stands twice"
        assert len(running) <= self.config.scheduler.max_num_seqs, "more requests run than there are seats"
        assert all(self.kv.num_blocks(r) == 0 for r in waiting), "a waiting request holds blocks"
        for request in running:
            slots = self.kv.num_blocks(request) * self.kv.block_size
            assert slots >= request.num_computed_tokens, f"{request} has no room for its computed tokens"
            assert slots - request.num_computed_tokens < self.kv.block_size, (
                f"{request} holds blocks it does not need"
            )
