"""One simulated run from its parts: workload, engine core, step timer and log, joined by SimPy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from zlib import crc32

import simpy

from servetwin.sim.config import RunConfig
from servetwin.sim.contract import SamplingParams, StepTimer
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.engine_process import EngineProcess
from servetwin.sim.events import EventLog
from servetwin.sim.host_model import HostModel
from servetwin.sim.policy import SchedulingPolicy
from servetwin.sim.records import StepObserver
from servetwin.sim.token_source import TokenSource
from servetwin.workloads.spec import RequestSpec, Workload


def simulate(
    config: RunConfig,
    workload: Workload,
    timer: StepTimer,
    log: EventLog,
    *,
    tokens: TokenSource,
    plan_tokens: bool,
    log_blocks: bool,
    host: HostModel | None = None,
    on_request: Callable[[RequestSpec], None] | None = None,
    on_step: StepObserver | None = None,
    vocab_size: int | None = None,
    cache_resets_ns: Iterable[int] = (),
    policy: SchedulingPolicy | None = None,
    max_concurrency: int | None = None,
) -> int:
    """Serves `workload` to its end and closes the log, also when it ends early; returns the end in simulated ns.

    `vocab_size`: refuse requests with a token id outside it (None: any id will do).
    `policy`: another than the configuration names. `cache_resets_ns`: when to ask for a prefix-cache reset.
    `max_concurrency`: requests that the client keeps in flight, holding the others back.
    `plan_tokens`: put token ids into the plans (for an executor that needs them, or to save the plans).
    """
    env = simpy.Environment(0)
    engine = EngineProcess(
        env,
        EngineCore(config.engine, policy, plan_tokens=plan_tokens, journal=log_blocks),
        timer,
        workload,
        log,
        tokens=tokens,
        sampling=sampling_of(config),
        host=host,
        on_request=on_request,
        on_step=on_step,
        vocab_size=vocab_size,
        cache_resets_ns=cache_resets_ns,
        max_concurrency=max_concurrency,
    )
    try:
        env.run(until=env.process(engine.run()))
    finally:
        log.close(int(env.now))
    return int(env.now)


def sampling_of(config: RunConfig) -> Callable[[RequestSpec], SamplingParams]:
    """How the requests of a run are sampled: the run's parameters, the request's own stop rules.

    Every request has a random stream of its own, so its tokens do not depend on its neighbours.
    """

    def sampling(spec: RequestSpec) -> SamplingParams:
        ignore_eos = config.ignore_eos if spec.ignore_eos is None else spec.ignore_eos
        extra = () if ignore_eos else config.engine.model.extra_eos_token_ids
        return SamplingParams(
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            seed=crc32(f"sampling|{config.seed}|{spec.request_id}".encode()),
            max_tokens=spec.output_tokens,
            min_tokens=spec.min_tokens,
            stop_token_ids=[*spec.stop_token_ids, *extra],
            ignore_eos=ignore_eos,
        )

    return sampling
