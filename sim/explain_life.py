"""What the log says about one request: its row, its events and its waits, with times in integer ns."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from servetwin.sim.columns import COMPLETED
from servetwin.sim.definitions import SERVER_E2E, TPOT, TTFT
from servetwin.sim.explain_waits import Wait
from servetwin.sim.metrics import timestamps
from servetwin.sim.records import WaitReason
from servetwin.sim.tables import Tables, ns_array
from servetwin.sim.units import seconds_to_ns

ENDS = ("finished", "aborted", "refused", "lost")
MOVES = ("prefilled", "lost")
"""It goes on at another replica, or anew."""
LATENCIES = {"ttft": TTFT, "tpot": TPOT, "e2e": SERVER_E2E}
SIMILAR_IDS_FROM = 5_000
"""Ids before and after the unknown one, in alphabetical order, among which close matches are looked for."""


class UnknownRequestError(ValueError):
    """No single request of the run has this id; the message names close ones."""


@dataclass(frozen=True, slots=True)
class Event:
    """A row of the events table."""

    time_ns: int
    kind: str
    reason: str | None
    until_ns: int | None
    computed_tokens: int
    blocks: int
    replica: int | None
    """None: before any."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the requests table; all None where it is not written, as for open requests of a killed run."""

    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    outcome: str | None = None
    sent_ns: int | None = None
    queued_ns: int | None = None
    first_token_ns: int | None = None
    latencies_ns: dict[str, int] = field(default_factory=dict)
    """Those of LATENCIES that the request has."""

    @property
    def is_written(self) -> bool:
        return self.num_prompt_tokens is not None


@dataclass(frozen=True, slots=True)
class Life:
    """What the log says about one request."""

    row: Row
    events: list[Event]
    """In order of time, waits left out; the first is its arrival."""
    waits: list[Wait]
    queued_ns: int
    first_token_ns: int | None
    end_ns: int
    """Its end, or that of the log."""
    several: bool = False
    """There are several replicas."""

    @property
    def arrival_ns(self) -> int:
        return self.events[0].time_ns

    @property
    def sent_ns(self) -> int:
        """When its client sent it."""
        return self.arrival_ns if self.row.sent_ns is None else self.row.sent_ns

    @property
    def ended(self) -> bool:
        return self.events[-1].kind in ENDS


def read_life(log: Tables, request_id: str) -> Life:
    """Collects the rows of one request. Raises UnknownRequestError."""
    mine = log.events[log.events.request_id == request_id]
    if (mine.kind == "arrived").sum() != 1:
        raise UnknownRequestError(_unknown(log, request_id, len(mine)))
    events = [_event(values) for values in mine.itertuples(index=False)]
    happened = sorted((e for e in events if e.kind != "wait"), key=_order)
    row = _row(log, request_id)
    # A request is queued when its first wait begins, or is scheduled in that instant.
    queued_ns = min((e.time_ns for e in events[1:]), default=events[0].time_ns)
    moved = any(e.kind in MOVES for e in happened)
    return Life(
        row=row,
        events=happened,
        waits=[_wait(request_id, row, happened, e) for e in events if e.kind == "wait"],
        queued_ns=queued_ns if row.queued_ns is None or moved else row.queued_ns,
        first_token_ns=row.first_token_ns if row.is_written else _first_saved_token(log, request_id),
        end_ns=happened[-1].time_ns if happened[-1].kind in ENDS else _end_of_log(log),
        several=log.events.replica.nunique() > 1,
    )


def _order(event: Event) -> tuple[int, int]:
    """Of events at one instant at several replicas: it leaves one before it comes to another."""
    return event.time_ns, 0 if event.kind == "arrived" else 1 if event.kind in MOVES else 2


def _unknown(log: Tables, request_id: str, num_events: int) -> str:
    if num_events:
        return f"request_id {request_id!r} was used more than once in this run: it names no single request"
    ids = sorted(log.events.request_id[log.events.kind == "arrived"])
    place = bisect(ids, request_id)
    near = ids[max(place - SIMILAR_IDS_FROM, 0) : place + SIMILAR_IDS_FROM]
    close = get_close_matches(request_id, near)
    hint = f"; close to it: {', '.join(close)}" if close else ""
    return f"request_id {request_id!r} is none of the {len(ids):,} requests of this run{hint}"


def _event(values: Any) -> Event:
    return Event(
        seconds_to_ns(values.time_s),
        values.kind,
        _text(values.reason),
        _ns(values.until_s),
        values.computed_tokens,
        values.blocks,
        None if math.isnan(values.replica) else int(values.replica),
    )


def _row(log: Tables, request_id: str) -> Row:
    """The request's row; TPOT and E2E are those of a whole answer."""
    frame = log.requests[log.requests.request_id == request_id]
    if frame.empty:
        return Row()
    values, times = frame.iloc[0], timestamps(frame)
    latencies = {name: float(metric.of(times)[0]) for name, metric in LATENCIES.items()}
    whole = values.finish_reason in COMPLETED
    return Row(
        num_prompt_tokens=int(values.num_prompt_tokens),
        num_output_tokens=int(values.num_output_tokens),
        outcome=_text(values.finish_reason),
        sent_ns=_ns(values.sent_s),
        queued_ns=_ns(values.queued_s),
        first_token_ns=_ns(values.first_token_s),
        latencies_ns={
            n: round(v) for n, v in latencies.items() if not math.isnan(v) and (whole or n == "ttft")
        },
    )


def _first_saved_token(log: Tables, request_id: str) -> int | None:
    tokens = log.tokens
    return _ns(tokens.time_s[tokens.request_id == request_id].min())


def _end_of_log(log: Tables) -> int:
    steps, events = log.steps, log.events
    step_ends = ns_array(steps.end_s.dropna())
    times = (step_ends, ns_array(events.time_s), ns_array(events.until_s.dropna()))
    return int(max(t.max(initial=0) for t in times))


def _wait(request_id: str, row: Row, happened: Sequence[Event], wait: Event) -> Wait:
    assert wait.reason is not None and wait.until_ns is not None, "a wait has a reason and an end"
    lost = [e.computed_tokens for e in happened if e.kind == "preempted" and e.time_ns <= wait.time_ns]
    known = _known_tokens(row, lost)
    return Wait(request_id, WaitReason(wait.reason), wait.time_ns, wait.until_ns, known, wait.replica)


def _known_tokens(row: Row, lost: Sequence[int]) -> int | None:
    """Prompt and outputs of a waiting request, from the computed tokens it lost at each preemption.

    A request that decodes knows one token more than it has computed; one preempted amid its prompt knows the rest.
    """
    if row.num_prompt_tokens is None or row.num_output_tokens is None:
        return None
    known = max([row.num_prompt_tokens, *(computed + 1 for computed in lost)])
    return min(known, row.num_prompt_tokens + row.num_output_tokens)


def _text(value: object) -> str | None:
    """A cell of a text column, whose empty cells pandas gives as NaN."""
    return value if isinstance(value, str) else None


def _ns(seconds: float) -> int | None:
    """A cell of a time column."""
    return None if math.isnan(seconds) else seconds_to_ns(seconds)
