"""The parameters under which gaps of mean 1 are likeliest, one kind of process after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from servetwin.workloads.arrivals import FloatArray
from servetwin.workloads.fitted_arrivals import (
    GammaGaps,
    HyperexponentialGaps,
    ObservedGaps,
    PoissonGaps,
    Process,
    SwitchingRate,
    WeibullGaps,
)
from servetwin.workloads.mmpp_likelihood import Two, log_likelihood
from servetwin.workloads.observed_lengths import PERCENTILES
from servetwin.workloads.quantiles import quantiles_of

SEARCHED_GAPS = 20_000
"""Parameters are searched for with so many gaps at most; the likelihood is that of all."""
STAYS = (3.0, 30.0, 300.0)
"""Where the search for MMPP(2) begins: expected requests in one state."""
LIMIT = 12.0
"""Of the logarithms that the search for MMPP(2) moves."""
TAIL_FROM = 0.99
GAP_PERCENTILES = tuple(
    sorted({*PERCENTILES, 0.0001, 0.001, 0.003, 0.985, 0.997, 0.998, 0.9995, 0.9998, 0.9999})
)


def independent_gaps(gaps: FloatArray) -> Iterator[tuple[Process, float]]:
    """Each kind of independent gaps of mean 1 at its likeliest, and the logarithm of the density of all gaps."""
    yield PoissonGaps(), -float(gaps.sum())
    some = gaps[:: max(1, len(gaps) // SEARCHED_GAPS)]
    for density, make, low, high in (
        (_gamma, lambda cv: GammaGaps(cv=cv), 1e-3, 100.0),
        (_weibull, lambda shape: WeibullGaps(shape=shape), 0.1, 2000.0),
        (_hyperexponential, lambda cv: HyperexponentialGaps(cv=cv), 1.0 + 1e-6, 100.0),
    ):
        parameter = _likeliest(density, some, low, high)
        yield make(parameter), density(gaps, parameter)


def switching_rate(gaps: FloatArray) -> tuple[Process, float]:
    """MMPP(2) of mean rate 1 at its likeliest, and the logarithm of the density of all gaps."""
    from scipy.optimize import minimize

    some = gaps[:SEARCHED_GAPS]
    some = some / some.mean()

    def cost(point: FloatArray) -> float:
        if np.abs(point).max() > LIMIT:
            return math.inf
        return -log_likelihood(some, *_two_states(point))

    # Half of the time at a tenth of the other rate.
    starts = [np.array([0.0, math.log(10.0), math.log(stay)]) for stay in STAYS]
    begun = sorted(starts, key=cost)
    options = {"xatol": 1e-3, "fatol": 1e-2, "maxiter": 400}
    found = min(
        (minimize(cost, s, method="Nelder-Mead", options=options) for s in begun[:2]), key=lambda f: f.fun
    )
    rates, leaving = _two_states(found.x)
    process = SwitchingRate(relative_rates=rates, stay_mean_gaps=(1 / leaving[0], 1 / leaving[1]))
    return process, log_likelihood(gaps, rates, leaving)


def observed_gaps(gaps: FloatArray) -> ObservedGaps:
    """The quantiles of these gaps of mean 1, shape [n]."""
    quantiles = quantiles_of(gaps, GAP_PERCENTILES)
    # Lines between the few quantiles of a long tail have another mean than the gaps there: the tail is stretched.
    at = np.array([*quantiles])
    values = np.array([*quantiles.values()])
    in_body, body = at <= TAIL_FROM, np.minimum(values, np.interp(TAIL_FROM, at, values))
    excess = float(np.trapezoid(values - body, at))
    stretch = (float(gaps.mean()) - float(np.trapezoid(body, at))) / excess if excess > 0 else 1.0
    values = np.where(in_body, values, body + (values - body) * max(stretch, 0.0))
    return ObservedGaps(quantiles=dict(zip(at.tolist(), values.tolist(), strict=True)))


def _two_states(point: FloatArray) -> tuple[Two, Two]:
    """Rates and leaving rates of mean 1 from the logarithms of: the stays' ratio, the rates' ratio, the whole cycle."""
    share = 1 / (1 + math.exp(-point[0]))
    ratio, cycle = math.exp(point[1]), 2 * math.exp(point[2])
    slow = 1 / (share * ratio + 1 - share)
    return (slow * ratio, slow), (1 / (cycle * share), 1 / (cycle * (1 - share)))


def _likeliest(
    density: Callable[[FloatArray, float], float], gaps: FloatArray, low: float, high: float
) -> float:
    from scipy.optimize import minimize_scalar

    found = minimize_scalar(
        lambda log: -density(gaps, math.exp(log)),
        bounds=(math.log(low), math.log(high)),
        method="bounded",
        options={"xatol": 1e-4},
    )
    return min(max(math.exp(float(found.x)), low), high)


def _gamma(gaps: FloatArray, cv: float) -> float:
    k = cv**-2
    constant = k * math.log(k) - math.lgamma(k)
    return float(len(gaps) * constant + (k - 1) * np.log(gaps).sum() - k * gaps.sum())


def _weibull(gaps: FloatArray, shape: float) -> float:
    scaled = np.log(gaps) + math.lgamma(1 + 1 / shape)
    powers = np.exp(np.minimum(shape * scaled, 700.0))
    constant = math.log(shape) + math.lgamma(1 + 1 / shape)
    return float(len(gaps) * constant + (shape - 1) * scaled.sum() - powers.sum())


def _hyperexponential(gaps: FloatArray, cv: float) -> float:
    squared = cv * cv
    p_long = 1 / ((squared + 1) * (1 + math.sqrt((squared - 1) / (squared + 1))))
    p_short = 1 - p_long
    # Both are above 0, so their sum is; of the longest gaps only the second is left.
    long = math.log(2 * p_long**2) - 2 * p_long * gaps
    short = math.log(2 * p_short**2) - 2 * p_short * gaps
    return float(np.logaddexp(long, short).sum())
