"""The plans of two runs of the same requests side by side: how far they agree, how many agree at all, how time drifts.

Two steps agree when they hold as many rows, prompt tokens, decode tokens and newly admitted requests. Steps without
tokens do not count on either side.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.steptime.features import Ints
from servetwin.sim.tables import Tables, ns_array
from servetwin.sim.validation.plan_parting import COMPARED, Parting, Sides, why_they_part

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
MASKS = 1024
"""Bit masks that are kept: one has as many bits as there are steps."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Of the second run's clock over the steps that agree. Idle time takes drift away: both then wait for a request."""

    last_ms: float
    """Start of the last of these steps, second run minus first one."""
    largest_ms: float
    """Where the two are furthest apart."""
    busy_s: float
    """Seconds of the first run with a step in flight until then."""

    @property
    def percent(self) -> float:
        """The last one, of the busy time."""
        return self.last_ms / 1e3 / self.busy_s * 100


@dataclass(frozen=True, slots=True)
class PlanAgreement:
    """Of two runs, the first of which is the measured one."""

    steps: tuple[int, int]
    """With tokens, of each run."""
    agreeing: int
    """Steps from the first on until they part."""
    in_order_percent: float
    """Of the steps of the longer run, those with a like step in the other one in the same order: the longest common
    subsequence. Many steps look alike, so some agree by chance."""
    drift: Drift | None
    """None where not even the first step agrees."""
    parting: Parting | None
    """None: they agree to the end."""

    def to_json(self) -> dict[str, Any]:
        drift = None if self.drift is None else {**asdict(self.drift), "percent_of_busy": self.drift.percent}
        return {
            "steps": list(self.steps),
            "agreeing_steps": self.agreeing,
            "in_order_percent": self.in_order_percent,
            "drift": drift,
            "parting": None if self.parting is None else asdict(self.parting),
        }


def plan_agreement(
    first: Tables, second: Tables, sides: Sides = ("the measured run", "the simulation")
) -> PlanAgreement | None:
    """None where a run does not say how many requests each step took in (runs of earlier versions), or has no steps.

    `sides`: what the two are called in words.
    """
    logs = (first, second)
    if any(not _knows_its_plans(log.steps) for log in logs):
        return None
    frames = [log.steps[log.steps["rows"] > 0] for log in logs]
    a, b = _numbered(*frames)
    shorter = min(len(a), len(b))
    unequal = a[:shorter] != b[:shorter]
    agreeing = int(unequal.argmax()) if unequal.any() else shorter
    same = agreeing == len(a) == len(b)
    in_order = agreeing + common_in_order(a[agreeing:], b[agreeing:])
    return PlanAgreement(
        steps=(len(a), len(b)),
        agreeing=agreeing,
        in_order_percent=100 * in_order / max(len(a), len(b)),
        drift=_drift(*(frame[:agreeing] for frame in frames)) if agreeing else None,
        parting=None if same else why_they_part(logs, sides, agreeing),
    )


def _knows_its_plans(steps: pd.DataFrame) -> bool:
    return bool((steps["rows"] > 0).any() and steps["new_requests"].notna().all())


def _numbered(a: pd.DataFrame, b: pd.DataFrame) -> tuple[Ints, Ints]:
    """A number for each step of both frames, equal for plans that agree."""
    plans = np.concatenate([frame[[*COMPARED]].to_numpy(dtype=np.int64) for frame in (a, b)])
    _, numbers = np.unique(plans, axis=0, return_inverse=True)
    return numbers.ravel()[: len(a)], numbers.ravel()[len(a) :]


def common_in_order(a: Ints, b: Ints) -> int:
    """Length of the longest common subsequence of two rows of numbers.

    Exact, by one addition of as many bits as `a` has numbers for each number of `b` (Crochemore, Iliopoulos, Pinzon
    and Reid 2001). difflib's search would be quadratic in Python's own steps, since most steps look alike.
    """
    a, b = a[np.isin(a, b)], b[np.isin(b, a)]

    @lru_cache(MASKS)
    def places(number: int) -> int:
        return int.from_bytes(np.packbits(a == number, bitorder="little").tobytes(), "little")

    every = (1 << len(a)) - 1
    unmatched = every
    for number in b.tolist():
        here = unmatched & places(number)
        unmatched = ((unmatched + here) | (unmatched - here)) & every
    return len(a) - unmatched.bit_count()


def _drift(a: pd.DataFrame, b: pd.DataFrame) -> Drift:
    """Of frames of equal length."""
    apart_ms = (ns_array(b["start_s"]) - ns_array(a["start_s"])) / 1e6
    start, end = a["start_s"].to_numpy(dtype=np.float64), a["end_s"].to_numpy(dtype=np.float64)
    # Steps overlap: each counts from the end of the one before, or from its own start after a pause.
    busy = end - np.maximum(start, np.concatenate([[-np.inf], end[:-1]]))
    return Drift(float(apart_ms[-1]), float(apart_ms[np.abs(apart_ms).argmax()]), float(busy.sum()))
