"""Random clusters: the engines and workloads of `leaping_strategies.py`, and what may happen to replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from leaping_strategies import Case, UnevenModel, cases

from servetwin.sim.cluster.config import Autoscale, ClusterConfig, Disaggregation, Failure
from servetwin.sim.cluster.fleet import ReplicaParts, simulate_cluster
from servetwin.sim.config import RunConfig
from servetwin.sim.events import MemorySink
from servetwin.sim.progress_guard import StalledError
from servetwin.sim.steptime.modelled import ConstantStepModel, ModelledStepTimer
from servetwin.sim.token_source import TokenSource
from servetwin.sim.units import NS_PER_S
from servetwin.workloads import ClosedLoop, ListWorkload

Draw = st.DrawFn
ROUTERS = (
    "random",
    "round_robin",
    "least_requests",
    "least_tokens",
    "power_of_two",
    "prefix_affinity",
    "session",
)


@dataclass(frozen=True)
class ClusterCase:
    """One simulation of several replicas."""

    case: Case
    cluster: ClusterConfig
    closed_loop: bool = False
    seed: int = 0

    def run(self, **how: bool) -> tuple[MemorySink, str | None]:
        """The log, and what the run ended with if it did not end well; `how` as for `simulate_cluster`."""
        case, tokens, sink = self.case, TokenSource(50), MemorySink()
        timer = ModelledStepTimer(case.model, tokens, "model")
        timer.overlaps_preparation = case.turnaround_ns == 0
        timer.turnaround_ns = case.turnaround_ns
        workload = ClosedLoop(case.requests) if self.closed_loop else ListWorkload(case.requests)
        try:
            simulate_cluster(
                RunConfig(engine=case.engine, executor="model", cluster=self.cluster, seed=self.seed),
                workload,
                ReplicaParts(case.engine, timer.another, case.host),
                sink,
                tokens=tokens,
                log_blocks=case.log_blocks,
                rows_per_part=case.rows_per_part,
                cache_resets_ns=case.cache_resets_ns,
                max_concurrency=case.max_concurrency,
                **how,
            )
        except StalledError as e:
            return sink, str(e)
        return sink, None


@st.composite
def cluster_cases(draw: Draw, **fixed: Any) -> ClusterCase:
    """Up to 25 requests on one to four replicas, of which some fail, come and go, or compute only prompts."""
    case = draw(cases())
    tick_s = draw(st.sampled_from([1e-9, 1e-6, 1e-3]))
    fields: dict[str, Any] = {
        "replicas": draw(st.integers(1, 4)),
        "router": draw(st.sampled_from(ROUTERS)),
        "max_queued_requests": draw(st.none() | st.none() | st.integers(1, 4)),
        "on_failure": draw(st.sampled_from(["lost", "retry", "reroute"])),
    }
    kind = draw(st.sampled_from(["plain", "plain", "scaled", "split"]))
    if kind == "scaled":
        most = fields["replicas"] + draw(st.integers(0, 2))
        # Not millions of looks at the signal.
        scale_tick_s = max(tick_s, _about_s(case) / 10_000)
        fields["autoscale"] = _autoscale(draw, scale_tick_s, fields["replicas"], most)
    if kind == "split":
        fields["disaggregation"], fields["replicas"] = _disaggregation(draw, tick_s)
        fields["on_failure"] = draw(st.sampled_from(["lost", "reroute"]))
    most = fields["replicas"] if kind != "scaled" else fields["autoscale"].max_replicas
    fields["failures"] = _failures(draw, tick_s, most)
    closed = draw(st.booleans())
    if closed:
        case = replace(case, requests=[replace(r, think_time_s=0.0) for r in case.requests])
    return ClusterCase(case, ClusterConfig(**fields | fixed), closed, draw(st.integers(0, 3)))


def _about_s(case: Case) -> float:
    """How long it may go on: its last arrival or reset, then one step after the other."""
    even = case.model.even if isinstance(case.model, UnevenModel) else case.model
    step_ns = even.step_ns if isinstance(even, ConstantStepModel) else getattr(even, "base_ns", 1)
    tokens = sum(request.output_tokens + 1 for request in case.requests)
    last_s = max(request.arrival_s for request in case.requests)
    return last_s + (max([0, *case.cache_resets_ns]) + tokens * step_ns) / NS_PER_S


def _autoscale(draw: Draw, tick_s: float, replicas: int, most: int) -> Autoscale:
    up = draw(st.sampled_from([0.3, 1.0, 3.0]))
    return Autoscale(
        signal=draw(st.sampled_from(["queue", "kv", "rate"])),
        scale_up_at=up,
        scale_down_at=draw(st.sampled_from([0.0, 0.1, 0.9])) * up,
        min_replicas=draw(st.integers(1, replicas)),
        max_replicas=most,
        interval_s=tick_s * draw(st.sampled_from([3, 10])),
        startup_delay_s=tick_s * draw(st.sampled_from([0, 2, 15])),
        cooldown_s=tick_s * draw(st.sampled_from([0, 7])),
    )


def _disaggregation(draw: Draw, tick_s: float) -> tuple[Disaggregation, int]:
    prefill, decode = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    split = Disaggregation(
        prefill_replicas=prefill,
        decode_replicas=decode,
        kv_transfer_bandwidth=draw(st.sampled_from([None, 10 / tick_s])),
        kv_transfer_latency_s=tick_s * draw(st.sampled_from([0, 1, 5])),
        kv_bytes_per_token=4,
    )
    return split, prefill + decode


def _failures(draw: Draw, tick_s: float, most: int) -> tuple[Failure, ...]:
    failures = []
    for replica in draw(st.lists(st.integers(0, most - 1), max_size=2, unique=True)):
        begin = draw(st.integers(0, 60))
        end = begin + draw(st.integers(1, 40))
        failures.append(Failure(replica=replica, from_s=begin * tick_s, to_s=end * tick_s))
    return tuple(failures)
