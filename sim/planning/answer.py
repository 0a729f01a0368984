"""The answer to a planning question: the best of some configurations, with what it costs and how sure that is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flag_names import spelled
from servetwin.sim.commands.run_fields import plain
from servetwin.sim.infeasible import InfeasibleError
from servetwin.sim.planning.capacity import (
    Capacity,
    Effort,
    OnRun,
    fewest_replicas,
    largest_load,
    nearest,
    slower,
)
from servetwin.sim.planning.one_run import prepare
from servetwin.sim.planning.parameters import Choice, Parameter, parameters_of
from servetwin.sim.planning.prices import Cost, Prices, price_of, read_prices
from servetwin.sim.planning.probing import Measured, replicas_of, to_json
from servetwin.sim.planning.search import Point
from servetwin.sim.planning.serve_line import serve_line
from servetwin.sim.planning.slo import METRICS, Slo
from servetwin.sim.planning.spec import RunSpec
from servetwin.sim.planning.step_time_error import step_time_error

if TYPE_CHECKING:
    import pandas as pd

REPLICAS_AT_MOST = 64


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked."""

    spec: RunSpec
    slo: Slo = field(default_factory=Slo)
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Field of the spec -> its values; every combination is tried."""
    target_rate: float | None = None
    """Requests/s to be served by the fewest replicas; None: the largest load is asked for."""
    replicas_at_most: int = REPLICAS_AT_MOST
    prices: Prices = field(default_factory=dict)
    effort: Effort = field(default_factory=Effort)
    step_time_error: float | None = None
    """Relative error of the step times (None: as their profile says)."""
    vllm_args: str | None = None
    """The pasted line that is part of the spec already."""

    def __post_init__(self) -> None:
        error_percent = None if self.step_time_error is None else 100 * self.step_time_error
        effort = self.effort
        checks: dict[str, tuple[float | None, Callable[[float], bool], str]] = {
            "--target-rate": (self.target_rate, lambda v: 0 < v < inf, "requests/s, above 0"),
            "--replicas-at-most": (self.replicas_at_most, lambda v: v >= 1, "at least 1"),
            "--tolerance": (
                effort.tolerance,
                lambda v: 1e-4 <= v <= 0.5,
                "a part of the rate, from 0.0001 to 0.5",
            ),
            "--max-simulations": (effort.max_simulations, lambda v: v >= 4, "at least 4"),
            "--seeds": (effort.seeds, lambda v: v >= 1, "at least 1"),
            "--step-time-error": (error_percent, lambda v: 0 < v < 100, "percent, above 0 and below 100"),
        }
        for flag, (value, is_allowed, allowed) in checks.items():
            if value is not None and not is_allowed(value):
                raise UsageError(f"{flag} {value:g}: must be {allowed}")
        if self.target_rate is None:
            return
        for name in ("replicas", "prefill_replicas", "decode_replicas", "autoscale"):
            if name in self.vary or self.spec[name] is not None:
                raise UsageError(
                    f"{spelled(name)} cannot stand beside --target-rate, for which the replicas are counted; without "
                    "--target-rate the largest load of so many is found"
                )

    def specs(self) -> list[tuple[dict[str, Any], RunSpec]]:
        """Every configuration: what is special about it, and its spec. Raises UsageError."""
        names = list(self.vary)
        combinations = product(*(self.vary[name] for name in names))
        return [
            (chosen := dict(zip(names, values, strict=True)), self.spec.with_(**chosen))
            for values in combinations
        ]


@dataclass(frozen=True)
class Row:
    """One configuration."""

    settings: dict[str, Any]
    capacity: Capacity | None
    """None: it cannot be run at all ..."""
    problem: str | None
    """... and why."""
    cost: Cost | None
    line: str
    """`vllm serve` ..."""
    unsaid: tuple[str, ...]
    """... and what it does not say."""

    @property
    def is_feasible(self) -> bool:
        return self.capacity is not None and self.capacity.is_feasible

    def merit(self, *, by_price: bool) -> tuple[float, float]:
        """The larger the better: requests for a USD, or for a GPU; then the load."""
        assert self.capacity is not None and self.capacity.rate is not None and self.cost is not None
        per_gpu = self.capacity.rate / self.capacity.gpus
        usd = self.cost.usd_per_hour
        if usd is None or not by_price:
            return per_gpu, self.capacity.rate
        return self.capacity.rate / usd if usd > 0 else inf, self.capacity.rate

    def to_json(self) -> dict[str, Any]:
        settings = {name: plain(value) for name, value in self.settings.items()}
        if self.capacity is None:
            return {"settings": settings, "feasible": False, "problem": self.problem}
        capacity = self.capacity
        limit = capacity.limit
        return {
            "settings": settings,
            "feasible": capacity.is_feasible,
            "max_request_rate": capacity.rate,
            "interval": None if limit is None or limit.interval is None else list(limit.interval),
            "bad_rate": None if limit is None else limit.upper,
            "monotone": None if limit is None else limit.is_monotone,
            "good_above": [] if limit is None else list(limit.good_above),
            "converged": None if limit is None else limit.converged,
            "replicas": capacity.replicas,
            "knee_rate": capacity.knee,
            "headroom": capacity.headroom,
            "binding": capacity.binding,
            "binding_reason": capacity.reason,
            "simulations": capacity.simulations,
            "cost": None if self.cost is None else self.cost.to_json(),
            "nearest": None if capacity.is_feasible else nearest(capacity),
            "vllm_serve": self.line,
            "not_in_vllm_serve": list(self.unsaid),
            "notes": list(capacity.notes),
            "curve": curve(capacity),
            "probes": [to_json(run) for run in capacity.runs],
        }


@dataclass(frozen=True)
class Plan:
    """The answer."""

    question: Question
    rows: tuple[Row, ...]
    best: Row | None
    """None: no configuration is feasible."""
    by_price: bool
    """The best is the cheapest, since all prices are known; else the one with the fewest GPUs for its load."""
    error: float | None
    """Relative error of the step times that was propagated; None: none is known."""
    rate_interval: tuple[float | None, float | None]
    """Largest rate of the best configuration if all its steps took longer (shorter) by that."""
    error_simulations: int
    assumed: tuple[str, ...]

    @property
    def simulations(self) -> int:
        """Of the searches; those of the step-time error come on top."""
        return sum(row.capacity.simulations for row in self.rows if row.capacity is not None)

    def to_json(self) -> dict[str, Any]:
        """The keys of `servetwin plan --json`."""
        best = None if self.best is None else self.best.capacity
        row = self.best or next((r for r in self.rows if r.capacity is not None), None)
        about = None if row is None else row.capacity
        slo = self.question.slo
        return {
            "feasible": best is not None,
            "max_request_rate": None if best is None else best.rate,
            "target_rate": self.question.target_rate,
            "replicas": None if best is None else best.replicas,
            "simulations": self.simulations,
            "binding": None if about is None else about.binding,
            "binding_reason": None if about is None else about.reason,
            "headroom": None if best is None else best.headroom,
            "knee_rate": None if about is None else about.knee,
            "settings": None if self.best is None else {n: plain(v) for n, v in self.best.settings.items()},
            "cost": None if self.best is None or self.best.cost is None else self.best.cost.to_json(),
            "nearest": None if best is not None or about is None else nearest(about),
            "step_time_error": {
                "error": self.error,
                "max_request_rate_slower": self.rate_interval[0],
                "max_request_rate_faster": self.rate_interval[1],
                "simulations": self.error_simulations,
            },
            "vllm_serve": None if self.best is None else self.best.line,
            "slo": {**slo.limits_ms, "percentile": slo.percentile, "attainment": slo.attainment},
            "assumed": list(self.assumed),
            "configurations": [row.to_json() for row in self.rows],
        }

    @property
    def configurations(self) -> pd.DataFrame:
        """One row for each configuration: its settings, then what was found."""
        import pandas as pd

        left_out = ("settings", "cost", "curve", "probes", "nearest", "notes", "not_in_vllm_serve")
        rows = []
        for row in self.rows:
            found = row.to_json()
            cost = found.get("cost") or {}
            rows.append(row.settings | {n: v for n, v in found.items() if n not in left_out} | cost)
        return pd.DataFrame(rows)

    @property
    def probes(self) -> pd.DataFrame:
        """One row for each simulated run of the searches."""
        import pandas as pd

        return pd.DataFrame(
            [
                row.settings | to_json(run)
                for row in self.rows
                if row.capacity is not None
                for run in row.capacity.runs
            ]
        )


def curve(capacity: Capacity) -> list[dict[str, Any]]:
    """The limits against the load: for each rate the mean over its seeds, 95 % intervals, and what was waited for."""
    points: dict[tuple[int, float], list[Measured]] = {}
    for run in (run for run in capacity.runs if run.rate != inf):
        points.setdefault((replicas_of(run.config), run.rate), []).append(run)
    return [_curve_row(points[at], at[0], capacity) for at in sorted(points)]


def _curve_row(runs: list[Measured], replicas: int, capacity: Capacity) -> dict[str, Any]:
    import numpy as np

    rate = runs[0].rate
    point = Point(rate, {run.seed: run.outcome for run in runs})
    row: dict[str, Any] = {
        "rate": rate,
        "seeds": len(runs),
        "replicas": replicas,
        "verdict": str(runs[0].verdict),
        "good": point.is_good,
        "mark": _mark(rate, capacity) if replicas == capacity.replicas else None,
    }
    for name in METRICS:
        values = [v for run in runs if (v := run.values[name]) is not None]
        finite = [v for v in values if isfinite(v)]
        row[f"{name}_ms"] = float(np.mean(finite)) if finite and len(finite) == len(values) else None
        row[f"{name}_ms_interval"] = _interval(runs, name, finite)
    attained = [run.attained for run in runs if run.attained is not None]
    waiting = runs[0].pressure.waiting
    row |= {
        "attained": float(np.mean(attained)) if attained else None,
        "preemptions": sum(run.preemptions for run in runs),
        "recomputed_fraction": runs[0].recomputed_fraction,
        "kv_used": runs[0].pressure.kv_used,
        "waits_for": max(waiting, key=lambda name: waiting[name]) if waiting else None,
    }
    return row


def _interval(runs: list[Measured], name: str, finite: list[float]) -> list[float] | None:
    """Over the seeds (t), or over resamples of the only run."""
    if len(runs) == 1:
        alone = runs[0].intervals[name]
        return None if alone is None or not finite else [alone.low, alone.high]
    if len(finite) < len(runs):
        return None
    import numpy as np
    from scipy import stats

    half = float(stats.t.ppf(0.975, len(finite) - 1) * np.std(finite, ddof=1) / np.sqrt(len(finite)))
    mean = float(np.mean(finite))
    return [max(mean - half, 0.0), mean + half]


def _mark(rate: float, capacity: Capacity) -> str | None:
    """limit: the answer; knee: the first rate beyond what can be served."""
    if capacity.rate is not None and rate == capacity.rate:
        return "limit"
    above = [run.rate for run in capacity.runs if capacity.knee and capacity.knee < run.rate < inf]
    return "knee" if above and rate == min(above) else None


def answer(question: Question, on_run: OnRun | None = None) -> Plan:
    """Raises UsageError and what `servetwin run` ends with; a configuration that does not fit is a row of its own."""
    rows = [_row(question, settings, spec, on_run) for settings, spec in question.specs()]
    good = [row for row in rows if row.is_feasible]
    by_price = all(row.cost is not None and row.cost.usd_per_hour is not None for row in good)
    best = max(good, key=lambda row: row.merit(by_price=by_price), default=None)
    if all(row.capacity is None for row in rows):
        raise InfeasibleError("; ".join(dict.fromkeys(str(row.problem) for row in rows)))
    error: float | None = None
    between: tuple[float | None, float | None] = (None, None)
    simulations, assumed = 0, tuple[str, ...]()
    if best is not None:
        assert best.capacity is not None
        prepared = prepare(best.capacity.spec)
        error = question.step_time_error or step_time_error(prepared.engine.described)
        assumed = prepared.engine.assumed
        if error is not None and question.target_rate is None:
            counted = _Counted(on_run)
            between = (
                slower(best.capacity, 1 + error, question.effort, counted),
                slower(best.capacity, 1 - error, question.effort, counted),
            )
            simulations = counted.count
    return Plan(question, tuple(rows), best, by_price, error, between, simulations, assumed)


class _Counted:
    """Passes on what is told, and counts it."""

    def __init__(self, told: OnRun | None) -> None:
        self._told = told
        self.count = 0

    def __call__(self, spec: RunSpec, run: Measured) -> None:
        self.count += 1
        if self._told is not None:
            self._told(spec, run)


def _row(question: Question, settings: dict[str, Any], spec: RunSpec, on_run: OnRun | None) -> Row:
    try:
        if question.target_rate is None:
            capacity = largest_load(spec, question.slo, question.effort, on_run)
        else:
            capacity = fewest_replicas(
                spec, question.slo, question.target_rate, question.effort, question.replicas_at_most, on_run
            )
    except InfeasibleError as e:
        return Row(settings, None, str(e), None, "", ())
    cost = capacity.cost(price_of(question.prices, spec["gpu"]))
    line, unsaid = serve_line(capacity.spec, capacity.runs[0].config.engine, question.vllm_args)
    return Row(settings, capacity, None, cost, line, unsaid)


def plan_of(
    spec: RunSpec,
    *,
    ttft: float | None = None,
    tpot: float | None = None,
    e2e: float | None = None,
    percentile: float = 99.0,
    attainment: float | None = None,
    target_rate: float | None = None,
    replicas_at_most: int = REPLICAS_AT_MOST,
    vary: Mapping[str, Sequence[Any] | str] | None = None,
    prices: Prices | None = None,
    seeds: int | None = None,
    tolerance: float = 0.01,
    max_simulations: int | None = None,
    step_time_error: float | None = None,
    on_run: OnRun | None = None,
) -> Plan:
    """The command line's question about a spec.

    Limits in ms, `prices` in USD per GPU and hour by card (`ANY_CARD`: for every one), `step_time_error` relative.
    `on_run` is told of every run. Raises UsageError, and what a run ends with; what is not feasible is an answer, whose
    `best` is None.
    """
    slo = Slo(ttft_ms=ttft, tpot_ms=tpot, e2e_ms=e2e, percentile=percentile, attainment=attainment)
    question = Question(
        spec=spec,
        slo=slo,
        vary=choices_of(parameters_of(vary or {})),
        target_rate=target_rate,
        replicas_at_most=replicas_at_most,
        prices=read_prices(f"{name}={usd}" if name else f"{usd}" for name, usd in (prices or {}).items()),
        effort=Effort(seeds, tolerance, max_simulations),
        step_time_error=step_time_error,
    )
    return answer(question, on_run)


QUESTION = frozenset(inspect.signature(plan_of).parameters) - {"spec"}


def plan(workload: str | Path | None = None, **given: Any) -> Plan:
    """`servetwin plan` from Python: the arguments of `plan_of`, and the flags of `run` as keywords.

    `plan("chat", executor="constant", step_time_s=0.02, max_num_seqs=64, ttft=500)`. `.to_json()` of the result is what
    the command prints, `.configurations` and `.probes` are pandas frames.
    """
    question = {name: value for name, value in given.items() if name in QUESTION}
    flags = {name: value for name, value in given.items() if name not in QUESTION}
    return plan_of(RunSpec.from_fields(workload, **flags), **question)


def choices_of(parameters: Sequence[Parameter]) -> dict[str, tuple[Any, ...]]:
    """Field -> values. Raises UsageError for a range, from which nothing is drawn here."""
    for one in (p for p in parameters if not isinstance(p, Choice)):
        raise UsageError(
            f"--vary {one.name}: give its values, separated by commas; plan draws none from a range"
        )
    return {p.name: p.values for p in parameters if isinstance(p, Choice)}
