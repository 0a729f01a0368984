"""From flags to an engine: which executor, which model, which limits, and what had to be assumed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flags import EngineFlags
from servetwin.sim.commands.show import say
from servetwin.sim.config import (
    ASSUMED_MAX_MODEL_LEN,
    ASSUMED_NUM_GPU_BLOCKS,
    NUM_RESERVED_BLOCKS,
    CacheConfig,
    EngineConfig,
    ExecutorOptions,
    ModelConfig,
    SchedulerConfig,
)
from servetwin.sim.contract import StepTimer
from servetwin.sim.model_folder import read_model_config
from servetwin.sim.plugins import load
from servetwin.sim.scenario import explain
from servetwin.sim.steptime.modelled import ConstantStepModel, ModelledStepTimer
from servetwin.sim.token_source import TokenSource
from servetwin.sim.units import seconds_to_ns

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
    if flags.async_scheduling:
        raise UsageError(
            "--async-scheduling is not supported yet: schedules are synchronous (--no-async-scheduling)"
        )
    try:
        if executor == "constant":
            return _constant_engine(flags, step_time_s, seed)
        return _executor_engine(flags, executor, step_time_s, seed)
    except ValidationError as e:
        raise UsageError(explain(e)) from e


def _constant_engine(flags: EngineFlags, step_time_s: float | None, seed: int) -> Engine:
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
    tokens = TokenSource(model.vocab_size, seed)
    return Engine(
        config=_engine_config(flags, model, num_gpu_blocks),
        timer=ModelledStepTimer(ConstantStepModel(seconds_to_ns(step_time_s)), tokens, "constant"),
        tokens=tokens,
        runs_a_model=False,
        assumed=assumed,
        described={"step_time_s": step_time_s},
    )


def _executor_engine(flags: EngineFlags, name: str, step_time_s: float | None, seed: int) -> Engine:
    if name == "torch":
        _check_torch_flags(flags, step_time_s)
        say(f"loading {flags.model}")
    build = load("servetwin.executors", name)
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
        config=_engine_config(flags, model, num_gpu_blocks),
        timer=timer,
        tokens=TokenSource(model.vocab_size, seed),
        runs_a_model=True,
        assumed=assumed,
        described=timer.describe() if hasattr(timer, "describe") else {},
        close=getattr(timer, "close", lambda: None),
    )


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


def _limits(flags: EngineFlags, max_model_len: int) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens) with vLLM's defaults where they were not given."""
    tokens = flags.max_num_batched_tokens
    if tokens is None:
        # Without chunked prefill a step must hold the longest prompt.
        tokens = DEFAULT_MAX_NUM_BATCHED_TOKENS
        if not flags.enable_chunked_prefill:
            tokens = max(tokens, max_model_len)
    seqs = flags.max_num_seqs
    if seqs is None:
        seqs = min(DEFAULT_MAX_NUM_SEQS, tokens)
    return seqs, tokens


def _engine_config(flags: EngineFlags, model: ModelConfig, num_gpu_blocks: int) -> EngineConfig:
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
            max_num_scheduled_tokens=flags.max_num_scheduled_tokens,
            enable_chunked_prefill=flags.enable_chunked_prefill,
            long_prefill_token_threshold=flags.long_prefill_token_threshold,
            policy=flags.scheduling_policy,
            scheduler_reserve_full_isl=flags.scheduler_reserve_full_isl,
        ),
    )
