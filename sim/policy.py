"""Who is served first and who has to go: scheduling policies and their waiting queues.

Rules of `vllm/v1/core/sched/request_queue.py` and the victim choice of `scheduler.py`, 0.22.0.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from servetwin.sim.request import Request


class SchedulingPolicy(Protocol):
    """The two decisions a policy takes. Built without arguments; holds no state of a run."""

    def order_key(self, request: Request, now: int) -> tuple[Any, ...]:
        """Waiting requests are admitted in ascending order of this key, taken when they are queued (`now`, ns)."""
        ...

    def choose_victim(self, running: Sequence[Request], now: int) -> Request:
        """Which running request gives up its blocks when another cannot grow."""
        ...


class FCFS:
    """First come, first served: admission in order of receipt, the latest admitted is preempted first."""

    def order_key(self, request: Request, now: int) -> tuple[Any, ...]:
        """Order of receipt needs no key: the queue keeps it, and preempted requests return to its front."""
        return ()

    def choose_victim(self, running: Sequence[Request], now: int) -> Request:
        return running[-1]


class Priority:
    """Lower priority value first, then earlier arrival, then the id as a string; the reverse is preempted first."""

    def order_key(self, request: Request, now: int) -> tuple[Any, ...]:
        return (request.priority, request.arrival_ns, request.request_id)

    def choose_victim(self, running: Sequence[Request], now: int) -> Request:
        """The first in running order with the largest (priority, arrival): the id breaks no tie here, as in vLLM."""
        return max(running, key=lambda r: (r.priority, r.arrival_ns))


POLICIES: dict[str, type[FCFS] | type[Priority]] = {"fcfs": FCFS, "priority": Priority}


class RequestQueue(Protocol):
    """The waiting requests in the order in which they will be admitted."""

    def add(self, request: Request, now: int) -> None:
        """A request that has just come in."""
        ...

    def put_back(self, request: Request, now: int) -> None:
        """A request that was preempted."""
        ...

    def peek(self) -> Request: ...

    def pop(self) -> Request: ...

    def remove(self, request: Request) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """In order of admission."""
        ...


class FIFOQueue:
    """Order of receipt; preempted requests go to the front, so several victims of a step keep their old order."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def add(self, request: Request, now: int) -> None:
        self._queue.append(request)

    def put_back(self, request: Request, now: int) -> None:
        self._queue.appendleft(request)

    def peek(self) -> Request:
        return self._queue[0]

    def pop(self) -> Request:
        return self._queue.popleft()

    def remove(self, request: Request) -> None:
        self._queue.remove(request)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


class KeyedQueue:
    """A heap on the policy's `order_key`; equal keys in order of queueing."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[Any, ...], int, Request]] = []
        self._count = 0

    def add(self, request: Request, now: int) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self._policy.order_key(request, now), self._count, request))

    put_back = add

    def peek(self) -> Request:
        return self._heap[0][2]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[2]

    def remove(self, request: Request) -> None:
        self._heap = [entry for entry in self._heap if entry[2] is not request]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[2] for entry in sorted(self._heap, key=lambda entry: entry[:2]))


def make_queue(policy: SchedulingPolicy) -> RequestQueue:
    """The waiting queue that fits a policy."""
    return FIFOQueue() if isinstance(policy, FCFS) else KeyedQueue(policy)
