"""A service level objective, and by how much a run keeps or misses it.

Latencies are those of `sim/definitions.py`, over the requests that were sent in the measured window. A request that was
refused or aborted, or that failed, has no latency and misses every limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.columns import COMPLETED
from servetwin.sim.definitions import definitions
from servetwin.sim.metrics import timestamps

if TYPE_CHECKING:
    import pandas as pd

    from servetwin.sim.planning.steady import Window

Floats = NDArray[np.float64]
METRICS = ("ttft", "tpot", "e2e")


class SloError(ValueError):
    """A limit that cannot be meant."""


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Limits in milliseconds (None: no limit), and how they are to be kept.

    Without `attainment` the percentile of each metric must be within its limit. With it, that share of all requests
    must be within all limits at once.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    percentile: float = 99.0
    attainment: float | None = None

    def __post_init__(self) -> None:
        for name, limit in (("ttft", self.ttft_ms), ("tpot", self.tpot_ms), ("e2e", self.e2e_ms)):
            if limit is not None and not 0 < limit < np.inf:
                raise SloError(f"--{name} {limit:g}: must be milliseconds, above 0")
        if not 0 < self.percentile < 100:
            raise SloError(f"--percentile {self.percentile:g}: must be above 0 and below 100")
        if self.attainment is not None and not 0 < self.attainment <= 1:
            raise SloError(f"--attainment {self.attainment:g}: must be a share above 0, at most 1")
        if self.attainment is not None and not self.limits_ms:
            raise SloError("--attainment needs a limit: --ttft, --tpot or --e2e")

    @property
    def limits_ms(self) -> dict[str, float]:
        """The metrics that are limited."""
        all_ = zip(METRICS, (self.ttft_ms, self.tpot_ms, self.e2e_ms), strict=True)
        return {name: limit for name, limit in all_ if limit is not None}

    def words(self) -> str:
        """For people."""
        if not self.limits_ms:
            return "no limits: the largest load whose queue does not grow without bound"
        limits = [f"{name.upper()} <= {limit:g} ms" for name, limit in self.limits_ms.items()]
        if self.attainment is not None:
            return f"{100 * self.attainment:g} % of requests with {' and '.join(limits)}"
        return f"P{self.percentile:g} of {', '.join(limits)}"


@dataclass(frozen=True)
class Latencies:
    """Of the requests sent in a window, in order of arrival: ms as arrays [n], inf where a request had no answer.

    TPOT is NaN where a request has one output token: it has no gap and counts in no percentile of TPOT.
    """

    ms: dict[str, Floats]

    @property
    def count(self) -> int:
        return len(self.ms["ttft"])

    @classmethod
    def of(cls, requests: pd.DataFrame, window: Window, metric_defs: str = "vllm-bench") -> Latencies:
        chosen = definitions(metric_defs)
        times = timestamps(requests)
        rows = np.flatnonzero(window.holds(times.sent))
        rows = rows[np.argsort(times.sent[rows], kind="stable")]
        answered = requests.finish_reason.isin(COMPLETED).to_numpy()
        by_name = {"ttft": chosen.ttft, "tpot": chosen.tpot, "e2e": chosen.e2e}
        return cls(
            {
                name: np.where(answered, metric.of(times), np.inf)[rows] / 1e6
                for name, metric in by_name.items()
            }
        )

    def percentile(self, name: str, p: float) -> float | None:
        """Linear between samples, as everywhere in the product; inf where that many had no answer."""
        return percentile(self.ms[name], p)

    def attained(self, slo: Slo) -> float | None:
        """Share of the requests that are within all limits."""
        ratios = self.ratios(slo)
        return float(np.mean(ratios <= 1)) if len(ratios) else None

    def ratios(self, slo: Slo) -> Floats:
        """For each request the largest of its latencies over their limits."""
        per_limit = [self.ms[name] / limit for name, limit in slo.limits_ms.items()]
        if not per_limit:
            return np.zeros(self.count)
        worst: Floats = np.nan_to_num(np.stack(per_limit), nan=0.0, posinf=np.inf).max(axis=0)
        return worst

    def take(self, rows: NDArray[np.int64]) -> Latencies:
        """Those at these places."""
        return Latencies({name: values[rows] for name, values in self.ms.items()})


def percentile(values: Floats, p: float) -> float | None:
    """Of values [n] in any order, NaN left out; None without any."""
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return None
    place = (len(known) - 1) * p / 100
    below = int(place)
    low, high = float(known[below]), float(known[min(below + 1, len(known) - 1)])
    return low if low == high else low + (high - low) * (place - below)


def margins(latencies: Latencies, slo: Slo) -> dict[str, float]:
    """For each limit the logarithm of the limit over what was reached: above 0 it is kept, -inf without answers.

    With `attainment` there is one margin, of that quantile of each request's worst ratio: it is 0 exactly where the
    share is reached.
    """
    if slo.attainment is not None:
        reached = percentile(latencies.ratios(slo), 100 * slo.attainment)
        return {} if reached is None else {"attainment": _log_ratio(1.0, reached)}
    found = {name: latencies.percentile(name, slo.percentile) for name in slo.limits_ms}
    return {n: _log_ratio(slo.limits_ms[n], value) for n, value in found.items() if value is not None}


def _log_ratio(limit: float, value: float) -> float:
    return float(np.log(limit / value)) if 0 < value < np.inf else (np.inf if value <= 0 else -np.inf)


def to_json(latencies: Latencies, slo: Slo) -> dict[str, Any]:
    """Percentiles in ms (None where it is infinite or unknown), and the share within all limits."""
    values = {f"p{slo.percentile:g}_{n}_ms": latencies.percentile(n, slo.percentile) for n in METRICS}
    return {name: v if v is not None and np.isfinite(v) else None for name, v in values.items()} | {
        "attained": latencies.attained(slo) if slo.limits_ms else None
    }
