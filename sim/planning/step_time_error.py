"""How far off the step times of a profile are, as its own test on held-out measurements says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

WHOLE = ("all", "attention")
"""Of what a test is about: whole steps, or the kernels that are hardest to foretell."""


def step_time_error(described: dict[str, Any]) -> float | None:
    """A relative error that nine of ten held-out steps keep within (mean over the tests, by their sizes).

    `described`: of an engine. None where its step times carry no test.
    """
    tests: Sequence[dict[str, Any]] = described.get("errors") or ()
    whole = [t for t in tests if t.get("of") in WHOLE and t.get("p90_percent") is not None]
    if not whole:
        return None
    errors = np.array([t["p90_percent"] for t in whole])
    return float(np.average(errors, weights=[t["n"] for t in whole])) / 100
