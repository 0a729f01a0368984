"""The largest load that is still good: a bracketing search over a noisy function that need not be monotone.

A probe says for a rate and a seed by how much the load is good: its margin, 0 or more, with the standard error that
one run can tell of itself. The search

1. brackets the limit, from a first guess downwards or upwards,
2. narrows the bracket by interpolation in log(rate) that falls back to halving,
3. looks beyond it on both sides, and says so where a load above a bad one is good ("not monotone here"): its answer is
   then the end of the first good stretch, counted from the lowest load that was tried,
4. repeats both ends with further seeds where the sign of the margin is within two standard errors of changing. Every
   rate is tried with the same seeds (common random numbers), so what a seed has of luck is the same on both sides.

What is known of a margin at a rate is the mean over its seeds. Nothing here knows what a probe runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, inf, isfinite, log, sqrt

import numpy as np

FIRST_STEPS = (1.0, 0.6, 0.28, 0.02)
"""Parts of the first guess that are tried until one is good; if the last is not, no load is."""
STEP_UP = 1.6
FIRST_STEP_BEYOND = 1.04
"""Up from a ceiling that was none: it cannot be far."""
BELOW, ABOVE = 0.4, 1.5
"""Between these parts of the limit it is looked whether loads below are good and loads above are not ..."""
WIDEST_GAP = 1.3
"""... at so many rates that neighbours are not farther apart than by this factor."""
MARGIN_CAP = 0.7
"""Margins are cut to this before interpolation: beyond the limit latencies explode, and say little of where it is."""
SHARE = (0.12, 0.88)
"""Of a bracket: interpolation does not go nearer to its ends."""
LEVEL = 0.95


class OutOfProbes(Exception):
    """The budget is spent."""


@dataclass(frozen=True)
class Outcome:
    """One probe."""

    margin: float
    """0 or more: good. A logarithm of a ratio, or anything else that is comparable between rates; may be infinite."""
    error: float = 0.0
    """Standard error of the margin, as far as one run can tell; 0: it would be the same again."""
    ceiling: float | None = None
    """A rate that cannot be served, seen by serving as much as could be."""


Probe = Callable[[float, int], Outcome]
"""Takes a rate and a seed."""


@dataclass
class Point:
    """A rate that was tried."""

    rate: float
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    luck: dict[int, float] = field(default_factory=dict, compare=False)
    """By how much a seed is better than the mean of all, where that is known."""

    @property
    def margin(self) -> float:
        """Mean over the seeds, each cut to what interpolation uses: one explosion does not outweigh the others.

        The luck of the seeds that were tried is taken off: where not all were, they need not stand for the others.
        """
        margins = self._margins
        luck = float(np.mean([self.luck.get(seed, 0.0) for seed in self.outcomes]))
        if len(margins) == 1:
            return margins[0] - luck
        return float(np.mean(np.clip(margins, -MARGIN_CAP, MARGIN_CAP))) - luck

    @property
    def error(self) -> float:
        """Standard error of the mean: from the spread over the seeds, or what the single run tells."""
        margins = self._margins
        if len(margins) > 1:
            return float(np.std(np.clip(margins, -MARGIN_CAP, MARGIN_CAP), ddof=1)) / sqrt(len(margins))
        return next(iter(self.outcomes.values())).error

    @property
    def is_good(self) -> bool:
        return self.margin >= 0

    @property
    def is_clear(self) -> bool:
        """The sign of the margin is beyond doubt."""
        return abs(self.margin) >= 2 * self.error

    @property
    def is_seen(self) -> bool:
        """What was measured here has the sign that is concluded: it is not the luck of other rates that decides."""
        margins = np.clip(self._margins, -MARGIN_CAP, MARGIN_CAP)
        return (float(np.mean(margins)) >= 0) == self.is_good

    @property
    def _margins(self) -> list[float]:
        return [o.margin for o in self.outcomes.values()]


@dataclass(frozen=True)
class Limit:
    """What a search found."""

    rate: float | None
    """The largest good rate, below which every one that was tried is good; None: not even the lowest is."""
    upper: float | None
    """The lowest bad rate above it; None: none was met."""
    interval: tuple[float, float] | None
    """Confidence interval (95 %) of the limit, from the errors of the margins and their slope; None: not known."""
    good_above: tuple[float, ...]
    """Rates above `upper` that are good beyond doubt: the function is not monotone here."""
    converged: bool
    """The bracket is as narrow as was asked for, or as the noise allows."""
    points: tuple[Point, ...]
    """All that was tried, by rate."""

    @property
    def is_monotone(self) -> bool:
        return not self.good_above

    @property
    def probes(self) -> int:
        return sum(len(p.outcomes) for p in self.points)


def find_limit(
    probe: Probe,
    first: float,
    *,
    ceiling: float | None = None,
    tolerance: float = 0.01,
    seeds: Sequence[int] = (0,),
    max_probes: int = 13,
    look_beyond: bool = True,
) -> Limit:
    """Searches upwards and downwards from `first`.

    `ceiling`: a rate that cannot be served, as far as is known. `tolerance`: width of the bracket at the end, as a part
    of the rate. `seeds`: what may be tried at a rate, the first always. `max_probes`: what the whole search may cost.
    """
    return _Search(probe, first, ceiling, tolerance, tuple(seeds), max_probes).run(look_beyond=look_beyond)


class _Search:
    def __init__(
        self,
        probe: Probe,
        first: float,
        ceiling: float | None,
        tolerance: float,
        seeds: tuple[int, ...],
        max_probes: int,
    ) -> None:
        self._probe, self._first, self._ceiling = probe, first, ceiling
        self._tolerance, self._seeds, self._max_probes = tolerance, seeds, max_probes
        self._points: dict[float, Point] = {}
        self._luck: dict[int, float] = {}
        self._step_up = STEP_UP
        self._spent = 0

    def run(self, *, look_beyond: bool) -> Limit:
        try:
            if self._bracket():
                self._narrow()
                if look_beyond:
                    self._look_beyond()
                self._repeat()
        except OutOfProbes:
            pass
        return self._found()

    # ------------------------------------------------------------ what is known

    @property
    def _ordered(self) -> list[Point]:
        return [self._points[rate] for rate in sorted(self._points)]

    def _low(self) -> Point | None:
        """The end of the first good stretch."""
        low = None
        for point in self._ordered:
            if not point.is_good:
                break
            low = point
        return low

    def _high(self) -> Point | None:
        """The bad rate behind it."""
        return next((p for p in self._ordered if not p.is_good), None)

    def _high_rate(self, low: float) -> float | None:
        """Where the limit is below: a bad rate, or what cannot be served, while nothing good lies beyond that."""
        high = None if (point := self._high()) is None else point.rate
        if self._ceiling is None or self._ceiling <= low:
            return high
        # Once it was tried just above it, that is what is known.
        close = high is not None and high < self._ceiling * (1 + 2 * self._tolerance)
        return high if close else self._ceiling

    # ------------------------------------------------------------ steps

    def _at(self, rate: float, seeds: Sequence[int] | None = None) -> Point:
        point = self._points.get(rate)
        for seed in self._seeds[:1] if seeds is None else seeds:
            if point is not None and seed in point.outcomes:
                continue
            if self._spent >= self._max_probes:
                raise OutOfProbes
            self._spent += 1
            outcome = self._probe(rate, seed)
            point = self._points.setdefault(rate, Point(rate, luck=self._luck))
            point.outcomes[seed] = outcome
            self._learn_luck()
            if outcome.ceiling is not None:
                self._ceiling = min(outcome.ceiling, self._ceiling or inf)
        assert point is not None
        return point

    def _learn_luck(self) -> None:
        """By how much each seed is better than the mean, over the rates that all of them were tried at."""
        whole = [p for p in self._points.values() if 1 < len(p.outcomes) == len(self._seeds)]
        if not whole:
            return
        table = [[p.outcomes[seed].margin for seed in self._seeds] for p in whole]
        margins = np.clip(table, -MARGIN_CAP, MARGIN_CAP)
        luck = (margins - margins.mean(axis=1, keepdims=True)).mean(axis=0)
        self._luck.update(zip(self._seeds, map(float, luck), strict=True))

    def _bracket(self) -> bool:
        """Whether some load is good."""
        for part in FIRST_STEPS:
            if self._at(self._first * part).is_good:
                break
        else:
            return False
        while (low := self._low()) is not None and self._high_rate(low.rate) is None:
            self._climb(low.rate)
        return True

    def _climb(self, rate: float) -> None:
        """The next rate above one that is good, where nothing is known to be bad."""
        self._at(rate * self._step_up)
        self._step_up = min(self._step_up**2, STEP_UP)

    def _narrow(self) -> None:
        """Until the bracket is as narrow as was asked for, or as the noise allows."""
        slow, before = 0, inf
        while True:
            low = self._low()
            if low is None:
                # A lower load has turned out bad: the good stretch, if any, lies below it.
                if (bad := self._high()) is None or bad.rate < self._first * FIRST_STEPS[-1] / 2:
                    return
                self._at(bad.rate / STEP_UP**3)
                continue
            high = self._high_rate(low.rate)
            if high is None:
                self._climb(low.rate)
                continue
            length = log(high / low.rate)
            if length <= log(1 + self._noise()):
                return
            slow = slow + 1 if length > before / 2 else 0
            before = length
            share = 0.5 if slow >= 2 else self._share(low, high)
            if slow >= 2:
                slow = 0
            self._at(low.rate * exp(length * share))

    def _share(self, low: Point, high_rate: float) -> float:
        """Where in the bracket to look next: where a line between its ends meets 0."""
        high = self._points.get(high_rate)
        if high is None:
            # What cannot be served is nearly the limit, where only that limits.
            return 0.75
        a, b = min(low.margin, MARGIN_CAP), max(high.margin, -MARGIN_CAP)
        if a - b <= 0:
            return 0.5
        return min(max(a / (a - b), SHARE[0]), SHARE[1])

    def _look_beyond(self) -> None:
        """Loads below must be good and loads above bad; where a lower one is bad, the search begins again there."""
        while (low := self._low()) is not None:
            if (rate := self._gap(low.rate * BELOW, low.rate)) is not None:
                self._at(rate)
            elif (high := self._high_rate(low.rate)) is None:
                self._climb(low.rate)
            elif high == self._ceiling and high not in self._points:
                # It was not tried, only concluded.
                if self._at(high * (1 + self._tolerance)).is_good:
                    self._ceiling, self._step_up = None, FIRST_STEP_BEYOND
            elif (rate := self._gap(high, high * ABOVE)) is not None:
                self._at(rate)
            else:
                break
            self._narrow()

    def _gap(self, start: float, end: float) -> float | None:
        """The middle of the widest gap between rates that were tried; None: all are narrow enough."""
        rates = [start, *(r for r in sorted(self._points) if start < r < end), end]
        widest = max(range(len(rates) - 1), key=lambda i: rates[i + 1] / rates[i])
        if rates[widest + 1] / rates[widest] <= WIDEST_GAP:
            return None
        return sqrt(rates[widest] * rates[widest + 1])

    def _repeat(self) -> None:
        """The ends with more seeds where the sign is in doubt, and the bracket moved where their mean says so."""
        while len(self._seeds) > 1:
            low, high = self._low(), self._high()
            doubtful = [p for p in (low, high) if p is not None and not self._is_settled(p)]
            if not doubtful:
                before = self._spent
                self._narrow()
                if self._spent == before:
                    return
                continue
            for point in doubtful:
                self._at(point.rate, self._seeds)
                if self._low() is not low or self._high() is not high:
                    self._step_over(point)
                    break

    def _noise(self) -> float:
        """A bracket as narrow as the limit can be told, as a part of the rate.

        With one seed the answer is for that draw of the workload: the tolerance alone counts.
        """
        low = self._low()
        slope = None if low is None or len(self._seeds) == 1 else _slope(self._ordered, low.rate)
        if low is None or slope is None:
            return self._tolerance
        # What is left when all seeds have been tried, on either side.
        error = low.error * sqrt(len(low.outcomes) / len(self._seeds))
        return max(self._tolerance, exp(min(2 * error / -slope, 0.2)) - 1)

    def _is_settled(self, point: Point) -> bool:
        return len(point.outcomes) == len(self._seeds) or (point.is_clear and point.is_seen)

    def _step_over(self, moved: Point) -> None:
        """The mean over all seeds has the other sign: the limit is looked for where the slope puts it."""
        slope = _slope(self._ordered, moved.rate)
        step = log(1 + self._tolerance)
        if slope is not None and isfinite(moved.margin):
            step = min(max((abs(moved.margin) + moved.error) / -slope, step), 12 * step)
        target = moved.rate * exp(step if moved.is_good else -step)
        low, high = self._low(), self._high()
        if (low is None or target > low.rate) and (high is None or target < high.rate):
            self._at(target, self._seeds)

    # ------------------------------------------------------------ the answer

    def _found(self) -> Limit:
        low, high = self._low(), self._high()
        upper = None if high is None else high.rate
        if low is not None:
            upper = self._high_rate(low.rate)
        above = [p.rate for p in self._ordered if high is not None and p.rate > high.rate and p.is_good]
        clear = [r for r in above if self._points[r].is_clear and high is not None and high.is_clear]
        return Limit(
            rate=None if low is None else low.rate,
            upper=upper,
            interval=None if low is None else _interval(self._ordered, low, upper),
            good_above=tuple(clear),
            converged=low is None or (upper is not None and upper / low.rate <= 1.05 * (1 + self._noise())),
            points=tuple(self._ordered),
        )


def _slope(points: Sequence[Point], rate: float) -> float | None:
    """Change of the margin with log(rate) around a rate, below 0; None where it cannot be told."""
    near = [
        p for p in points if isfinite(p.margin) and abs(p.margin) < 1.5 and 1 / 1.35 < p.rate / rate < 1.35
    ]
    if len({p.rate for p in near}) < 2:
        return None
    x = np.log([p.rate / rate for p in near])
    # Near points say more of the slope here than far ones.
    slope = float(np.polyfit(x, [p.margin for p in near], 1, w=1 / (np.abs(x) + 0.02))[0])
    return slope if slope < 0 else None


def _interval(points: Sequence[Point], low: Point, upper: float | None) -> tuple[float, float] | None:
    """Of the limit: by how much the margin's error moves the place where it meets 0, and the bracket itself."""
    from scipy import stats

    top = low.rate if upper is None else upper
    ends = [p for p in points if p.rate in (low.rate, top) and isfinite(p.margin)]
    error = max((p.error for p in ends), default=0.0)
    if error == 0:
        return low.rate, top
    slope = _slope(points, low.rate)
    if slope is None:
        return None
    repeats = max(len(p.outcomes) for p in ends)
    quantile = float(
        stats.t.ppf((1 + LEVEL) / 2, repeats - 1) if repeats > 1 else stats.norm.ppf((1 + LEVEL) / 2)
    )
    half = min(quantile * error / -slope, 1.0)
    return low.rate * exp(-half), top * exp(half)
