"""The waiting requests, in the order in which a policy wants them admitted."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from servetwin.sim.policy import SchedulingPolicy, inherits
from servetwin.sim.request import Request


class RequestQueue(Protocol):
    """The waiting requests in the order in which they will be admitted."""

    def add(self, request: Request, now: int) -> None:
        """A request that has just come in."""
        ...

    def put_back(self, request: Request, now: int) -> None:
        """A request that was preempted."""
        ...

    def peek(self, now: int) -> Request: ...

    def remove(self, request: Request) -> None:
        """Takes out one that is in the queue: admitted or ended."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """In order of admission."""
        ...


def order_key(policy: SchedulingPolicy, request: Request, now: int) -> tuple[Any, ...]:
    """The policy's key; raises ValueError when it is no tuple."""
    key = policy.order_key(request, now)
    if not isinstance(key, tuple):
        raise ValueError(
            f"order_key of {type(policy).__name__} gave {key!r} for {request.request_id!r}, not a tuple"
        )
    return key


class FIFOQueue(deque[Request]):
    """Order of receipt; preempted requests go to the front, so several victims of a step keep their old order."""

    def add(self, request: Request, now: int) -> None:
        self.append(request)

    def put_back(self, request: Request, now: int) -> None:
        self.appendleft(request)

    def peek(self, now: int) -> Request:
        return self[0]

    def remove(self, request: Request) -> None:
        if self[0] is request:
            self.popleft()
        else:
            super().remove(request)


class KeyedQueue:
    """A heap on the policy's `order_key`; equal keys in order of queueing."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[Any, ...], int, Request]] = []
        self._count = 0

    def add(self, request: Request, now: int) -> None:
        self._count += 1
        heapq.heappush(self._heap, (order_key(self._policy, request, now), self._count, request))

    put_back = add

    def peek(self, now: int) -> Request:
        return self._heap[0][2]

    def remove(self, request: Request) -> None:
        if self._heap[0][2] is request:
            heapq.heappop(self._heap)
            return
        self._heap = [entry for entry in self._heap if entry[2] is not request]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[2] for entry in sorted(self._heap, key=lambda entry: entry[:2]))


class DynamicQueue:
    """For keys that change while requests wait: every look takes them anew, which costs one key per request."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._requests: list[Request] = []
        self._now = 0

    def add(self, request: Request, now: int) -> None:
        self._now = now
        self._requests.append(request)

    put_back = add

    def peek(self, now: int) -> Request:
        self._now = now
        return min(self._requests, key=self._key)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def _key(self, request: Request) -> tuple[Any, ...]:
        return order_key(self._policy, request, self._now)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests, key=self._key))


def make_queue(policy: SchedulingPolicy) -> RequestQueue:
    """The waiting queue that fits a policy."""
    if getattr(policy, "dynamic_order", False):
        return DynamicQueue(policy)
    if inherits(policy, "order_key"):
        return FIFOQueue()
    return KeyedQueue(policy)
