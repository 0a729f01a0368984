"""Planted bugs: scheduling policies, KV-cache managers and engines that are wrong in one way each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from servetwin.sim.block_pool import BlockPool
from servetwin.sim.config import EngineConfig
from servetwin.sim.contract import ModelRunnerOutput
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.kv_cache_manager import KVCacheManager
from servetwin.sim.policy import FCFS, AdmissionState, Priority, SchedulingPolicy
from servetwin.sim.records import EngineCoreOutputs, Frame
from servetwin.sim.request import Request

# ---------------------------------------------------------------- policies


class NeverAdmits(FCFS):
    """Nothing ever comes in."""

    def may_admit(self, request: Request, state: AdmissionState) -> bool:
        return False


class NeverResumes(FCFS):
    """Who was preempted never comes in again."""

    def may_admit(self, request: Request, state: AdmissionState) -> bool:
        return request.num_preemptions == 0


class NewestFirst(FCFS):
    """Last come, first served: under load the oldest wait for ever."""

    def order_key(self, request: Request, now: int) -> tuple[Any, ...]:
        return (-request.arrival_ns, request.request_id)


class ShortestFirst(FCFS):
    """Shortest prompt first, without ageing: under load the longest wait for ever."""

    def order_key(self, request: Request, now: int) -> tuple[Any, ...]:
        return (request.num_prompt_tokens, request.arrival_ns, request.request_id)


class ForeignVictim(FCFS):
    """Preempts the request that was preempted last, once there is one."""

    def __init__(self) -> None:
        self._victim: Request | None = None

    def choose_victim(self, running: Sequence[Request], now: int) -> Request:
        self._victim = self._victim or running[-1]
        return self._victim


class KeyByIdentity(FCFS):
    """Breaks ties by memory address."""

    def order_key(self, request: Request, now: int) -> tuple[Any, ...]:
        return (request.priority, id(request))


class RandomVictim(FCFS):
    """Draws lots from a stream that all engines share."""

    def choose_victim(self, running: Sequence[Request], now: int) -> Request:
        return random.choice(running)


class PromotesVictims(Priority):
    """Changes the request instead of its key."""

    def choose_victim(self, running: Sequence[Request], now: int) -> Request:
        victim = super().choose_victim(running, now)
        victim.priority -= 1
        return victim


class KeyIsNoTuple(FCFS):
    """Gives a bare number."""

    def order_key(self, request: Request, now: int) -> tuple[Any, ...]:
        return request.priority  # type: ignore[return-value]


class KeysOfTwoKinds(FCFS):
    """Gives keys that do not compare: clients without a name first, or so it was meant."""

    def order_key(self, request: Request, now: int) -> tuple[Any, ...]:
        return (request.client_id, request.arrival_ns)


class AdmitsByCount(FCFS):
    """Answers with a number of seats."""

    def may_admit(self, request: Request, state: AdmissionState) -> bool:
        return 3 - len(state.running)  # type: ignore[return-value]


class RaisesOnTies(FCFS):
    """Looks for somebody less urgent, who need not exist."""

    def choose_victim(self, running: Sequence[Request], now: int) -> Request:
        return next(r for r in running if r.priority > running[0].priority)


# ---------------------------------------------------------------- KV-cache managers


def manager(kind: type[KVCacheManager]) -> Callable[[EngineConfig, SchedulingPolicy], EngineCore]:
    """An engine factory with another KV-cache manager, for `check_policy(engine=...)`."""

    def engine(config: EngineConfig, policy: SchedulingPolicy) -> EngineCore:
        kv = kind(
            block_size=config.cache.block_size,
            num_gpu_blocks=config.cache.num_gpu_blocks,
            max_model_len=config.model.max_model_len,
            enable_caching=config.cache.enable_prefix_caching,
        )
        return EngineCore(config, policy, kv=kv)

    return engine


class TouchesBeforeItChecks(KVCacheManager):
    """Takes hold of the hits of an allocation that is then refused."""

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hits: Sequence[int] = (), **options: int
    ) -> Any:
        blocks = super().allocate_slots(request, num_new_tokens, hits, **options)
        if blocks is None:
            self.pool.touch(hits, request.request_id)
        return blocks


class FreesTwice(KVCacheManager):
    """Gives the last block of a table back twice."""

    def free(self, request: Request) -> None:
        table = self.block_ids(request)
        super().free(request)
        if table and self.pool.references(table[-1]) == 0:
            self.pool._queue.append(table[-1])
            self.pool.num_free += 1


class KeepsABlock(KVCacheManager):
    """Never gives the first block of a long table back."""

    def free(self, request: Request) -> None:
        if len(request.block_ids) > 2:
            del request.block_ids[0]
        super().free(request)


class HitsByLength(KVCacheManager):
    """Takes any cached block for the first of a prompt, whatever its content."""

    def get_computed_blocks(self, request: Request) -> list[int]:
        hits = super().get_computed_blocks(request)
        cached = [b for b in range(1, self.pool.num_gpu_blocks) if self.pool.hash_of(b) is not None]
        full = request.num_tokens > self.block_size
        return cached[:1] if self.enable_caching and full and not hits else hits


class ForgetsFreeHits(KVCacheManager):
    """Does not count that hits on free blocks use up free blocks."""

    def _blocks_needed(self, request: Request, num_tokens: int, hits: Sequence[int]) -> int:
        free_hits = sum(self.pool.references(b) == 0 for b in hits)
        return super()._blocks_needed(request, num_tokens, hits) - free_hits


class _StaleIndexPool(BlockPool):
    """Evicts a content from the block, not from the index."""

    def take(self, count: int, request_id: str) -> list[int]:
        index = dict(self._blocks_of)
        blocks = super().take(count, request_id)
        self._blocks_of = index
        return blocks


class KeepsStaleHashes(KVCacheManager):
    """An evicted content can still be found."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pool = _StaleIndexPool(options["num_gpu_blocks"])


class TouchesTwice(KVCacheManager):
    """Takes hold of each hit twice."""

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hits: Sequence[int] = (), **options: int
    ) -> Any:
        blocks = super().allocate_slots(request, num_new_tokens, hits, **options)
        if blocks is not None:
            self.pool.touch(hits, request.request_id)
        return blocks


class MiscountsCachedBlocks(KVCacheManager):
    """Counts a freed block as cached, whether it is or not."""

    def free(self, request: Request) -> None:
        super().free(request)
        self.pool.num_cached_free = self.pool.num_free


# ---------------------------------------------------------------- engines


class _Engine(EngineCore):
    """Built as `check_policy(engine=...)` wants it."""

    def __init__(self, config: EngineConfig, policy: SchedulingPolicy) -> None:
        super().__init__(config, policy)


class HidesHits(_Engine):
    """Keeps its prefix hits to itself."""

    def begin(self, now: int) -> Frame | None:
        frame = super().begin(now)
        for admission in frame.record.admitted if frame is not None else []:
            admission.hit_tokens = 0
        return frame


class StopsEarly(_Engine):
    """Goes to sleep while one request is left."""

    def has_work(self) -> bool:
        return len(self.scheduler.requests) > 1


class TellsTwice(_Engine):
    """Reports an end in every later step."""

    told: frozenset[str] = frozenset()

    def begin(self, now: int) -> Frame | None:
        frame = super().begin(now)
        if frame is not None:
            frame.plan.finished_req_ids |= self.told
            self.told = frozenset(frame.plan.finished_req_ids)
        return frame


class RunsLate(_Engine):
    """Dates its steps by their number."""

    def begin(self, now: int) -> Frame | None:
        frame = super().begin(now)
        if frame is not None:
            frame.start_ns = frame.step
        return frame


class LosesTheWaiting(_Engine):
    """An abort takes the next one of the queue with it."""

    def abort_requests(self, request_ids: Any) -> list[Request]:
        ended = super().abort_requests(request_ids)
        for request in list(self.scheduler.waiting)[:1]:
            self.scheduler.waiting.remove(request)
            del self.scheduler.requests[request.request_id]
        return ended


class ForgetsABlock(_Engine):
    """Does not tell the worker of the blocks that a running request gets."""

    def begin(self, now: int) -> Frame | None:
        frame = super().begin(now)
        if frame is not None:
            cached = frame.plan.scheduled_cached_reqs
            cached.new_block_ids = [
                b if r in cached.resumed_req_ids else None
                for r, b in zip(cached.req_ids, cached.new_block_ids, strict=True)
            ]
        return frame


class SchedulesTheDead(_Engine):
    """Plans a row for a request that has ended."""

    ended: tuple[str, ...] = ()

    def begin(self, now: int) -> Frame | None:
        frame = super().begin(now)
        if frame is not None:
            for request_id in self.ended:
                frame.plan.num_scheduled_tokens[request_id] = 1
                frame.plan.total_num_scheduled_tokens += 1
            self.ended = tuple(frame.plan.finished_req_ids)
        return frame


class OneTokenTooMany(_Engine):
    """Gives out the last token of a step twice."""

    def complete(self, frame: Frame, output: ModelRunnerOutput) -> EngineCoreOutputs:
        outputs = super().complete(frame, output)
        outputs.new_token_ids = {r: tokens * 2 for r, tokens in outputs.new_token_ids.items()}
        return outputs


class ServesTheSecond(_Engine):
    """Lets the second of the queue come in first."""

    def add_request(self, request: Request, now: int) -> None:
        super().add_request(request, now)
        queue = self.scheduler.waiting
        first = next(iter(queue))
        if first is not request:
            queue.remove(first)
            queue.add(first, now)


def crowded(config: EngineConfig, policy: SchedulingPolicy) -> EngineCore:
    """An engine with a seat more than its configuration says."""
    scheduler = config.scheduler
    seats = scheduler.max_num_seqs + 1
    more = scheduler.model_copy(
        update={"max_num_seqs": seats, "max_num_batched_tokens": scheduler.max_num_batched_tokens + seats}
    )
    return EngineCore(config.model_copy(update={"scheduler": more}), policy)


# ---------------------------------------------------------------- and the invariants that they break

POLICIES: dict[type[FCFS], str] = {
    ForeignVictim: "policy contract",
    PromotesVictims: "policy contract",
    KeyIsNoTuple: "policy contract",
    KeysOfTwoKinds: "policy contract",
    AdmitsByCount: "policy contract",
    RaisesOnTies: "policy contract",
    KeyByIdentity: "determinism",
    RandomVictim: "determinism",
    NeverAdmits: "progress or refusal",
    NeverResumes: "progress or refusal",
    NewestFirst: "no starvation",
    ShortestFirst: "no starvation",
}
MANAGERS: dict[type[KVCacheManager], str] = {
    ForgetsFreeHits: "no exception",
    TouchesBeforeItChecks: "refusals change nothing",
    FreesTwice: "conservation of blocks",
    KeepsABlock: "conservation of blocks",
    TouchesTwice: "references",
    KeepsStaleHashes: "hash index",
    HitsByLength: "hits are written",
    MiscountsCachedBlocks: "the engine's books",
}
ENGINES: dict[Callable[[EngineConfig, SchedulingPolicy], EngineCore], str] = {
    LosesTheWaiting: "conservation of requests",
    crowded: "limits",
    SchedulesTheDead: "causality",
    RunsLate: "time",
    ServesTheSecond: "order of service",
    TellsTwice: "ends are told once",
    ForgetsABlock: "plans replay",
    HidesHits: "computed once",
    OneTokenTooMany: "whole answers",
    StopsEarly: "an empty end",
}
