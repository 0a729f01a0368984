"""From flags to an engine: which executor, which model, which limits, and what had to be assumed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from servetwin.sim.commands.compat import rules_of
from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flags import EngineFlags
from servetwin.sim.commands.profile_source import HEEDED as HEEDED_BY_PROFILES
from servetwin.sim.commands.profile_source import kernels_source
from servetwin.sim.commands.recorded_source import PREFIX as RECORDED
from servetwin.sim.commands.recorded_source import recorded_run, with_recorded
from servetwin.sim.commands.roofline_source import (
    StepSource,
    refuse_card_flags,
    required_card,
    roofline_source,
)
from servetwin.sim.commands.show import say
from servetwin.sim.commands.steps_source import steps_source, with_measured_limits
from servetwin.sim.config import (
    ASSUMED_MAX_MODEL_LEN,
    ASSUMED_NUM_GPU_BLOCKS,
    NUM_RESERVED_BLOCKS,
    EngineConfig,
    ModelConfig,
    SpeculativeConfig,
    explain,
)
from servetwin.sim.contract import StepTimer
from servetwin.sim.engine_options import (
    EngineOptions,
    read_speculative_config,
    resolve_async_scheduling,
    why_synchronous,
)
from servetwin.sim.host_model import HostModel
from servetwin.sim.live_server import LiveServer
from servetwin.sim.model_folder import read_model_config
from servetwin.sim.plugins import PluginError, load
from servetwin.sim.policy import load_policy
from servetwin.sim.steptime.drafting import DraftModel
from servetwin.sim.steptime.modelled import ConstantStepModel, ModelledStepTimer
from servetwin.sim.steptime.profiles import load_profile
from servetwin.sim.steptime.recorded import RecordedHostModel, RecordedSteps, RecordedStepTimer
from servetwin.sim.steptime.shipped import names_profile, shipped_profiles
from servetwin.sim.steptime.steps_profile import StepsProfile
from servetwin.sim.token_source import TokenSource
from servetwin.sim.units import seconds_to_ns

MIN_STEP_TIME_S, MAX_STEP_TIME_S = 1e-9, 86_400.0
"""The clock counts whole nanoseconds, and a day is more than any step."""


@dataclass(frozen=True)
class Engine:
    """An engine ready to serve."""

    config: EngineConfig
    timer: StepTimer | None
    """Runs the steps of a simulation; None for an engine on the wall clock."""
    tokens: TokenSource
    runs_a_model: bool
    """It needs token ids and produces them itself."""
    host: HostModel | None = None
    """The engine's own time around each step; None: none."""
    assumed: tuple[str, ...] = ()
    described: dict[str, Any] = field(default_factory=dict)
    server: LiveServer | None = None
    """Serves on the wall clock."""
    close: Callable[[], None] = lambda: None

    @property
    def notes(self) -> tuple[str, ...]:
        """Where a run with this model differs from the real engine; every output of it says so."""
        note = self.described.get("note")
        return (note,) if note else ()


def build_engine(flags: EngineFlags, executor: str, step_time_s: float | None, seed: int) -> Engine:
    """The engine that the flags name. Raises UsageError (or another ValueError with a message for its user)."""
    drafting = _drafting(flags)
    load_policy(flags.scheduling_policy)
    rules_of(flags.vllm_compat)
    try:
        if executor == "roofline":
            return _roofline_engine(flags, step_time_s, seed, drafting)
        is_profile = not executor.startswith(RECORDED) and names_profile(executor)
        refuse_card_flags(flags, executor, HEEDED_BY_PROFILES if is_profile else ())
        if executor.startswith(RECORDED):
            return _recorded_engine(flags, executor, step_time_s, seed, drafting)
        if is_profile:
            return _profile_engine(flags, Path(executor), step_time_s, seed, drafting)
        if executor == "constant":
            return _constant_engine(flags, step_time_s, seed, drafting)
        return _executor_engine(flags, executor, step_time_s, seed, drafting)
    except ValidationError as e:
        raise UsageError(explain(e)) from e


def build_live_engine(flags: EngineFlags, seed: int) -> Engine:
    """The engine that the flags name, in a child process and on the wall clock. Raises UsageError as above."""
    drafting = _drafting(flags)
    load_policy(flags.scheduling_policy)
    rules_of(flags.vllm_compat)
    _check_drafting("torch", drafting, flags.draft_acceptance_rate)
    refuse_card_flags(flags, "torch")
    if flags.model is None:
        raise UsageError("--live needs --model: a local Hugging Face folder")
    _check_torch_flags(flags, None)
    options = engine_options(flags, seed)
    _asynchronous(options, drafting)
    say(f"loading {flags.model} in a child process")
    try:
        server: LiveServer = load("servetwin.live", "torch")(options)
    except ValidationError as e:
        raise UsageError(explain(e)) from e
    return Engine(
        config=server.config,
        timer=None,
        server=server,
        tokens=TokenSource(server.config.model.vocab_size, seed),
        runs_a_model=True,
        described=dict(server.described),
        close=server.close,
    )


def engine_options(flags: EngineFlags, seed: int) -> EngineOptions:
    """The flags as engine options: fields of one name mean one thing."""
    names = [f.name for f in fields(EngineOptions) if f.name not in ("seed", "usage_context")]
    return EngineOptions(seed=seed, **{name: getattr(flags, name) for name in names})


def _drafting(flags: EngineFlags) -> SpeculativeConfig | None:
    """Who drafts; keys of the configuration that change nothing here are named."""
    try:
        read = read_speculative_config(flags.speculative_config)
    except ValueError as e:
        raise UsageError(f"--speculative-config {e}") from e
    if read.without_effect:
        say(f"--speculative-config: no effect here: {', '.join(read.without_effect)}")
    return read.config


def _constant_engine(
    flags: EngineFlags, step_time_s: float | None, seed: int, drafting: SpeculativeConfig | None
) -> Engine:
    if step_time_s is None:
        raise UsageError("--executor constant needs --step-time-s: the seconds every step takes")
    if not MIN_STEP_TIME_S <= step_time_s <= MAX_STEP_TIME_S:
        raise UsageError(
            f"--step-time-s {step_time_s} must be between {MIN_STEP_TIME_S:g} and {MAX_STEP_TIME_S:g} seconds"
        )
    _refuse_inert(flags, "constant")
    num_gpu_blocks = flags.num_gpu_blocks_override or ASSUMED_NUM_GPU_BLOCKS
    model, assumed = _assumed_model(flags, num_gpu_blocks)
    assumed += _assumed_limits(flags, model.max_model_len)
    source = StepSource(
        "constant",
        ConstantStepModel(seconds_to_ns(step_time_s)),
        num_gpu_blocks,
        {"step_time_s": step_time_s},
        assumed,
    )
    return _modelled_engine(flags, source, model, seed, drafting)


def _refuse_inert(
    flags: EngineFlags, executor: str, step_time_s: float | None = None, heeded: Collection[str] = ()
) -> None:
    """What only an engine with a model or a card could heed, but for the flags that are `heeded`."""
    if step_time_s is not None:
        raise UsageError(
            f"--step-time-s has no effect with --executor {executor}, which has its own step times"
        )
    inert = {
        "--dtype": flags.dtype != "auto",
        "--load-format": flags.load_format != "auto",
        "--kv-cache-memory-bytes": flags.kv_cache_memory_bytes is not None,
        "--gpu-memory-utilization": flags.gpu_memory_utilization is not None,
        "--zero-fresh-blocks": flags.zero_fresh_blocks,
        "--compile": flags.compile,
        "--threads": flags.threads is not None,
        "--enforce-eager": flags.enforce_eager,
        "--cudagraph-capture-sizes": flags.cudagraph_capture_sizes is not None,
        "--max-cudagraph-capture-size": flags.max_cudagraph_capture_size is not None,
    }
    for name in (n for n, given in inert.items() if given and n not in heeded):
        raise UsageError(f"{name} has no effect with --executor {executor}, which runs no model")


def _roofline_engine(
    flags: EngineFlags, step_time_s: float | None, seed: int, drafting: SpeculativeConfig | None
) -> Engine:
    if step_time_s is not None:
        raise UsageError("--step-time-s has no effect with --executor roofline, which estimates its steps")
    card, folder = required_card(flags)
    model = read_model_config(folder, flags.max_model_len)
    seqs, batched = engine_options(flags, seed).limits(model.max_model_len, card.default_limits())
    flags = replace(flags, max_num_seqs=seqs, max_num_batched_tokens=batched)
    return _modelled_engine(flags, roofline_source(flags, card, folder), model, seed, drafting)


def _profile_engine(
    flags: EngineFlags, path: Path, step_time_s: float | None, seed: int, drafting: SpeculativeConfig | None
) -> Engine:
    _refuse_inert(flags, str(path), step_time_s, HEEDED_BY_PROFILES)
    profile = load_profile(path)
    if isinstance(profile, StepsProfile):
        flags = with_measured_limits(flags, profile)
        source = steps_source(flags, profile, path)
    else:
        source = kernels_source(flags, engine_options(flags, seed), profile, path)
    model, _ = _assumed_model(flags, source.num_gpu_blocks)
    source = replace(source, assumed=source.assumed + _assumed_limits(flags, model.max_model_len))
    return _modelled_engine(flags, source, model, seed, drafting)


def _recorded_engine(
    flags: EngineFlags,
    executor: str,
    step_time_s: float | None,
    seed: int,
    drafting: SpeculativeConfig | None,
) -> Engine:
    _refuse_inert(flags, executor, step_time_s)
    run = recorded_run(executor)
    flags = with_recorded(flags, run)
    num_gpu_blocks = flags.num_gpu_blocks_override or ASSUMED_NUM_GPU_BLOCKS
    model, assumed = _assumed_model(flags, num_gpu_blocks)
    tokens = TokenSource(model.vocab_size, seed)
    options = engine_options(flags, seed)
    asynchronous = _asynchronous(options, drafting)
    config = options.engine_config(model, num_gpu_blocks, drafting, asynchronous=asynchronous)
    steps = RecordedSteps.of(run.steps)
    return Engine(
        config=config,
        timer=RecordedStepTimer(steps, tokens, _draft_model(flags, config, tokens, seed)),
        tokens=tokens,
        runs_a_model=False,
        host=RecordedHostModel(steps),
        assumed=assumed,
        described={"recorded": str(run.path)},
    )


def _modelled_engine(
    flags: EngineFlags,
    source: StepSource,
    model: ModelConfig,
    seed: int,
    drafting: SpeculativeConfig | None,
) -> Engine:
    """An engine whose steps take the time that a step model says."""
    tokens = TokenSource(model.vocab_size, seed)
    options = engine_options(flags, seed)
    asynchronous = _asynchronous(options, drafting)
    config = options.engine_config(model, source.num_gpu_blocks, drafting, asynchronous=asynchronous)
    drafts = _draft_model(flags, config, tokens, seed)
    return Engine(
        config=config,
        timer=ModelledStepTimer(source.model, tokens, source.name, drafts),
        tokens=tokens,
        runs_a_model=False,
        host=source.host,
        assumed=source.assumed,
        described=source.described,
    )


def _executor_engine(
    flags: EngineFlags, name: str, step_time_s: float | None, seed: int, drafting: SpeculativeConfig | None
) -> Engine:
    _check_drafting(name, drafting, flags.draft_acceptance_rate)
    options = engine_options(flags, seed)
    if name == "torch":
        _check_torch_flags(flags, step_time_s)
        say(f"loading {flags.model}")
    build = _load_executor(name)
    if not _takes_options(build):
        raise UsageError(f"--executor {name}: {type(build).__name__} cannot be called with ExecutorOptions")
    timer = build(options.executor_options(step_time_s=step_time_s, speculative=drafting))
    if not callable(getattr(timer, "run", None)):
        raise UsageError(
            f"--executor {name}: what it returned has no method run(plan) (see contract.StepTimer)"
        )
    num_gpu_blocks = (
        getattr(timer, "num_gpu_blocks", None) or flags.num_gpu_blocks_override or ASSUMED_NUM_GPU_BLOCKS
    )
    model: ModelConfig | None = getattr(timer, "model_config", None)
    assumed: tuple[str, ...] = ()
    if model is None:
        model, assumed = _assumed_model(flags, num_gpu_blocks)
    asynchronous = _asynchronous(options, drafting, timer)
    return Engine(
        config=options.engine_config(model, num_gpu_blocks, drafting, asynchronous=asynchronous),
        timer=timer,
        tokens=TokenSource(model.vocab_size, seed),
        runs_a_model=True,
        assumed=assumed,
        described=timer.describe() if hasattr(timer, "describe") else {},
        close=getattr(timer, "close", lambda: None),
    )


def _check_drafting(name: str, drafting: SpeculativeConfig | None, acceptance_rate: float | None) -> None:
    """The torch executor drafts and verifies by itself; it has no model that drafts."""
    if acceptance_rate is not None:
        raise UsageError(
            f"--draft-acceptance-rate goes with modelled step times only: --executor {name} verifies drafts"
        )
    if drafting is not None and (name != "torch" or drafting.method != "ngram"):
        raise UsageError(
            f"--speculative-config: --executor {name} cannot draft with method {drafting.method}; allowed: torch with "
            "method ngram, and every method with modelled step times"
        )


def _load_executor(name: str) -> Any:
    try:
        return load("servetwin.executors", name)
    except PluginError as e:
        allowed = (
            "allowed: constant (with --step-time-s), roofline (with --gpu), the file or folder of a profile, a shipped "
            f"profile ({', '.join(shipped_profiles())}), recorded:RUN, "
        )
        raise UsageError(f"--executor {e}".replace("allowed: ", allowed)) from e


def _takes_options(build: Any) -> bool:
    """It can be called with one argument, as far as can be told."""
    if not callable(build):
        return False
    try:
        inspect.signature(build).bind(object())
    except ValueError:
        return True
    except TypeError:
        return False
    return True


def _check_torch_flags(flags: EngineFlags, step_time_s: float | None) -> None:
    """What can be refused before torch is imported, which takes its time."""
    if step_time_s is not None:
        raise UsageError("--step-time-s has no effect with --executor torch, which measures its steps")
    if flags.model is None:
        raise UsageError("--executor torch needs --model: a local Hugging Face folder")
    read_model_config(flags.model, flags.max_model_len)


def _assumed_model(flags: EngineFlags, num_gpu_blocks: int) -> tuple[ModelConfig, tuple[str, ...]]:
    """The model as far as its folder says; without one, numbers that are said to be assumed."""
    assumed = []
    if flags.num_gpu_blocks_override is None:
        assumed.append(f"num_gpu_blocks {num_gpu_blocks}")
    if flags.model is not None:
        model = read_model_config(flags.model, flags.max_model_len)
    elif flags.max_model_len is not None:
        model = ModelConfig(max_model_len=flags.max_model_len)
    else:
        pool_tokens = (num_gpu_blocks - NUM_RESERVED_BLOCKS) * flags.block_size
        model = ModelConfig(max_model_len=max(min(ASSUMED_MAX_MODEL_LEN, pool_tokens), 1))
        limited = " (all that the pool holds)" if model.max_model_len < ASSUMED_MAX_MODEL_LEN else ""
        assumed.append(f"max_model_len {model.max_model_len}{limited}")
    return model, tuple(assumed)


def _assumed_limits(flags: EngineFlags, max_model_len: int) -> tuple[str, ...]:
    """Nothing here knows a GPU, of which vLLM's defaults depend."""
    seqs, tokens = engine_options(flags, 0).limits(max_model_len)
    named = {
        "max_num_seqs": (flags.max_num_seqs, seqs),
        "max_num_batched_tokens": (flags.max_num_batched_tokens, tokens),
    }
    said = [f"{name} {value}" for name, (given, value) in named.items() if given is None]
    if not said:
        return ()
    return (f"{', '.join(said)} (`vllm serve` on a GPU of 70 GiB or more that is no A100: 1024, 8192)",)


def _asynchronous(options: EngineOptions, drafting: SpeculativeConfig | None, timer: object = None) -> bool:
    """On by default as in vLLM 0.22.0; off, with a line that says why, where something forbids it."""
    reason = why_synchronous(drafting, timer)
    try:
        asynchronous = resolve_async_scheduling(options.async_scheduling, reason)
    except ValueError as e:
        raise UsageError(f"--async-scheduling: {reason}") from e
    if reason is not None and options.async_scheduling is None:
        say(f"asynchronous scheduling is off: {reason}")
    return asynchronous


def _draft_model(
    flags: EngineFlags, config: EngineConfig, tokens: TokenSource, seed: int
) -> DraftModel | None:
    rate, drafting = flags.draft_acceptance_rate, config.speculative
    if drafting is None:
        if rate is not None:
            raise UsageError("--draft-acceptance-rate has no effect without --speculative-config")
        return None
    if rate is None or not 0 <= rate <= 1:
        raise UsageError(
            "--speculative-config needs --draft-acceptance-rate, from 0 to 1 (no model verifies drafts); "
            + ("it is missing" if rate is None else f"got {rate}")
        )
    return DraftModel(
        tokens,
        num_speculative_tokens=drafting.num_speculative_tokens,
        acceptance_rate=rate,
        reports_drafts=not config.scheduler.async_scheduling,
        seed=seed,
    )
