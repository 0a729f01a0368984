"""Errors of foretold times, in percent of the measured ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Errors:
    """Of n times; percentiles are numpy's linear ones, of absolute errors."""

    n: int
    mape: float
    """Mean absolute error."""
    median: float
    p90: float
    p99: float
    bias: float
    """Mean signed error: above 0 where too long a time was foretold."""

    @classmethod
    def of(cls, foretold: Floats, measured: Floats) -> Errors | None:
        """None where there is nothing to compare."""
        if not len(measured):
            return None
        signed = 100 * (foretold / measured - 1)
        median, p90, p99 = (float(x) for x in np.percentile(np.abs(signed), (50, 90, 99)))
        return cls(len(measured), float(np.abs(signed).mean()), median, p90, p99, float(signed.mean()))

    def to_json(self) -> dict[str, Any]:
        """With the unit in each name."""
        return {name if name == "n" else f"{name}_percent": value for name, value in asdict(self).items()}
