"""A probe: the workload at another rate through the simulated engine, judged.

The workload is the same at every rate, but for its times, which are stretched or squeezed (common random numbers: what
luck a draw of requests has it has at every rate). The rate is that of the requests as they are sent: their number over
the time between the first and the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, isfinite, log
from typing import Any

import numpy as np

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.config import RunConfig
from servetwin.sim.planning.bootstrap import BlockBootstrap, Interval, interval
from servetwin.sim.planning.one_run import RunResult, prepare, run_one
from servetwin.sim.planning.pressure import Pressure, pressure
from servetwin.sim.planning.saturation import EXCESS, SaturationWatch
from servetwin.sim.planning.search import Outcome
from servetwin.sim.planning.slo import METRICS, Latencies, Slo, margins
from servetwin.sim.planning.spec import RunSpec
from servetwin.sim.planning.steady import Lives, SteadyState, Verdict, account, steady_state, token_rate
from servetwin.sim.units import seconds_to_ns
from servetwin.workloads import ClosedLoop, values_of

RESAMPLES = 300
BLOCKS = 20
"""Requests near each other share a queue: a resample is made of whole parts of a run, a twentieth each."""
AT_ONCE_S = 1e-3
"""Span into which a workload is squeezed to see how much an engine can serve."""
QUEUED_SPAN = 0.25
"""A queue that stood for this part of the arrivals says how much the engine can serve."""
FAR = 1e15
"""ms that stand for infinity where numbers are interpolated."""


@dataclass(frozen=True)
class Load:
    """One draw of the workload."""

    requests: int
    rate: float
    """Requests/s at `rate_scale` as in the spec."""
    arrivals_ns: np.ndarray[tuple[int], np.dtype[np.int64]]
    mean_tokens: float
    """Prompt and output of a request."""
    is_closed: bool
    lengths: tuple[int, ...]
    """Prompt tokens, to tell draws apart."""


@dataclass(frozen=True)
class Measured:
    """One simulated run."""

    rate: float
    """Requests/s; inf: all at once."""
    seed: int
    requests: int
    steady: SteadyState
    counts: dict[str, int]
    values: dict[str, float | None]
    """ttft, tpot, e2e -> their percentile in ms; inf where that many requests had no answer."""
    intervals: dict[str, Interval | None]
    """95 % of each, from the run alone."""
    attained: float | None
    margins: dict[str, float]
    """Limit -> log(limit / reached)."""
    outcome: Outcome
    output_tokens_per_s: float
    total_tokens_per_s: float
    pressure: Pressure
    recomputed_fraction: float | None
    preemptions: int
    prefix_hit_fraction: float | None
    peak_running: int
    end_s: float
    """Simulated time of the end."""
    mean_replicas: float
    """Over the run; they come and go with --autoscale."""
    simulated_steps: int
    ended_early: str | None
    config: RunConfig
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        return self.steady.verdict

    @property
    def missed(self) -> str | None:
        """The limit that is missed by most, or kept by least; None: the queue alone decides."""
        if self.steady.verdict is Verdict.OVERLOADED or not self.margins:
            return None
        worst = min(self.margins, key=lambda name: self.margins[name])
        return None if self.outcome.margin < 0 <= self.margins[worst] else worst


class Prober:
    """Runs a spec at rates and seeds, each once.

    `on_run`: told of every run that was simulated. `watch`: end overloaded runs early.
    """

    def __init__(
        self,
        spec: RunSpec,
        slo: Slo,
        *,
        on_run: Callable[[Measured], None] | None = None,
        watch: bool = True,
    ) -> None:
        self.spec, self.slo = spec, slo
        self.simulations = 0
        self._on_run, self._watch = on_run, watch
        self._loads: dict[int, Load] = {}
        self._known: dict[tuple[float, int], Measured] = {}

    def __call__(self, rate: float, seed: int) -> Outcome:
        """For the search."""
        return self.at(rate, seed).outcome

    @property
    def seed(self) -> int:
        """The first of the seeds."""
        return int(self.spec["seed"])

    def all(self) -> list[Measured]:
        """What was run, by rate and seed."""
        return [self._known[key] for key in sorted(self._known)]

    def load(self, seed: int) -> Load:
        """What is sent. Raises UsageError where it has no times to be scaled."""
        if seed not in self._loads:
            workload = self.spec.request().load.open(seed)
            times_s = np.array(values_of(workload.requests, "arrival_s"))
            span_s = float(times_s.max() - times_s.min())
            if span_s <= 0:
                raise UsageError(
                    "all requests arrive at one time, so there is no rate to change: --request-rate gives them times"
                )
            prompts = values_of(workload.requests, "prompt_tokens")
            outputs = values_of(workload.requests, "output_tokens")
            self._loads[seed] = Load(
                requests=len(times_s),
                rate=len(times_s) / span_s,
                arrivals_ns=np.sort(np.array([seconds_to_ns(t) for t in times_s], dtype=np.int64)),
                mean_tokens=float(np.mean(prompts) + np.mean(outputs)),
                is_closed=isinstance(workload, ClosedLoop),
                lengths=tuple(prompts[:100]),
            )
        return self._loads[seed]

    def is_drawn(self) -> bool:
        """Another seed gives other requests."""
        one, other = self.load(self.seed), self.load(self.seed + 1)
        return one.lengths != other.lengths or not np.array_equal(one.arrivals_ns, other.arrivals_ns)

    def at(self, rate: float, seed: int | None = None) -> Measured:
        """The run at a rate; inf: all requests at once. Raises what `run` ends with."""
        seed = self.seed if seed is None else seed
        known = self._known.get((rate, seed))
        if known is None:
            known = self._known[rate, seed] = self._run(rate, seed)
            if self._on_run is not None:
                self._on_run(known)
        return known

    def _run(self, rate: float, seed: int) -> Measured:
        load = self.load(seed)
        scale = load.requests / load.rate / AT_ONCE_S if rate == inf else rate / load.rate
        spec = self.spec.with_(seed=seed, rate_scale=self.spec["rate_scale"] * scale)
        prepared = prepare(spec)
        watch = None
        if self._watch and not load.is_closed and self._is_beyond(rate):
            room = room_of(prepared.config, load)
            watch = SaturationWatch((load.arrivals_ns / scale).astype(np.int64), room)
        self.simulations += 1
        result = run_one(spec, on_progress=watch, prepared=prepared)
        return judge(result, self.slo, rate, seed, spec["metric_defs"])

    def _is_beyond(self, rate: float) -> bool:
        """More than was served when all requests came at once, where that is known: no burst looks like overload."""
        known = [run.steady.saturated_rate for (r, _), run in self._known.items() if r == inf]
        return rate != inf and all(served is not None and rate > EXCESS * served for served in known)


def replicas_of(config: RunConfig) -> int:
    """Engines of a run, at its start where they come and go."""
    return config.cluster.replicas


def room_of(config: RunConfig, load: Load) -> int:
    """Requests that can run at once: seats, or what the pools hold of requests of mean length."""
    engine = config.engine
    pool_tokens = (engine.cache.num_gpu_blocks - 1) * engine.cache.block_size
    held = max(int(pool_tokens / max(load.mean_tokens, 1.0)), 1)
    return min(engine.scheduler.max_num_seqs, held) * config.cluster.most_replicas


def judge(result: RunResult, slo: Slo, rate: float, seed: int, metric_defs: str) -> Measured:
    """What a run says."""
    log_, requests = result.log, result.log.requests
    lives = Lives.of(requests)
    steady = steady_state(lives)
    if result.ended_early is not None:
        steady = replace(steady, verdict=Verdict.OVERLOADED)
    # With all requests at once there is no window between arrivals: what is looked at is the queue.
    window = steady.queued_window if rate == inf else steady.window
    latencies = Latencies.of(requests, steady.window, metric_defs)
    kept = margins(latencies, slo)
    own = result.summary["servetwin"]
    out_rate = token_rate(log_, window)
    prompts, outputs = result.summary["total_input_tokens"], result.summary["total_output_tokens"]
    return Measured(
        rate=rate,
        seed=seed,
        requests=len(requests),
        steady=steady,
        counts=account(requests),
        values={name: latencies.percentile(name, slo.percentile) for name in METRICS},
        intervals=_intervals(latencies, slo.percentile),
        attained=latencies.attained(slo) if slo.limits_ms else None,
        margins=kept,
        outcome=_outcome(steady, latencies, slo, kept, rate, result.ended_early is not None),
        output_tokens_per_s=out_rate,
        total_tokens_per_s=out_rate * (1 + prompts / outputs) if outputs else 0.0,
        pressure=pressure(log_, window, result.config.engine),
        recomputed_fraction=own["recomputed_fraction"],
        preemptions=own["preemptions"],
        prefix_hit_fraction=own["cached_prompt_fraction"],
        peak_running=int(log_.steps.running.max()) if len(log_.steps) else 0,
        end_s=result.end_ns / 1e9,
        mean_replicas=_mean_replicas(own, result),
        simulated_steps=own["steps"],
        ended_early=result.ended_early,
        config=result.config,
        notes=result.notes,
    )


def _mean_replicas(own: dict[str, Any], result: RunResult) -> float:
    if result.config.cluster.autoscale is None or not result.end_ns:
        return float(replicas_of(result.config))
    return float(own["cluster"]["replica_hours"] * 3600 / (result.end_ns / 1e9))


def _outcome(
    steady: SteadyState,
    latencies: Latencies,
    slo: Slo,
    kept: dict[str, float],
    rate: float,
    ended_early: bool,
) -> Outcome:
    """By how much the load is good: within its limits, and not more than can be served."""
    by_queue = _queue_margin(steady, rate, ended_early)
    if by_queue < 0 or not slo.limits_ms:
        return Outcome(min([by_queue, *kept.values()]), 0.0 if slo.limits_ms else steady.saturated_error)
    if not kept:
        # Nobody was sent in the window.
        return Outcome(-inf)
    worst = min(kept, key=lambda name: kept[name])
    return Outcome(kept[worst], _margin_error(latencies, slo, worst))


def _queue_margin(steady: SteadyState, rate: float, ended_early: bool) -> float:
    """Below 0: the queue grows without bound. log(what can be served / what arrives), where a queue stood to tell."""
    served = steady.saturated_rate
    if rate == inf:
        return -inf
    if steady.verdict is Verdict.OVERLOADED or ended_early:
        return min(log(served / rate), -1e-3) if served else -1.0
    if served is None or steady.queued_share < QUEUED_SPAN:
        return 1.0
    # A long queue that did not grow: without limits on latency it is the load that is asked for, up to what is served.
    return log(served / rate)


def _margin_error(latencies: Latencies, slo: Slo, worst: str) -> float:
    """Standard error of a margin, from resamples of the run."""
    bootstrap = _bootstrap(latencies.count)
    if worst == "attainment":
        assert slo.attainment is not None, "that is its name"
        samples = bootstrap.percentiles(np.minimum(latencies.ratios(slo), FAR), 100 * slo.attainment)
    else:
        samples = bootstrap.percentiles(np.minimum(latencies.ms[worst], FAR), slo.percentile)
    usable = samples[(samples > 0) & (samples < FAR / 2)]
    return float(np.std(np.log(usable))) if len(usable) > 2 else 0.0


def _intervals(latencies: Latencies, percentile: float) -> dict[str, Interval | None]:
    if latencies.count < 2:
        return dict.fromkeys(METRICS)
    bootstrap = _bootstrap(latencies.count)
    found: dict[str, Interval | None] = {}
    for name in METRICS:
        samples = bootstrap.percentiles(np.minimum(latencies.ms[name], FAR), percentile)
        found[name] = interval(samples[samples < FAR / 2])
    return found


def _bootstrap(n: int) -> BlockBootstrap:
    return BlockBootstrap(n, resamples=RESAMPLES, block_length=max(n // BLOCKS, 1))


def to_json(run: Measured) -> dict[str, Any]:
    """One row of the probes."""

    def number(value: float | None) -> float | None:
        return value if value is not None and isfinite(value) else None

    return {
        "rate": number(run.rate),
        "seed": run.seed,
        "verdict": str(run.verdict),
        "good": run.outcome.margin >= 0,
        "margin": number(run.outcome.margin),
        "margin_error": run.outcome.error,
        "ended_early": run.ended_early,
        "requests": run.requests,
        **run.counts,
        **{f"{name}_ms": number(value) for name, value in run.values.items()},
        **{f"{name}_ms_interval": _pair(run.intervals[name]) for name in METRICS},
        "attained": run.attained,
        "latencies_truncated": run.ended_early is not None or run.verdict is Verdict.OVERLOADED,
        "served_rate": run.steady.served_rate,
        "output_tokens_per_s": run.output_tokens_per_s,
        "window_s": [run.steady.window.start_ns / 1e9, run.steady.window.end_ns / 1e9],
        "replicas": replicas_of(run.config),
        "mean_replicas": run.mean_replicas,
        "preemptions": run.preemptions,
        "recomputed_fraction": run.recomputed_fraction,
        "prefix_hit_fraction": run.prefix_hit_fraction,
        "simulated_steps": run.simulated_steps,
        **run.pressure.to_json(),
    }


def _pair(found: Interval | None) -> list[float] | None:
    return None if found is None else [found.low, found.high]
