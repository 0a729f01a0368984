"""Two runs compared: what differs in every figure, how sure that is, and what differs in their configuration.

Latencies are those of the requests that completed in both runs, paired by id: their differences are resampled in blocks
of consecutive requests (`planning/bootstrap.py`). Figures of a run as a whole are single values: they differ or not,
and have no interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from servetwin.sim.definitions import ENGINE_INTERVALS, Metric, RequestMetric, definitions
from servetwin.sim.metric_names import MetricName, default_names
from servetwin.sim.metrics import Distribution, distribution, summarize, timestamps
from servetwin.sim.pairing import Pairs, pair
from servetwin.sim.planning.bootstrap import RESAMPLES, BlockBootstrap, Floats, Interval, interval
from servetwin.sim.runs import Run
from servetwin.sim.tables import Tables

NS_PER_MS = 1e6
NOT_COMPARED = ("versions", "host", "process", "step_time_source", "assumed")
"""Of a run's header: where it was made; `config` says the rest."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of two runs; `delta` = b - a, percents are of a. None: there is no sample, or no interval."""

    name: MetricName
    a: float | None
    b: float | None
    interval: Interval | None = None
    """Of delta, in the unit of the figure."""
    interval_percent: Interval | None = None
    """Of delta / a, in percent."""
    pairs: int | None = None
    """Requests that it is computed from; None for a figure of the run as a whole, and for pooled gaps."""

    @property
    def delta(self) -> float | None:
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def delta_percent(self) -> float | None:
        return None if self.delta is None or not self.a else 100 * self.delta / abs(self.a)

    def to_json(self) -> dict[str, Any]:
        return {
            "unit": self.name.unit,
            "a": self.a,
            "b": self.b,
            "delta": self.delta,
            "delta_percent": self.delta_percent,
            "interval": None if self.interval is None else list(self.interval),
            "interval_percent": None if self.interval_percent is None else list(self.interval_percent),
            "pairs": self.pairs,
        }


@dataclass(frozen=True)
class Comparison:
    """Of run B against run A."""

    pairs: Pairs
    differences: Mapping[str, Difference]
    """By name of the figure."""
    formulas: Mapping[str, str]
    level: float
    bootstrap: BlockBootstrap
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "pairs": self.pairs.to_json(),
            "interval": {
                "method": "paired bootstrap of blocks of consecutive requests, percentile interval",
                "level": self.level,
                "resamples": self.bootstrap.resamples,
                "block_requests": self.bootstrap.block_length,
                "seed": self.bootstrap.seed,
            },
            "formulas": dict(self.formulas),
            "metrics": {name: difference.to_json() for name, difference in self.differences.items()},
        }


def compare_runs(
    a: Tables,
    b: Tables,
    names: Iterable[MetricName] = (),
    *,
    metric_defs: str = "vllm-bench",
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """The default figures and those of `names`. Raises ValueError where no request completed in both."""
    pairs = pair(a.requests, b.requests)
    if not len(pairs):
        raise ValueError(nothing_paired(pairs))
    wanted = list(dict.fromkeys([*default_names(), *names]))
    metrics = latency_metrics(metric_defs)
    bootstrap = BlockBootstrap(len(pairs), resamples=resamples, seed=seed)
    differences = {
        **_latencies(a, b, pairs, metrics, wanted, bootstrap, level),
        **run_figures(_summary(a), _summary(b), wanted),
    }
    ordered = {str(name): differences[str(name)] for name in wanted}
    return Comparison(
        pairs, ordered, formulas_of(pairs, metrics), level, bootstrap, list(pairing_notes(pairs))
    )


def latency_metrics(metric_defs: str) -> dict[str, Metric]:
    """By the names of `metric_names.LATENCIES`. Raises ValueError for unknown definitions."""
    metrics = {**definitions(metric_defs).metrics(), **ENGINE_INTERVALS}
    metrics["e2el"] = metrics.pop("e2e")
    return metrics


def formulas_of(pairs: Pairs, metrics: Mapping[str, Metric]) -> dict[str, str]:
    """What each latency means for these requests."""
    held_back = any((frame.sent_s > frame.arrival_s).any() for frame in (pairs.a, pairs.b))
    return {name: metric.words(held_back=held_back) for name, metric in metrics.items()}


def nothing_paired(pairs: Pairs) -> str:
    """Why two runs cannot be compared request by request."""
    if pairs.not_completed:
        reasons = "; ".join(f"{words}: {count}" for words, count in pairs.not_completed.items())
        return f"no request completed in both runs ({reasons})"
    return (
        f"no request of A ({pairs.only_in_a:,}) is in B ({pairs.only_in_b:,}) by its request_id: the runs served "
        "different workloads"
    )


def _latencies(
    a: Tables,
    b: Tables,
    pairs: Pairs,
    metrics: Mapping[str, Metric],
    wanted: Iterable[MetricName],
    bootstrap: BlockBootstrap,
    level: float,
) -> dict[str, Difference]:
    found = paired_latencies(pairs, metrics, wanted, bootstrap, level)
    for quantity, names in _by_quantity(wanted).items():
        if not isinstance(metric := metrics[quantity], RequestMetric):
            pool_a, pool_b = (distribution(metric, timestamps(log.requests), log) for log in (a, b))
            found |= {str(n): Difference(n, _of_pool(pool_a, n), _of_pool(pool_b, n)) for n in names}
    return found


def paired_latencies(
    pairs: Pairs,
    metrics: Mapping[str, Metric],
    wanted: Iterable[MetricName],
    bootstrap: BlockBootstrap | None,
    level: float = 0.95,
) -> dict[str, Difference]:
    """Of the latencies in `wanted` that single requests have; without a bootstrap they have no intervals."""
    found: list[Difference] = []
    # One latency of one run after the other: a million pairs of all of them at once would take their memory.
    for quantity, names in _by_quantity(wanted).items():
        if isinstance(metric := metrics[quantity], RequestMetric):
            samples = _both_known(metric.of(timestamps(pairs.a)), metric.of(timestamps(pairs.b)))
            found += _paired(names, *samples, bootstrap, level)
    return {str(difference.name): difference for difference in found}


def _by_quantity(names: Iterable[MetricName]) -> dict[str, list[MetricName]]:
    """Figures of latencies by the latency, of which all are computed together."""
    found: dict[str, list[MetricName]] = {}
    for name in names:
        if name.statistic is not None:
            found.setdefault(name.quantity, []).append(name)
    return found


def _both_known(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """In ms; a pair of which one side has no value is left out on both."""
    unknown = np.isnan(a) | np.isnan(b)
    return np.where(unknown, np.nan, a / NS_PER_MS), np.where(unknown, np.nan, b / NS_PER_MS)


def _paired(
    names: Sequence[MetricName], a: Floats, b: Floats, bootstrap: BlockBootstrap | None, level: float
) -> list[Difference]:
    """Figures of one latency of the same requests."""
    known = ~np.isnan(a)
    count = int(known.sum())
    if not count:
        return [Difference(name, None, None, pairs=0) for name in names]
    resampled: list[dict[MetricName, Floats]] = [{}, {}]
    if bootstrap is not None and bootstrap.num_blocks > 1:
        resampled = [_resampled(names, side, bootstrap) for side in (a, b)]
    found = []
    for name in names:
        value_a, value_b = _statistic(name, a[known]), _statistic(name, b[known])
        if name not in resampled[0]:
            found.append(Difference(name, value_a, value_b, pairs=count))
            continue
        first, second = (side[name] for side in resampled)
        with np.errstate(invalid="ignore", divide="ignore"):
            percent = interval(100 * (second - first) / np.abs(first), level)
        found.append(Difference(name, value_a, value_b, interval(second - first, level), percent, count))
    return found


def _statistic(name: MetricName, values: Floats) -> float:
    match name.statistic:
        case "mean":
            return float(values.mean())
        case "std":
            return float(values.std())
        case "max":
            return float(values.max())
    assert name.percentile is not None, "all others are percentiles"
    return float(np.percentile(values, name.percentile))


def _resampled(
    names: Sequence[MetricName], values: Floats, bootstrap: BlockBootstrap
) -> dict[MetricName, Floats]:
    """Of every resample. A maximum has none: resamples never go beyond the largest value."""
    percentiles = {name: name.percentile for name in names if name.percentile is not None}
    found = dict(
        zip(percentiles, bootstrap.several_percentiles(values, list(percentiles.values())), strict=True)
    )
    for name in names:
        if name.statistic == "mean":
            found[name] = bootstrap.means(values)
        elif name.statistic == "std":
            found[name] = bootstrap.stds(values)
    return found


def _of_pool(pool: Distribution, name: MetricName) -> float | None:
    if name.percentile is not None:
        value = pool.percentile(name.percentile)
    else:
        value = {"mean": pool.mean, "std": pool.std, "max": pool.max}[name.statistic or ""]
    return None if value is None else value / NS_PER_MS


def _summary(log: Tables) -> Mapping[str, Any]:
    """That of a folder was computed when the run ended; figures of a run as a whole have one definition."""
    return log.summary if isinstance(log, Run) else summarize(log)


def run_figures(
    a: Mapping[str, Any], b: Mapping[str, Any], wanted: Iterable[MetricName]
) -> dict[str, Difference]:
    """Of summaries of the two runs, the figures in `wanted` that are of a run as a whole."""

    def figure(summary: Mapping[str, Any], name: str) -> float | None:
        value = summary[name] if name in summary else summary["servetwin"][name]
        return None if value is None else float(value)

    return {
        str(name): Difference(name, figure(a, name.quantity), figure(b, name.quantity))
        for name in wanted
        if name.statistic is None
    }


def pairing_notes(pairs: Pairs) -> Iterator[str]:
    """What must be known before the figures are believed."""
    if pairs.only_in_a or pairs.only_in_b:
        yield f"{pairs.only_in_a:,} requests are in A only, {pairs.only_in_b:,} in B only: they are in no pair"
    for words, count in pairs.not_completed.items():
        yield f"{count:,} requests did not complete in both runs ({words}): they are in no pair"
    if pairs.different_lengths:
        yield f"{pairs.different_lengths:,} pairs have different numbers of prompt or output tokens"
    if pairs.different_arrivals:
        yield f"{pairs.different_arrivals:,} pairs arrived at different times"


def configuration_differences(a: Run, b: Run) -> dict[str, tuple[Any, Any]]:
    """Field (with dots) -> its values in both runs (None: not said), for what was run and what it was run on."""
    first, second = (dict(_fields(_described(run))) for run in (a, b))
    names = list(dict.fromkeys([*first, *second]))
    return {
        name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)
    }


def _described(run: Run) -> dict[str, Any]:
    described = {name: run.header.get(name) or {} for name in ("workload", "executor")}
    config = {name: value for name, value in run.config.items() if name not in NOT_COMPARED}
    # The name of the executor stands in the configuration, what it is like in the header.
    return config | {"workload": described["workload"], "executor_details": described["executor"]}


def _fields(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _fields(item, f"{before}{name}.")
        else:
            yield f"{before}{name}", item
