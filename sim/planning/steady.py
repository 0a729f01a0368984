"""Whether a run came to a steady state, and what of it may be measured.

Three verdicts. `stable`: the number of requests present has settled, and none piled up. `backlogged`: no queue that
grows without bound, but none that has settled either: a burst is being worked off, or the run is too short. And
`overloaded`: the queue before the engine grows in proportion to time, so its latencies say how long the run was and
nothing else.

Warm-up is cut by MSER-5 (White, Cobb and Spratt, "A comparison of five steady-state truncation heuristics for
simulation", WSC 2000): the number present, averaged over equal pieces of the run, is averaged again in groups of five,
and that many groups are dropped from the front as make the remaining ones' variance over their number smallest. Where
that is more than half, the run shows no steady state. Cool-down is cut by the arrivals: what comes after the last one,
and requests sent so late that half of the others would not have ended by then, see an engine that is emptying.

Rules of measurement (one sentence each): a latency belongs to the run if its request was sent inside the window, a
token or a completion if its own instant is inside it, wherever its request began.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.columns import COMPLETED
from servetwin.sim.tables import Tables, ns_array
from servetwin.sim.units import NS_PER_S

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
PIECES = 250
"""Equal pieces of a run, over each of which the number present is averaged."""
GROUP = 5
LONGEST_COOL_DOWN = 0.2
"""Share of the span of the arrivals that is cut from its end at most."""
EXPLAINED = 0.75
"""A queue grows with time where a line explains so much of its variance in the second half of the arrivals ..."""
LEAST_GROWTH = 0.002
"""... and so much of the arrivals at least stays behind. A critical queue wanders; its best line explains less."""
LARGE_QUEUE = 0.1
"""A queue of this share of all requests at the last arrival has not settled, nor has one of this share of those present
on the average of the second half of a run without a steady part."""


LONG_QUEUE = 0.25
"""A queue that stands at the last arrival, and has for this part of the arrivals, has not settled either."""


class Verdict(StrEnum):
    STABLE = "stable"
    BACKLOGGED = "backlogged"
    OVERLOADED = "overloaded"


class Window(NamedTuple):
    """A part of simulated time, both ends included."""

    start_ns: float
    end_ns: float

    @property
    def length_s(self) -> float:
        return (self.end_ns - self.start_ns) / NS_PER_S

    def holds(self, times_ns: Floats) -> NDArray[np.bool_]:
        """Which of the instants [n] lie inside; NaN does not."""
        inside: NDArray[np.bool_] = (times_ns >= self.start_ns) & (times_ns <= self.end_ns)
        return inside


@dataclass(frozen=True)
class Lives:
    """Requests as arrays [n] of ns, in order of arrival: NaN where something has not happened (yet)."""

    sent: Floats
    first_scheduled: Floats
    finish: Floats
    """Also of those that were aborted or refused."""
    completed: NDArray[np.bool_]

    @classmethod
    def of(cls, requests: pd.DataFrame) -> Lives:
        """Of a table of requests."""
        sent = ns_array(requests.sent_s.fillna(requests.arrival_s))
        order = np.argsort(sent, kind="stable")
        return cls(
            sent=sent[order],
            first_scheduled=ns_array(requests.first_scheduled_s)[order],
            finish=ns_array(requests.finish_s)[order],
            completed=requests.finish_reason.isin(COMPLETED).to_numpy()[order],
        )

    @property
    def admitted(self) -> Floats:
        """When each left the queue: scheduled for the first time, or ended before."""
        return np.where(np.isnan(self.first_scheduled), self.finish, self.first_scheduled)


@dataclass(frozen=True)
class SteadyState:
    """What a run shows."""

    verdict: Verdict
    window: Window
    """What is measured: the steady part, or the second half of the arrivals where there is none."""
    has_settled: bool
    """MSER-5 found a part whose number present is steady."""
    arrival_rate: float
    """Requests per second over the span of the arrivals."""
    served_rate: float | None
    """Completions per second in the window (None: fewer than two)."""
    growth: float
    """Requests by which the queue grows, for each that arrives in the second half."""
    saturated_rate: float | None
    """Completions per second while a queue stood, which is what the engine can do (None: too few)."""
    saturated_error: float
    """Standard error of that, as a part of it, from batches of completions."""
    queued_share: float
    """Longest time in which somebody waited without a break, as a part of the span of the arrivals."""
    queued_window: Window
    """That time."""
    longest_queue: int


def steady_state(lives: Lives) -> SteadyState:
    """Judges a run, whether it came to its end or was broken off."""
    start, last = float(lives.sent[0]), float(lives.sent[-1])
    span = max(last - start, 1.0)
    present = averages(lives.sent, lives.finish, start, last)
    cut = mser5(present)
    queue = averages(lives.sent, lives.admitted, start, last)
    growth, explained = _trend(queue, len(lives.sent))
    window = _window(lives, start, last, cut)
    served = steady_rate(lives.finish[lives.completed], window)
    waiting = int(np.sum(~(lives.admitted <= last)))
    piled_up = growth > LEAST_GROWTH and explained > EXPLAINED and queue[-PIECES // 4 :].min() > 0.5
    if piled_up and waiting >= 2:
        verdict = Verdict.OVERLOADED
    elif _has_backlog(lives, last, waiting) or (cut is None and _is_queueing(queue, present)):
        verdict = Verdict.BACKLOGGED
    else:
        verdict = Verdict.STABLE
    return SteadyState(
        verdict=verdict,
        window=window,
        has_settled=cut is not None,
        arrival_rate=(len(lives.sent) - 1) / span * NS_PER_S,
        served_rate=served,
        growth=growth,
        saturated_rate=saturated_rate(lives),
        saturated_error=_batch_error(_while_queued(lives)),
        queued_share=min(_queued_for(lives, last) / span, 1.0),
        queued_window=_queued_window(lives),
        longest_queue=_longest(lives.sent, lives.admitted),
    )


def averages(begin: Floats, end: Floats, start: float, last: float, pieces: int = PIECES) -> Floats:
    """How many of the intervals [n] from `begin` to `end` (NaN: for ever) hold an instant, averaged over each of
    `pieces` equal parts of `start` to `last`.
    """
    edges = np.linspace(start, max(last, start + 1.0), pieces + 1)
    present: Floats = np.diff(_area(begin, edges, start) - _area(end, edges, start)) / np.diff(edges)
    return present


def _area(instants: Floats, edges: Floats, origin: float) -> Floats:
    """For each edge the sum of the times since those instants that lie before it."""
    ordered = np.sort(instants[~np.isnan(instants)]) - origin
    before = np.searchsorted(ordered, edges - origin)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    area: Floats = before * (edges - origin) - sums[before]
    return area


def mser5(values: Floats) -> float | None:
    """Share of equidistant values [n] that is warm-up; None where it would be more than half of them."""
    groups = values[: len(values) // GROUP * GROUP].reshape(-1, GROUP).mean(axis=1)
    n = len(groups)
    if n < 4:
        return None
    # Sums from each place to the end, of deviations from the mean: variances of the rest without a loop.
    deviations = groups - groups.mean()
    left = n - np.arange(n)
    sums, squares = np.cumsum(deviations[::-1])[::-1], np.cumsum(deviations[::-1] ** 2)[::-1]
    errors = np.maximum(squares - sums**2 / left, 0.0) / left**2
    # The last few groups are alike by chance: the published rule leaves them out.
    place = int(np.argmin(errors[: n - GROUP] if n > 2 * GROUP else errors[: n - 1]))
    return place / n if place <= n // 2 else None


def steady_rate(completions_ns: Floats, window: Window) -> float | None:
    """Completions per second inside the window, start-up not counted: from the first instant of completion on.

    n completions at n instants span n - 1 gaps, so it is the number after the first instant over the time from there
    to the last one (reports.md 66: dividing by the whole run dilutes the rate by the time until the first answer).
    """
    inside = completions_ns[window.holds(completions_ns)]
    if not len(inside) or inside.max() <= inside.min():
        return None
    return float((inside > inside.min()).sum() / (inside.max() - inside.min()) * NS_PER_S)


def saturated_rate(lives: Lives) -> float | None:
    """Completions per second during the longest time in which somebody waited to be admitted."""
    done = _while_queued(lives)
    if len(done) < 2 or done[-1] <= done[0]:
        return None
    return float((done > done[0]).sum() / (done[-1] - done[0]) * NS_PER_S)


def _while_queued(lives: Lives) -> Floats:
    """Instants of completion [k] during that time, in order.

    One turnover of those that ran when the first of them ended is left out: they started together or with fewer
    neighbours. Nothing where that leaves less than one more turnover.
    """
    begin, end = _longest_queueing(lives.sent, lives.admitted)
    done = np.sort(lives.finish[lives.completed])
    done = done[(done > begin) & (done <= end)]
    if not len(done):
        return done
    running = int(np.sum(lives.first_scheduled < done[0])) - int(np.sum(lives.finish < done[0]))
    turnover = max(running, 1)
    if len(done) < 2 * turnover:
        # They have not been replaced once: what is seen is the start.
        return done[:0]
    return done[turnover - 1 :]


def _batch_error(done: Floats) -> float:
    """Standard error of the rate of completions, relative: from ten batches of equal number."""
    size = (len(done) - 1) // 10
    if size < 5:
        return 0.0
    lengths = np.diff(done[: 10 * size + 1 : size])
    return float(np.std(lengths, ddof=1) / np.mean(lengths) / np.sqrt(10)) if lengths.mean() > 0 else 0.0


def _queued_for(lives: Lives, last: float) -> float:
    """Length in ns of the longest time in which somebody waited, up to the last arrival."""
    begin, end = _longest_queueing(lives.sent, lives.admitted)
    return max(min(end, last) - begin, 0.0)


def _queued_window(lives: Lives) -> Window:
    begin, end = _longest_queueing(lives.sent, lives.admitted)
    known = np.concatenate([lives.sent, lives.finish[~np.isnan(lives.finish)]])
    return Window(begin, min(end, float(known.max())))


def _longest_queueing(sent: Floats, admitted: Floats) -> tuple[float, float]:
    """The longest stretch in which at least one request waited."""
    leaves = np.sort(admitted[~np.isnan(admitted)])
    instants = np.unique(np.concatenate([sent, leaves]))
    waiting = np.searchsorted(sent, instants, side="right") - np.searchsorted(leaves, instants, side="right")
    busy = np.concatenate([[False], waiting > 0, [False]])
    starts, ends = np.flatnonzero(~busy[:-1] & busy[1:]), np.flatnonzero(busy[:-1] & ~busy[1:])
    if not len(starts):
        return 0.0, 0.0
    # A queue that still stands at the end of what is known has no end.
    until = np.append(instants, np.inf)[ends]
    longest = int(np.argmax(np.minimum(until, instants[-1] + 1) - instants[starts]))
    return float(instants[starts[longest]]), float(until[longest])


def _longest(sent: Floats, admitted: Floats) -> int:
    leaves = np.sort(admitted[~np.isnan(admitted)])
    return int(np.max(np.arange(1, len(sent) + 1) - np.searchsorted(leaves, sent, side="right")))


def _has_backlog(lives: Lives, last: float, waiting: int) -> bool:
    """At the last arrival many wait, or some have waited for long without a break."""
    begin, end = _longest_queueing(lives.sent, lives.admitted)
    stands = begin < last <= end and last - begin > LONG_QUEUE * (last - float(lives.sent[0]))
    return waiting > LARGE_QUEUE * len(lives.sent) or (stands and waiting >= 2)


def _is_queueing(queue: Floats, present: Floats) -> bool:
    half = len(queue) // 2
    return float(queue[half:].mean()) > LARGE_QUEUE * float(present[half:].mean())


def _trend(queue: Floats, arrivals: int) -> tuple[float, float]:
    """Growth of the queue in the second half, per arrival there, and how much of its variance a line explains."""
    half = queue[len(queue) // 2 :]
    x = np.arange(len(half), dtype=np.float64)
    slope, intercept = np.polyfit(x, half, 1)
    variance = float(np.var(half))
    explained = 1 - float(np.var(half - slope * x - intercept)) / variance if variance > 0 else 0.0
    return float(slope * len(half) / max(arrivals / 2, 1)), explained


def _window(lives: Lives, start: float, last: float, cut: float | None) -> Window:
    span = last - start
    begin = start + span * (0.5 if cut is None else cut)
    lengths = (lives.finish - lives.sent)[lives.completed]
    cool_down = min(float(np.median(lengths)) if len(lengths) else 0.0, LONGEST_COOL_DOWN * span)
    return Window(begin, max(last - cool_down, begin))


def account(requests: pd.DataFrame, now_ns: float | None = None) -> dict[str, int]:
    """What became of every request that was sent: completed, running, waiting, refused, aborted, lost, failed.

    They add up to the rows. `now_ns`: as of that instant of the run (None: as of its end); what was sent later does
    not count.
    """
    at = np.inf if now_ns is None else now_ns
    sent = ns_array(requests.sent_s.fillna(requests.arrival_s))
    finish, begun = ns_array(requests.finish_s), ns_array(requests.first_scheduled_s)
    reason = requests.finish_reason.fillna("").to_numpy(dtype=object)
    came, ended, runs = sent <= at, finish <= at, begun <= at
    groups = {"refused": ("refused",), "aborted": ("abort",), "lost": ("lost",), "failed": ("error",)}
    counts = {
        "completed": int(np.sum(came & ended & np.isin(reason, COMPLETED))),
        "running": int(np.sum(came & ~ended & runs)),
        "waiting": int(np.sum(came & ~ended & ~runs)),
    }
    return counts | {name: int(np.sum(came & ended & np.isin(reason, r))) for name, r in groups.items()}


def token_rate(log: Tables, window: Window) -> float:
    """Output tokens of completed requests per second of the window, by when each came out (reports.md 67)."""
    first = ns_array(log.requests.first_token_s)[log.requests.finish_reason.isin(COMPLETED).to_numpy()]
    tokens = int(window.holds(first).sum())
    for gaps in log.gap_parts():
        tokens += int(gaps.samples[window.holds(gaps.time_ns.astype(np.float64))].sum())
    return tokens / window.length_s if window.length_s > 0 else 0.0
