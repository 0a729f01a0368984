"""Why and for how long requests waited: intervals with one reason each, found in O(changes) per step.

In every step only the head of the queue has a reason of its own; whoever stands behind it waits for the head.
So nothing is touched for a request that stays behind the head, however long the queue is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from servetwin.sim.records import ScheduleRecord, WaitReason


@dataclass(slots=True)
class Wait:
    """An interval that has not ended yet."""

    since_ns: int
    reason: WaitReason


Emit = Callable[[str, WaitReason, int, int], None]
"""Takes request_id, reason, from_ns, until_ns of a finished interval."""


class WaitTracker:
    """Follows the waiting queue and emits an interval when it ends: admitted, aborted, or another reason.

    A reason found at one schedule call holds until the next. Intervals of length 0 are not emitted.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._open: dict[str, Wait] = {}
        self._newly_queued: dict[str, int] = {}
        self._head: str | None = None

    def queued(self, request_id: str, now_ns: int) -> None:
        """The request joins the queue; its reason is known at the next schedule call."""
        self._newly_queued[request_id] = now_ns

    def scheduled(self, record: ScheduleRecord, now_ns: int) -> None:
        """One schedule call: ends the waits of admitted requests, begins new ones, follows the head."""
        for preempted in record.preempted:
            self._newly_queued[preempted.request_id] = now_ns
        for admitted in record.admitted:
            self.left(admitted.request_id, now_ns)
        self.headed_by(record.head, record.head_reason, now_ns)

    def headed_by(self, head: str | None, reason: WaitReason | None, now_ns: int) -> None:
        """A schedule call is over: this request heads the queue, for this reason (None: nobody waits)."""
        for request_id, since_ns in self._newly_queued.items():
            self._open[request_id] = Wait(since_ns, _reason(request_id, head, reason))
        self._newly_queued.clear()
        for known in (self._head, head):
            if known is not None and known in self._open:
                self._change(known, _reason(known, head, reason), now_ns)
        self._head = head

    def queued_behind(self) -> None:
        """A schedule call that finds the same head with the same reason as the one before it, and admits nobody."""
        for request_id, since_ns in self._newly_queued.items():
            self._open[request_id] = Wait(since_ns, WaitReason.HEAD_OF_LINE)
        self._newly_queued.clear()

    def left(self, request_id: str, now_ns: int) -> None:
        """The request waits no longer (admitted or aborted); no effect when it did not wait."""
        self._newly_queued.pop(request_id, None)
        wait = self._open.pop(request_id, None)
        if wait is not None:
            self._end(request_id, wait, now_ns)

    def close(self, now_ns: int) -> None:
        """The log ends: so do all waits."""
        for request_id in [*self._open]:
            self.left(request_id, now_ns)

    def _change(self, request_id: str, reason: WaitReason, now_ns: int) -> None:
        wait = self._open[request_id]
        if wait.reason is not reason:
            self._end(request_id, wait, now_ns)
            self._open[request_id] = Wait(now_ns, reason)

    def _end(self, request_id: str, wait: Wait, now_ns: int) -> None:
        if now_ns > wait.since_ns:
            self._emit(request_id, wait.reason, wait.since_ns, now_ns)


def _reason(request_id: str, head: str | None, reason: WaitReason | None) -> WaitReason:
    return WaitReason.HEAD_OF_LINE if reason is None or request_id != head else reason
