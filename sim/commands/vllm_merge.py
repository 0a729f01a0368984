"""`--vllm-args`: what a pasted `vllm serve` command line adds to the engine flags."""

from __future__ import annotations

from dataclasses import replace

from servetwin.sim.commands.flags import EngineFlags
from servetwin.sim.vllm_args import VllmArgs, parse_vllm_args

NEEDS_A_MODEL = (
    "dtype", "load_format", "kv_cache_memory_bytes", "gpu_memory_utilization", "enforce_eager",
    "cudagraph_capture_sizes", "max_cudagraph_capture_size",
)  # fmt: skip
"""Fields that only an executor which runs a model can act on."""


def merge(flags: EngineFlags, args: VllmArgs) -> EngineFlags:
    """The flags, with what `args` sets where the flag itself was left at its default."""
    default = EngineFlags()
    added = {
        name: value for name, value in args.engine.items() if getattr(flags, name) == getattr(default, name)
    }
    return replace(flags, **added)


def with_vllm_args(flags: EngineFlags, text: str, *, runs_a_model: bool) -> tuple[EngineFlags, list[str]]:
    """The flags merged with a `vllm serve` command line, and what its user must be told, one line each.

    Raises VllmArgsError for a command line that cannot be followed.
    """
    args = parse_vllm_args(text)
    if not runs_a_model:
        args = args.without(*NEEDS_A_MODEL)
    notes = args.warnings()
    model = args.engine.get("model")
    if flags.model is None and model is not None and not model.is_dir():
        args = args.without("model")
        notes.append(
            f"--vllm-args: the model {model} is no folder here, so nothing is known of it; "
            "--model FOLDER names a local Hugging Face folder"
        )
    return merge(flags, args), notes
