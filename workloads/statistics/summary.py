"""A distribution in four figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean and percentiles (linear between the two nearest values), in the unit of what was summarised."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: NDArray[Any]) -> Self:
        """Of at least one value, shape [n]."""
        return cls(float(values.mean()), *(float(p) for p in np.percentile(values, (50, 90, 99))))

    def to_json(self) -> dict[str, float]:
        return asdict(self)
