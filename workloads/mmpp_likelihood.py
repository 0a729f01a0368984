"""How likely gaps are under a rate that switches between two values at random (MMPP(2))."""

from __future__ import annotations

import math

import numpy as np

from servetwin.workloads.arrivals import FloatArray

Two = tuple[float, float]
Matrices = tuple[FloatArray, FloatArray, FloatArray, FloatArray]
"""2 x 2 matrices by element, row by row, shape [n] each."""


def log_likelihood(gaps: FloatArray, rates: Two, leaving: Two) -> float:
    """The logarithm of the density of these gaps in their order, shape [n].

    rates: requests per unit of time in either state. leaving: changes per unit of time from either state; both above 0.
    The density is a product of matrices, a gap each: exp((Q - R) gap) R, where Q switches and R holds the rates
    (Fischer and Meier-Hellstern 1993). It begins as a request finds the state.
    """
    matrices, log_scale = _of_gaps(gaps, rates, leaving)
    (a, b, c, d), log_product = _product(matrices)
    # The state that a request finds: by the time spent in it and by its rate.
    first, second = leaving[1] * rates[0], leaving[0] * rates[1]
    density = (first * (a + b) + second * (c + d)) / (first + second)
    return log_scale + log_product + math.log(density) if density > 0 else -math.inf


def _of_gaps(gaps: FloatArray, rates: Two, leaving: Two) -> tuple[Matrices, float]:
    """The matrix of each gap without its fastest growing factor, and the logarithm of the product of these."""
    (r1, r2), (q1, q2) = rates, leaving
    d11, d22 = -(q1 + r1), -(q2 + r2)
    spread = math.sqrt((d11 - d22) ** 2 + 4 * q1 * q2)
    slow, fast = (d11 + d22 + spread) / 2, (d11 + d22 - spread) / 2
    fading = np.exp(-spread * gaps)
    own = -np.expm1(-spread * gaps) / spread
    a = ((d11 - fast) - fading * (d11 - slow)) / spread * r1
    d = ((d22 - fast) - fading * (d22 - slow)) / spread * r2
    return (a, q1 * own * r2, q2 * own * r1, d), slow * float(gaps.sum())


def _product(matrices: Matrices) -> tuple[tuple[float, float, float, float], float]:
    """The product in order, scaled, and the logarithm of what it was divided by; pair by pair."""
    log_scale = 0.0
    while len(matrices[0]) > 1:
        matrices, rest = _pairs(matrices)
        size = np.maximum.reduce(matrices)
        if not (size > 0).all():
            return (0.0, 0.0, 0.0, 0.0), 0.0
        log_scale += float(np.log(size).sum())
        a, b, c, d = (np.concatenate((m / size, m_rest)) for m, m_rest in zip(matrices, rest, strict=True))
        matrices = a, b, c, d
    return (
        float(matrices[0][0]),
        float(matrices[1][0]),
        float(matrices[2][0]),
        float(matrices[3][0]),
    ), log_scale


def _pairs(matrices: Matrices) -> tuple[Matrices, Matrices]:
    """Each two neighbours multiplied, and the last one where it has no neighbour."""
    even = len(matrices[0]) // 2 * 2
    a, b, c, d = (m[0:even:2] for m in matrices)
    e, f, g, h = (m[1:even:2] for m in matrices)
    ra, rb, rc, rd = (m[even:] for m in matrices)
    return (a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h), (ra, rb, rc, rd)
