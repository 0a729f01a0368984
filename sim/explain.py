"""The life of one request, told from the tables of a run: what happened when, why it waited, where its time went.

Pure: tables in, a `Story` out. `explain_life` collects the rows, `explain_waits` knows what each wait means,
`explain_text` lays the story out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from servetwin.sim.config import EngineConfig
from servetwin.sim.explain_life import LATENCIES, Event, Life, read_life
from servetwin.sim.explain_waits import Circumstances, counted
from servetwin.sim.tables import Tables
from servetwin.sim.units import NS_PER_S, ns_to_seconds

WAITING, BEFORE_FIRST_TOKEN, DECODING = "waiting", "running before the first token", "decoding"
RUNNING, PREEMPTED = "running", "preempted"
MOVING, LOST = "on its way to another replica", "lost with its replica"
HELD_BACK = "held back by its client"
STEP_BOUNDARY, ON_ITS_WAY = "step boundary", "on its way to the engine"
"""Before the engine has it: requests are taken in between two steps only; on the wall clock sending takes time, too."""
NEXT_SCHEDULE, NOT_LOGGED = "next schedule call", "not in the log"
"""Beside the reasons of the log, which a schedule call finds: until the first one; a killed run knows no more."""

TAKEN_IN = {
    STEP_BOUNDARY: "taken in at the end of the step that ran when it arrived",
    ON_ITS_WAY: "reached the engine",
}

ORDER_AT_ONE_INSTANT = (
    "arrived", "sent", "queued", "first token", "finished", "aborted", "refused", "prefilled", "lost", "received",
    "retried", "scheduled", "resumed", "preempted",
    "wait",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to the request."""

    time_ns: int
    kind: str
    """A kind of the events table, or "sent", "queued", "first token", "log ends"."""
    text: str
    until_ns: int | None = None
    """Waits only."""
    reason: str | None = None
    """Waits only, as in the events table."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A share of the request's time. The phases of a story add up to its `total_ns`."""

    name: str
    reason: str | None
    """Why it waited, in phases without progress."""
    duration_ns: int


@dataclass(frozen=True, slots=True)
class Story:
    """One request from its arrival to its end, or to the end of the log."""

    request_id: str
    outcome: str | None
    """Finish reason; None: it had not ended when the log ended."""
    partial: str | None
    """Why the log of the run is not whole; None when it is."""
    num_prompt_tokens: int | None
    num_output_tokens: int | None
    """None where a run was killed before it wrote the request's row."""
    latencies_ns: dict[str, int]
    """ttft, tpot, e2e, as far as the request has them; formulas: LATENCIES."""
    moments: tuple[Moment, ...]
    phases: tuple[Phase, ...]
    total_ns: int

    def to_json(self) -> dict[str, Any]:
        """The story in JSON values: instants in seconds of simulated time, durations in ms."""
        return {
            "request_id": self.request_id,
            "outcome": self.outcome,
            "partial": self.partial,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            **{f"{name}_ms": _ms(self.latencies_ns.get(name)) for name in LATENCIES},
            "moments": [
                {
                    "time_s": ns_to_seconds(m.time_ns),
                    "until_s": None if m.until_ns is None else ns_to_seconds(m.until_ns),
                    "kind": m.kind,
                    "reason": m.reason,
                    "text": m.text,
                }
                for m in self.moments
            ],
            "phases": [
                {"phase": p.name, "reason": p.reason, "duration_ms": _ms(p.duration_ns)} for p in self.phases
            ],
            "total_ms": _ms(self.total_ns),
        }


def explain(log: Tables, config: EngineConfig, request_id: str, partial: str | None = None) -> Story:
    """Tells the life of one request.

    `partial`: why the log of the run is not whole, if it is not. Raises UnknownRequestError.
    """
    life = read_life(log, request_id)
    replicas: set[int | None] = {None}
    if life.several:
        replicas = {event.replica for event in life.events} | {wait.replica for wait in life.waits}
    circumstances = {replica: Circumstances(log, config, replica) for replica in replicas}
    first = circumstances[life.events[0].replica if life.several else None]
    taken_in = STEP_BOUNDARY if first.step_ran_at(life.sent_ns) else ON_ITS_WAY
    return Story(
        request_id=request_id,
        outcome=life.row.outcome,
        partial=partial,
        num_prompt_tokens=life.row.num_prompt_tokens,
        num_output_tokens=life.row.num_output_tokens,
        latencies_ns=life.row.latencies_ns,
        moments=tuple(sorted(_moments(life, circumstances, taken_in), key=_order)),
        phases=_phases(life, taken_in),
        total_ns=life.end_ns - life.arrival_ns,
    )


# ---------------------------------------------------------------- moments


def _moments(
    life: Life, circumstances: Mapping[int | None, Circumstances], taken_in: str
) -> Iterator[Moment]:
    for event in life.events:
        yield Moment(event.time_ns, event.kind, _happened(life, event))
    for wait in life.waits:
        text = circumstances[wait.replica if life.several else None].sentence(wait)
        yield Moment(wait.from_ns, "wait", text, wait.until_ns, wait.reason.value)
    if life.sent_ns > life.arrival_ns:
        yield Moment(
            life.sent_ns, "sent", "sent by its client, who had as many in flight as --max-concurrency lets"
        )
    if life.queued_ns > life.sent_ns and life.row.queued_ns is not None:
        yield Moment(life.queued_ns, "queued", TAKEN_IN[taken_in])
    if life.first_token_ns is not None:
        yield Moment(life.first_token_ns, "first token", "first token")
    if not life.ended:
        yield Moment(life.end_ns, "log ends", "had not ended when the run stopped")


def _order(moment: Moment) -> tuple[int, int]:
    last = len(ORDER_AT_ONE_INSTANT)
    kind = moment.kind
    return moment.time_ns, ORDER_AT_ONE_INSTANT.index(kind) if kind in ORDER_AT_ONE_INSTANT else last


def _happened(life: Life, event: Event) -> str:
    tokens, blocks = event.computed_tokens, counted(event.blocks, "block")
    hits, computed = (
        f"{counted(tokens, 'token')} found in the prefix cache",
        counted(tokens, "computed token"),
    )
    match event.kind:
        case "scheduled":
            return f"{_first_scheduled(life, event)}: {hits}, {blocks} taken"
        case "preempted":
            return f"preempted because blocks ran out: {computed} and {blocks} lost"
        case "resumed":
            before = [e for e in life.events if e.kind == "preempted" and e.time_ns <= event.time_ns]
            again = max(max(e.computed_tokens for e in before) - tokens, 0)
            return f"resumed: {hits}, {again} to be computed again, {blocks} taken"
        case "finished":
            return (
                f"finished ({event.reason}) with {counted(life.row.num_output_tokens or 0, 'output token')}"
            )
        case "aborted":
            return f"aborted by its client: {computed} and {blocks} given up"
        case "refused":
            return f"refused: {event.reason}"
        case "prefilled":
            return f"prompt computed by replica {event.replica}, which gives up {blocks}; its KV is sent on"
        case "received":
            return f"taken in by replica {event.replica}, which has got its KV"
        case "lost":
            return f"replica {event.replica} failed: {computed} and {blocks} lost"
        case "retried":
            return f"taken in by replica {event.replica}, to begin anew"
        case kind:
            return kind


def _first_scheduled(life: Life, event: Event) -> str:
    before = any(e.kind == "scheduled" and e.time_ns < event.time_ns for e in life.events)
    where = f" at replica {event.replica}" if life.several else ""
    return f"{'scheduled' if before else 'first scheduled'}{where}"


# ---------------------------------------------------------------- where its time went

AFTER = {"preempted": PREEMPTED, "prefilled": MOVING, "lost": LOST}
"""What a request does after such an event, if it does not run; else it waits."""


def _phases(life: Life, taken_in: str) -> tuple[Phase, ...]:
    """Adds up what `_stretches` gives, in order of first appearance."""
    totals: dict[tuple[str, str | None], int] = {}
    for name, reason, duration_ns in _stretches(life, taken_in):
        if duration_ns:
            totals[name, reason] = totals.get((name, reason), 0) + duration_ns
    return tuple(Phase(name, reason, duration) for (name, reason), duration in totals.items())


def _stretches(life: Life, taken_in: str) -> Iterator[tuple[str, str | None, int]]:
    """From arrival to end without gap: (phase, reason, ns)."""
    yield WAITING, HELD_BACK, life.sent_ns - life.arrival_ns
    yield WAITING, taken_in, life.queued_ns - life.sent_ns
    since, running, name = life.queued_ns, False, WAITING
    for event in [*life.events[1:], None]:
        until = life.end_ns if event is None else event.time_ns
        if running:
            yield from _running(life, since, until)
        elif name in (MOVING, LOST):
            yield name, None, until - since
        else:
            whole = event is not None or life.row.is_written
            yield from _waiting(life, name, since, until, NEXT_SCHEDULE if whole else NOT_LOGGED)
        since, name = until, AFTER.get(event.kind, WAITING) if event is not None else WAITING
        running = event is not None and event.kind in ("scheduled", "resumed")


def _running(life: Life, since: int, until: int) -> Iterator[tuple[str, str | None, int]]:
    if life.first_token_ns is None:
        # An open request of a log that is not closed has no row that would say when its first token came.
        yield BEFORE_FIRST_TOKEN if life.row.is_written else RUNNING, None, until - since
    else:
        split = min(max(life.first_token_ns, since), until)
        yield BEFORE_FIRST_TOKEN, None, split - since
        yield DECODING, None, until - split


def _waiting(
    life: Life, name: str, since: int, until: int, rest: str
) -> Iterator[tuple[str, str | None, int]]:
    """The logged waits, and what they leave over, for which `rest` is the reason."""
    left = until - since
    for wait in life.waits:
        if since <= wait.from_ns and wait.until_ns <= until:
            yield name, wait.reason.value, wait.until_ns - wait.from_ns
            left -= wait.until_ns - wait.from_ns
    yield name, rest, left


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns * 1000 / NS_PER_S
