"""Lengths of prompts and answers in figures: how they go together, where a service cut them, whether few are usual."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Numbers = NDArray[np.int64] | NDArray[np.float64]

CAP_BAND = 0.0003
"""Lengths within this part of the largest are at the cap, too: Azure's code service cut at 7,435 to 7,437."""
CAP_SHARE, CAP_REQUESTS, CAP_EXCESS = 0.01, 10, 5
"""A cap has so large a share of the requests, so many, and so many times what the lengths just below it suggest."""
USUAL_SHARE, USUAL_REQUESTS = 0.1, 100
"""A single length is remarkable from this share on, among so many requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """A length at which a service cut."""

    low_tokens: int
    high_tokens: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualLength:
    """A length that many requests have."""

    tokens: int
    requests: int


def correlation(prompt_tokens: Numbers, output_tokens: Numbers) -> float | None:
    """Pearson's coefficient; None where either is constant."""
    if np.ptp(prompt_tokens) == 0 or np.ptp(output_tokens) == 0:
        return None
    return float(np.corrcoef(prompt_tokens, output_tokens)[0, 1])


def find_cap(tokens: Tokens) -> Cap | None:
    """The cap at the largest length, or None."""
    high = int(tokens.max())
    low = high - int(high * CAP_BAND)
    at_cap = tokens >= low
    count, width = int(at_cap.sum()), high - low + 1
    below = int(((tokens >= low - 10 * width) & ~at_cap).sum())
    if count == len(tokens) or count < max(CAP_REQUESTS, CAP_SHARE * len(tokens)):
        return None
    if count < CAP_EXCESS * max(1.0, below / 10):
        return None
    return Cap(low_tokens=int(tokens[at_cap].min()), high_tokens=high, requests=count)


def find_usual(tokens: Tokens) -> UsualLength | None:
    """The most frequent length, where it is remarkably frequent."""
    values, counts = np.unique(tokens, return_counts=True)
    most = int(counts.argmax())
    if len(tokens) < USUAL_REQUESTS or counts[most] < USUAL_SHARE * len(tokens):
        return None
    return UsualLength(tokens=int(values[most]), requests=int(counts[most]))
