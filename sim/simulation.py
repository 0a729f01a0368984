"""One simulated run from its parts: workload, engine core, step timer and log, joined by SimPy."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import simpy

from servetwin.sim.config import EngineConfig, RunConfig
from servetwin.sim.contract import SamplingParams, StepResult, StepTimer
from servetwin.sim.driver import Driver
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.engine_process import EngineProcess
from servetwin.sim.events import EventLog
from servetwin.sim.host_model import HostModel, LinearHostModel
from servetwin.sim.leaping_core import LeapingCore
from servetwin.sim.leaping_process import LeapingProcess, OnProgress
from servetwin.sim.policy import SchedulingPolicy, load_policy, may_leap
from servetwin.sim.records import EngineCoreOutputs, Frame, StepObserver
from servetwin.sim.steptime.modelled import ModelledStepTimer
from servetwin.sim.token_source import TokenSource
from servetwin.workloads.spec import RequestSpec, Workload

MANY_RULES = 10_000
"""Stop rules that are worth remembering: nearly all requests have one of few output lengths."""

FEWER_COLLECTIONS = (100_000, 20, 100)
"""Thresholds of the collector of cyclic garbage while a simulation goes on."""


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
    leaps: bool = True,
    plans: bool = False,
    on_progress: OnProgress | None = None,
) -> int:
    """Serves `workload` to its end and closes the log, also when it ends early; returns the end in simulated ns.

    Steps with a modelled time go without plans where nobody wants to see these, and many at once where they are
    alike: the log is the same (`why_stepped` says what stands against it). `leaps`: many at once; `plans`: no step
    without one. `on_progress`: told of steps, of requests that ended with them, and of the time in ns.

    `vocab_size`: refuse requests with a token id outside it (None: any id will do).
    `policy`: another than the configuration names. `cache_resets_ns`: when to ask for a prefix-cache reset.
    `max_concurrency`: requests that the client keeps in flight, holding the others back.
    `plan_tokens`: put token ids into the plans (for an executor that needs them, or to save the plans).
    """
    env = simpy.Environment(0)
    common: dict[str, Any] = {
        "tokens": tokens,
        "on_request": on_request,
        "cache_resets_ns": cache_resets_ns,
        "max_concurrency": max_concurrency,
    }
    policy = policy or load_policy(config.engine.scheduler.policy)
    engine: Driver[Any]
    wants_plans = plans or plan_tokens or on_step is not None or log.saves_tokens or vocab_size is not None
    if not wants_plans and why_stepped(config.engine, policy, timer, host) is None:
        assert isinstance(timer, ModelledStepTimer) and isinstance(host, LinearHostModel | None)
        core = LeapingCore(config.engine, policy, tokens=tokens, journal=log_blocks)
        engine = LeapingProcess(
            env,
            core,
            timer,
            workload,
            log,
            sampling=stop_rules_of(config),
            host=host,
            on_progress=on_progress,
            leaps=leaps,
            **common,
        )
    else:
        engine = EngineProcess(
            env,
            EngineCore(config.engine, policy, plan_tokens=plan_tokens, journal=log_blocks),
            timer,
            workload,
            log,
            sampling=sampling_of(config),
            host=host,
            on_step=_both(on_step, on_progress),
            vocab_size=vocab_size,
            **common,
        )
    with _fewer_collections():
        try:
            env.run(until=env.process(engine.run()))
        finally:
            engine.settle()
            log.close(int(env.now))
    return int(env.now)


@contextmanager
def _fewer_collections() -> Iterator[None]:
    """Collects cyclic garbage less often: a run makes millions of objects and hardly any cycles."""
    before = gc.get_threshold()
    gc.set_threshold(*FEWER_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def why_stepped(
    config: EngineConfig, policy: SchedulingPolicy, timer: StepTimer, host: HostModel | None = None
) -> str | None:
    """Why every step of a run is decided by itself, with a plan, in words; None where this is not needed."""
    # Anybody's own kind may look at plans.
    if type(timer) is not ModelledStepTimer:
        return "steps are run, not modelled"
    if timer.drafts is not None or config.speculative is not None:
        return "speculative decoding"
    if not getattr(timer.model, "pure", True):
        return "step times are drawn at random"
    if host is not None and type(host) is not LinearHostModel:
        return "a host model that looks at plans"
    if not may_leap(policy):
        return f"the policy {config.scheduler.policy} does not declare leaps, or looks at every step"
    return None


def progress_observer(on_progress: OnProgress, env: simpy.Environment) -> StepObserver:
    """Tells of progress by simulated time `env`, step by step."""

    def observe(frame: Frame, result: StepResult, outputs: EngineCoreOutputs) -> None:
        on_progress(1, len(outputs.finished), int(env.now))

    return observe


def _both(on_step: StepObserver | None, on_progress: OnProgress | None) -> StepObserver | None:
    """One observer of steps for both."""
    if on_progress is None:
        return on_step

    def observe(frame: Frame, result: StepResult, outputs: EngineCoreOutputs) -> None:
        if on_step is not None:
            on_step(frame, result, outputs)
        on_progress(1, len(outputs.finished), frame.start_ns)

    return observe


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


def stop_rules_of(config: RunConfig) -> Callable[[RequestSpec], SamplingParams]:
    """The same where nobody samples: requests with the same rules share their parameters."""
    known: dict[tuple[Any, ...], SamplingParams] = {}
    sampling = sampling_of(config)

    def rules(spec: RequestSpec) -> SamplingParams:
        key = (spec.output_tokens, spec.min_tokens, spec.stop_token_ids, spec.ignore_eos)
        params = known.get(key)
        if params is None:
            if len(known) >= MANY_RULES:
                known.clear()
            params = known[key] = sampling(spec)
        return params

    return rules
