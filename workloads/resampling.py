"""More (or fewer) requests like those of a trace: a bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.checks import check_requests
from servetwin.workloads.columns import RequestColumns
from servetwin.workloads.id_lists import id_lists, with_ids
from servetwin.workloads.spec import RequestSpec
from servetwin.workloads.streams import stream
from servetwin.workloads.transform import as_columns

Ints = NDArray[np.int64]


def resampled(requests: Sequence[RequestSpec], *, n: int, seed: int = 0) -> RequestColumns:
    """`n` requests drawn with replacement, at the trace's rate.

    A draw is a request, or a session as a whole (the last one cut to make `n`), and comes the gap after the draw
    before that it had in the trace: rate, gap CV and all lengths together are kept on average, bursts of several gaps
    are not. What is drawn again gets `@2`, `@3` ... behind its ids, and fresh prefix ids in the place of those that
    nothing else has: two prompts never become the same by being drawn twice, but for prompts given by their tokens.
    """
    check_requests("n", n)
    columns = as_columns(requests)
    draws = _draw(_Units.of(columns), n, stream(seed, "resampling"))
    taken = columns.take(draws.request)
    shift_s = draws.start_s - draws.old_start_s
    taken = taken.with_column("arrival_s", taken.arrival_s + shift_s)
    if taken.has("abort_s"):
        pairs = zip(taken.values("abort_s"), shift_s.tolist(), strict=True)
        taken = taken.with_column("abort_s", [None if t is None else max(t + s, 0.0) for t, s in pairs])
    for name in ("request_id", "session_id"):
        if name == "request_id" or taken.has(name):
            taken = taken.with_column(name, _copies(taken.values(name), draws.copy))
    if taken.has("prefix_ids"):
        taken = with_ids(taken, _own_ids(taken, draws))
    return taken.in_order_of_arrival()


@dataclass(frozen=True, slots=True)
class _Units:
    """What is drawn: sessions, and requests without one; numbered by their first arrival."""

    members: Ints
    """Requests, unit by unit; shape [requests]."""
    sizes: Ints
    starts_s: NDArray[np.float64]
    """First arrivals; shape [units], like `sizes`."""

    @classmethod
    def of(cls, columns: RequestColumns) -> _Units:
        numbers: dict[str | int, int] = {}
        names = columns.values("session_id")
        unit = np.array(
            [numbers.setdefault(i if name is None else name, len(numbers)) for i, name in enumerate(names)]
        )
        members = np.argsort(unit, kind="stable")
        sizes = np.bincount(unit)
        return cls(members, sizes, columns.arrival_s[members[sizes.cumsum() - sizes]])

    @property
    def gaps_s(self) -> NDArray[np.float64]:
        """Time from the unit before; the first one has the mean of the others."""
        gaps = np.diff(self.starts_s)
        return np.concatenate([[gaps.mean() if gaps.size else 0.0], gaps])


@dataclass(frozen=True, slots=True)
class _Draws:
    """The requests of all draws, draw by draw. Shape [n] each."""

    request: Ints
    """Place in the trace."""
    draw: Ints
    unit: Ints
    copy: Ints
    """1 where its unit is drawn for the first time, then 2, ..."""
    start_s: NDArray[np.float64]
    """Of the draw."""
    old_start_s: NDArray[np.float64]
    """Of the unit, in the trace."""


def _draw(units: _Units, n: int, rng: np.random.Generator) -> _Draws:
    drawn = rng.integers(0, len(units.sizes), size=n)
    drawn = drawn[: int(np.searchsorted(units.sizes[drawn].cumsum(), n)) + 1]
    sizes = units.sizes[drawn]
    gaps_s = units.gaps_s[drawn]
    starts_s = units.starts_s[0] + gaps_s.cumsum() - gaps_s[0]
    draw = np.repeat(np.arange(len(drawn)), sizes)[:n]
    place = np.arange(len(draw)) - (sizes.cumsum() - sizes)[draw]
    unit = drawn[draw]
    return _Draws(
        request=units.members[(units.sizes.cumsum() - units.sizes)[unit] + place],
        draw=draw,
        unit=unit,
        copy=_occurrence(drawn)[draw],
        start_s=starts_s[draw],
        old_start_s=units.starts_s[unit],
    )


def _occurrence(values: Ints) -> Ints:
    """How often each value has come so far, itself included."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.searchsorted(ordered, ordered)
    counts = np.empty(len(values), dtype=np.int64)
    counts[order] = np.arange(len(values)) - first + 1
    return counts


def _copies(names: Sequence[str | None], copy: Ints) -> list[str | None]:
    """Names with the number of their copy behind them, from the second on."""
    taken = set(names)
    chosen: list[str | None] = []
    for name, number in zip(names, copy.tolist(), strict=True):
        new = name if name is None or number == 1 else f"{name}@{number}"
        while number > 1 and new is not None and new in taken:
            new += "@"
        chosen.append(new)
    return chosen


def _own_ids(taken: RequestColumns, draws: _Draws) -> Ints:
    """Prefix ids in which the second copy of a unit shares with the first only what other units have, too.

    Whether an id belongs to one unit is seen in the draws: what no other drawn unit has is nobody's to share.
    """
    lists = id_lists(taken)
    unit = draws.unit[lists.rows]
    units = int(draws.unit.max()) + 1
    owners = np.bincount(np.unique(lists.codes * units + unit) // units, minlength=lists.distinct)
    fresh = (draws.copy[lists.rows] > 1) & (owners[lists.codes] == 1)
    pairs = draws.draw[lists.rows[fresh]] * lists.distinct + lists.codes[fresh]
    _, number = np.unique(pairs, return_inverse=True)
    ids = lists.codes.copy()
    ids[fresh] = lists.distinct + number
    return ids
