"""The requests of a run as trace events: a track each, what it did and waited for, arrows from preemption to resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from servetwin.sim.export.perfetto_steps import Window
from servetwin.sim.export.trace_events import Event, Track, flow, instant, process, slice_event, thread
from servetwin.sim.tables import Tables, ns_array
from servetwin.sim.token_times import OutputTimes
from servetwin.sim.units import NS_PER_S

if TYPE_CHECKING:
    import pandas as pd

REQUESTS_PID = 1_000_000
"""Number of the process that stands for the clients."""
NEVER = -1
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

    `at`: its instants (INSTANTS, NEVER for what has not happened); `moves`: when it was preempted and resumed;
    `outputs`: when it got tokens. After it is scheduled or resumed it is in prefill until its next output.
    """
    sent = at["sent_s"] if at["sent_s"] != NEVER else at["arrival_s"]
    marks = [(at["arrival_s"], "held back by the client"), (sent, "waits for the step to end")]
    marks += [(at["queued_s"], "queued"), (at["first_scheduled_s"], "prefill")]
    marks = [(ns, name) for ns, name in marks if ns != NEVER]
    admissions = [at["first_scheduled_s"]] if at["first_scheduled_s"] != NEVER else []
    for ns, kind in moves:
        marks.append((ns, "prefill" if kind == "resumed" else "preempted"))
        admissions += [ns] if kind == "resumed" else []
    lost = sorted(ns for ns, kind in moves if kind == "preempted")
    for admitted in admissions:
        place = int(np.searchsorted(outputs, admitted, side="right"))
        until = next((ns for ns in lost if ns >= admitted), end_ns)
        if place < len(outputs) and outputs[place] < until:
            marks.append((outputs[place], "decode"))
    marks.sort(key=lambda mark: mark[0])
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
    """Of each request that was preempted: when, and when it was resumed, in order."""
    moves: dict[str, list[tuple[int, str]]] = {}
    for part in _parts_of_moves(log):
        for request_id, time_s, kind in zip(part.request_id, part.time_s, part.kind, strict=True):
            moves.setdefault(request_id, []).append((round(time_s * NS_PER_S), kind))
    for found in moves.values():
        # A request that is preempted and resumed at one instant was preempted first, and is again after that.
        found.sort(key=lambda move: move[0])
    return moves


def _parts_of_moves(log: Tables) -> Iterator[pd.DataFrame]:
    import pyarrow.compute as pc

    for part in log.iter_parts("events"):
        yield part.filter(pc.field("kind").isin(["preempted", "resumed"])).to_pandas()


def _end_of_log(log: Tables) -> int:
    """When the last thing happened that a request tells of: what has not ended goes on until then."""
    latest = log.requests[["finish_s", "last_token_s", "first_scheduled_s", "arrival_s"]].max().max()
    return 0 if np.isnan(latest) else round(float(latest) * NS_PER_S)
