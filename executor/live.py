"""`servetwin run --live`: a workload sent on the wall clock through `LLMEngine` to an engine in a child process.

The client is an open loop: every request has an absolute send time, so a late one delays no other. What the engine
did comes back as the calls that the event log wants, and makes the same run folder as a simulation.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module

from servetwin.executor.engine_args import EngineArgs
from servetwin.executor.live_log import LiveLog
from servetwin.executor.llm_engine import LLMEngine
from servetwin.sim.contract import SamplingParams
from servetwin.sim.engine_options import EngineOptions
from servetwin.sim.events import EventLog
from servetwin.sim.live_server import Served
from servetwin.sim.progress_guard import StalledError
from servetwin.sim.records import StepObserver
from servetwin.sim.token_source import TokenSource
from servetwin.sim.units import ns_to_seconds, seconds_to_ns
from servetwin.workloads.spec import RequestSpec, Workload

POLL_S = 0.2
"""Longest wait without a look at whether the run is to end."""
FINE_NS = 2_000_000
"""So near to a send time the client sleeps instead of waiting for outputs: sockets are polled in milliseconds."""
WRITES_PARTS = ("pandas", "pyarrow.parquet")
"""Loaded before the run begins: at the first part it would make the requests of half a second late."""
FLUSH_S = 5.0
"""How long the engine may take for its last, empty step."""


class LiveEngine:
    """An engine in a child process, ready to serve one workload (the `sim.plugins.LiveServer` protocol)."""

    def __init__(self, options: EngineOptions) -> None:
        self._log = LiveLog()
        args = EngineArgs(**{**asdict(options), "skip_tokenizer_init": True})
        self._engine = LLMEngine.from_engine_args(args, multiprocess=True, listener=self._log)
        self.config = self._engine.engine_config
        self.described = self._engine.described

    def serve(
        self,
        workload: Workload,
        log: EventLog,
        *,
        tokens: TokenSource,
        sampling: Callable[[RequestSpec], SamplingParams],
        log_blocks: bool,
        on_request: Callable[[RequestSpec], None],
        on_step: StepObserver,
        on_tick: Callable[[], None],
        max_concurrency: int | None = None,
    ) -> Served:
        """Sends the workload and closes the log, also when it ends early. Arguments as for `sim.simulation.simulate`.

        `on_tick`: called several times a second; what it raises ends the run. `max_concurrency`: requests that may be
        in flight; the others are sent when one of those has ended.
        """
        for module in WRITES_PARTS:
            import_module(module)
        origin_ns = time.monotonic_ns()
        self._log.begin(log, origin_ns, log_blocks=log_blocks, on_step=on_step)
        client = _Client(
            self._engine, self._log, workload, tokens, sampling, on_request, on_tick, max_concurrency
        )
        try:
            client.run()
        finally:
            log.close(time.monotonic_ns() - origin_ns)
        return Served(time.monotonic_ns() - origin_ns, client.send_delays_ns)

    def close(self) -> None:
        """Ends the child."""
        self._engine.shutdown()


class _Client:
    """Sends requests when they are due, gives up those whose time has come, and reads what comes back."""

    def __init__(
        self,
        engine: LLMEngine,
        log: LiveLog,
        workload: Workload,
        tokens: TokenSource,
        sampling: Callable[[RequestSpec], SamplingParams],
        on_request: Callable[[RequestSpec], None],
        on_tick: Callable[[], None],
        max_concurrency: int | None,
    ) -> None:
        self.send_delays_ns: list[int] = []
        self._engine, self._log, self._workload = engine, log, workload
        self._tokens, self._sampling = tokens, sampling
        self._on_request, self._on_tick = on_request, on_tick
        self._max_concurrency = max_concurrency
        self._due: list[tuple[int, int, RequestSpec]] = []
        self._aborts: list[tuple[int, int, str]] = []
        self._count = 0
        self._pull()

    def run(self) -> None:
        """Serves the workload to its end.

        Raises EngineDeadError, and StalledError when the engine waits for something that will not come.
        """
        while self._due or self._log.in_flight:
            self._on_tick()
            self._send_due()
            self._abort_due()
            self._receive()
            self._log.flush_if_due()
            for spec, answer, ended_ns in self._log.take_ended():
                self._tokens.ended(spec, answer)
                self._workload.finished(spec.request_id, ended_ns)
                self._pull()
        deadline = time.monotonic() + FLUSH_S
        while not self._log.flushed and time.monotonic() < deadline:
            self._engine.step(timeout_s=POLL_S)

    def _pull(self) -> None:
        """Everything that the workload can name by now."""
        while (spec := self._workload.next()) is not None:
            self._count += 1
            heapq.heappush(self._due, (seconds_to_ns(spec.arrival_s), self._count, spec))

    def _may_send(self) -> bool:
        return bool(self._due) and self._due[0][0] <= self._log.now_ns() and not self._full()

    def _send_due(self) -> None:
        while self._may_send():
            due_ns, number, spec = heapq.heappop(self._due)
            if spec.abort_s is not None and seconds_to_ns(spec.abort_s) <= self._log.now_ns():
                self._give_up(spec)
                continue
            prompt = self._tokens.prompt(spec).token_ids()
            sent_ns = self._log.now_ns()
            self.send_delays_ns.append(sent_ns - due_ns)
            sent = replace(spec, arrival_s=ns_to_seconds(sent_ns))
            self._on_request(sent)
            self._log.sent(sent)
            try:
                self._engine.add_request(
                    spec.request_id,
                    {"prompt_token_ids": prompt, "cache_salt": spec.cache_salt},
                    self._sampling(spec),
                    priority=spec.priority,
                    client_id=spec.client_id,
                    predicted_output_tokens=spec.predicted_output_tokens,
                )
            except ValueError as e:
                self._log.refused(spec.request_id, time.monotonic_ns(), str(e))
                continue
            if spec.abort_s is not None:
                heapq.heappush(self._aborts, (seconds_to_ns(spec.abort_s), number, spec.request_id))

    def _give_up(self, spec: RequestSpec) -> None:
        """Its client waited for its turn in vain, or it came late: it is logged, and not sent."""
        spec = replace(spec, arrival_s=ns_to_seconds(self._log.now_ns()))
        self._on_request(spec)
        self._log.given_up(spec)

    def _abort_due(self) -> None:
        while self._aborts and self._aborts[0][0] <= self._log.now_ns():
            _, _, request_id = heapq.heappop(self._aborts)
            if request_id in self._log.in_flight:
                self._engine.abort_request(request_id)

    def _receive(self) -> None:
        """Takes in outputs until the next thing is due, or until some came."""
        times = [self._due[0][0]] if self._due and not self._full() else []
        times += [abort[0] for abort in self._aborts[:1]]
        if not times and (stalled := self._engine.stalled) is not None:
            raise StalledError(stalled)
        left_ns = min(times, default=2**62) - self._log.now_ns()
        if 0 < left_ns <= FINE_NS:
            time.sleep(left_ns / 1e9)
        else:
            # Also with nothing in flight: the engine may die while it has nothing to do.
            self._engine.step(timeout_s=min(max(left_ns - FINE_NS, 0) / 1e9, POLL_S))

    def _full(self) -> bool:
        return self._max_concurrency is not None and len(self._log.in_flight) >= self._max_concurrency
