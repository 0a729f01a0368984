"""What every engine in simulated time has in common: requests in and out, and in what order things happen.

Order at one instant: aborts due, step end (update), arrivals, aborts again, next schedule. Idle time is skipped. How a
step is run is said in `sim/engine_process.py` (a plan for an executor) and `sim/leaping_process.py` (a modelled time).
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable
from itertools import islice
from typing import Any, Generic

import simpy

from servetwin.sim.arrivals import Feed, arrivals_of
from servetwin.sim.contract import SamplingParams, StepTimer
from servetwin.sim.engine_core import Core, F
from servetwin.sim.events import EventLog
from servetwin.sim.progress_guard import ProgressGuard, StalledError
from servetwin.sim.records import ScheduleRecord, WaitReason
from servetwin.sim.request import Request
from servetwin.sim.timeline import Timeline
from servetwin.sim.token_source import TokenSource
from servetwin.sim.units import ns_to_seconds, seconds_to_ns
from servetwin.workloads.spec import RequestSpec, Workload

SamplingOf = Callable[[RequestSpec], SamplingParams]


class Driver(ABC, Generic[F]):
    """One engine in simulated time (integer ns). `run` is the SimPy process.

    The workload is pulled, one request ahead of time; requests that can never run are refused and logged. Raises
    StalledError rather than spinning. `cache_resets_ns`: when to ask for a reset of the prefix cache.
    `max_concurrency`: requests that the client keeps in flight; it holds the others back, in their order.
    """

    def __init__(
        self,
        env: simpy.Environment,
        core: Core[F],
        timer: StepTimer,
        workload: Workload | Feed,
        log: EventLog,
        *,
        tokens: TokenSource,
        sampling: SamplingOf,
        on_request: Callable[[RequestSpec], None] | None = None,
        vocab_size: int | None = None,
        cache_resets_ns: Iterable[int] = (),
        max_concurrency: int | None = None,
    ) -> None:
        self.env = env
        self.core = core
        self.log = log
        self._arrivals = workload if isinstance(workload, Feed) else arrivals_of(workload, max_concurrency)
        self._in_flight: dict[str, tuple[RequestSpec, Request]] = {}
        self._aborts: list[tuple[int, int, Request]] = []
        self._abort_count = 0
        config = core.config
        self._block_size, self._max_model_len = config.cache.block_size, config.model.max_model_len
        self._eos_token_id = config.model.eos_token_id
        self._tokens = tokens
        self._sampling = sampling
        self._guard = ProgressGuard()
        self._on_request = on_request
        self._vocab_size = vocab_size
        self._timeline = Timeline(
            overlaps_preparation=getattr(timer, "overlaps_preparation", True),
            turnaround_ns=getattr(timer, "turnaround_ns", 0),
        )
        self._cache_resets = deque(sorted(cache_resets_ns))
        self._logs_blocks = core.scheduler.kv.pool.journal is not None

    @property
    def now(self) -> int:
        """Simulated time in ns."""
        return int(self.env.now)

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Serves the workload to its end."""
        while True:
            if (others := self._others()) is not None:
                yield others
            yield from self._short_way()
            self._take_in(self.now)
            if self._aborts:
                self._abort_due()
            if self._cache_resets:
                self._reset_due()
            if (landing := self._leap()) is not None:
                yield landing
                self._land()
                continue
            frame = self.core.begin(self.now)
            if frame is None and not self.core.in_flight:
                if (waiting := self._rest()) is None:
                    return
                yield waiting
                continue
            if frame is not None:
                if frame.is_idle and not self._runs_something(frame):
                    # Empty steps before it would keep this instant going round for ever.
                    while len(self.core.in_flight) > 1:
                        yield from self._complete()
                    yield self._sit_out(frame)
                    continue
                yield from self._submit(frame)
                if frame.has_tokens and self.core.has_room:
                    continue
            yield from self._complete()

    # ------------------------------------------------------------ waiting

    def _others(self) -> simpy.Event | None:
        """What has to happen at this instant before arrivals are taken in, if anything."""
        return None

    def _rest(self) -> simpy.Event | None:
        """Nothing is left to do: the next arrival, or whatever comes before it; None when nobody will come."""
        arrival = self._arrivals.due_ns
        return None if arrival is None else self._wait_until(min([arrival, *islice(self._cache_resets, 1)]))

    # ------------------------------------------------------------ a step

    def _short_way(self) -> Iterable[simpy.Event]:
        """Takes steps in another way than the following, as far as it goes."""
        return ()

    def _leap(self) -> simpy.Event | None:
        """Begins many steps at once, where that is possible; the event is their end."""
        return None

    def _land(self) -> None:
        """Those steps are over."""

    def settle(self) -> None:
        """The run is over, perhaps before its end: tells the log what it does not know yet."""

    @abstractmethod
    def _submit(self, frame: F) -> Generator[simpy.Event, Any, None]:
        """A step is handed to the worker, which runs it."""

    @abstractmethod
    def _complete(self) -> Generator[simpy.Event, Any, None]:
        """The oldest step in flight comes back, and its tokens are out."""

    def _runs_something(self, frame: F) -> bool:
        """Another step in flight has tokens, so its end may change what can be scheduled."""
        return any(other.has_tokens for other in self.core.in_flight if other is not frame)

    def _sit_out(self, frame: F) -> simpy.Event:
        """A schedule call that found nothing to do: only an arrival or an abort can change that."""
        self.core.abandon(frame)
        self.log.sat_out(frame)
        times = [*islice(self._cache_resets, 1)]
        if self._aborts:
            times.append(self._aborts[0][0])
        return self._sit_until(times, frame.record)

    def _sit_until(self, times_ns: list[int], record: ScheduleRecord) -> simpy.Event:
        """The next of these instants, or an arrival; raises StalledError when none will come."""
        if (arrival := self._arrivals.due_ns) is not None:
            times_ns.append(arrival)
        if not times_ns:
            raise self._stalled(record)
        return self._wait_until(min(times_ns))

    def _stalled(self, record: ScheduleRecord) -> StalledError:
        left = ", ".join(sorted(self.core.scheduler.requests)[:5])
        return StalledError(
            f"at {ns_to_seconds(self.now):.9g} s nothing can be scheduled and nothing will arrive; unfinished "
            f"requests: {left}; {self._why_nobody_comes_in(record)}"
        )

    def _why_nobody_comes_in(self, record: ScheduleRecord) -> str:
        if record.head_reason is WaitReason.POLICY:
            return f"may_admit of the policy {self.core.config.scheduler.policy} refuses {record.head!r}"
        return f"{record.head!r} waits for: {record.head_reason}" if record.head else "all of them run"

    def _wait_until(self, time_ns: int) -> simpy.Event:
        return self.env.timeout(max(time_ns - self.now, 0))

    # ------------------------------------------------------------ requests in and out

    def _take_in(self, now: int) -> None:
        """Takes in every request that has arrived by now."""
        arrivals, core, log = self._arrivals, self.core, self.log
        while (due_ns := arrivals.due_ns) is not None and due_ns <= now:
            spec, sent_ns = arrivals.pop()
            if self._on_request is not None:
                self._on_request(spec)
            request = self._request(spec, sent_ns)
            refusal = core.refusal(request) or self._token_refusal(spec)
            if refusal is not None:
                log.refused(spec, now, refusal, sent_ns=sent_ns)
                self._tokens.ended(spec, ())
                arrivals.finished(spec.request_id, now)
            else:
                self._in_flight[spec.request_id] = spec, request
                self._tokens.add(spec)
                core.add_request(request, now)
                self._guard.progress()
                self._log_arrival(spec, now, sent_ns)
                if spec.abort_s is not None:
                    self._abort_count += 1
                    heapq.heappush(self._aborts, (seconds_to_ns(spec.abort_s), self._abort_count, request))

    def _log_arrival(self, spec: RequestSpec, now: int, sent_ns: int) -> None:
        self.log.arrived(spec, now, sent_ns=sent_ns)

    def _token_refusal(self, spec: RequestSpec) -> str | None:
        """A model has no embedding for an id outside its vocabulary."""
        if self._vocab_size is None:
            return None
        highest = max(spec.prompt_token_ids or (0,))
        if highest < self._vocab_size:
            return None
        return f"prompt token id {highest} is outside the model's vocabulary (0 to {self._vocab_size - 1})"

    def _request(self, spec: RequestSpec, arrival_ns: int) -> Request:
        request = Request(
            spec.request_id,
            self._tokens.prompt(spec),
            self._sampling(spec),
            block_size=self._block_size,
            max_model_len=self._max_model_len,
            arrival_ns=arrival_ns,
            priority=spec.priority,
            eos_token_id=self._eos_token_id,
            cache_salt=spec.cache_salt,
            client_id=spec.client_id,
            predicted_output_tokens=spec.predicted_output_tokens,
        )
        # The next turn of its session may begin with them.
        request.keeps_tokens = spec.session_id is not None
        return request

    def _abort_due(self) -> None:
        """Aborts whose time has come. One due before its request was taken in has waited for that."""
        while self._aborts and self._aborts[0][0] <= self.now:
            _, _, request = heapq.heappop(self._aborts)
            if self.core.scheduler.requests.get(request.request_id) is request:
                # Else it has ended; a later request may carry the same id.
                self._abort(request)
        self._log_blocks()

    def _abort(self, request: Request) -> None:
        request_id, blocks = request.request_id, self.core.scheduler.kv.num_blocks(request)
        self.core.abort_requests([request_id])
        self._guard.progress()
        self.log.aborted(request_id, self.now, request.num_computed_tokens, blocks)
        self._ended(request_id, self.now)

    def _reset_due(self) -> None:
        """Prefix-cache resets whose time has come, at the step boundary; each says whether it could be done."""
        while self._cache_resets and self._cache_resets[0] <= self.now:
            self._cache_resets.popleft()
            self.log.cache_reset(self.now, done=self.core.reset_prefix_cache())
            self._log_blocks()

    def _ended(self, request_id: str, now: int) -> None:
        spec, request = self._in_flight.pop(request_id)
        self._tokens.ended(spec, request.output_token_ids)
        self._arrivals.finished(request_id, now)

    def _log_blocks(self) -> None:
        if not self._logs_blocks:
            return
        changes = self.core.drain_block_changes()
        if changes:
            self.log.block_changes(changes, self.now)
