"""A closed loop: a later turn of a session is sent when the turn before has ended and its think time has passed.

With recorded times a slow engine would get turns whose predecessors it has not answered yet, which no client sends.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, pairwise
from typing import Any, Literal

from servetwin.workloads.checks import check_count
from servetwin.workloads.columns import RequestColumns
from servetwin.workloads.spec import ArgumentError, ListWorkload, RequestSpec

Loop = Literal["auto", "open", "closed"]
LOOPS: tuple[Loop, ...] = ("auto", "open", "closed")
"""auto: closed where there are sessions with think times."""


class ClosedLoop:
    """A workload whose sessions wait for their answers.

    The first turn of a session here, and a request without session, is sent at its `arrival_s`. Every other turn is
    sent `think_time_s` (none: 0) after the end of the turn before, however that ended; its `arrival_s` is then that
    time. Turns follow one another by `turn`, ties and turns without number as they stand in `requests`.
    """

    open_loop = False

    def __init__(self, requests: Iterable[RequestSpec], about: dict[str, Any] | None = None) -> None:
        self.requests: Sequence[RequestSpec] = [*requests]
        self.about = {} if about is None else about
        self._numbers = count()
        self._ready: list[tuple[float, int, RequestSpec]] = []
        self._next_turn: dict[str, RequestSpec] = {}
        """Request id -> the turn that waits for it."""
        for session in _sessions(self.requests):
            for turn, following in pairwise(session):
                self._next_turn[turn.request_id] = following
        waiting = {turn.request_id for turn in self._next_turn.values()}
        for spec in sorted(self.requests, key=lambda r: r.arrival_s):
            if spec.request_id not in waiting:
                self._push(spec)

    def next(self) -> RequestSpec | None:
        """The earliest request that may be sent by what has ended so far."""
        return heapq.heappop(self._ready)[2] if self._ready else None

    def finished(self, request_id: str, now_ns: int) -> None:
        """The turn that waited for this one becomes known."""
        following = self._next_turn.pop(request_id, None)
        if following is not None:
            think_ns = round((following.think_time_s or 0.0) * 1e9)
            self._push(replace(following, arrival_s=(now_ns + think_ns) / 1e9))

    def __len__(self) -> int:
        return len(self.requests)

    def _push(self, spec: RequestSpec) -> None:
        heapq.heappush(self._ready, (spec.arrival_s, next(self._numbers), spec))


class Users(ClosedLoop):
    """A fixed number of users, each of whom sends the next request of its own when the last has been answered.

    Prompts share nothing with those before: a user is a session without memory.
    """

    def __init__(
        self, requests: Sequence[RequestSpec], *, users: int, think_times_s: Sequence[float]
    ) -> None:
        """Request i is sent by user i % users, `think_times_s[i]` after its last answer; the first ones at 0.

        Raises ArgumentError for fewer than one user.
        """
        check_count("users", users)
        super().__init__(
            replace(
                spec,
                arrival_s=think_s if i < users else 0.0,
                session_id=f"user-{i % users}",
                turn=i // users,
                think_time_s=think_s,
                context_tokens=None,
            )
            for i, (spec, think_s) in enumerate(zip(requests, think_times_s, strict=True))
        )


def as_workload(
    requests: Sequence[RequestSpec], about: dict[str, Any], loop: Loop = "auto"
) -> ListWorkload | ClosedLoop:
    """The workload that sends these requests; `about["loop"]` says how.

    Raises ArgumentError for a closed loop without sessions, whose turns nothing connects.
    """
    if loop == "closed" and not _has(requests, "session_id"):
        raise ArgumentError("loop", "'closed': no request has a session_id, so no turn waits for another")
    waits = _has(requests, "session_id") and _has(requests, "think_time_s")
    closed = loop == "closed" or (loop == "auto" and waits)
    about = about | {"loop": "closed" if closed else "open"}
    return ClosedLoop(requests, about) if closed else ListWorkload(requests, about)


def _has(requests: Sequence[RequestSpec], name: str) -> bool:
    if isinstance(requests, RequestColumns):
        return requests.has(name)
    return any(getattr(r, name) is not None for r in requests)


def _sessions(requests: Iterable[RequestSpec]) -> Iterator[list[RequestSpec]]:
    """The turns of each session in their order."""
    sessions: dict[str, list[RequestSpec]] = {}
    for spec in requests:
        if spec.session_id is not None:
            sessions.setdefault(spec.session_id, []).append(spec)
    for turns in sessions.values():
        yield sorted(turns, key=lambda r: 0 if r.turn is None else r.turn)
