"""Figures of a run as pure functions of its tables: the keys of `vllm bench serve`, and ours beside them.

Completed means finish reason length or stop; latencies and totals are those of completed requests. A figure
without a sample is None ("no data"), never 0. Percentiles interpolate linearly (numpy's default), standard
deviations are those of the population.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from servetwin.sim.cluster.figures import cluster_figures
from servetwin.sim.columns import COMPLETED
from servetwin.sim.definitions import (
    CLIENT_E2E,
    CLIENT_INTERVALS,
    DEFINITIONS,
    ENGINE_INTERVALS,
    RATES,
    TPOT_OR_ZERO,
    TTFT,
    Metric,
    RequestMetric,
    Timestamps,
    definitions,
)
from servetwin.sim.event_figures import EventFigures, event_figures
from servetwin.sim.step_rows import FOR_FIGURES, StepFigures, figures
from servetwin.sim.tables import Tables, ns_array, replica_of
from servetwin.sim.units import NS_PER_S

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "DEFINITIONS",
    "Distribution",
    "distribution",
    "engine_intervals",
    "finish_counts",
    "statistics_ms",
    "step_figures",
    "summarize",
    "timestamps",
]

Array = np.ndarray[tuple[int], np.dtype[np.float64]]
NS_PER_MS = 1e6
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Distribution:
    """Samples with multiplicities, in ascending order; NaN samples are left out at the door (`of`)."""

    values: Array
    cumulative: np.ndarray[tuple[int], np.dtype[np.int64]]
    """Samples up to and including each value."""

    @classmethod
    def of(cls, samples: Array, counts: Array | None = None) -> Distribution:
        """From samples [n] and how often each stands (once by default); equal values are joined."""
        known = ~np.isnan(samples)
        weights = np.ones(len(samples), dtype=np.int64) if counts is None else counts.astype(np.int64)
        values, place = np.unique(samples[known], return_inverse=True)
        totals = np.bincount(place, weights=weights[known], minlength=len(values)).astype(np.int64)
        return cls(values[totals > 0], np.cumsum(totals[totals > 0]))

    @property
    def count(self) -> int:
        return int(self.cumulative[-1]) if len(self.cumulative) else 0

    @cached_property
    def _weights(self) -> Array:
        return np.diff(self.cumulative, prepend=0).astype(np.float64)

    @property
    def mean(self) -> float | None:
        return float(self.values @ self._weights) / self.count if self.count else None

    @property
    def std(self) -> float | None:
        """Of the population (divided by n)."""
        if self.mean is None:
            return None
        return float(np.sqrt(((self.values - self.mean) ** 2) @ self._weights / self.count))

    @property
    def max(self) -> float | None:
        return float(self.values[-1]) if self.count else None

    def percentile(self, p: float) -> float | None:
        """As `numpy.percentile` gives it for the samples written out; p in 0..100."""
        if not self.count:
            return None
        place = (self.count - 1) * p / 100
        below = int(place)
        ranks = (below, min(below + 1, self.count - 1))
        low, high = self.values[np.searchsorted(self.cumulative, ranks, side="right")]
        return float(low + (high - low) * (place - below))


def summarize(
    log: Tables, metric_defs: str = "vllm-bench", goodput_ms: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """All figures of a run as JSON values.

    `metric_defs`: vllm-server, vllm-bench, guidellm or inference-perf. `goodput_ms`: limits in ms for any of
    ttft, tpot, e2el; `request_goodput` counts completed requests within all of them. Keys ending in _ms are
    milliseconds, rates are per second of `duration` (first arrival to last finish of a completed request).
    """
    chosen = definitions(metric_defs)
    steps, requests, events = step_figures(log), log.request_figures, event_figures(log)
    completed = requests.finish_reason.isin(COMPLETED)
    done = requests if completed.all() else requests[completed]
    times = timestamps(done)
    latencies = {
        "ttft": distribution(chosen.ttft, times, log),
        "tpot": distribution(chosen.tpot, times, log),
        "itl": distribution(chosen.itl, times, log),
        "e2el": distribution(chosen.e2e, times, log),
    }
    # No key of `vllm bench serve`: it stands with ours only.
    ntpot = {"ntpot": distribution(chosen.ntpot, times, log)} if chosen.ntpot else {}
    held_back = _client_intervals(times, log)
    client_formulas = {name: CLIENT_INTERVALS[name].formula for name in held_back}
    return {
        **_totals(requests, done, times, goodput_ms),
        **_peaks(times, log),
        **{k: v for name, d in latencies.items() for k, v in _bench_statistics(name, d).items()},
        **{k: v for name, d in held_back.items() for k, v in _bench_statistics(name, d).items()},
        **_drafting(steps),
        "busy_time_s": steps.busy_ns / NS_PER_S,
        "servetwin": {
            "metric_defs": chosen.name,
            "formulas": chosen.formulas(held_back=bool(held_back))
            | {name: m.formula for name, m in ENGINE_INTERVALS.items()}
            | client_formulas
            | RATES,
            "percentile_method": "linear",
            "requests": _finish_counts(requests, events),
            "latency": {
                f"{name}_ms": statistics_ms(d)
                for name, d in (latencies | ntpot | engine_intervals(times, log) | held_back).items()
            },
            **_engine_figures(requests, steps),
            **cluster_figures(requests, events, steps.busy_ns_of),
        },
    }


def timestamps(requests: pd.DataFrame) -> Timestamps:
    """Rows of `requests` as arrays in ns."""
    return Timestamps(
        arrival=ns_array(requests.arrival_s),
        # Runs of before the column was added held nothing back.
        sent=ns_array(requests.sent_s.fillna(requests.arrival_s)),
        queued=ns_array(requests.queued_s),
        first_scheduled=ns_array(requests.first_scheduled_s),
        first_token=ns_array(requests.first_token_s),
        last_token=ns_array(requests.last_token_s),
        finish=ns_array(requests.finish_s),
        output_tokens=requests.num_output_tokens.to_numpy(dtype=np.float64),
    )


def distribution(metric: Metric, times: Timestamps, log: Tables) -> Distribution:
    """A metric over completed requests, or over their pooled gaps (those of the log), in ns."""
    if isinstance(metric, RequestMetric):
        return Distribution.of(metric.of(times))
    lengths, counts = log.gap_lengths
    return Distribution.of(lengths.astype(np.float64), counts.astype(np.float64))


def engine_intervals(times: Timestamps, log: Tables) -> dict[str, Distribution]:
    """Queue, prefill, decode and inference time of completed requests, in ns."""
    return {name: distribution(metric, times, log) for name, metric in ENGINE_INTERVALS.items()}


def _client_intervals(times: Timestamps, log: Tables) -> dict[str, Distribution]:
    """What a client's own queue added, in ns; nothing where it held no request back."""
    if not (times.sent > times.arrival).any():
        return {}
    return {name: distribution(metric, times, log) for name, metric in CLIENT_INTERVALS.items()}


def statistics_ms(d: Distribution) -> dict[str, Any]:
    """Number of samples, and mean, std, percentiles and maximum in ms (None without samples)."""
    return {
        "count": d.count,
        "mean": _ms(d.mean),
        "std": _ms(d.std),
        **{f"p{p}": _ms(d.percentile(p)) for p in PERCENTILES},
        "max": _ms(d.max),
    }


def finish_counts(log: Tables) -> dict[str, int]:
    """Requests by how they ended; `open`: arrived and not ended, as far as was written (a killed run has no rows
    for them). The counts add up to all requests that arrived.
    """
    return _finish_counts(log.request_figures, event_figures(log))


def _finish_counts(requests: pd.DataFrame, events: EventFigures) -> dict[str, int]:
    counts = {str(reason): int(n) for reason, n in requests.finish_reason.value_counts().items()}
    arrived = max(events.number_of("arrived"), len(requests))
    return dict(sorted(counts.items())) | {"open": arrived - sum(counts.values())}


def step_figures(log: Tables) -> StepFigures:
    """What a summary needs of the steps of a run, however many they are."""
    totals: Counter[str] = Counter()
    num_steps = num_leapt = busy_ns = 0
    peaks = []
    busy_ns_of: Counter[int] = Counter()
    for table in log.iter_columns("steps", FOR_FIGURES):
        part = figures(table)
        busy_ns_of[replica_of(table)] += part.busy_ns
        totals.update(part.totals)
        num_steps += part.num_steps
        num_leapt += part.num_leapt
        busy_ns += part.busy_ns
        peaks += [] if part.peak_used_fraction is None else [part.peak_used_fraction]
    return StepFigures(totals, num_steps, num_leapt, busy_ns, max(peaks, default=None), busy_ns_of)


def _bench_statistics(name: str, d: Distribution) -> dict[str, float | None]:
    figures = {"mean": d.mean, "median": d.percentile(50), "std": d.std, "p99": d.percentile(99)}
    return {f"{figure}_{name}_ms": _ms(value) for figure, value in figures.items()}


def _totals(
    requests: pd.DataFrame, done: pd.DataFrame, times: Timestamps, goodput_ms: Mapping[str, float] | None
) -> dict[str, Any]:
    first_arrival = ns_array(requests.arrival_s).min(initial=np.inf)
    duration = float(times.finish.max() - first_arrival) / NS_PER_S if len(done) else None
    inputs, outputs = int(done.num_prompt_tokens.sum()), int(done.num_output_tokens.sum())

    def rate(count: int) -> float | None:
        return count / duration if duration else None

    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(requests) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": rate(len(done)),
        "request_goodput": rate(_good(times, goodput_ms)) if goodput_ms else None,
        "output_throughput": rate(outputs),
        "total_token_throughput": rate(inputs + outputs),
    }


def _good(times: Timestamps, limits_ms: Mapping[str, float]) -> int:
    """Completed requests within all limits, as `vllm bench serve --goodput` counts (TPOT of one token: 0)."""
    metrics = {"ttft": TTFT, "tpot": TPOT_OR_ZERO, "e2el": CLIENT_E2E}
    good = np.ones(len(times.arrival), dtype=bool)
    for name, limit_ms in limits_ms.items():
        if name not in metrics:
            raise ValueError(f"goodput limit {name!r} is not known; allowed: {', '.join(metrics)}")
        good &= metrics[name].of(times) <= limit_ms * NS_PER_MS
    return int(good.sum())


def _peaks(times: Timestamps, log: Tables) -> dict[str, Any]:
    """Largest number of outputs, and of requests present, in one second; seconds start at the first arrival.

    As in `vllm bench serve`: completed requests only; one is present in every second that it touches.
    """
    if not len(times.arrival):
        return {"max_output_tokens_per_s": None, "max_concurrent_requests": None}
    origin = times.arrival.min()
    first, last = _seconds(times.arrival - origin), _seconds(times.last_token - origin)
    seconds = [_seconds(times.first_token - origin)]
    outputs = [np.ones(len(first))]
    for gaps in log.gap_parts():
        second = _seconds(gaps.time_ns - origin)
        kept = (second >= 0) & (second <= last.max())
        seconds_of_part, place = np.unique(second[kept], return_inverse=True)
        seconds.append(seconds_of_part)
        sums = np.bincount(place, weights=gaps.samples[kept], minlength=len(seconds_of_part))
        outputs.append(sums.astype(np.float64))
    come_and_go = np.concatenate([np.ones(len(first)), -np.ones(len(last))])
    return {
        "max_output_tokens_per_s": float(_by_second(np.concatenate(seconds), np.concatenate(outputs)).max()),
        "max_concurrent_requests": int(
            _by_second(np.concatenate([first, last + 1]), come_and_go).cumsum().max()
        ),
    }


def _by_second(seconds: np.ndarray[tuple[int], np.dtype[np.int64]], amounts: Array) -> Array:
    """Sums of the amounts in each second that has any, in order: a run may span years of nothing."""
    _, place = np.unique(seconds, return_inverse=True)
    totals: Array = np.bincount(place, weights=amounts).astype(np.float64)
    return totals


def _seconds(ns: Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    seconds: np.ndarray[tuple[int], np.dtype[np.int64]] = (ns // NS_PER_S).astype(np.int64)
    return seconds


def _engine_figures(requests: pd.DataFrame, steps: StepFigures) -> dict[str, Any]:
    totals = steps.totals
    computed = totals["prefill_tokens"] + totals["decode_tokens"]
    queries, hits = totals["prefix_query_tokens"], totals["prefix_hit_tokens"]
    recomputed = int(requests.recomputed_tokens.sum())
    # Each prompt once. The queries of the steps are vLLM's counters: a refused head is looked up again in every step.
    came_in = requests[requests.first_scheduled_s.notna()]
    cached, admitted = int(came_in.cached_tokens.sum()), int(came_in.num_prompt_tokens.sum())
    leapt = steps.num_leapt
    return {
        "steps": steps.num_steps,
        "leapt_steps": leapt,
        "leapt_fraction": leapt / steps.num_steps if steps.num_steps else None,
        "preemptions": int(requests.preemptions.sum()),
        "evictions": totals["evictions"],
        "computed_tokens": computed,
        "recomputed_tokens": recomputed,
        "recomputed_fraction": recomputed / computed if computed else None,
        "cached_prompt_tokens": cached,
        "admitted_prompt_tokens": admitted,
        "cached_prompt_fraction": cached / admitted if admitted else None,
        "prefix_query_tokens": queries,
        "prefix_hit_tokens": hits,
        "prefix_hit_rate": hits / queries if queries else None,
        "preempted_query_tokens": totals["preempted_query_tokens"],
        "preempted_hit_tokens": totals["preempted_hit_tokens"],
        "kv_peak_used_fraction": steps.peak_used_fraction,
        "predicted_outside_steps": totals["predicted_outside"],
    }


def _drafting(steps: StepFigures) -> dict[str, Any]:
    """vLLM's figures of speculative decoding; nothing where no draft was verified.

    acceptance_rate = accepted / drafted tokens in percent; acceptance_length = 1 + accepted tokens per verification.
    """
    rounds, drafted = steps.totals["draft_rows"], steps.totals["draft_tokens"]
    if not rounds:
        return {}
    accepted = steps.totals["accepted_draft_tokens"]
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_acceptance_length": 1 + accepted / rounds,
        "spec_decode_num_drafts": rounds,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
    }


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / NS_PER_MS
