"""The SimPy driver of one engine: it owns the waiting, `EngineCore` owns the deciding.

Order at one instant: aborts due, step end (update), arrivals, aborts again, next schedule. A step is run (or its
duration computed) when it is submitted, while simulated time stands still; `sim/timeline.py` says when its worker and
its device are done with it. With asynchronous scheduling the next step is submitted before that. Idle time is skipped.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterable
from itertools import islice
from typing import Any, NamedTuple

import simpy

from servetwin.sim.contract import SamplingParams, StepResult, StepTimer
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.events import EventLog
from servetwin.sim.host_model import HostModel, LinearHostModel
from servetwin.sim.progress_guard import ProgressGuard, StalledError
from servetwin.sim.records import Frame, StepObserver, WaitReason
from servetwin.sim.request import Request
from servetwin.sim.step_check import check_result
from servetwin.sim.timeline import StepTimes, Timeline
from servetwin.sim.token_source import TokenSource
from servetwin.sim.units import ns_to_seconds, seconds_to_ns
from servetwin.workloads.spec import RequestSpec, Workload

SamplingOf = Callable[[RequestSpec], SamplingParams]


class Submitted(NamedTuple):
    """A step in flight."""

    frame: Frame
    result: StepResult
    times: StepTimes


class EngineProcess:
    """One engine in simulated time (integer ns). `run` is the SimPy process.

    The workload is pulled, one request ahead of time; requests that can never run are refused and logged. Raises
    StalledError rather than spinning. `cache_resets_ns`: when to ask for a reset of the prefix cache.
    `max_concurrency`: requests that the client keeps in flight; it holds the others back, in their order.
    """

    def __init__(
        self,
        env: simpy.Environment,
        core: EngineCore,
        timer: StepTimer,
        workload: Workload,
        log: EventLog,
        *,
        tokens: TokenSource,
        sampling: SamplingOf,
        host: HostModel | None = None,
        on_request: Callable[[RequestSpec], None] | None = None,
        on_step: StepObserver | None = None,
        vocab_size: int | None = None,
        cache_resets_ns: Iterable[int] = (),
        max_concurrency: int | None = None,
    ) -> None:
        self.env = env
        self.core = core
        self.timer = timer
        self.log = log
        self._arrivals = _Arrivals(workload, max_concurrency)
        self._in_flight: dict[str, tuple[RequestSpec, Request]] = {}
        self._aborts: list[tuple[int, int, Request]] = []
        self._abort_count = 0
        self._tokens = tokens
        self._sampling = sampling
        self._host = host or LinearHostModel()
        self._guard = ProgressGuard()
        self._on_request = on_request
        self._on_step = on_step
        self._vocab_size = vocab_size
        self._timeline = Timeline(
            overlaps_preparation=getattr(timer, "overlaps_preparation", True),
            turnaround_ns=getattr(timer, "turnaround_ns", 0),
        )
        self._submitted: deque[Submitted] = deque()
        self._cache_resets = deque(sorted(cache_resets_ns))

    @property
    def now(self) -> int:
        """Simulated time in ns."""
        return int(self.env.now)

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Serves the workload to its end."""
        while True:
            self._take_in()
            self._abort_due()
            self._reset_due()
            frame = self.core.begin(self.now)
            if frame is None and not self.core.in_flight:
                arrival = self._arrivals.next_ns()
                if arrival is None:
                    return
                yield self._wait_until(min([arrival, *islice(self._cache_resets, 1)]))
                continue
            if frame is not None:
                if frame.is_idle and not self._runs_something():
                    # Empty steps before it would keep this instant going round for ever.
                    while self._submitted:
                        yield from self._complete()
                    yield self._sit_out(frame)
                    continue
                yield from self._submit(frame)
                if frame.plan.num_scheduled_tokens and self.core.has_room:
                    continue
            yield from self._complete()

    # ------------------------------------------------------------ a step

    def _submit(self, frame: Frame) -> Generator[simpy.Event, Any, None]:
        """The plan goes to the worker, which runs it."""
        self.log.scheduled(frame)
        self._log_blocks()
        schedule_ns = self._host.schedule_ns(frame.plan)
        if schedule_ns:
            yield self.env.timeout(schedule_ns)
        result = self.timer.run(frame.plan)
        check_result(frame.plan, result)
        times = self._timeline.submit(self.now, schedule_ns, result.prepare_ns, result.device_ns)
        self._submitted.append(Submitted(frame, result, times))

    def _complete(self) -> Generator[simpy.Event, Any, None]:
        """The oldest step in flight comes back, and its tokens are out."""
        frame, result, times = self._submitted.popleft()
        times.update_ns = self._host.update_ns(frame.plan)
        delay = max(times.device_end_ns - self.now, 0) + times.update_ns
        if delay:
            yield self.env.timeout(delay)
        self._abort_due()
        outputs = self.core.complete(frame, result.output)
        if result.draft_token_ids is not None:
            self.core.update_draft_tokens(result.draft_token_ids)
        self.log.stepped(frame, result, times, self.now, outputs)
        self._log_blocks()
        for request_id in outputs.finished:
            self._ended(request_id)
        self._guard.step(frame, outputs, self.core.scheduler.requests.values())
        if self._on_step is not None:
            self._on_step(frame, result, outputs)

    def _runs_something(self) -> bool:
        """A step in flight has tokens, so its end may change what can be scheduled."""
        return any(submitted.frame.plan.num_scheduled_tokens for submitted in self._submitted)

    def _sit_out(self, frame: Frame) -> simpy.Event:
        """A schedule call that found nothing to do: only an arrival or an abort can change that."""
        self.core.abandon(frame)
        self.log.sat_out(frame)
        times = [*islice(self._cache_resets, 1)]
        if (arrival := self._arrivals.next_ns()) is not None:
            times.append(arrival)
        if self._aborts:
            times.append(self._aborts[0][0])
        if not times:
            left = ", ".join(sorted(self.core.scheduler.requests)[:5])
            raise StalledError(
                f"at {ns_to_seconds(self.now):.9g} s nothing can be scheduled and nothing will arrive; unfinished "
                f"requests: {left}; {self._why_nobody_comes_in(frame)}"
            )
        return self._wait_until(min(times))

    def _why_nobody_comes_in(self, frame: Frame) -> str:
        record = frame.record
        if record.head_reason is WaitReason.POLICY:
            return f"may_admit of the policy {self.core.config.scheduler.policy} refuses {record.head!r}"
        return f"{record.head!r} waits for: {record.head_reason}" if record.head else "all of them run"

    def _wait_until(self, time_ns: int) -> simpy.Event:
        return self.env.timeout(max(time_ns - self.now, 0))

    # ------------------------------------------------------------ requests in and out

    def _take_in(self) -> None:
        """Takes in every request that has arrived by now."""
        while (arrival := self._arrivals.next_ns()) is not None and arrival <= self.now:
            spec, sent_ns = self._arrivals.pop()
            if self._on_request is not None:
                self._on_request(spec)
            request = self._request(spec, sent_ns)
            refusal = self.core.refusal(request) or self._token_refusal(spec)
            if refusal is not None:
                self.log.refused(spec, self.now, refusal, sent_ns=sent_ns)
                self._tokens.ended(spec, ())
                self._arrivals.finished(spec.request_id, self.now)
                continue
            self._in_flight[spec.request_id] = spec, request
            self._tokens.add(spec)
            self.core.add_request(request, self.now)
            self._guard.progress()
            self.log.arrived(spec, self.now, sent_ns=sent_ns)
            if spec.abort_s is not None:
                self._abort_count += 1
                heapq.heappush(self._aborts, (seconds_to_ns(spec.abort_s), self._abort_count, request))

    def _token_refusal(self, spec: RequestSpec) -> str | None:
        """A model has no embedding for an id outside its vocabulary."""
        highest = max(spec.prompt_token_ids or (0,))
        if self._vocab_size is None or highest < self._vocab_size:
            return None
        return f"prompt token id {highest} is outside the model's vocabulary (0 to {self._vocab_size - 1})"

    def _request(self, spec: RequestSpec, arrival_ns: int) -> Request:
        config = self.core.config
        return Request(
            spec.request_id,
            self._tokens.prompt(spec),
            self._sampling(spec),
            block_size=config.cache.block_size,
            max_model_len=config.model.max_model_len,
            arrival_ns=arrival_ns,
            priority=spec.priority,
            eos_token_id=config.model.eos_token_id,
            cache_salt=spec.cache_salt,
            client_id=spec.client_id,
            predicted_output_tokens=spec.predicted_output_tokens,
        )

    def _abort_due(self) -> None:
        """Aborts whose time has come. One due before its request was taken in has waited for that."""
        while self._aborts and self._aborts[0][0] <= self.now:
            _, _, request = heapq.heappop(self._aborts)
            request_id = request.request_id
            if self.core.scheduler.requests.get(request_id) is not request:
                # It has ended; a later request may carry the same id.
                continue
            blocks = self.core.scheduler.kv.num_blocks(request)
            self.core.abort_requests([request_id])
            self._guard.progress()
            self.log.aborted(request_id, self.now, request.num_computed_tokens, blocks)
            self._ended(request_id)
        self._log_blocks()

    def _reset_due(self) -> None:
        """Prefix-cache resets whose time has come, at the step boundary; each says whether it could be done."""
        while self._cache_resets and self._cache_resets[0] <= self.now:
            self._cache_resets.popleft()
            self.log.cache_reset(self.now, done=self.core.reset_prefix_cache())
            self._log_blocks()

    def _ended(self, request_id: str) -> None:
        spec, request = self._in_flight.pop(request_id)
        self._tokens.ended(spec, request.output_token_ids)
        self._arrivals.finished(request_id, self.now)

    def _log_blocks(self) -> None:
        changes = self.core.drain_block_changes()
        if changes:
            self.log.block_changes(changes, self.now)


class _Arrivals:
    """The client's side: requests that the workload has named and that have not been sent, earliest first."""

    def __init__(self, workload: Workload, max_concurrency: int | None) -> None:
        self._workload = workload
        self._open_loop = bool(getattr(workload, "open_loop", False))
        self._ahead: list[tuple[int, int, RequestSpec]] = []
        self._count = 0
        self._free = float("inf") if max_concurrency is None else max_concurrency
        self._free_since_ns = 0
        self._pull()

    def next_ns(self) -> int | None:
        """When the next request is sent; None when none is known, or all that may be are in flight."""
        if not self._ahead or self._free < 1:
            return None
        return max(self._ahead[0][0], self._free_since_ns)

    def pop(self) -> tuple[RequestSpec, int]:
        """The next request, and when it is sent: at its arrival, or when another's end let it go."""
        arrival_ns, _, spec = heapq.heappop(self._ahead)
        self._free -= 1
        self._pull()
        return spec, max(arrival_ns, self._free_since_ns)

    def finished(self, request_id: str, now_ns: int) -> None:
        if self._free < 1:
            self._free_since_ns = now_ns
        self._free += 1
        self._workload.finished(request_id, now_ns)
        if not self._open_loop or not self._ahead:
            # A closed loop may now know a request that is due before those it named already.
            self._pull()

    def _pull(self) -> None:
        spec = self._workload.next()
        if spec is not None:
            self._count += 1
            heapq.heappush(self._ahead, (seconds_to_ns(spec.arrival_s), self._count, spec))
