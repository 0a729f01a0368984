"""`--executor PROFILE`: step times from a profile of whole steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flags import EngineFlags
from servetwin.sim.commands.roofline_source import StepSource
from servetwin.sim.commands.show import say
from servetwin.sim.config import ASSUMED_NUM_GPU_BLOCKS
from servetwin.sim.steptime.steps_profile import StepsProfile

LIMITS = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_model_len": "max_model_len",
    "num_gpu_blocks_override": "num_gpu_blocks",
}
"""Flags without a default of their own -> what the profile calls them."""


def with_measured_limits(flags: EngineFlags, profile: StepsProfile) -> EngineFlags:
    """The flags, those that were not given being what they were in the measured engine; that is said.

    Raises UsageError for flags that such a profile cannot heed.
    """
    refuse_kernel_flags(
        tensor_parallel_size=flags.tensor_parallel_size,
        gpu=flags.gpu,
        cudagraph_capture_sizes=flags.cudagraph_capture_sizes,
        max_cudagraph_capture_size=flags.max_cudagraph_capture_size,
        enforce_eager=flags.enforce_eager,
    )
    measured: dict[str, Any] = dict(profile.engine)
    if (size := measured.get("block_size")) is not None:
        # The memory stays, whatever it is cut into.
        measured["num_gpu_blocks"] = max(measured["num_gpu_blocks"] * size // flags.block_size, 2)
    missing = {
        name: measured[key]
        for name, key in LIMITS.items()
        if getattr(flags, name) is None and measured.get(key) is not None
    }
    if missing:
        say(f"as in the profile: {', '.join(f'{name} {value:,}' for name, value in missing.items())}")
    return replace(flags, **missing)


def steps_source(flags: EngineFlags, profile: StepsProfile, path: Path) -> StepSource:
    """Times of the profile, of its host as well."""
    return StepSource(
        "profile",
        profile.step_model(),
        flags.num_gpu_blocks_override or ASSUMED_NUM_GPU_BLOCKS,
        {
            "note": _note(profile, path),
            "profile": str(path),
            "measured": profile.about,
            "errors": profile.errors,
            "coverage": profile.coverage,
            "model": profile.about.get("model"),
        },
        _assumed(flags, profile),
        profile.host_model(),
    )


def refuse_kernel_flags(
    *,
    tensor_parallel_size: int,
    gpu: str | None,
    cudagraph_capture_sizes: tuple[int, ...] | None,
    max_cudagraph_capture_size: int | None,
    enforce_eager: bool,
) -> None:
    """Raises UsageError for what cannot be told from times of whole steps."""
    given = {
        f"--tensor-parallel-size {tensor_parallel_size}": tensor_parallel_size != 1,
        "--gpu": gpu is not None,
        "--cudagraph-capture-sizes": cudagraph_capture_sizes is not None,
        "--max-cudagraph-capture-size": max_cudagraph_capture_size is not None,
        "--enforce-eager": enforce_eager,
    }
    for name in (n for n, is_given in given.items() if is_given):
        raise UsageError(
            f"{name}: goes with a profile of kernels; this one holds times of whole steps, as they were measured"
        )


def _assumed(flags: EngineFlags, profile: StepsProfile) -> tuple[str, ...]:
    """What a reader might take for granted."""
    said = []
    model = profile.about.get("model")
    if flags.model is not None and model is not None and flags.model.resolve().name != model:
        said.append(f"steps of {flags.model} take as long as those of {model}, which were measured")
    if flags.block_size != profile.engine.get("block_size", flags.block_size):
        said.append(
            f"blocks of {flags.block_size} tokens take as long as those of {profile.engine['block_size']}"
        )
    if profile.host is None:
        said.append("the host takes no time between steps: no live run was measured")
    return tuple(said)


def _note(profile: StepsProfile, path: Path) -> str:
    """What every output of such a run says."""
    about = profile.about
    return (
        f"step times are fitted to steps of {about.get('model', 'an unknown model')} measured on "
        f"{about.get('device', 'an unknown machine')} ({path}); {profile.describe_error()}"
        + (f"; {note}" if (note := about.get("note")) else "")
    )
