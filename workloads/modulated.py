"""Arrivals whose rate is random itself: Markov-modulated, on-off, over-dispersed counts.

They make the long silences and long bursts of real traces, which independent gaps cannot.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.arrivals import FloatArray, check_rate
from servetwin.workloads.checks import check_between, check_count, check_positive, check_seed
from servetwin.workloads.schedules import times_at_rates
from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.streams import arrival_stream

MAX_STATES = 32
MAX_SWITCHES_PER_REQUEST = 100.0
"""Switching that much faster than requests come is Poisson at the mean rate."""
STAYS = 256
"""Drawn at once."""
BINS = 4096
"""Drawn at once."""
MAX_PER_BIN = 1e5
MAX_DISPERSION = 1e5
MIN_BUSY = 1e-5
"""Smallest share of bins that get a request at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MMPP:
    """A Markov-modulated Poisson process: a hidden state, which changes at random, sets the rate.

    State i lasts exponentially long and goes over to j at the rate switching_per_s[i][j]. It starts in its
    long-run distribution, so the mean rate holds from the first second.
    """

    rates_per_s: tuple[float, ...]
    """Requests per second in each state, 0 or more, at least one above 0; 2 to 32 states."""
    switching_per_s: tuple[tuple[float, ...], ...]
    """Changes per second from state i (row) to state j (column), 0 or more; the diagonal is 0."""
    seed: int | None = None

    def __post_init__(self) -> None:
        states = len(self.rates_per_s)
        check_between("states", states, 2, MAX_STATES)
        _check_none_negative("rates_per_s", self.rates_per_s)
        if len(self.switching_per_s) != states or any(len(row) != states for row in self.switching_per_s):
            raise WorkloadError(
                f"switching_per_s {self.switching_per_s!r}: must be {states} rows of {states}"
            )
        for i, row in enumerate(self.switching_per_s):
            _check_none_negative(f"switching_per_s[{i}]", row)
            if row[i] != 0:
                raise WorkloadError(f"switching_per_s[{i}][{i}] {row[i]!r}: must be 0")
        if not self._every_state_leads_everywhere():
            raise WorkloadError(
                f"switching_per_s {self.switching_per_s!r}: must lead from every state to all"
            )
        check_seed(self.seed)
        self._check_pace()

    @classmethod
    def two_state(
        cls,
        *,
        rates_per_s: tuple[float, float],
        leaving_per_s: tuple[float, float],
        seed: int | None = None,
    ) -> Self:
        """MMPP(2): `leaving_per_s` are q12 and q21, one over the mean stay in either state."""
        q12, q21 = leaving_per_s
        return cls(rates_per_s=rates_per_s, switching_per_s=((0.0, q12), (q21, 0.0)), seed=seed)

    def _every_state_leads_everywhere(self) -> bool:
        steps = (np.array(self.switching_per_s) > 0) | np.eye(len(self.rates_per_s), dtype=bool)
        reached = np.linalg.matrix_power(steps.astype(float), len(self.rates_per_s))
        return bool((reached > 0).all())

    def _check_pace(self) -> None:
        if not any(self.rates_per_s):
            raise WorkloadError(f"rates_per_s {self.rates_per_s!r}: must have one above 0")
        switches_per_s = float(self.state_shares @ np.array(self.switching_per_s).sum(axis=1))
        if switches_per_s > MAX_SWITCHES_PER_REQUEST * self.rate_per_s:
            raise WorkloadError(
                f"switching_per_s {self.switching_per_s!r}: must be at most {MAX_SWITCHES_PER_REQUEST:g} changes "
                f"per request (here {switches_per_s / self.rate_per_s:.3g}); beyond, it is Poisson"
            )

    @property
    def state_shares(self) -> FloatArray:
        """The share of time spent in each state, shape [states]."""
        flows = np.array(self.switching_per_s, dtype=np.float64)
        # Balance of every state but one, and a sum of 1 in its place.
        balance = flows.T - np.diag(flows.sum(axis=1))
        balance[-1] = 1.0
        return np.linalg.solve(balance, np.eye(len(flows))[-1])

    @property
    def rate_per_s(self) -> float:
        """Mean number of requests per second."""
        return float(self.state_shares @ np.array(self.rates_per_s))

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Send times of `n` requests in seconds, ascending, shape [n]."""
        check_count("n", n, at_least=0)
        # Two streams: how long the path of states must be does not move the points of a longer draw.
        path_rng, point_rng = arrival_stream(self.seed, rng).spawn(2)
        points = point_rng.exponential(size=n).cumsum()
        if n == 0:
            return points
        states, stays_s = self._path_until(points[-1], path_rng)
        return times_at_rates(points, stays_s, np.asarray(self.rates_per_s, dtype=np.float64)[states])

    def _path_until(self, expected: float, rng: np.random.Generator) -> tuple[list[int], FloatArray]:
        """The states one after another, and the seconds each lasts, until that many requests can be expected."""
        rates = np.asarray(self.rates_per_s, dtype=np.float64)
        states: list[int] = []
        stays_s: list[FloatArray] = []
        reached = 0.0
        for new_states, new_stays_s in self._path(rng):
            states += new_states
            stays_s.append(new_stays_s)
            reached += float(rates[new_states] @ new_stays_s)
            # The margin is for sums rounded in another order.
            if reached > expected * (1 + 1e-9):
                break
        return states, np.concatenate(stays_s)

    def _path(self, rng: np.random.Generator) -> Iterator[tuple[list[int], FloatArray]]:
        """The states one after another and how many seconds each lasts, some at a time."""
        flows = np.array(self.switching_per_s, dtype=np.float64)
        leaving_per_s = flows.sum(axis=1)
        choices = (flows / leaving_per_s[:, None]).cumsum(axis=1).tolist()
        state = bisect(self.state_shares.cumsum()[:-1].tolist(), rng.random())
        while True:
            jump, stay = rng.random((STAYS, 2)).T
            states = []
            for u in jump.tolist():
                states.append(state)
                state = bisect(choices[state][:-1], u)
            yield states, -np.log1p(-stay) / leaving_per_s[states]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnOff:
    """Poisson arrivals while on, none while off; both last exponentially long. MMPP(2) with a silent state."""

    rate_per_s: float
    """Mean number of requests per second over on and off, above 0 and finite."""
    on_s: float
    """Mean length of a time with arrivals, in seconds."""
    off_s: float
    """Mean length of a silence, in seconds."""
    seed: int | None = None

    def __post_init__(self) -> None:
        check_rate(self.rate_per_s)
        check_positive("on_s", self.on_s)
        check_positive("off_s", self.off_s)
        check_seed(self.seed)
        self.as_mmpp()

    @property
    def on_rate_per_s(self) -> float:
        """Requests per second while on."""
        return self.rate_per_s * (self.on_s + self.off_s) / self.on_s

    def as_mmpp(self) -> MMPP:
        """The same process."""
        return MMPP.two_state(
            rates_per_s=(self.on_rate_per_s, 0.0),
            leaving_per_s=(1 / self.on_s, 1 / self.off_s),
            seed=self.seed,
        )

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Send times of `n` requests in seconds, ascending, shape [n]."""
        return self.as_mmpp().times_s(n, rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class NegativeBinomialCounts:
    """Independent negative-binomial counts per bin of time, the requests of a bin uniformly spread over it.

    With mean m a count has the variance m d: d is the index of dispersion at the width of a bin (m/r more than 1,
    r = m/(d - 1)). Traces are matched more easily by it than by the CV of gaps.
    """

    rate_per_s: float
    """Mean number of requests per second, above 0 and finite."""
    index_of_dispersion: float
    """Variance of the counts divided by their mean, above 1 (Poisson) to 100,000."""
    bin_s: float = 1.0
    """Width of a bin in seconds."""
    seed: int | None = None

    def __post_init__(self) -> None:
        check_rate(self.rate_per_s)
        check_positive("bin_s", self.bin_s)
        check_between("rate_per_s * bin_s", self.rate_per_s * self.bin_s, 0, MAX_PER_BIN, " requests per bin")
        check_between("index_of_dispersion", self.index_of_dispersion, 1, MAX_DISPERSION)
        if self.index_of_dispersion == 1:
            raise WorkloadError("index_of_dispersion 1: must be above 1 (Poisson has 1)")
        check_seed(self.seed)
        busy = -np.expm1(-self._r * np.log(self.index_of_dispersion))
        if busy < MIN_BUSY:
            raise WorkloadError(
                f"bin_s {self.bin_s!r}: must be longer; at this rate and dispersion a bin has a request with "
                f"probability {busy:.2g}, less than {MIN_BUSY:g}"
            )

    @property
    def _r(self) -> float:
        return self.rate_per_s * self.bin_s / (self.index_of_dispersion - 1)

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Send times of `n` requests in seconds, ascending, shape [n]."""
        check_count("n", n, at_least=0)
        count_rng, place_rng = arrival_stream(self.seed, rng).spawn(2)
        times = [np.empty(0)]
        first_bin, missing = 0, n
        while missing > 0:
            counts = self._counts(count_rng, missing)
            bins = np.repeat(np.arange(first_bin, first_bin + len(counts)), counts)
            times.append(np.sort(bins + place_rng.random(len(bins))))
            first_bin, missing = first_bin + len(counts), missing - len(bins)
        return np.concatenate(times)[:n] * self.bin_s

    def _counts(self, rng: np.random.Generator, needed: int) -> NDArray[np.int64]:
        """Requests of the next bins: of whole bins, and hardly more than needed."""
        counts = rng.negative_binomial(self._r, 1 / self.index_of_dispersion, BINS)
        enough = int(np.searchsorted(counts.cumsum(), needed)) + 1
        return counts[:enough]


def _check_none_negative(name: str, values: tuple[float, ...]) -> None:
    for i, value in enumerate(values):
        if value != 0:
            check_positive(f"{name}[{i}]", value)
