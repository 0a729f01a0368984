"""Two sets of requests side by side: do they look alike?

Distributions are compared by the two-sample Kolmogorov-Smirnov test: its statistic is the largest difference between
the shares of requests up to any value. A p-value speaks of chance only (with many requests the smallest difference is
no chance, and the turns of a session are not independent), so the verdict goes by the statistic as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from servetwin.workloads.arrivals import FloatArray
from servetwin.workloads.columns import RequestColumns
from servetwin.workloads.kolmogorov_smirnov import Values, kolmogorov_smirnov
from servetwin.workloads.lengths import IntArray
from servetwin.workloads.reuse_points import prefixed_prompts, reuse_points
from servetwin.workloads.session_turns import SessionTurns, has_sessions, session_turns
from servetwin.workloads.spec import RequestSpec
from servetwin.workloads.statistics.arrivals import arrival_figures
from servetwin.workloads.statistics.lengths import correlation
from servetwin.workloads.statistics.ticks import find_ticks, spread_ticks

T = TypeVar("T")
Pair = tuple[T | None, T | None]
"""What either set has; None: not known."""
Verdict = Literal["alike", "close", "differs", "unknown"]
P_ALIKE = 0.05
KS_ALIKE, KS_CLOSE = 0.03, 0.1
"""Largest statistics with these verdicts."""
RATIO_ALIKE, RATIO_CLOSE = 0.1, 0.25
"""Of two numbers: how far apart, in terms of the larger one."""
POINTS_ALIKE, POINTS_CLOSE = 3.0, 8.0
"""Of two percentages."""
CORRELATION_ALIKE, CORRELATION_CLOSE = 0.05, 0.15
PREFIX_PROMPTS = 20_000
"""The first ones, at most, of which prefix reuse is compared."""
MIN_VALUES = 8
"""Of each set: fewer of them tell no distributions apart."""
MIN_SPAN_S = 10.0
"""Needed for an index of dispersion at 1 s."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of a report."""

    name: str
    first: float | None
    """What the first set has; of a distribution its mean. None: not known."""
    second: float | None
    verdict: Verdict
    """unknown: one of both says nothing."""
    ks_statistic: float | None = None
    p_value: float | None = None


@dataclass(frozen=True, slots=True)
class TwoSampleReport:
    """The comparison of two sets of requests, line by line."""

    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Comparison:
        """The line of that name."""
        return next(c for c in self.comparisons if c.name == name)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"comparisons": [asdict(c) for c in self.comparisons], "notes": list(self.notes)}


def two_sample(first: Sequence[RequestSpec], second: Sequence[RequestSpec]) -> TwoSampleReport:
    """Compares gaps, lengths, what joins them, prefixes and sessions of two sets of requests.

    Of sessions with think times, gaps and rates are those of their beginnings: when later turns come is for the engine
    to say. Coarse clocks are spread before gaps are measured.
    """
    both = tuple(
        _Sample(r if isinstance(r, RequestColumns) else RequestColumns.of(r)) for r in (first, second)
    )
    a, b = both
    arrivals = tuple(_arrivals(a, b))
    return TwoSampleReport(
        (*arrivals, *_lengths(a, b), *_prefixes(a, b), *_sessions(a, b)),
        (*_notes(a, b), *_about_order(arrivals)),
    )


class _Sample:
    """One of the sets, and what is measured of it."""

    def __init__(self, requests: RequestColumns) -> None:
        self.requests = requests.in_order_of_arrival()
        self.sessions: SessionTurns | None = None
        if has_sessions(self.requests):
            prompts = prefixed_prompts(self.requests)
            whole = prompts is not None and len(prompts.ids) == len(self.requests)
            self.sessions = session_turns(self.requests, prompts if whole else None)
        times_s = self.requests.arrival_s
        if self.sessions is not None and self.requests.has("think_time_s"):
            times_s = np.sort(self.sessions.arrival_s[self.sessions.first])
        self.ticks = find_ticks(times_s)
        self.times_s = times_s if self.ticks is None else spread_ticks(times_s, self.ticks.tick_s)
        self.arrivals = arrival_figures(self.times_s)
        """None: all arrive at one time."""

    @property
    def gaps_s(self) -> FloatArray | None:
        return None if self.arrivals is None else np.diff(self.times_s)

    def rate_per_s(self) -> float | None:
        return None if self.arrivals is None else self.arrivals.rate_per_s

    def gap_cv(self) -> float | None:
        return None if self.arrivals is None else self.arrivals.gap_cv

    def dispersion(self) -> float | None:
        a = self.arrivals
        return None if a is None or a.span_s < MIN_SPAN_S else a.dispersion_1s

    def rank_correlation(self) -> float | None:
        from scipy.stats import rankdata

        return correlation(rankdata(self.requests.prompt_tokens), rankdata(self.requests.output_tokens))

    def context_percent(self) -> float | None:
        """Prompt tokens that are context of the turn before."""
        if self.sessions is None or np.isnan(self.sessions.context_tokens).all():
            return None
        return 100 * float(np.nansum(self.sessions.context_tokens) / self.sessions.prompt_tokens.sum())

    @property
    def turns(self) -> IntArray | None:
        return None if self.sessions is None else self.sessions.turns

    def think_times_s(self) -> FloatArray | None:
        if self.sessions is None:
            return None
        known = self.sessions.think_time_s[self.sessions.later]
        known = known[~np.isnan(known)]
        return known if len(known) else None


def _notes(a: _Sample, b: _Sample) -> Iterator[str]:
    for which, sample in (("first", a), ("second", b)):
        if sample.ticks is not None:
            yield (
                f"arrivals of the {which} set lie on ticks of {sample.ticks.tick_s:.6g} s: spread before they are "
                "compared"
            )
    if a.sessions is not None or b.sessions is not None:
        yield "turns of one session are not independent, so p-values of their lengths come out too small"


def _about_order(arrivals: Sequence[Comparison]) -> Iterator[str]:
    """Counts may differ where gaps do not: these are compared without their order."""
    verdicts = {c.name: c.verdict for c in arrivals}
    if verdicts["gaps_s"] == "alike" and verdicts["index_of_dispersion_1s"] == "differs":
        yield (
            "gaps are alike but the index of dispersion is not: in one set short gaps follow one another more often "
            "(longer bursts), which a model of independent gaps does not hold"
        )


def _arrivals(a: _Sample, b: _Sample) -> Iterator[Comparison]:
    yield _distributions("gaps_s", (a.gaps_s, b.gaps_s))
    yield _numbers("rate_per_s", (a.rate_per_s(), b.rate_per_s()), _by_ratio)
    yield _numbers("gap_cv", (a.gap_cv(), b.gap_cv()), _by_ratio)
    yield _numbers("index_of_dispersion_1s", (a.dispersion(), b.dispersion()), _by_ratio)


def _lengths(a: _Sample, b: _Sample) -> Iterator[Comparison]:
    for name in ("prompt_tokens", "output_tokens"):
        yield _distributions(name, (getattr(a.requests, name), getattr(b.requests, name)))
    yield _numbers("rank_correlation", (a.rank_correlation(), b.rank_correlation()), _by_correlation)


def _prefixes(a: _Sample, b: _Sample) -> Iterator[Comparison]:
    prompts, others = (prefixed_prompts(s.requests) for s in (a, b))
    points = None if prompts is None else reuse_points(prompts.first(PREFIX_PROMPTS))
    # Caches of the same size for both, from the first.
    sizes = [] if points is None else [*points.lru_percent]
    other = None if others is None else reuse_points(others.first(PREFIX_PROMPTS), sizes)

    infinite = (None if p is None else p.infinite_percent for p in (points, other))
    yield _numbers("prefix_hit_percent_infinite", (next(infinite), next(infinite)), _by_points)
    for size in sizes:
        lru = (None if p is None else p.lru_percent[size] for p in (points, other))
        yield _numbers(f"prefix_hit_percent_{size}_blocks", (next(lru), next(lru)), _by_points)


def _sessions(a: _Sample, b: _Sample) -> Iterator[Comparison]:
    if a.sessions is None and b.sessions is None:
        return
    yield _distributions("turns", (a.turns, b.turns))
    yield _distributions("think_time_s", (a.think_times_s(), b.think_times_s()))
    yield _numbers("context_percent", (a.context_percent(), b.context_percent()), _by_points)


# ---------------------------------------------------------------- verdicts


def _distributions(name: str, values: Pair[Values]) -> Comparison:
    a, b = values
    first, second = (None if one is None else float(one.mean()) for one in values)
    if a is None or b is None:
        return Comparison(name, first, second, "unknown")
    if min(len(a), len(b)) < MIN_VALUES:
        return Comparison(name, first, second, "unknown")
    statistic, p = kolmogorov_smirnov(a, b)
    verdict: Verdict = "alike" if p >= P_ALIKE else _graded(statistic, KS_ALIKE, KS_CLOSE)
    return Comparison(name, first, second, verdict, statistic, p)


def _numbers(name: str, values: Pair[float], graded: Callable[[float, float], Verdict]) -> Comparison:
    a, b = values
    return Comparison(name, a, b, "unknown" if a is None or b is None else graded(a, b))


def _by_ratio(a: float, b: float) -> Verdict:
    return _graded(abs(a - b) / max(abs(a), abs(b), 1e-12), RATIO_ALIKE, RATIO_CLOSE)


def _by_points(a: float, b: float) -> Verdict:
    return _graded(abs(a - b), POINTS_ALIKE, POINTS_CLOSE)


def _by_correlation(a: float, b: float) -> Verdict:
    return _graded(abs(a - b), CORRELATION_ALIKE, CORRELATION_CLOSE)


def _graded(difference: float, alike: float, close: float) -> Verdict:
    return "alike" if difference <= alike else "close" if difference <= close else "differs"
