"""One simulated run of several replicas behind a front door, joined by one SimPy environment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import simpy

from servetwin.sim.arrivals import Arrivals
from servetwin.sim.cluster.autoscaler import Autoscaler
from servetwin.sim.cluster.build import DriverFactory, ReplicaParts, timer_for_each
from servetwin.sim.cluster.config import DEFAULT_ROUTER, ClusterConfig
from servetwin.sim.cluster.failures import Failures
from servetwin.sim.cluster.front_door import FrontDoor
from servetwin.sim.cluster.hand_over import HandOver
from servetwin.sim.cluster.prefill_log import PrefillLog
from servetwin.sim.cluster.replica import Replica, Role, State
from servetwin.sim.cluster.router import load_router
from servetwin.sim.config import EngineConfig, RunConfig
from servetwin.sim.events import EventLog, Sink
from servetwin.sim.leaping_process import OnProgress
from servetwin.sim.progress_guard import StalledError
from servetwin.sim.token_source import TokenSource
from servetwin.workloads.spec import RequestSpec, Workload

__all__ = ["ReplicaParts", "simulate_cluster", "timer_for_each"]


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
    cluster, env = config.cluster, simpy.Environment(0)
    each = _parts_of_each(parts, cluster.most_replicas)
    roles = _roles(cluster)
    kinds = [PrefillLog if role is Role.PREFILL else EventLog for role in roles]
    logs = [
        kind(sink, log_blocks=log_blocks, save_tokens=save_tokens, replica=index)
        for index, kind in enumerate(kinds)
    ]
    for log in logs:
        if rows_per_part is not None:
            log.flush_at_rows(rows_per_part)
        if on_log is not None:
            on_log(log)
    end = _End(on_progress)
    drivers = DriverFactory(
        env,
        config,
        tokens,
        cache_resets_ns=sorted(cache_resets_ns),
        log_blocks=log_blocks,
        leaps=leaps,
        plans=plans or save_tokens,
        on_progress=end.progress,
    )
    door = _front_door(env, config, workload, tokens, max_concurrency, on_request)
    door.replicas = [
        Replica(
            index,
            _kv_tokens(each[index].engine),
            partial(drivers.build, each[index]),
            logs[index],
            door.ended,
            lambda: door.is_over,
            role,
        )
        for index, role in enumerate(roles)
    ]
    try:
        _start(env, cluster, door)
        env.run()
        _check_ended(door)
    finally:
        now = int(env.now) if door.in_flight else end.time_ns
        for replica in door.replicas:
            if replica.driver is not None:
                replica.driver.settle()
        for log in logs:
            log.close(now)
    return end.time_ns


def _parts_of_each(parts: ReplicaParts | Sequence[ReplicaParts], count: int) -> Sequence[ReplicaParts]:
    each = [parts] * count if isinstance(parts, ReplicaParts) else [*parts]
    if len(each) != count:
        raise ValueError(f"parts of {len(each)} replicas were given; the cluster may have {count}")
    return each


def _front_door(
    env: simpy.Environment,
    config: RunConfig,
    workload: Workload,
    tokens: TokenSource,
    max_concurrency: int | None,
    on_request: Callable[[RequestSpec], None] | None,
) -> FrontDoor:
    cluster, seed = config.cluster, config.seed
    name = cluster.router or DEFAULT_ROUTER
    door = FrontDoor(
        env,
        Arrivals(workload, max_concurrency),
        load_router(name, seed),
        tokens=tokens,
        reacts=max_concurrency is not None or not getattr(workload, "open_loop", False),
        max_queued=cluster.max_queued_requests,
        on_request=on_request,
    )
    if (split := cluster.disaggregation) is not None:
        door.hand_over = HandOver(env, door, load_router(name, seed + 1), split, cluster.on_failure)
    return door


def _start(env: simpy.Environment, cluster: ClusterConfig, door: FrontDoor) -> None:
    """The first replicas are there, and the client begins."""
    failures = Failures(env, door, cluster.failures, cluster.on_failure)
    for replica in door.replicas[: cluster.replicas]:
        replica.state = State.READY
        if cluster.most_replicas > 1:
            replica.log.replica_changed("replica_ready", 0)
        replica.boot(failures.next_of(replica.index))
    if cluster.autoscale is not None:
        Autoscaler(env, door, failures, cluster.autoscale)
    door.opened()


def _check_ended(door: FrontDoor) -> None:
    """Raises StalledError when something is left that nothing will ever happen to."""
    if door.is_over:
        return
    for replica in door.replicas:
        if replica.driver is not None and replica.driver.stuck is not None:
            raise replica.driver.stalled()
    raise StalledError(f"{len(door.in_flight)} requests wait for replicas that will never be there")


class _End:
    """When the last step ended."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self.time_ns = 0
        self._on_progress = on_progress

    def progress(self, num_steps: int, num_ended: int, now_ns: int) -> None:
        """Passes it on."""
        self.time_ns = max(self.time_ns, now_ns)
        if self._on_progress is not None:
            self._on_progress(num_steps, num_ended, now_ns)


def _roles(cluster: ClusterConfig) -> list[Role]:
    """Of every replica that there can be."""
    split = cluster.disaggregation
    if split is None:
        return [Role.ALL] * cluster.most_replicas
    return [Role.PREFILL] * split.prefill_replicas + [Role.DECODE] * split.decode_replicas


def _kv_tokens(engine: EngineConfig) -> int:
    return engine.cache.usable_blocks * engine.cache.block_size
