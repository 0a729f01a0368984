"""The engine's core: a scheduler and the steps in flight, without clock, threads or SimPy.

`begin` schedules a step, somebody runs its plan, `complete` takes the result in. The drivers
(`sim/engine_process.py` in simulated time, `executor/core_loop.py` on the wall clock) decide when.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from servetwin.sim.async_scheduler import AsyncScheduler
from servetwin.sim.block_hash import TokenPrompt
from servetwin.sim.config import EngineConfig
from servetwin.sim.contract import DraftTokenIds, EngineCoreRequest, ModelRunnerOutput
from servetwin.sim.kv_cache_manager import KVCacheManager
from servetwin.sim.policy import SchedulingPolicy
from servetwin.sim.records import AnyFrame, BlockChange, EngineCoreOutputs, Frame
from servetwin.sim.request import Request, RequestStatus
from servetwin.sim.scheduler import Scheduler

F = TypeVar("F", bound=AnyFrame)


class Core(ABC, Generic[F]):
    """One engine, whatever its scheduler makes of a step: requests in and out, and the steps in flight."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler) -> None:
        self.config = config
        self.scheduler = scheduler
        self.batch_queue_size = 2 if config.scheduler.async_scheduling else 1
        """Steps that may be in flight."""
        self.in_flight: deque[F] = deque()
        self._next_step = 0
        slots = min(config.model.max_model_len, config.cache.usable_blocks * config.cache.block_size)
        self._tokens_for_sure = slots - config.num_lookahead_tokens
        """A request of no more tokens than these can run to its end."""

    def number_from(self, step: int) -> None:
        """Its first step is this one of the log."""
        self._next_step = step

    def refusal(self, request: Request) -> str | None:
        """Why this request could never run to its end, in words; None when it can (`EngineConfig.refusal`)."""
        if request.max_total_tokens <= self._tokens_for_sure:
            return None
        min_tokens = request.sampling_params.min_tokens
        return self.config.refusal(request.num_prompt_tokens, request.max_tokens, min_tokens)

    def add_request(self, request: Request, now: int) -> None:
        """Queues a request (checked with `refusal` before)."""
        self.scheduler.add_request(request, now)

    def abort_requests(self, request_ids: Iterable[str]) -> list[Request]:
        """Ends requests at the client's wish; returns those that were known and unfinished."""
        ended = self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self._forget_in_flight(r.request_id for r in ended)
        return ended

    def has_work(self) -> bool:
        """A step is due: something is unfinished, or the worker has not heard yet of something that ended."""
        return self.scheduler.has_unfinished_requests() or self.scheduler.has_finished_requests()

    @property
    def has_room(self) -> bool:
        """Another step may be begun before the oldest in flight is complete."""
        return len(self.in_flight) < self.batch_queue_size

    def begin(self, now: int) -> F | None:
        """Schedules the next step at time `now` (ns); None when nothing is to be done or enough steps are in flight.

        A driver begins another step as long as the last one has tokens and fewer than `batch_queue_size` are in
        flight; else it completes the oldest.
        """
        if len(self.in_flight) >= self.batch_queue_size or not self.has_work():
            return None
        frame = self._schedule(self._next_step, now)
        self._next_step += 1
        self.in_flight.append(frame)
        return frame

    def abandon(self, frame: F) -> None:
        """Forgets a step that scheduled nothing and will not be run."""
        assert not frame.has_tokens, "a step with tokens has to be run"
        self.in_flight.remove(frame)
        self._next_step -= 1

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False, with nothing changed, while any request holds a block."""
        return self.scheduler.reset_prefix_cache()

    def drain_block_changes(self) -> list[BlockChange]:
        """The block changes since the last call (empty unless built with `journal`)."""
        journal = self.scheduler.kv.pool.journal
        if not journal:
            return []
        changes = list(journal)
        journal.clear()
        return changes

    @abstractmethod
    def _schedule(self, number: int, now: int) -> F:
        """Decides step `number`."""

    def _forget_in_flight(self, ended: Iterable[str]) -> None:
        """What steps in flight bring for requests that have ended is nobody's."""


class EngineCore(Core[Frame]):
    """One engine whose steps are plans that somebody runs. Arguments as for `Scheduler`."""

    def __init__(
        self,
        config: EngineConfig,
        policy: SchedulingPolicy | None = None,
        *,
        kv: KVCacheManager | None = None,
        plan_tokens: bool = True,
        journal: bool = False,
    ) -> None:
        scheduler = AsyncScheduler if config.scheduler.async_scheduling else Scheduler
        super().__init__(config, scheduler(config, policy, kv=kv, plan_tokens=plan_tokens, journal=journal))

    def new_request(self, request: EngineCoreRequest) -> Request:
        """A request as it came from the front end, in the form that is queued."""
        return Request(
            request.request_id,
            TokenPrompt(request.prompt_token_ids),
            request.sampling_params,
            block_size=self.config.cache.block_size,
            max_model_len=self.config.model.max_model_len,
            arrival_ns=request.arrival_ns,
            priority=request.priority,
            eos_token_id=self.config.model.eos_token_id,
            cache_salt=request.cache_salt,
            client_id=request.client_id,
            predicted_output_tokens=request.predicted_output_tokens,
        )

    def _schedule(self, number: int, now: int) -> Frame:
        plan, record = self.scheduler.schedule(now)
        return Frame(number, now, plan, record)

    def _forget_in_flight(self, ended: Iterable[str]) -> None:
        """What steps in flight bring for requests that have ended is nobody's: not a later one's with the same id."""
        for request_id in ended:
            for frame in self.in_flight:
                if request_id in frame.plan.num_scheduled_tokens:
                    frame.gone.add(request_id)

    def complete(self, frame: Frame, output: ModelRunnerOutput) -> EngineCoreOutputs:
        """Takes in the result of the oldest step in flight.

        Raises ValueError for a token of a request that still had known tokens to compute after that step: an
        executor must not sample there.
        """
        assert self.in_flight and self.in_flight[0] is frame, (
            "steps complete in the order in which they began"
        )
        self.in_flight.popleft()
        for request_id, left in frame.record.unfinished.items():
            if output.sampled_token_ids[output.req_id_to_index[request_id]]:
                raise ValueError(
                    f"the executor sampled for request {request_id!r}, which has {left} known tokens left to compute"
                )
        outputs = self.scheduler.update_from_output(frame.plan, output, frame.gone)
        if self.in_flight:
            self._forget_in_flight(outputs.finished)
        return outputs

    def update_draft_tokens(self, drafts: DraftTokenIds) -> None:
        """Takes in the drafts that followed the step just completed (synchronous scheduling)."""
        self.scheduler.update_draft_token_ids(drafts)
