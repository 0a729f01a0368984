"""The client's side of an engine: which request is sent next, and when."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque

from servetwin.sim.units import seconds_to_ns
from servetwin.workloads.spec import RequestSpec, Workload


def arrivals_of(workload: Workload, max_concurrency: int | None) -> Arrivals:
    """The client of a workload; `max_concurrency`: requests that it keeps in flight."""
    is_open = max_concurrency is None and bool(getattr(workload, "open_loop", False))
    return OpenLoop(workload) if is_open else Arrivals(workload, max_concurrency)


class Feed(ABC):
    """Where an engine gets its requests from."""

    due_ns: int | None = None
    """When the next request is sent; None when none is known, or all that may be are in flight."""

    @abstractmethod
    def pop(self) -> tuple[RequestSpec, int]:
        """The next request, and when it was sent."""

    @abstractmethod
    def finished(self, request_id: str, now_ns: int) -> None:
        """A request has ended."""


class Arrivals(Feed):
    """The client's side: requests that the workload has named and that the engine has not taken in, earliest first."""

    def __init__(self, workload: Workload, max_concurrency: int | None) -> None:
        self._workload = workload
        self._open_loop = bool(getattr(workload, "open_loop", False))
        self._ahead: list[tuple[int, int, RequestSpec]] = []
        self._sent: deque[tuple[RequestSpec, int]] = deque()
        """On their way while the engine was busy, each with its time; they count as in flight."""
        self._count = 0
        self._is_limited = max_concurrency is not None
        self._free = float("inf") if max_concurrency is None else max_concurrency
        self._free_since_ns = 0
        self._pull()

    def pop(self) -> tuple[RequestSpec, int]:
        """The next request, and when it is sent: at its arrival, or when another's end let it go."""
        if not self._sent:
            self._send()
        sent = self._sent.popleft()
        self._look()
        return sent

    def finished(self, request_id: str, now_ns: int) -> None:
        """A request has ended."""
        if self._is_limited:
            # The engine looks at its end of a step only; who was sent before was in flight.
            while self._may_send() and max(self._ahead[0][0], self._free_since_ns) < now_ns:
                self._send()
        if self._free < 1:
            self._free_since_ns = now_ns
        self._free += 1
        self._workload.finished(request_id, now_ns)
        if self._open_loop and self._ahead:
            self._look()
        else:
            # A closed loop may now know a request that is due before those it named already.
            self._pull()

    def _may_send(self) -> bool:
        return bool(self._ahead) and self._free >= 1

    def _send(self) -> None:
        arrival_ns, _, spec = heapq.heappop(self._ahead)
        self._free -= 1
        self._sent.append((spec, max(arrival_ns, self._free_since_ns)))
        self._pull()

    def _pull(self) -> None:
        spec = self._workload.next()
        if spec is not None:
            self._count += 1
            heapq.heappush(self._ahead, (seconds_to_ns(spec.arrival_s), self._count, spec))
        self._look()

    def _look(self) -> None:
        if self._sent:
            self.due_ns = self._sent[0][1]
        elif self._may_send():
            self.due_ns = max(self._ahead[0][0], self._free_since_ns)
        else:
            self.due_ns = None


class OpenLoop(Arrivals):
    """The same where nothing waits for anything: requests come in the order in which the workload names them."""

    def __init__(self, workload: Workload) -> None:
        self._next = workload.next
        self._ended = workload.finished
        self._spec: RequestSpec | None = None
        self.due_ns = None
        self._look()

    def pop(self) -> tuple[RequestSpec, int]:
        spec, sent_ns = self._spec, self.due_ns
        assert spec is not None and sent_ns is not None, "somebody is due"
        self._look()
        return spec, sent_ns

    def finished(self, request_id: str, now_ns: int) -> None:
        self._ended(request_id, now_ns)
        if self.due_ns is None:
            self._look()

    def _look(self) -> None:
        spec = self._spec = self._next()
        self.due_ns = None if spec is None else seconds_to_ns(spec.arrival_s)
