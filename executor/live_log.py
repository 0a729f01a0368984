"""What an engine on the wall clock tells, brought onto the clock of a run and into its event log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from servetwin.sim.contract import StepResult
from servetwin.sim.events import EventLog
from servetwin.sim.records import BlockChange, EngineCoreOutputs, Frame, StepObserver
from servetwin.sim.timeline import StepTimes
from servetwin.sim.units import NS_PER_S
from servetwin.workloads.spec import RequestSpec

FLUSH_FIRST_NS, FLUSH_LAST_NS = NS_PER_S, 10 * NS_PER_S
"""A run writes what is new after so long at first, and from its first minute on after so long."""


class Ended(NamedTuple):
    """A request that has ended."""

    spec: RequestSpec
    answer: list[int]
    """Its tokens, if it belongs to a session."""
    ended_ns: int


class LiveLog:
    """Listens to the engine core (`core_loop.CoreListener`); times come in as monotonic ns and go on since `begin`."""

    def __init__(self) -> None:
        self.in_flight: dict[str, RequestSpec] = {}
        """Sent and not ended."""
        self._untold: set[str] = set()
        """Requests that ended, and of which no plan has told the worker yet."""
        self._answers: dict[str, list[int]] = {}
        """Tokens so far of requests in sessions, whose next turn may repeat them."""
        self._ended: list[Ended] = []
        self._log: EventLog | None = None
        self._origin_ns = 0
        self._flush_at_ns = FLUSH_FIRST_NS
        self._log_blocks = False
        self._on_step: StepObserver | None = None

    def begin(self, log: EventLog, origin_ns: int, *, log_blocks: bool, on_step: StepObserver) -> None:
        """From now on there is a run, which began at `origin_ns`."""
        self._log, self._origin_ns, self._flush_at_ns = log, origin_ns, FLUSH_FIRST_NS
        self._log_blocks, self._on_step = log_blocks, on_step

    @property
    def flushed(self) -> bool:
        """The engine has told its worker of every request that ended."""
        return not self._untold

    def now_ns(self) -> int:
        """Since the start of the run."""
        return time.monotonic_ns() - self._origin_ns

    def sent(self, spec: RequestSpec) -> None:
        """A request is on its way to the engine; `arrival_s` is when it was sent. ValueError for an id in use."""
        if spec.request_id in self.in_flight:
            raise ValueError(f"request_id {spec.request_id!r} is in use by an unfinished request")
        self.in_flight[spec.request_id] = spec
        if spec.session_id is not None:
            self._answers[spec.request_id] = []

    def given_up(self, spec: RequestSpec) -> None:
        """A request whose client gave up before its turn to be sent: the engine never hears of it."""
        self.sent(spec)
        now_ns = self.now_ns()
        self._writes.arrived(spec, now_ns)
        self._writes.aborted(spec.request_id, now_ns, computed_tokens=0, blocks=0)
        self._end(spec.request_id, self._origin_ns + now_ns)

    def flush_if_due(self) -> None:
        """Writes what is new if it is time: a killed run has left it, and a long one has not too many parts."""
        now_ns = self.now_ns()
        if now_ns >= self._flush_at_ns:
            self._writes.flush()
            self._flush_at_ns = self.now_ns() + min(max(now_ns // 6, FLUSH_FIRST_NS), FLUSH_LAST_NS)

    def take_ended(self) -> Sequence[Ended]:
        """Those that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # ------------------------------------------------------------ what the engine tells

    def arrived(self, request_id: str, now_ns: int) -> None:
        self._writes.arrived(self.in_flight[request_id], now_ns - self._origin_ns)

    def refused(self, request_id: str, now_ns: int, reason: str) -> None:
        self._writes.refused(self.in_flight[request_id], now_ns - self._origin_ns, reason)
        self._end(request_id, now_ns)

    def aborted(self, request_id: str, now_ns: int, computed_tokens: int, blocks: int) -> None:
        self._writes.aborted(request_id, now_ns - self._origin_ns, computed_tokens, blocks)
        self._untold.add(request_id)
        self._end(request_id, now_ns)

    def scheduled(self, frame: Frame) -> None:
        self._writes.scheduled(self._on_our_clock(frame))

    def stepped(
        self, frame: Frame, result: StepResult, times: StepTimes, end_ns: int, outputs: EngineCoreOutputs
    ) -> None:
        frame, origin = self._on_our_clock(frame), self._origin_ns
        times = replace(
            times,
            prepare_start_ns=times.prepare_start_ns - origin,
            device_start_ns=times.device_start_ns - origin,
            device_end_ns=times.device_end_ns - origin,
        )
        self._writes.stepped(frame, result, times, end_ns - origin, outputs)
        for request_id, answer in self._answers.items():
            answer += outputs.new_token_ids.get(request_id, ())
        # An empty step may have been scheduled before the request ended that leaves nothing to do.
        self._untold = (self._untold | outputs.finished.keys()) - frame.plan.finished_req_ids
        for request_id in outputs.finished:
            self._end(request_id, end_ns)
        if self._on_step is not None:
            self._on_step(frame, result, outputs)

    def sat_out(self, frame: Frame) -> None:
        self._writes.sat_out(self._on_our_clock(frame))

    def block_changes(self, changes: Sequence[BlockChange], now_ns: int) -> None:
        if self._log_blocks:
            self._writes.block_changes(changes, now_ns - self._origin_ns)

    @property
    def _writes(self) -> EventLog:
        assert self._log is not None, "requests are sent after `begin`"
        return self._log

    def _on_our_clock(self, frame: Frame) -> Frame:
        return replace(frame, start_ns=frame.start_ns - self._origin_ns)

    def _end(self, request_id: str, now_ns: int) -> None:
        spec, answer = self.in_flight.pop(request_id), self._answers.pop(request_id, [])
        self._ended.append(Ended(spec, answer, now_ns - self._origin_ns))
