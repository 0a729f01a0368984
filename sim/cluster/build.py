"""The engines of a cluster: what each is made of, and its driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import simpy

from servetwin.sim.cluster.inbox import Inbox
from servetwin.sim.cluster.replica_driver import LeapingReplica, ReplicaDriver, SteppedReplica
from servetwin.sim.config import EngineConfig, RunConfig
from servetwin.sim.contract import StepTimer
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.events import EventLog
from servetwin.sim.host_model import HostModel, LinearHostModel
from servetwin.sim.leaping_core import LeapingCore
from servetwin.sim.leaping_process import OnProgress
from servetwin.sim.policy import load_policy
from servetwin.sim.simulation import progress_observer, sampling_of, stop_rules_of, why_stepped
from servetwin.sim.steptime.modelled import ModelledStepTimer
from servetwin.sim.token_source import TokenSource


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


@dataclass(frozen=True)
class DriverFactory:
    """Builds the drivers of one run. Fields as the parameters of `simulate_cluster`."""

    env: simpy.Environment
    config: RunConfig
    tokens: TokenSource
    cache_resets_ns: Sequence[int]
    log_blocks: bool
    leaps: bool
    plans: bool
    on_progress: OnProgress

    def build(self, parts: ReplicaParts, inbox: Inbox, log: EventLog) -> ReplicaDriver:
        """A new engine, empty, that goes on writing the log."""
        policy, timer, host = load_policy(parts.engine.scheduler.policy), parts.timer(), parts.host
        now = int(self.env.now)
        common: dict[str, Any] = {
            "tokens": self.tokens,
            "cache_resets_ns": [ns for ns in self.cache_resets_ns if ns >= now],
        }
        if not self.plans and why_stepped(parts.engine, policy, timer, host) is None:
            core = LeapingCore(parts.engine, policy, tokens=self.tokens, journal=self.log_blocks)
            core.number_from(log.num_steps)
            return LeapingReplica(
                self.env,
                core,
                cast(ModelledStepTimer, timer),
                inbox,
                log,
                sampling=stop_rules_of(self.config),
                host=cast(LinearHostModel | None, host),
                on_progress=self.on_progress,
                leaps=self.leaps,
                **common,
            )
        stepped = EngineCore(parts.engine, policy, plan_tokens=False, journal=self.log_blocks)
        stepped.number_from(log.num_steps)
        return SteppedReplica(
            self.env,
            stepped,
            timer,
            inbox,
            log,
            sampling=sampling_of(self.config),
            host=host,
            on_step=progress_observer(self.on_progress, self.env),
            **common,
        )
