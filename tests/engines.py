"""Engines for tests: built in one line and stepped by hand, with a model that answers every row and a worker that
knows nothing but the plans; or served by the simulated clock into a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from zlib import crc32

from servetwin.sim.async_scheduler import UNKNOWN_DRAFT
from servetwin.sim.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from servetwin.sim.contract import (
    DraftTokenIds,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    StepShape,
    StepTimer,
)
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.events import EventLog, MemorySink, Sink
from servetwin.sim.host_model import HostModel
from servetwin.sim.policy import SchedulingPolicy
from servetwin.sim.records import EngineCoreOutputs, Frame, StepObserver
from servetwin.sim.request import Request
from servetwin.sim.rules import Rules
from servetwin.sim.simulation import simulate
from servetwin.sim.steptime.modelled import ConstantStepModel, ModelledStepTimer
from servetwin.sim.steptime.plan_rows import PlanReader, PlanRow
from servetwin.sim.token_source import TokenPrompt, TokenSource
from servetwin.workloads import ListWorkload, RequestSpec

STEPS_AT_MOST = 2_000
WRONG_DRAFT = 1 << 40
"""No token that any answer has."""


def engine_config(
    *,
    block_size: int = 4,
    usable_blocks: int = 100,
    max_model_len: int | None = None,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 512,
    caching: bool = False,
    eos_token_id: int | None = None,
    speculative: SpeculativeConfig | None = None,
    rules: Rules | None = None,
    **scheduler: object,
) -> EngineConfig:
    """A configuration in the words of the reports: `usable_blocks` leaves out the null block.

    `max_model_len` is by default what the pool holds; other names are those of SchedulerConfig.
    """
    return EngineConfig(
        model=ModelConfig(
            max_model_len=max_model_len or block_size * usable_blocks, eos_token_id=eos_token_id
        ),
        cache=CacheConfig(
            block_size=block_size, num_gpu_blocks=usable_blocks + 1, enable_prefix_caching=caching
        ),
        scheduler=SchedulerConfig.model_validate(
            {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, **scheduler}
        ),
        speculative=speculative,
        rules=rules or Rules.exact(),
    )


NO_SHAPE = StepShape(*[0] * len(StepShape._fields))
"""Of a step of which no plan says what is in it."""


def some_tokens(name: str, count: int) -> list[int]:
    """A run of tokens that no other name gives."""
    return [crc32(f"{name}|{i}".encode()) for i in range(count)]


class Engine:
    """An engine core stepped by hand. Requests enter unchecked: `core.refusal` is asked where a test is about it.

    `right_drafts`: with asynchronous scheduling only the worker knows the drafts; so many of each step are right.
    """

    def __init__(
        self,
        config: EngineConfig,
        policy: SchedulingPolicy | None = None,
        *,
        plan_tokens: bool = True,
        journal: bool = False,
        right_drafts: int = 0,
    ) -> None:
        self.config = config
        self.core = EngineCore(config, policy, plan_tokens=plan_tokens, journal=journal)
        self.scheduler = self.core.scheduler
        self.kv = self.scheduler.kv
        self.pool = self.kv.pool
        self.known: dict[str, Request] = {}
        """Every request that was ever added."""
        self._answers: dict[str, Sequence[int]] = {}
        self._reader = PlanReader()
        self._num_sampled: Counter[str] = Counter()
        self._right_drafts = right_drafts

    def request(
        self,
        request_id: str,
        prompt: int | Sequence[int],
        max_tokens: int = 1,
        *,
        priority: int = 0,
        arrival_ns: int | None = None,
        cache_salt: str | None = None,
        **sampling: object,
    ) -> Request:
        """A request that is not in the engine; a prompt given by its length shares no token with another."""
        tokens = some_tokens(request_id, prompt) if isinstance(prompt, int) else prompt
        return Request(
            request_id,
            TokenPrompt(tuple(tokens)),
            SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
            block_size=self.config.cache.block_size,
            max_model_len=self.config.model.max_model_len,
            arrival_ns=len(self.known) if arrival_ns is None else arrival_ns,
            priority=priority,
            eos_token_id=self.config.model.eos_token_id,
            cache_salt=cache_salt,
        )

    def add(
        self,
        request_id: str,
        prompt: int | Sequence[int],
        max_tokens: int = 1,
        *,
        answer: Sequence[int] = (),
        **options: object,
    ) -> Request:
        """Queues a request; later ones arrive later. `answer`: its first output tokens."""
        request = self.request(request_id, prompt, max_tokens, **options)  # type: ignore[arg-type]
        self.put(request)
        self._answers[request_id] = answer
        return request

    def put(self, request: Request) -> None:
        """Queues a request made elsewhere."""
        self.known[request.request_id] = request
        self._num_sampled.pop(request.request_id, None)
        self.core.add_request(request, now=len(self.known))

    def abort(self, *request_ids: str) -> list[str]:
        """The ids that were ended by it."""
        return [r.request_id for r in self.core.abort_requests(request_ids)]

    # ------------------------------------------------------------ the loop

    def schedule(self) -> Frame:
        frame = self.core.begin(now=len(self.known))
        assert frame is not None, "there is nothing to do"
        return frame

    def complete(self, frame: Frame) -> EngineCoreOutputs:
        return self.core.complete(frame, self.model_output(frame.plan))

    def turn(self) -> Frame | None:
        """One turn of the engine's loop: schedules, and completes the oldest step unless another may be begun."""
        frame = self.core.begin(now=len(self.known))
        if frame is None or not frame.plan.num_scheduled_tokens or not self.core.has_room:
            self.complete(self.core.in_flight[0])
        return frame

    def step(self) -> dict[str, int]:
        """One turn; returns the tokens it scheduled by request."""
        frame = self.turn()
        return {} if frame is None else frame.plan.num_scheduled_tokens

    def frames(self) -> Iterator[Frame]:
        """All steps until nothing is left to do; each is seen between its schedule and its update."""
        for _ in range(STEPS_AT_MOST):
            if not self.core.has_work() and not self.core.in_flight:
                return
            frame = self.core.begin(now=len(self.known))
            if frame is not None:
                yield frame
                if frame.plan.num_scheduled_tokens and self.core.has_room:
                    continue
            self.complete(self.core.in_flight[0])
        raise AssertionError(f"no end after {STEPS_AT_MOST} steps")

    def run(self, until: Callable[[], bool] | None = None) -> list[Frame]:
        """Turns until a condition holds, or until nothing is left to do; returns the frames."""
        if until is None:
            return list(self.frames())
        frames: list[Frame] = []
        for _ in range(STEPS_AT_MOST):
            if until():
                return frames
            if (frame := self.turn()) is not None:
                frames.append(frame)
        raise AssertionError(f"no end after {len(frames)} steps")

    # ------------------------------------------------------------ the model

    def model_output(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """The next tokens of each row that reaches its last known token, none for the others. Once for each plan."""
        rows = self._reader.rows(plan)
        ids = [row.request_id for row in rows]
        return ModelRunnerOutput(
            ids, {r: i for i, r in enumerate(ids)}, [self._sample(r, plan) for r in rows]
        )

    def token(self, request_id: str, index: int) -> int:
        """What the model says at this place of the request's output."""
        answer = self._answers.get(request_id, ())
        return answer[index] if index < len(answer) else crc32(f"{request_id}>{index}".encode())

    def draft(self, request_id: str, *, right: int = 0, wrong: int = 0) -> None:
        """Drafts for the next step: so many that the model will agree with, then so many that it will not."""
        first = self.known[request_id].num_output_tokens
        guesses = [self.token(request_id, first + i) for i in range(right)] + [WRONG_DRAFT] * wrong
        self.core.update_draft_tokens(DraftTokenIds([request_id], [guesses]))

    def _sample(self, row: PlanRow, plan: SchedulerOutput) -> list[int]:
        """One token more than there are right drafts in front."""
        if not row.samples:
            return []
        request_id, first = row.request_id, self._num_sampled[row.request_id]
        tokens = [self.token(request_id, first)]
        for place, draft in enumerate(plan.scheduled_spec_decode_tokens.get(request_id, ())):
            right = place < self._right_drafts if draft == UNKNOWN_DRAFT else draft == tokens[-1]
            if not right:
                break
            tokens.append(self.token(request_id, first + len(tokens)))
        self._num_sampled[request_id] += len(tokens)
        return tokens

    # ------------------------------------------------------------ what stands where

    @property
    def running(self) -> list[str]:
        return [r.request_id for r in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [r.request_id for r in self.scheduler.waiting]

    def table(self, request_id: str) -> list[int]:
        """The block table of a request."""
        return self.kv.block_ids(self.known[request_id])


def drafting(method: str, num_speculative_tokens: int) -> SpeculativeConfig:
    return SpeculativeConfig.model_validate(
        {"method": method, "num_speculative_tokens": num_speculative_tokens}
    )


def spec(request_id: str, prompt: int, output: int, at_s: float = 0.0, **rest: Any) -> RequestSpec:
    """A request of a workload, by its lengths."""
    return RequestSpec(
        request_id=request_id, arrival_s=at_s, prompt_tokens=prompt, output_tokens=output, **rest
    )


def serve(
    requests: list[RequestSpec],
    config: EngineConfig,
    *,
    step_ns: int = 1_000_000_000,
    timer: StepTimer | None = None,
    host: HostModel | None = None,
    policy: SchedulingPolicy | None = None,
    ignore_eos: bool = True,
    save_tokens: bool = False,
    cache_resets_ns: Iterable[int] = (),
    on_step: StepObserver | None = None,
    sink: Sink | None = None,
    max_concurrency: int | None = None,
    log_blocks: bool = True,
) -> MemorySink:
    """The log of requests served by the simulated clock; `sink` gets it instead, if there is one."""
    log = MemorySink()
    tokens = TokenSource(config.model.vocab_size)
    simulate(
        RunConfig(engine=config, executor="constant", ignore_eos=ignore_eos),
        ListWorkload(requests),
        timer or ModelledStepTimer(ConstantStepModel(step_ns), tokens, "constant"),
        EventLog(log if sink is None else sink, save_tokens=save_tokens),
        tokens=tokens,
        plan_tokens=False,
        log_blocks=log_blocks,
        host=host,
        policy=policy,
        cache_resets_ns=cache_resets_ns,
        on_step=on_step,
        max_concurrency=max_concurrency,
    )
    return log


def scheduled(frames: Sequence[Frame], request_id: str) -> list[int]:
    """The tokens that a request got, step by step, steps without it left out."""
    counts = [f.plan.num_scheduled_tokens.get(request_id, 0) for f in frames]
    return [n for n in counts if n]


def preempted(frames: Sequence[Frame]) -> list[str]:
    """The victims in order."""
    return [p.request_id for f in frames for p in f.record.preempted]


def hit_tokens(frames: Sequence[Frame], request_id: str) -> list[int]:
    """Prefix hits of a request, one number per admission."""
    return [a.hit_tokens for f in frames for a in f.record.admitted if a.request_id == request_id]


class Worker:
    """What a worker knows from the plans and its own samples: block tables, tokens, progress, and what each slot holds.

    A slot holds the whole sequence up to its token, as K/V does.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self._slots: dict[int, int] = {}

    def read(self, plan: SchedulerOutput) -> None:
        """Takes in the deltas of a plan."""
        for request_id in plan.finished_req_ids:
            for known in (self.tables, self.tokens, self.computed):
                known.pop(request_id, None)
        for new in plan.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            self.tables[new.req_id] = list(new.block_ids[0])
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            self.computed[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[i]
            resumed = request_id in cached.resumed_req_ids
            self.tables[request_id] = ([] if resumed else self.tables[request_id]) + (
                [] if blocks is None else list(blocks[0])
            )
            self.tokens[request_id] = cached.all_token_ids.get(request_id, self.tokens[request_id])
            assert resumed or self.computed[request_id] == cached.num_computed_tokens[i]
            self.computed[request_id] = cached.num_computed_tokens[i]

    def execute(self, plan: SchedulerOutput) -> None:
        """Writes every slot of the step."""
        for request_id, count in plan.num_scheduled_tokens.items():
            start = self.computed[request_id]
            content = self._contents(request_id, start + count)
            for position in range(start, start + count):
                self._slots[self._slot(request_id, position)] = content[position]
            self.computed[request_id] = start + count

    def sampled(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            self.tokens[output.request_id] += output.new_token_ids

    def unwritten(self, request_id: str) -> list[int]:
        """Positions below its computed tokens whose slot holds something else than what belongs there."""
        content = self._contents(request_id, self.computed[request_id])
        return [p for p, c in enumerate(content) if self._slots.get(self._slot(request_id, p)) != c]

    def _slot(self, request_id: str, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return self.tables[request_id][block] * self._block_size + offset

    def _contents(self, request_id: str, stop: int) -> list[int]:
        contents, content = [], 0
        for token in self.tokens[request_id][:stop]:
            content = hash((content, token))
            contents.append(content)
        return contents
