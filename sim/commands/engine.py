"""From flags to an engine: which executor, which model, which limits, and what had to be assumed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from servetwin.sim.commands.compat import rules
from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flags import EngineFlags
from servetwin.sim.commands.show import say
from servetwin.sim.commands.speculation import speculative
from servetwin.sim.config import (
    ASSUMED_MAX_MODEL_LEN,
    ASSUMED_NUM_GPU_BLOCKS,
    NUM_RESERVED_BLOCKS,
    CacheConfig,
    EngineConfig,
    ExecutorOptions,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from servetwin.sim.contract import StepTimer
from servetwin.sim.model_folder import read_model_config
from servetwin.sim.plugins import PluginError, load
from servetwin.sim.policy import load_policy
from servetwin.sim.scenario import explain
from servetwin.sim.steptime.drafting import DraftModel
from servetwin.sim.steptime.modelled import ConstantStepModel, ModelledStepTimer
from servetwin.sim.token_source import TokenSource
from servetwin.sim.units import seconds_to_ns
from servetwin.sim.vllm_args import resolve_long_prefill_token_threshold

MIN_STEP_TIME_S, MAX_STEP_TIME_S = 1e-9, 86_400.0
"""The clock counts whole nanoseconds, and a day is more than any step."""
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048


@dataclass(frozen=True)
class Engine:
    """An engine ready to serve."""

    config: EngineConfig
    timer: StepTimer
    tokens: TokenSource
    runs_a_model: bool
    """The timer needs token ids and produces them itself."""
    assumed: tuple[str, ...] = ()
    described: dict[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None


def build_engine(flags: EngineFlags, executor: str, step_time_s: float | None, seed: int) -> Engine:
    """The engine that the flags name. Raises UsageError (or another ValueError with a message for its user)."""
    drafting, without_effect = speculative(flags.speculative_config)
    if without_effect:
        say(f"--speculative-config: no effect here: {', '.join(without_effect)}")
    load_policy(flags.scheduling_policy)
    rules(flags)
    try:
        if executor == "constant":
            return _constant_engine(flags, step_time_s, seed, drafting)
        return _executor_engine(flags, executor, step_time_s, seed, drafting)
    except ValidationError as e:
        raise UsageError(explain(e)) from e


def _constant_engine(
    flags: EngineFlags, step_time_s: float | None, seed: int, drafting: SpeculativeConfig | None
) -> Engine:
    if step_time_s is None:
        raise UsageError("--executor constant needs --step-time-s: the seconds every step takes")
    if not MIN_STEP_TIME_S <= step_time_s <= MAX_STEP_TIME_S:
        raise UsageError(
            f"--step-time-s {step_time_s} must be between {MIN_STEP_TIME_S:g} and {MAX_STEP_TIME_S:g} seconds"
        )
    inert = {
        "--dtype": flags.dtype != "auto",
        "--load-format": flags.load_format != "auto",
        "--kv-cache-memory-bytes": flags.kv_cache_memory_bytes is not None,
    }
    for name in (n for n, given in inert.items() if given):
        raise UsageError(f"{name} has no effect with --executor constant, which runs no model")
    num_gpu_blocks = flags.num_gpu_blocks_override or ASSUMED_NUM_GPU_BLOCKS
    model, assumed = _assumed_model(flags, num_gpu_blocks)
    assumed += _assumed_limits(flags, model.max_model_len)
    tokens = TokenSource(model.vocab_size, seed)
    config = _engine_config(flags, model, num_gpu_blocks, drafting, _asynchronous(flags, drafting))
    step_model = ConstantStepModel(seconds_to_ns(step_time_s))
    return Engine(
        config=config,
        timer=ModelledStepTimer(step_model, tokens, "constant", _draft_model(flags, config, tokens, seed)),
        tokens=tokens,
        runs_a_model=False,
        assumed=assumed,
        described={"step_time_s": step_time_s},
    )


def _executor_engine(
    flags: EngineFlags, name: str, step_time_s: float | None, seed: int, drafting: SpeculativeConfig | None
) -> Engine:
    if drafting is not None or flags.draft_acceptance_rate is not None:
        raise UsageError(
            f"speculative decoding goes with modelled step times only: --executor {name} does not verify drafts"
        )
    if name == "torch":
        _check_torch_flags(flags, step_time_s)
        say(f"loading {flags.model}")
    build = _load_executor(name)
    if not _takes_options(build):
        raise UsageError(f"--executor {name}: {type(build).__name__} cannot be called with ExecutorOptions")
    timer = build(_executor_options(flags, step_time_s, seed))
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
    return Engine(
        config=_engine_config(flags, model, num_gpu_blocks, None, _asynchronous(flags, None, timer)),
        timer=timer,
        tokens=TokenSource(model.vocab_size, seed),
        runs_a_model=True,
        assumed=assumed,
        described=timer.describe() if hasattr(timer, "describe") else {},
        close=getattr(timer, "close", lambda: None),
    )


def _load_executor(name: str) -> Any:
    try:
        return load("servetwin.executors", name)
    except PluginError as e:
        allowed = "allowed: constant (with --step-time-s), "
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


def _executor_options(flags: EngineFlags, step_time_s: float | None, seed: int) -> ExecutorOptions:
    num_seqs, num_batched_tokens = _limits(flags, flags.max_model_len or 0)
    return ExecutorOptions(
        model=flags.model,
        load_format=flags.load_format,
        dtype=flags.dtype,
        block_size=flags.block_size,
        num_gpu_blocks=flags.num_gpu_blocks_override,
        kv_cache_memory_bytes=flags.kv_cache_memory_bytes,
        max_model_len=flags.max_model_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_batched_tokens,
        step_time_s=step_time_s,
        seed=seed,
    )


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
    seqs, tokens = _limits(flags, max_model_len)
    named = {
        "max_num_seqs": (flags.max_num_seqs, seqs),
        "max_num_batched_tokens": (flags.max_num_batched_tokens, tokens),
    }
    said = [f"{name} {value}" for name, (given, value) in named.items() if given is None]
    if not said:
        return ()
    return (f"{', '.join(said)} (`vllm serve` on a GPU of 70 GiB or more that is no A100: 1024, 8192)",)


def _limits(flags: EngineFlags, max_model_len: int) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens) with vLLM's defaults where they were not given."""
    tokens = flags.max_num_batched_tokens
    factor = 2 if flags.performance_mode == "throughput" else 1
    if tokens is None:
        # Without chunked prefill a step must hold the longest prompt.
        tokens = DEFAULT_MAX_NUM_BATCHED_TOKENS * factor
        if not flags.enable_chunked_prefill:
            tokens = max(tokens, max_model_len)
    seqs = flags.max_num_seqs
    if seqs is None:
        seqs = min(DEFAULT_MAX_NUM_SEQS * factor, tokens)
    return seqs, tokens


def _asynchronous(flags: EngineFlags, drafting: SpeculativeConfig | None, timer: object = None) -> bool:
    """On by default as in vLLM 0.22.0; off, with a line that says why, where something forbids it."""
    reason = None
    if drafting is not None and drafting.forbids_async_scheduling:
        reason = f"the {drafting.method} drafter needs the tokens that it leaves in the worker"
    elif not getattr(timer, "supports_async_scheduling", True):
        reason = "the executor does not support it"
    if reason is None:
        return flags.async_scheduling is not False
    if flags.async_scheduling:
        raise UsageError(f"--async-scheduling: {reason}")
    if flags.async_scheduling is None:
        say(f"asynchronous scheduling is off: {reason}")
    return False


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


def _engine_config(
    flags: EngineFlags,
    model: ModelConfig,
    num_gpu_blocks: int,
    drafting: SpeculativeConfig | None,
    asynchronous: bool,
) -> EngineConfig:
    num_seqs, num_batched_tokens = _limits(flags, model.max_model_len)
    return EngineConfig(
        model=model,
        cache=CacheConfig(
            block_size=flags.block_size,
            num_gpu_blocks=num_gpu_blocks,
            enable_prefix_caching=flags.enable_prefix_caching,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_batched_tokens,
            max_num_scheduled_tokens=_token_cap(flags, drafting, num_seqs, num_batched_tokens),
            enable_chunked_prefill=flags.enable_chunked_prefill,
            long_prefill_token_threshold=resolve_long_prefill_token_threshold(
                flags.long_prefill_token_threshold, flags.max_num_partial_prefills, model.max_model_len
            ),
            policy=flags.scheduling_policy,
            scheduler_reserve_full_isl=flags.scheduler_reserve_full_isl,
            async_scheduling=asynchronous,
            use_v2_model_runner=flags.use_v2_model_runner,
        ),
        speculative=drafting,
        rules=rules(flags),
    )


def _token_cap(
    flags: EngineFlags, drafting: SpeculativeConfig | None, num_seqs: int, num_batched_tokens: int
) -> int | None:
    """max_num_scheduled_tokens; a drafter that adds tokens to the model's batch takes them off the budget."""
    if flags.max_num_scheduled_tokens is not None or drafting is None or not drafting.extra_slots_per_seq:
        return flags.max_num_scheduled_tokens
    left = num_batched_tokens - drafting.extra_slots_per_seq * num_seqs
    if left < 1:
        raise UsageError(
            f"max_num_batched_tokens {num_batched_tokens} leaves no room: method {drafting.method} takes "
            f"{drafting.extra_slots_per_seq} token of it for each of max_num_seqs {num_seqs} requests"
        )
    return left
