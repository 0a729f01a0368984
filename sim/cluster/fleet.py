"""One simulated run of several replicas behind a front door, joined by one SimPy environment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import simpy

from servetwin.sim.arrivals import Arrivals
from servetwin.sim.cluster.autoscaler import Autoscaler
from servetwin.sim.cluster.config import DEFAULT_ROUTER, ClusterConfig
from servetwin.sim.cluster.failures import Failures
from servetwin.sim.cluster.front_door import FrontDoor
from servetwin.sim.cluster.hand_over import HandOver
from servetwin.sim.cluster.inbox import Inbox
from servetwin.sim.cluster.prefill_log import PrefillLog
from servetwin.sim.cluster.replica import Replica, Role, State
from servetwin.sim.cluster.replica_driver import LeapingReplica, ReplicaDriver, SteppedReplica
from servetwin.sim.cluster.router import load_router
from servetwin.sim.config import EngineConfig, RunConfig
from servetwin.sim.contract import StepTimer
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.events import EventLog, Sink
from servetwin.sim.host_model import HostModel, LinearHostModel
from servetwin.sim.leaping_core import LeapingCore
from servetwin.sim.leaping_process import OnProgress
from servetwin.sim.policy import load_policy
from servetwin.sim.progress_guard import StalledError
from servetwin.sim.simulation import progress_observer, sampling_of, stop_rules_of, why_stepped
from servetwin.sim.steptime.modelled import ModelledStepTimer
from servetwin.sim.token_source import TokenSource
from servetwin.workloads.spec import RequestSpec, Workload


@dataclass(frozen=True)
class ReplicaParts:
    """What one replica is made of."""

    engine: EngineConfig
    timer: Callable[[], StepTimer]
    """A timer of its own: one that reads plans goes from plan to plan."""
    host: HostModel | None = None


def timer_for_each(timer: StepTimer) -> Callable[[], StepTimer]:
    """Timers like this one. Raises ValueError where its steps are run, and not modelled."""
    if type(timer) is not ModelledStepTimer:
        raise ValueError(
            "several replicas need modelled step times: one model, or one recording, is one engine"
        )
    return timer.another


def simulate_cluster(
    config: RunConfig,
    workload: Workload,
    parts: ReplicaParts | Sequence[ReplicaParts],
    sink: Sink,
    *,
    tokens: TokenSource,
    log_blocks: bool = True,
    save_tokens: bool = False,
    rows_per_part: int | None = None,
    on_request: Callable[[RequestSpec], None] | None = None,
    cache_resets_ns: Iterable[int] = (),
    max_concurrency: int | None = None,
    leaps: bool = True,
    plans: bool = False,
    on_progress: OnProgress | None = None,
    on_log: Callable[[EventLog], object] | None = None,
) -> int:
    """Serves `workload` to its end; returns the end in simulated ns. Keywords as for `simulation.simulate`.

    `config.cluster` says how many replicas there are and who gets which request; each is built from `parts`, or from
    its own of them (they may be different cards). All logs go to `sink`, each with its replica; `on_log` is told of
    each at the start. The same seed gives the same run.
    """
    fleet = _Fleet(config, workload, parts, sink, log_blocks, save_tokens, rows_per_part)
    if on_log is not None:
        for log in fleet.logs:
            on_log(log)
    return fleet.run(
        tokens,
        on_request,
        sorted(cache_resets_ns),
        max_concurrency,
        leaps=leaps,
        plans=plans or save_tokens,
        on_progress=on_progress,
    )


class _Fleet:
    def __init__(
        self,
        config: RunConfig,
        workload: Workload,
        parts: ReplicaParts | Sequence[ReplicaParts],
        sink: Sink,
        log_blocks: bool,
        save_tokens: bool,
        rows_per_part: int | None,
    ) -> None:
        self._config, self._cluster, self._workload = config, config.cluster, workload
        count = self._cluster.most_replicas
        self._parts = [parts] * count if isinstance(parts, ReplicaParts) else [*parts]
        if len(self._parts) != count:
            raise ValueError(f"parts of {len(self._parts)} replicas were given; the cluster may have {count}")
        self._env = simpy.Environment(0)
        self._log_blocks = log_blocks
        self.logs = [
            (PrefillLog if role is Role.PREFILL else EventLog)(
                sink, log_blocks=log_blocks, save_tokens=save_tokens, replica=index
            )
            for index, role in enumerate(_roles(self._cluster))
        ]
        for log in self.logs:
            if rows_per_part is not None:
                log.flush_at_rows(rows_per_part)

    def run(
        self,
        tokens: TokenSource,
        on_request: Callable[[RequestSpec], None] | None,
        cache_resets_ns: Sequence[int],
        max_concurrency: int | None,
        *,
        leaps: bool,
        plans: bool,
        on_progress: OnProgress | None,
    ) -> int:
        env, cluster = self._env, self._cluster
        name, seed = cluster.router or DEFAULT_ROUTER, self._config.seed
        arrivals = Arrivals(self._workload, max_concurrency)
        door = FrontDoor(
            env,
            arrivals,
            load_router(name, seed),
            tokens=tokens,
            reacts=max_concurrency is not None or not getattr(self._workload, "open_loop", False),
            max_queued=cluster.max_queued_requests,
            on_request=on_request,
        )
        if cluster.disaggregation is not None:
            router = load_router(name, seed + 1)
            door.hand_over = HandOver(env, door, router, cluster.disaggregation, cluster.on_failure)
        failures = Failures(env, door, cluster.failures, cluster.on_failure)
        end = _End()

        def progress(num_steps: int, num_ended: int, now_ns: int) -> None:
            end.time_ns = max(end.time_ns, now_ns)
            if on_progress is not None:
                on_progress(num_steps, num_ended, now_ns)

        def build_at(index: int) -> Callable[[Inbox, EventLog], ReplicaDriver]:
            def build(inbox: Inbox, log: EventLog) -> ReplicaDriver:
                now = int(env.now)
                resets = [ns for ns in cache_resets_ns if ns >= now]
                return self._driver(index, inbox, log, tokens, resets, leaps, plans, progress)

            return build

        door.replicas = [
            Replica(
                index,
                _kv_tokens(self._parts[index].engine),
                build_at(index),
                self.logs[index],
                door.ended,
                lambda: door.is_over,
                role,
            )
            for index, role in enumerate(_roles(cluster))
        ]
        try:
            self._start(door, failures)
            env.run()
            self._check_ended(door)
        finally:
            now = int(env.now) if door.in_flight else end.time_ns
            for replica in door.replicas:
                if replica.driver is not None:
                    replica.driver.settle()
            for log in self.logs:
                log.close(now)
        return end.time_ns

    def _start(self, door: FrontDoor, failures: Failures) -> None:
        cluster = self._cluster
        for replica in door.replicas[: cluster.replicas]:
            replica.state = State.READY
            if cluster.most_replicas > 1:
                replica.log.replica_changed("replica_ready", 0)
            replica.boot(failures.next_of(replica.index))
        if cluster.autoscale is not None:
            Autoscaler(self._env, door, failures, cluster.autoscale)
        door.opened()

    def _driver(
        self,
        index: int,
        inbox: Inbox,
        log: EventLog,
        tokens: TokenSource,
        cache_resets_ns: Sequence[int],
        leaps: bool,
        plans: bool,
        on_progress: OnProgress,
    ) -> ReplicaDriver:
        parts = self._parts[index]
        policy, timer, host = load_policy(parts.engine.scheduler.policy), parts.timer(), parts.host
        common: dict[str, Any] = {"tokens": tokens, "cache_resets_ns": cache_resets_ns}
        driver: ReplicaDriver
        if not plans and why_stepped(parts.engine, policy, timer, host) is None:
            core = LeapingCore(parts.engine, policy, tokens=tokens, journal=self._log_blocks)
            core.number_from(log.num_steps)
            driver = LeapingReplica(
                self._env,
                core,
                cast(ModelledStepTimer, timer),
                inbox,
                log,
                sampling=stop_rules_of(self._config),
                host=cast(LinearHostModel | None, host),
                on_progress=on_progress,
                leaps=leaps,
                **common,
            )
        else:
            stepped = EngineCore(parts.engine, policy, plan_tokens=False, journal=self._log_blocks)
            stepped.number_from(log.num_steps)
            driver = SteppedReplica(
                self._env,
                stepped,
                timer,
                inbox,
                log,
                sampling=sampling_of(self._config),
                host=host,
                on_step=progress_observer(on_progress, self._env),
                **common,
            )
        return driver

    def _check_ended(self, door: FrontDoor) -> None:
        """Raises StalledError when something is left that nothing will ever happen to."""
        if door.is_over:
            return
        for replica in door.replicas:
            if replica.driver is not None and replica.driver.stuck is not None:
                raise replica.driver.stalled()
        raise StalledError(f"{len(door.in_flight)} requests wait for replicas that will never be there")


@dataclass
class _End:
    """When the last step ended."""

    time_ns: int = 0


def _roles(cluster: ClusterConfig) -> list[Role]:
    """Of every replica that there can be."""
    split = cluster.disaggregation
    if split is None:
        return [Role.ALL] * cluster.most_replicas
    return [Role.PREFILL] * split.prefill_replicas + [Role.DECODE] * split.decode_replicas


def _kv_tokens(engine: EngineConfig) -> int:
    return engine.cache.usable_blocks * engine.cache.block_size
