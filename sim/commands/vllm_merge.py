"""`--vllm-args`: what a pasted `vllm serve` command line adds to the engine flags."""

from __future__ import annotations

from dataclasses import replace

from servetwin.sim.commands.flags import EngineFlags
from servetwin.sim.vllm_args import VllmArgs, parse_vllm_args

ONLY_REAL = ("load_format", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
"""Fields that only an executor which really runs a model can act on."""
MEMORY = ("dtype", "kv_cache_memory_bytes", "gpu_memory_utilization", "enforce_eager")
"""Fields that decide the size of the pool."""
ONLY_MODELLED = ("kv_cache_dtype", "tensor_parallel_size")
"""Fields that no real executor here can act on."""
WITHOUT_EFFECT = {"constant": ONLY_REAL + MEMORY + ONLY_MODELLED, "roofline": ONLY_REAL}
"""Built-in executor -> fields that it ignores; every other one ignores ONLY_MODELLED."""


def merge(flags: EngineFlags, args: VllmArgs) -> EngineFlags:
    """The flags, with what `args` sets where the flag itself was left at its default."""
    default = EngineFlags()
    added = {
        name: value for name, value in args.engine.items() if getattr(flags, name) == getattr(default, name)
    }
    return replace(flags, **added)


def with_vllm_args(flags: EngineFlags, text: str, *, executor: str) -> tuple[EngineFlags, list[str]]:
    """The flags merged with a `vllm serve` command line, and what its user must be told, one line each.

    Raises VllmArgsError for a command line that cannot be followed.
    """
    args = parse_vllm_args(text)
    args = args.without(*WITHOUT_EFFECT.get(executor, ONLY_MODELLED))
    notes = args.warnings()
    model = args.engine.get("model")
    if flags.model is None and model is not None and not model.is_dir():
        args = args.without("model")
        notes.append(
            f"--vllm-args: the model {model} is no folder here, so nothing is known of it; "
            "--model FOLDER names a local Hugging Face folder"
        )
    return merge(flags, args), notes
