"""Capacity of one configuration: the largest load it serves well, or how many replicas a load needs.

Every question begins with all requests at once: what is served then is the knee, the load from which on the queue grows
without bound, and the first guess of the search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Any

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.planning.pressure import binding
from servetwin.sim.planning.prices import Cost
from servetwin.sim.planning.probing import Measured, Prober, replicas_of
from servetwin.sim.planning.search import Limit, Point, find_limit
from servetwin.sim.planning.slo import Slo
from servetwin.sim.planning.spec import RunSpec

NEAREST = 3
"""The nearest feasible load is looked for with so many times the tolerance."""
FIRST_PART = 0.9
"""Of the knee: where the search begins."""
ENOUGH_TURNOVERS = 8
"""Requests, for each that runs at once when all come together: fewer are over before the engine is steady."""
MOST_DRAWN = 20_000
"""Requests that are drawn at most where their number is not given."""
ONE_DRAW, FURTHER_DRAW = 14, 5
IDLE_PART = 0.02
"""Of the knee: the load at which a limit that is missed can be met by no number of replicas."""
OnRun = Callable[[RunSpec, Measured], None]


@dataclass(frozen=True)
class Effort:
    """How much is simulated for one configuration."""

    seeds: int | None = None
    """Draws of the workload (None: 3, or 1 where a seed changes nothing)."""
    tolerance: float = 0.01
    max_simulations: int | None = None
    """Runs for one configuration (None: ONE_DRAW with one seed, FURTHER_DRAW more for each further one)."""

    def budget(self, seeds: int) -> int:
        """Runs for a search with so many seeds."""
        if self.max_simulations is not None:
            return self.max_simulations
        return ONE_DRAW + FURTHER_DRAW * (seeds - 1)


@dataclass(frozen=True)
class Capacity:
    """What was found of one configuration."""

    spec: RunSpec
    """As it was simulated, number of requests and of replicas included."""
    slo: Slo
    rate: float | None
    """The largest good rate that was tried (with a target: the target); None: there is none."""
    replicas: int
    knee: float | None
    """Requests/s that are served when all come at once; None: they never had to queue."""
    limit: Limit | None
    """Of the search; with a target only where that is not feasible, for the nearest load that is."""
    at_limit: Measured | None
    """A run at the rate."""
    beyond: Measured | None
    """A run at the lowest bad rate above it."""
    runs: tuple[Measured, ...]
    binding: str
    reason: str
    """Why it is that, in a sentence."""
    notes: tuple[str, ...]
    simulations: int

    @property
    def is_feasible(self) -> bool:
        return self.rate is not None

    @property
    def headroom(self) -> float | None:
        """How much more load there could be until the queue grows without bound, as a part of the load."""
        return None if self.rate is None or self.knee is None else max(self.knee / self.rate - 1, 0.0)

    @property
    def gpus(self) -> float:
        """On the average over the run at the limit, where replicas come and go."""
        replicas = self.replicas if self.at_limit is None else self.at_limit.mean_replicas
        return replicas * int(self.spec["tensor_parallel_size"])

    def cost(self, price: float | None) -> Cost | None:
        run = self.at_limit
        if run is None or self.rate is None:
            return None
        return Cost(self.gpus, price, run.output_tokens_per_s, run.total_tokens_per_s, self.rate)


def largest_load(spec: RunSpec, slo: Slo, effort: Effort, on_run: OnRun | None = None) -> Capacity:
    """The largest rate at which `spec` keeps `slo`."""
    prober, saturated, notes = _saturated(spec, slo, on_run)
    seeds = _seeds(prober, effort)
    knee = saturated.steady.saturated_rate
    limit = find_limit(
        prober,
        FIRST_PART * (knee or _rate_of(saturated)),
        ceiling=knee,
        tolerance=effort.tolerance,
        seeds=seeds,
        # One is kept for a look below the knee.
        max_probes=max(effort.budget(len(seeds)) - prober.simulations - 1, 2),
    )
    if knee is not None:
        limit = _below_the_knee(prober, limit, knee, effort.tolerance)
    if limit.rate is not None and knee is not None and limit.rate > knee * (1 + effort.tolerance):
        notes += (
            f"all at once {knee:.4g} requests/s are served, which is less than at the limit: the engine loses "
            "throughput when it is overloaded",
        )
        knee = limit.rate
    at_limit = None if limit.rate is None else prober.at(limit.rate)
    beyond = _beyond(prober, limit)
    name, reason = _binding(at_limit, beyond, saturated)
    return Capacity(
        spec=prober.spec,
        slo=slo,
        rate=limit.rate,
        replicas=replicas_of(saturated.config),
        knee=knee,
        limit=limit,
        at_limit=at_limit,
        beyond=beyond,
        runs=tuple(prober.all()),
        binding=name,
        reason=reason,
        notes=notes,
        simulations=prober.simulations,
    )


def _below_the_knee(prober: Prober, limit: Limit, knee: float, tolerance: float) -> Limit:
    """One just below the knee for a rate just beyond it, good only as the run ends before its queue has grown."""
    if limit.rate is None or not knee <= limit.rate <= knee * (1 + tolerance):
        return limit
    rates = [p.rate for p in limit.points if p.is_good and knee * (1 - tolerance / 4) <= p.rate < knee]
    if rates:
        return replace(limit, rate=max(rates))
    below = Point(knee * (1 - tolerance / 10))
    below.outcomes[prober.seed] = prober(below.rate, prober.seed)
    if not below.is_good:
        return limit
    points = sorted((*limit.points, below), key=lambda point: point.rate)
    return replace(limit, rate=below.rate, points=tuple(points))


def fewest_replicas(
    spec: RunSpec, slo: Slo, target: float, effort: Effort, at_most: int, on_run: OnRun | None = None
) -> Capacity:
    """The fewest replicas that keep `slo` at `target` requests/s. Raises UsageError where they cannot be counted."""
    return _ReplicaSearch(spec, slo, target, effort, at_most, on_run).run()


@dataclass
class _ReplicaSearch:
    spec: RunSpec
    slo: Slo
    target: float
    effort: Effort
    at_most: int
    on_run: OnRun | None
    probers: dict[int, Prober] = field(default_factory=dict)
    tried: dict[int, Point] = field(default_factory=dict)

    def run(self) -> Capacity:
        single, saturated, notes = _saturated(self._with(1), self.slo, self.on_run)
        self.probers[1] = single
        knee = saturated.steady.saturated_rate or _rate_of(saturated)
        fewest = max(ceil(self.target / (knee * 1.05)), 1)
        self.spec, more = _with_enough(self.spec, single, saturated, fewest)
        notes = more or notes
        found = None if self._is_hopeless(single, knee) else self._search(fewest, knee)
        if found is None:
            return self._none(single, saturated, notes)
        prober = self.probers[found]
        all_at_once = saturated if found == 1 else prober.at(inf)
        at_target = prober.at(self.target)
        below = self.probers[found - 1].at(self.target) if found - 1 in self.tried else None
        at_once = all_at_once.steady.saturated_rate
        name, reason = _binding(at_target, below, all_at_once)
        return Capacity(
            spec=prober.spec,
            slo=self.slo,
            rate=self.target,
            replicas=found,
            knee=at_once if at_once is not None and at_once >= self.target else None,
            limit=None,
            at_limit=at_target,
            beyond=below,
            runs=tuple(run for n in sorted(self.probers) for run in self.probers[n].all()),
            binding=name,
            reason=reason,
            notes=notes,
            simulations=self._simulations(),
        )

    def _search(self, fewest: int, knee: float) -> int | None:
        """Gallop upwards from what the knee asks for, then halve; every number below the answer is bad or untried."""
        n = min(max(ceil(self.target / (knee * FIRST_PART)), fewest), self.at_most)
        bad = fewest - 1
        step = 1
        while not self._is_good(n):
            bad = max(bad, n)
            if n >= self.at_most:
                return None
            n, step = min(n + step, self.at_most), step * 2
        while n - bad > 1:
            # Most often the first guess is right, or one too many.
            middle = n - 1 if n - bad <= 3 else (n + bad) // 2
            n, bad = (middle, bad) if self._is_good(middle) else (n, middle)
        return n

    def _is_good(self, replicas: int) -> bool:
        prober = self._prober(replicas)
        point = self.tried.setdefault(replicas, Point(self.target))
        for seed in _seeds(prober, self.effort):
            point.outcomes[seed] = prober(self.target, seed)
            if len(point.outcomes) == 1 and point.is_clear:
                break
        return point.is_good

    def _is_hopeless(self, single: Prober, knee: float) -> bool:
        """A nearly idle engine misses the limits: more of them are no faster."""
        return bool(self.slo.limits_ms) and not single(knee * IDLE_PART, single.seed).margin >= 0

    def _none(self, single: Prober, saturated: Measured, notes: tuple[str, ...]) -> Capacity:
        most = max(self.tried, default=1)
        limit = None if most not in self.tried else self._what_so_many_serve(most, saturated)
        runs = tuple(run for n in sorted(self.probers) for run in self.probers[n].all())
        worst = self.probers[most].at(self.target) if most in self.tried else single.all()[0]
        name, reason = _binding(None, worst, saturated)
        return Capacity(
            spec=self.spec,
            slo=self.slo,
            rate=None,
            replicas=most,
            knee=saturated.steady.saturated_rate,
            limit=limit,
            at_limit=None,
            beyond=worst,
            runs=runs,
            binding=name,
            reason=reason,
            notes=notes,
            simulations=self._simulations(),
        )

    def _what_so_many_serve(self, replicas: int, saturated: Measured) -> Limit:
        """The nearest load that is feasible."""
        knee = replicas * (saturated.steady.saturated_rate or _rate_of(saturated))
        prober = self._prober(replicas)
        return find_limit(
            prober,
            FIRST_PART * min(knee, self.target),
            ceiling=self.target,
            tolerance=NEAREST * self.effort.tolerance,
            seeds=[prober.seed],
            max_probes=self.effort.budget(1),
            look_beyond=False,
        )

    def _prober(self, replicas: int) -> Prober:
        if replicas not in self.probers:
            spec = self._with(replicas)
            self.probers[replicas] = Prober(spec, self.slo, on_run=_told(self.on_run, spec))
        return self.probers[replicas]

    def _with(self, replicas: int) -> RunSpec:
        return self.spec.with_(replicas=replicas)

    def _simulations(self) -> int:
        return sum(prober.simulations for prober in self.probers.values())


def _saturated(spec: RunSpec, slo: Slo, on_run: OnRun | None) -> tuple[Prober, Measured, tuple[str, ...]]:
    """All requests at once, and enough of them where their number is ours to choose."""
    prober = Prober(spec, slo, on_run=_told(on_run, spec))
    run = prober.at(inf)
    grown, notes = _with_enough(spec, prober, run, 1)
    if grown is spec:
        return prober, run, notes
    larger = Prober(grown, slo, on_run=_told(on_run, grown))
    larger.simulations = prober.simulations
    return larger, larger.at(inf), notes


def _with_enough(
    spec: RunSpec, prober: Prober, all_at_once: Measured, replicas: int
) -> tuple[RunSpec, tuple[str, ...]]:
    """The spec with enough requests for a steady state of so many replicas, or a note that they are few.

    `prober`, `all_at_once`: of the spec, whose engines count as one of the replicas.
    """
    at_once, there = all_at_once.peak_running * replicas, prober.load(prober.seed).requests
    needed = min(ENOUGH_TURNOVERS * at_once, MOST_DRAWN)
    if needed <= there:
        return spec, ()
    if spec["num_prompts"] is None and prober.is_drawn():
        said = f"{needed:,} requests are drawn (--num-prompts): up to {at_once:,} run at once"
        return spec.with_(num_prompts=needed), (said,)
    few = f"{there:,} requests are few where up to {at_once:,} run at once: {needed:,} or more"
    return spec, (f"{few} (--num-prompts, a longer trace) would show a steady state",)


def _told(on_run: OnRun | None, spec: RunSpec) -> Callable[[Measured], None] | None:
    return None if on_run is None else lambda run: on_run(spec, run)


def _seeds(prober: Prober, effort: Effort) -> Sequence[int]:
    if effort.seeds is not None and effort.seeds < 1:
        raise UsageError(f"--seeds {effort.seeds}: must be at least 1")
    count = effort.seeds
    if count is None:
        count = 3 if prober.is_drawn() else 1
    return range(prober.seed, prober.seed + count)


def _rate_of(run: Measured) -> float:
    """Requests/s over a whole run in which nobody waited."""
    return run.counts["completed"] / max(run.end_s, 1e-9)


def _beyond(prober: Prober, limit: Limit) -> Measured | None:
    """The run at the lowest bad rate above the limit, the lowest of all where nothing is good."""
    bad = [p for p in limit.points if not p.is_good and (limit.rate is None or p.rate > limit.rate)]
    if not bad:
        return None
    seed = next(iter(bad[0].outcomes))
    return prober.at(bad[0].rate, seed)


def _binding(at_limit: Measured | None, beyond: Measured | None, saturated: Measured) -> tuple[str, str]:
    """Of the run that misses its limits first; of all at once where none does."""
    run = beyond if beyond is not None else (at_limit or saturated)
    missed = run.missed
    # Where the queue grows it says best what for when all are in it.
    found = saturated.pressure if missed is None else run.pressure
    # An engine that is always full does not say what a fuller step would take; another run may.
    elasticity: dict[str, float] = {}
    for one in (at_limit, beyond, saturated):
        elasticity |= {} if one is None else one.pressure.elasticity
    return binding(found, missed, elasticity | found.elasticity)


def nearest(capacity: Capacity) -> dict[str, Any]:
    """Of what is not feasible, the run that comes nearest.

    It keeps the limits at a smaller load, with as many replicas as there may be; or, where no load keeps them, it says
    what the limits would have to be.
    """
    limit = capacity.limit
    runs = [r for r in capacity.runs if r.rate != inf]
    if limit is not None and limit.rate is not None:
        runs = [r for r in runs if r.rate == limit.rate and replicas_of(r.config) == capacity.replicas]
    run = max(runs, key=lambda r: r.outcome.margin)
    values = {name: v for name, v in run.values.items() if name in capacity.slo.limits_ms}
    return {
        "rate": run.rate,
        "replicas": replicas_of(run.config),
        "good": run.outcome.margin >= 0,
        **{f"{name}_ms": v if v is not None and v < inf else None for name, v in values.items()},
        "attained": run.attained,
    }


def slower(capacity: Capacity, factor: float, effort: Effort, on_run: OnRun | None = None) -> float | None:
    """The largest rate if every step took `factor` times as long.

    A run whose steps take f times as long at the rate r is, second by second, the run at the rate f x r watched in slow
    motion: its latencies are f times those. So the search goes over the same runs, with limits divided by f.
    """
    limits = {f"{name}_ms": limit / factor for name, limit in capacity.slo.limits_ms.items()}
    prober = Prober(capacity.spec, replace(capacity.slo, **limits), on_run=_told(on_run, capacity.spec))
    assert capacity.rate is not None, "there is a limit to be moved"
    limit = find_limit(
        prober,
        capacity.rate,
        ceiling=capacity.knee,
        tolerance=2 * effort.tolerance,
        seeds=range(prober.seed, prober.seed + 1),
        max_probes=effort.budget(1),
        look_beyond=False,
    )
    return None if limit.rate is None else limit.rate / factor
