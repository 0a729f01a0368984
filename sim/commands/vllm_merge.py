"""`--vllm-args`: what a pasted `vllm serve` command line adds to the engine flags."""

from __future__ import annotations

from dataclasses import replace

from servetwin.sim.commands.flag_names import spelled
from servetwin.sim.commands.flags import EngineFlags
from servetwin.sim.commands.profile_source import HEEDED as HEEDED_BY_PROFILES
from servetwin.sim.commands.recorded_source import PREFIX as RECORDED
from servetwin.sim.steptime.shipped import names_profile
from servetwin.sim.vllm_args import VllmArgs, parse_vllm_args

ONLY_REAL = ("load_format", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
"""Fields that only an executor which really runs a model can act on."""
MEMORY = ("dtype", "kv_cache_memory_bytes", "gpu_memory_utilization", "enforce_eager")
"""Fields that decide the size of the pool."""
ONLY_MODELLED = ("kv_cache_dtype", "tensor_parallel_size")
"""Fields that no real executor here can act on."""
MODEL_OR_CARD = ONLY_REAL + MEMORY + ONLY_MODELLED
WITHOUT_EFFECT = {"constant": MODEL_OR_CARD, "roofline": ONLY_REAL}
"""Built-in executor -> fields that it ignores."""


def merge(flags: EngineFlags, args: VllmArgs) -> EngineFlags:
    """The flags, with what `args` sets where the flag itself was left at its default."""
    default = EngineFlags()
    added = {
        name: value for name, value in args.engine.items() if getattr(flags, name) == getattr(default, name)
    }
    return replace(flags, **added)


def _without_effect(executor: str) -> tuple[str, ...]:
    """Fields that the executor ignores."""
    if executor.startswith(RECORDED):
        return MODEL_OR_CARD
    if executor not in WITHOUT_EFFECT and names_profile(executor):
        return tuple(name for name in MODEL_OR_CARD if spelled(name) not in HEEDED_BY_PROFILES)
    return WITHOUT_EFFECT.get(executor, ONLY_MODELLED)


def with_vllm_args(flags: EngineFlags, text: str, *, executor: str) -> tuple[EngineFlags, list[str]]:
    """The flags merged with a `vllm serve` command line, and what its user must be told, one line each.

    Raises VllmArgsError for a command line that cannot be followed.
    """
    args = parse_vllm_args(text)
    args = args.without(*_without_effect(executor))
    notes = args.warnings()
    model = args.engine.get("model")
    if flags.model is None and model is not None and not model.is_dir():
        args = args.without("model")
        notes.append(
            f"--vllm-args: the model {model} is no folder here, so nothing is known of it; "
            "--model FOLDER names a local Hugging Face folder"
        )
    return merge(flags, args), notes
