"""Why the plans of two runs of the same requests part: what the engines knew when the first step differed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.explain_waits import MEANINGS
from servetwin.sim.records import WaitReason
from servetwin.sim.tables import Tables, ns_array

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
Sides = tuple[str, str]
Kind = Literal["request", "arrival", "wait", "order", "preemption", "cache", "end", "drafts", "other"]
COMPARED = {
    "rows": "rows",
    "prefill_tokens": "prompt tokens",
    "decode_tokens": "decode tokens",
    "new_requests": "new requests",
}
"""Columns of steps/ that say whether two plans agree."""


@dataclass(frozen=True, slots=True)
class Parting:
    """The first step that differs."""

    step: int
    """Its place among the steps with tokens, from 0."""
    kind: Kind
    words: str
    first: dict[str, float] | None
    """start_s and COMPARED in the first run; None: it had ended."""
    second: dict[str, float] | None


def why_they_part(logs: tuple[Tables, Tables], sides: Sides, step: int) -> Parting:
    """The reason, of those that the logs can tell, that comes first in a schedule call."""
    a, b = (Moment(log, side, step) for log, side in zip(logs, sides, strict=True))
    kind, words = next(_reasons(a, b))
    pools = [moment.usable_blocks for moment in (a, b)]
    if None not in pools and pools[0] != pools[1]:
        words += f"; the pools differ: {pools[0]:,} blocks in {a.side}, {pools[1]:,} in {b.side}"
    return Parting(step, kind, words, a.plan, b.plan)


class _Request(NamedTuple):
    """Times in ns, NaN: never."""

    arrival_ns: float
    queued_ns: float
    scheduled_ns: float
    """First time."""
    end: str | None


class Moment:
    """One run when the step in question was scheduled (of those with tokens the `step`-th, from 0)."""

    def __init__(self, log: Tables, side: str, step: int) -> None:
        self.log, self.side, self.place = log, side, step
        steps = log.steps
        rows = np.flatnonzero(steps["rows"] > 0)
        self.ended = step >= len(rows)
        """There is no such step."""
        self._row = len(steps) if self.ended else int(rows[step])
        self.start_ns = np.inf if self.ended else float(ns_array(steps["start_s"])[self._row])
        self._ends_ns = ns_array(steps["end_s"])[rows]

    @property
    def plan(self) -> dict[str, float] | None:
        if self.ended:
            return None
        row = self.log.steps.iloc[self._row]
        return {"start_s": float(row["start_s"])} | {name: int(row[name]) for name in COMPARED}

    @property
    def usable_blocks(self) -> int | None:
        if self.ended:
            return None
        row = self.log.steps.iloc[self._row]
        return int(row["used_blocks"] + row["cached_free_blocks"] + row["free_blocks"])

    def count(self, column: str) -> int:
        """What the step says in a column of steps/, 0 where there is none."""
        return 0 if self.ended else int(self.log.steps[column].iloc[self._row])

    @property
    def admitted(self) -> dict[str, int]:
        """Requests that the step took in -> tokens that they found cached."""
        events = self._events_of(("scheduled", "resumed"), "new_requests")
        return dict(zip(events["request_id"], events["computed_tokens"], strict=True))

    @property
    def preempted(self) -> list[str]:
        """Requests that the step drove out."""
        return self._events_of(("preempted",), "preemptions")["request_id"].tolist()

    def _events_of(self, kinds: tuple[str, ...], counted_in: str) -> pd.DataFrame:
        # Steps may be scheduled at one instant, so they are told apart by their order.
        counts = self.log.steps[counted_in].to_numpy(dtype=np.int64)
        first, here = int(counts[: self._row].sum()), counts[self._row : self._row + 1].sum()
        events = self.log.events
        return events[events["kind"].isin(kinds)].iloc[first : first + int(here)]

    @cached_property
    def requests(self) -> dict[str, _Request]:
        """By their ids."""
        rows = self.log.requests
        times = (ns_array(rows[name]).tolist() for name in ("arrival_s", "queued_s", "first_scheduled_s"))
        values = map(_Request, *times, rows["finish_reason"])
        return dict(zip(rows["request_id"], values, strict=True))

    @cached_property
    def ends(self) -> dict[str, tuple[int, str]]:
        """Request -> the step with whose end it ended, and how."""
        done = self.log.requests.dropna(subset=["finish_s"])
        places = np.searchsorted(self._ends_ns, ns_array(done["finish_s"]))
        return dict(
            zip(done["request_id"], zip(places.tolist(), done["finish_reason"], strict=True), strict=True)
        )

    def wait_of(self, request_id: str) -> WaitReason | None:
        """Why the step left it waiting."""
        events = self.log.events
        mine = events[(events["request_id"] == request_id) & (events["kind"] == "wait")]
        here = (ns_array(mine["time_s"]) <= self.start_ns) & (ns_array(mine["until_s"]) > self.start_ns)
        return WaitReason(mine["reason"][here].iloc[0]) if here.any() else None


Found = Iterator[tuple[Kind, str]]


def _reasons(a: Moment, b: Moment) -> Found:
    """In the order in which one leads to another: who had left, then what a schedule call does from first to last."""
    yield from _ended_otherwise(a, b)
    yield from _preempted_in_one(a, b)
    yield from _admitted_in_one(a, b)
    yield from _admitted_in_one(b, a)
    yield from _found_cached(a, b)
    yield from _verified_drafts(a, b)
    differ = [
        f"{a.count(name):,} against {b.count(name):,} {what}"
        for name, what in COMPARED.items()
        if a.count(name) != b.count(name)
    ]
    yield (
        "other",
        f"{', '.join(differ)} of the same requests: other limits of tokens or rows, or another policy",
    )


def _preempted_in_one(a: Moment, b: Moment) -> Found:
    for here, there in ((a, b), (b, a)):
        for request_id in here.preempted:
            if request_id not in there.preempted:
                used = " and ".join(f"{m.count('used_blocks'):,} in {m.side}" for m in (here, there))
                yield (
                    "preemption",
                    f"request {request_id!r} was preempted in {here.side} only; blocks in use then: {used}",
                )


def _admitted_in_one(here: Moment, there: Moment) -> Found:
    for request_id in here.admitted:
        if request_id not in there.admitted:
            yield _why_not(request_id, here, there)


def _why_not(request_id: str, here: Moment, there: Moment) -> tuple[Kind, str]:
    """Why a request that came in `here` did not do so `there`."""
    name = f"request {request_id!r}"
    mine, other = here.requests.get(request_id), there.requests.get(request_id)
    if mine is None or other is None:
        # A run that was killed has no row of a request that had not ended.
        aborted = mine is not None and mine.end == "abort"
        return "request", f"{name} is in {here.side} only" + (" (aborted)" if aborted else "")
    before = (
        f"{name} came {_ms(here.start_ns - mine.arrival_ns)} before the step was scheduled in {here.side}"
    )
    if other.arrival_ns > there.start_ns:
        return "arrival", f"{before}, {_ms(other.arrival_ns - there.start_ns)} after it in {there.side}"
    if other.queued_ns > there.start_ns:
        sent, after = there.start_ns - other.arrival_ns, other.queued_ns - there.start_ns
        return "arrival", (
            f"{before}; in {there.side} it was sent {_ms(sent)} before and reached the engine {_ms(after)} after"
        )
    if (reason := there.wait_of(request_id)) is not None:
        return "wait", f"{name} was taken in by {here.side}; in {there.side} it waited: {MEANINGS[reason]}"
    at = "never" if np.isnan(other.scheduled_ns) else f"at {other.scheduled_ns / 1e9:.6g} s"
    return "order", f"{name} was taken in by {here.side} in this step, by {there.side} {at}"


def _found_cached(a: Moment, b: Moment) -> Found:
    ours, theirs = a.admitted, b.admitted
    for request_id in ours:
        if ours[request_id] != theirs[request_id]:
            yield (
                "cache",
                f"request {request_id!r} found {ours[request_id]:,} tokens of its prompt cached in {a.side}, "
                f"{theirs[request_id]:,} in {b.side}",
            )


def _ended_otherwise(a: Moment, b: Moment) -> Found:
    ours, theirs = a.ends, b.ends
    unequal = [r for r in ours if r in theirs and _ended_before(ours[r], theirs[r], a.place)]
    for request_id in sorted(unequal, key=lambda r: min(ours[r], theirs[r])):
        said = ", ".join(
            f"with step {place:,} ({reason}) in {side}"
            for (place, reason), side in ((ours[request_id], a.side), (theirs[request_id], b.side))
        )
        stop = "; a stop is known a step later than an end by length, so the step in flight still has its row"
        yield "end", f"request {request_id!r} ended {said}" + (stop if "(stop)" in said else "")


def _ended_before(one: tuple[int, str], other: tuple[int, str], step: int) -> bool:
    """The two ends differ, and `step` could show it: with another reason alone it is the next one that does."""
    if one[0] != other[0]:
        return min(one[0], other[0]) < step
    return one[1] != other[1] and one[0] == step - 1


def _verified_drafts(a: Moment, b: Moment) -> Found:
    if a.count("draft_tokens") != b.count("draft_tokens"):
        yield (
            "drafts",
            f"{a.count('draft_tokens'):,} drafts were verified in {a.side}, {b.count('draft_tokens'):,} in {b.side}",
        )


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3g} ms"
