"""What an engine core tells whoever keeps a log of it, in its own process or in the parent's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from servetwin.sim.contract import StepResult
from servetwin.sim.records import BlockChange, EngineCoreOutputs, Frame
from servetwin.sim.timeline import StepTimes


class CoreListener(Protocol):
    """Told of everything in the order of happening. Times are `time.monotonic_ns()`, one clock for all processes."""

    def arrived(self, request_id: str, now_ns: int) -> None:
        """The engine has queued a request."""
        ...

    def refused(self, request_id: str, now_ns: int, reason: str) -> None:
        """A request that can never run was turned away (one whose id is in use is not told)."""
        ...

    def aborted(self, request_id: str, now_ns: int, computed_tokens: int, blocks: int) -> None:
        """The client gave a request up; what it had computed and held is gone."""
        ...

    def scheduled(self, frame: Frame) -> None:
        """A step has been handed to the worker; `frame.start_ns` is when its schedule call began."""
        ...

    def stepped(
        self, frame: Frame, result: StepResult, times: StepTimes, end_ns: int, outputs: EngineCoreOutputs
    ) -> None:
        """A step is complete; empty ones (0 tokens), which tell the worker of ended requests, are told, too."""
        ...

    def sat_out(self, frame: Frame) -> None:
        """A schedule call found nothing to do: those who wait do so for its reasons, until something comes in."""
        ...

    def block_changes(self, changes: list[BlockChange], now_ns: int) -> None:
        """What the block pool did since the last call."""
        ...


class Arrived(msgspec.Struct, tag=True, frozen=True):
    request_id: str
    now_ns: int

    def replay(self, listener: CoreListener) -> None:
        listener.arrived(self.request_id, self.now_ns)


class Refused(msgspec.Struct, tag=True, frozen=True):
    request_id: str
    now_ns: int
    reason: str

    def replay(self, listener: CoreListener) -> None:
        listener.refused(self.request_id, self.now_ns, self.reason)


class Aborted(msgspec.Struct, tag=True, frozen=True):
    request_id: str
    now_ns: int
    computed_tokens: int
    blocks: int

    def replay(self, listener: CoreListener) -> None:
        listener.aborted(self.request_id, self.now_ns, self.computed_tokens, self.blocks)


class Scheduled(msgspec.Struct, tag=True, frozen=True):
    frame: Frame

    def replay(self, listener: CoreListener) -> None:
        listener.scheduled(self.frame)


class Stepped(msgspec.Struct, tag=True, frozen=True):
    frame: Frame
    result: StepResult
    times: StepTimes
    end_ns: int
    outputs: EngineCoreOutputs

    def replay(self, listener: CoreListener) -> None:
        listener.stepped(self.frame, self.result, self.times, self.end_ns, self.outputs)


class SatOut(msgspec.Struct, tag=True, frozen=True):
    frame: Frame

    def replay(self, listener: CoreListener) -> None:
        listener.sat_out(self.frame)


class BlockChanges(msgspec.Struct, tag=True, frozen=True):
    changes: list[BlockChange]
    now_ns: int

    def replay(self, listener: CoreListener) -> None:
        listener.block_changes(self.changes, self.now_ns)


ListenerCall = Arrived | Refused | Aborted | Scheduled | Stepped | SatOut | BlockChanges
"""One call as a message, with the arguments of the method that its `replay` calls."""


class SendingListener:
    """A `CoreListener` that makes a message of every call."""

    def __init__(self, send: Callable[[ListenerCall], None]) -> None:
        self._send = send

    def arrived(self, request_id: str, now_ns: int) -> None:
        self._send(Arrived(request_id, now_ns))

    def refused(self, request_id: str, now_ns: int, reason: str) -> None:
        self._send(Refused(request_id, now_ns, reason))

    def aborted(self, request_id: str, now_ns: int, computed_tokens: int, blocks: int) -> None:
        self._send(Aborted(request_id, now_ns, computed_tokens, blocks))

    def scheduled(self, frame: Frame) -> None:
        self._send(Scheduled(frame))

    def stepped(
        self, frame: Frame, result: StepResult, times: StepTimes, end_ns: int, outputs: EngineCoreOutputs
    ) -> None:
        self._send(Stepped(frame, result, times, end_ns, outputs))

    def sat_out(self, frame: Frame) -> None:
        self._send(SatOut(frame))

    def block_changes(self, changes: list[BlockChange], now_ns: int) -> None:
        self._send(BlockChanges(changes, now_ns))
