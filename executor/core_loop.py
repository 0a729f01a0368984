"""The wall-clock driver of an engine: requests in, steps run by the worker, tokens out.

The deciding is `sim.engine_core.EngineCore`'s, the same that the simulation drives. One turn of the loop: schedule a
step and hand it to the worker; unless another may follow at once (asynchronous scheduling), take in the oldest result,
after the aborts that came while it ran.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from servetwin.executor.core_listener import CoreListener
from servetwin.executor.core_outputs import OutputWriter
from servetwin.executor.engine_args import EngineArgs
from servetwin.executor.engine_log import logger
from servetwin.executor.step_worker import StepWorker, WorkerStep
from servetwin.sim.config import EngineConfig, ExecutorOptions, explain
from servetwin.sim.contract import EngineCoreOutput, EngineCoreRequest
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.engine_options import why_synchronous
from servetwin.sim.kv_capacity import full_capacity
from servetwin.sim.plugins import Executor
from servetwin.sim.policy import load_policy
from servetwin.sim.progress_guard import ProgressGuard, StalledError
from servetwin.sim.records import EngineCoreOutputs, Frame, WaitReason
from servetwin.sim.timeline import StepTimes

TakeAborts = Callable[[], Iterable[str]]
"""Gives the ids of the requests that were given up since it was last called."""


def build_torch_executor(options: ExecutorOptions) -> Executor:
    """The real one. torch is imported here, in the worker's thread: a client of a child process never loads it."""
    from servetwin.executor.step_timer import build_torch_executor

    return build_torch_executor(options)


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A step that the worker has."""

    frame: Frame
    schedule_ns: int
    future: Future[WorkerStep]


class CoreLoop:
    """One engine on the wall clock. Its methods are called from one thread; torch work is done in another.

    Raises ValueError for arguments or a model that do not do. `listener`: told of everything that happens.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        listener: CoreListener | None = None,
        build: Callable[[ExecutorOptions], Executor] = build_torch_executor,
    ) -> None:
        began_s = time.monotonic()
        policy = load_policy(args.scheduling_policy)
        options = executor_options(args)
        logger.info("Loading model %s (load_format=%s, dtype=%s)", args.model, args.load_format, args.dtype)
        self._worker = StepWorker(lambda: build(options))
        with ExitStack() as undo:
            undo.callback(self._worker.close)
            executor = self._worker.executor
            with _configuration_errors_explained():
                self.config: EngineConfig = args.for_engine(executor.model_config, executor.num_gpu_blocks)
            self.described: dict[str, Any] = executor.describe()
            self._core = EngineCore(self.config, policy, journal=listener is not None)
            undo.pop_all()
        self._listener = listener
        self._submitted: deque[_Submitted] = deque()
        self._outputs = OutputWriter()
        self._guard = ProgressGuard()
        self.stalled: str | None = None
        """Why requests are left of which nothing can be scheduled until something comes in; None while they can."""
        _log_start(self.config, self.described, time.monotonic() - began_s)

    # ------------------------------------------------------------ requests in

    def add_request(self, request: EngineCoreRequest) -> EngineCoreOutput | None:
        """Queues a request; one that can never run, or whose id is in use, is answered at once with its error."""
        now_ns = time.monotonic_ns()
        request_id = request.request_id
        if request_id in self._core.scheduler.requests:
            return _error(request_id, f"request_id {request_id!r} is in use by an unfinished request")
        reason = self._token_refusal(request.prompt_token_ids)
        if reason is None:
            queued = self._core.new_request(request)
            reason = self._core.refusal(queued)
        if reason is not None:
            if self._listener is not None:
                self._listener.refused(request_id, now_ns, reason)
            return _error(request_id, reason)
        self._core.add_request(queued, now_ns)
        self._outputs.queued(request_id, now_ns)
        self._something_came()
        if self._listener is not None:
            self._listener.arrived(request_id, now_ns)
        return None

    def _token_refusal(self, prompt_token_ids: Sequence[int]) -> str | None:
        """Looked at here, too: in the model such a prompt would bring down every other request."""
        if not prompt_token_ids:
            return "prompt is empty"
        vocab_size = self.config.model.vocab_size
        for wrong in (min(prompt_token_ids), max(prompt_token_ids)):
            if not 0 <= wrong < vocab_size:
                return f"prompt token id {wrong} is outside the model's vocabulary (0 to {vocab_size - 1})"
        return None

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests, of which no more output will come; unknown ids are those of requests that ended already."""
        now_ns = time.monotonic_ns()
        for request_id in request_ids:
            request = self._core.scheduler.requests.get(request_id)
            if request is None:
                continue
            blocks = self._core.scheduler.kv.num_blocks(request)
            self._core.abort_requests([request_id])
            self._outputs.forget(request_id)
            self._something_came()
            if self._listener is not None:
                self._listener.aborted(request_id, now_ns, request.num_computed_tokens, blocks)
        self._tell_block_changes()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False, with nothing changed, while any request holds a block."""
        done = self._core.reset_prefix_cache()
        self._something_came()
        self._tell_block_changes()
        return done

    def _something_came(self) -> None:
        self._guard.progress()
        self.stalled = None

    # ------------------------------------------------------------ steps

    def has_work(self) -> bool:
        """`step` has something to do."""
        return bool(self._submitted) or (self._core.has_work() and self.stalled is None)

    def step(self, take_aborts: TakeAborts = tuple) -> list[EngineCoreOutput]:
        """One turn of the loop; [] when nothing came out of it.

        `take_aborts` is called when a result is there and nothing of it has been taken in. Raises what the executor
        raised, StepResultError for a result that cannot be, and StalledError when nothing will ever come out any more.
        The engine is not usable after that.
        """
        start_ns = time.monotonic_ns()
        frame = self._core.begin(start_ns)
        if frame is not None:
            if frame.is_idle and not self._runs_something():
                return self._sit_out(frame)
            self._submit(frame)
            if frame.plan.num_scheduled_tokens and self._core.has_room:
                return []
        return self._complete(take_aborts) if self._submitted else []

    def _submit(self, frame: Frame) -> None:
        """The worker gets the plan first: what is written down about it does not delay it."""
        schedule_ns = time.monotonic_ns() - frame.start_ns
        self._submitted.append(_Submitted(frame, schedule_ns, self._worker.submit(frame.plan)))
        self._outputs.scheduled(frame)
        if self._listener is not None:
            self._listener.scheduled(frame)
        self._tell_block_changes()

    def _complete(self, take_aborts: TakeAborts) -> list[EngineCoreOutput]:
        """Waits for the oldest step in flight and takes its tokens in."""
        submitted = self._submitted[0]
        done = submitted.future.result()
        self._submitted.popleft()
        self.abort_requests(take_aborts())
        frame, result = submitted.frame, done.result
        outputs = self._core.complete(frame, result.output)
        if result.draft_token_ids is not None:
            self._core.update_draft_tokens(result.draft_token_ids)
        self._guard.step(frame, outputs, self._core.scheduler.requests.values())
        written = self._outputs.write(outputs, result.output.logprobs)
        self._tell_step(submitted, done, outputs)
        return written

    def _tell_step(self, submitted: _Submitted, done: WorkerStep, outputs: EngineCoreOutputs) -> None:
        if self._listener is None:
            return
        end_ns = time.monotonic_ns()
        frame, schedule_ns = submitted.frame, submitted.schedule_ns
        if not self.config.scheduler.async_scheduling:
            # The host does nothing else while the worker wakes up.
            schedule_ns = done.start_ns - frame.start_ns
        times = step_times(schedule_ns, done, end_ns)
        self._listener.stepped(frame, done.result, times, end_ns, outputs)
        self._tell_block_changes()

    def _tell_block_changes(self) -> None:
        if self._listener is not None and (changes := self._core.drain_block_changes()):
            self._listener.block_changes(changes, time.monotonic_ns())

    # ------------------------------------------------------------ nothing to schedule

    def _runs_something(self) -> bool:
        """A step in flight has tokens, so its end may change what can be scheduled."""
        return any(submitted.frame.plan.num_scheduled_tokens for submitted in self._submitted)

    def _sit_out(self, frame: Frame) -> list[EngineCoreOutput]:
        """A schedule call that found nothing to do: what comes in may change that, if a policy is the reason."""
        while self._submitted:
            # Empty steps, out of which nothing comes.
            self._complete(tuple)
        self._core.abandon(frame)
        if self._listener is not None:
            self._listener.sat_out(frame)
        self.stalled = self._why_nobody_runs(frame)
        if frame.record.head_reason is not WaitReason.POLICY or frame.record.running:
            raise StalledError(self.stalled)
        logger.warning("%s", self.stalled)
        return []

    def _why_nobody_runs(self, frame: Frame) -> str:
        record, unfinished = frame.record, sorted(self._core.scheduler.requests)
        if record.head_reason is WaitReason.POLICY:
            why = f"may_admit of the policy {self.config.scheduler.policy} refuses {record.head!r}"
        else:
            why = f"{record.head!r} waits for: {record.head_reason}" if record.head else "all of them run"
        some = ", ".join(unfinished[:5]) + (" and others" if len(unfinished) > 5 else "")
        return f"nothing can be scheduled and nothing is in flight; unfinished requests: {some}; {why}"

    def close(self) -> None:
        """Waits for the steps in flight and gives the executor's memory back."""
        self._worker.close()


def step_times(schedule_ns: int, done: WorkerStep, end_ns: int) -> StepTimes:
    """The lanes of a step that ran: prepare and device as measured, from when the worker began with it."""
    device_start_ns = done.start_ns + done.result.prepare_ns
    device_end_ns = device_start_ns + done.result.device_ns
    # An executor may state more time than has gone by.
    update_ns = max(end_ns - device_end_ns, 0)
    return StepTimes(schedule_ns, done.start_ns, device_start_ns, device_end_ns, update_ns)


def _error(request_id: str, reason: str) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [], finish_reason="error", error=reason)


def executor_options(args: EngineArgs) -> ExecutorOptions:
    """What the executor is built from. Raises ValueError, in one line, for what no model could be served with."""
    with _configuration_errors_explained():
        return args.for_executor()


@contextmanager
def _configuration_errors_explained() -> Iterator[None]:
    try:
        yield
    except ValidationError as e:
        raise ValueError(explain(e)) from e


def _log_start(config: EngineConfig, described: dict[str, Any], took_s: float) -> None:
    """vLLM's start-up lines."""
    cache = config.cache
    capacity = full_capacity(cache.num_gpu_blocks, cache.block_size, config.model.max_model_len)
    for line in capacity.lines("GPU KV cache" if described.get("device_type") == "cuda" else "KV cache"):
        logger.info("%s", line)
    if config.scheduler.async_scheduling:
        logger.info("Asynchronous scheduling is enabled.")
    else:
        reason = why_synchronous(config.speculative) or "as asked for"
        logger.info("Asynchronous scheduling is disabled (%s).", reason)
    if note := described.get("note"):
        logger.warning("Note: %s", note)
    logger.info("Engine core is ready (took %.2f s)", took_s)
