"""The requests of a run as trace events: a track each, what it did and waited for, arrows from preemption to resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from servetwin.sim.export.perfetto_steps import Window
from servetwin.sim.export.trace_events import Event, Track, flow, instant, process, slice_event, thread
from servetwin.sim.tables import Tables, ns_array
from servetwin.sim.token_times import OutputTimes
from servetwin.sim.units import NS_PER_S

REQUESTS_PID = 1_000_000
"""Number of the process that stands for the clients."""
NEVER = -1
PHASES = {
    "scheduled": "prefill",
    "preempted": "preempted",
    "resumed": "prefill",
    "prefilled": "KV transfer",
    "received": "queued",
    "lost": "lost with its replica",
    "retried": "queued",
}
"""Kind of an event -> what the request does from then on."""
ORDER_AT_AN_INSTANT = ("resumed", "prefilled", "lost", "retried", "received", "scheduled", "preempted")
INSTANTS = (
    "arrival_s",
    "sent_s",
    "queued_s",
    "first_scheduled_s",
    "first_token_s",
    "last_token_s",
    "finish_s",
)
ARGUMENTS = (
    "num_prompt_tokens",
    "num_output_tokens",
    "cached_tokens",
    "recomputed_tokens",
    "preemptions",
    "replica",
)


class Phase(NamedTuple):
    """What a request is doing from an instant to another one."""

    name: str
    start_ns: int
    end_ns: int


def request_events(log: Tables, window: Window) -> Iterator[Event]:
    """Of all requests that touch the window, in order of arrival."""
    requests = log.requests
    times = OutputTimes(log)
    moves = _moves(log)
    end_of_log = _end_of_log(log)
    flows = count(1)
    yield from process(REQUESTS_PID, "requests", REQUESTS_PID)
    columns = {name: ns_array(requests[name]) for name in INSTANTS}
    instants = {
        name: np.where(np.isnan(v), NEVER, v).astype(np.int64).tolist() for name, v in columns.items()
    }
    facts = requests[list(ARGUMENTS)].astype(object).where(requests[list(ARGUMENTS)].notna(), None)
    rows = zip(
        requests.request_id,
        zip(*(instants[name] for name in INSTANTS), strict=True),
        requests.finish_reason.astype(object).where(requests.finish_reason.notna(), None),
        facts.itertuples(index=False, name=None),
        strict=True,
    )
    for place, (request_id, row, reason, fact) in enumerate(rows, start=1):
        at = dict(zip(INSTANTS, row, strict=True))
        end_ns = end_of_log if at["finish_s"] == NEVER else at["finish_s"]
        if not window.touches(at["arrival_s"], max(end_ns, at["arrival_s"])):
            continue
        outputs = _outputs(times, request_id, fact, at)
        phases = phases_of(at, end_ns, moves.get(request_id, []), outputs)
        args = dict(zip(ARGUMENTS, fact, strict=True)) | {"finish_reason": reason}
        track = Track(REQUESTS_PID, place)
        yield from thread(track, request_id, place)
        yield from _drawn(track, at, phases, args, window, flows)


def phases_of(
    at: dict[str, int], end_ns: int, moves: Sequence[tuple[int, str]], outputs: Sequence[int]
) -> list[Phase]:
    """What a request did, one phase behind another.

    `at`: its instants (INSTANTS, NEVER for what has not happened); `moves`: what happened to it (PHASES) and when;
    `outputs`: when it got tokens. After it is scheduled or resumed it is in prefill until its next output.
    """
    sent = at["sent_s"] if at["sent_s"] != NEVER else at["arrival_s"]
    begins_anew = any(kind == "retried" for _, kind in moves)
    marks = [
        (at["arrival_s"], "held back by the client"),
        (sent, "queued" if begins_anew else "waits for the step to end"),
    ]
    if not begins_anew:
        # Of a request that began anew, that is when it did so.
        marks.append((at["queued_s"], "queued"))
    if not any(kind == "scheduled" for _, kind in moves):
        moves = sorted([(at["first_scheduled_s"], "scheduled"), *moves])
    marks += [(ns, PHASES[kind]) for ns, kind in moves]
    for ns, kind in moves:
        if PHASES[kind] == "prefill":
            until = next((other for other, _ in moves if other > ns), end_ns)
            place = int(np.searchsorted(outputs, ns, side="right"))
            if ns != NEVER and place < len(outputs) and outputs[place] < until:
                marks.append((outputs[place], "decode"))
    marks = sorted((mark for mark in marks if mark[0] != NEVER), key=lambda mark: mark[0])
    ends = [ns for ns, _ in marks[1:]] + [end_ns]
    return [Phase(name, start, end) for (start, name), end in zip(marks, ends, strict=True) if end > start]


def _drawn(
    track: Track,
    at: dict[str, int],
    phases: Sequence[Phase],
    args: dict[str, Any],
    window: Window,
    flows: Iterator[int],
) -> Iterator[Event]:
    yield instant(track, "arrival", at["arrival_s"], args)
    shown = [phase for phase in phases if window.touches(phase.start_ns, phase.end_ns)]
    preempted: Phase | None = None
    for phase in shown:
        yield slice_event(track, phase.name, phase.start_ns, phase.end_ns)
        if phase.name == "preempted":
            preempted = phase
        elif preempted is not None:
            yield from flow("resumed", next(flows), (track, preempted.start_ns), (track, phase.start_ns))
            preempted = None
    if at["finish_s"] != NEVER:
        yield instant(track, f"ended: {args['finish_reason']}", at["finish_s"])


def _outputs(times: OutputTimes, request_id: str, fact: Sequence[Any], at: dict[str, int]) -> list[int]:
    if at["first_token_s"] == NEVER:
        return []
    replica = int(fact[ARGUMENTS.index("replica")] or 0)
    found: list[int] = times.of(request_id, replica, at["first_token_s"], at["last_token_s"]).tolist()
    return found


def _moves(log: Tables) -> dict[str, list[tuple[int, str]]]:
    """Of each request that did not just run through: what happened to it (PHASES) and when, in order."""
    moves: dict[str, list[tuple[int, str]]] = {}
    for request_id, ns, kind in _events_of_kinds(log, [kind for kind in PHASES if kind != "scheduled"]):
        moves.setdefault(request_id, []).append((ns, kind))
    if moves:
        for request_id, ns, kind in _events_of_kinds(log, ["scheduled"]):
            if request_id in moves:
                moves[request_id].append((ns, kind))
    for found in moves.values():
        found.sort(key=lambda move: (move[0], ORDER_AT_AN_INSTANT.index(move[1])))
    return moves


def _events_of_kinds(log: Tables, kinds: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    import pyarrow.compute as pc

    for part in log.iter_parts("events"):
        rows = part.filter(pc.field("kind").isin(kinds) & ~pc.field("request_id").is_null()).to_pandas()
        yield from zip(
            rows.request_id, ns_array(rows.time_s).astype(np.int64).tolist(), rows.kind, strict=True
        )


def _end_of_log(log: Tables) -> int:
    """When the last thing happened that a request tells of: what has not ended goes on until then."""
    latest = log.requests[["finish_s", "last_token_s", "first_scheduled_s", "arrival_s"]].max().max()
    return 0 if np.isnan(latest) else round(float(latest) * NS_PER_S)
