"""`--executor PROFILE`: step times from a profile of `servetwin fit`, or from a folder of per-kernel tables."""

from __future__ import annotations

from pathlib import Path

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flags import EngineFlags
from servetwin.sim.commands.roofline_source import StepSource
from servetwin.sim.config import ASSUMED_NUM_GPU_BLOCKS
from servetwin.sim.model_shape_reader import read_model_shape
from servetwin.sim.steptime.profiles import KernelProfile, load_profile


def profile_source(flags: EngineFlags, path: Path) -> StepSource:
    """Raises UsageError, ProfileError, ModelFolderError."""
    if flags.model is None:
        raise UsageError(
            f"--executor {path} needs --model FOLDER (its config.json says how many layers there are)"
        )
    profile, shape = load_profile(path), read_model_shape(flags.model)
    assumed = []
    if flags.num_gpu_blocks_override is None:
        assumed.append(f"num_gpu_blocks {ASSUMED_NUM_GPU_BLOCKS} (`servetwin kv` says how many a card holds)")
    return StepSource(
        "profile",
        profile.step_model(shape.num_layers),
        flags.num_gpu_blocks_override or ASSUMED_NUM_GPU_BLOCKS,
        {
            "note": _note(profile, path),
            "profile": str(path),
            "measured": profile.about,
            "errors": profile.errors,
            "model": shape.name,
        },
        tuple(assumed),
    )


def _note(profile: KernelProfile, path: Path) -> str:
    """What every output of such a run says."""
    about = profile.about
    on = ", ".join(str(about[name]) for name in ("gpu", "model") if name in about) or "an unknown card"
    checked = next((e for e in profile.errors if e["of"] == "attention"), None)
    error = "its error was not checked (`servetwin fit` does)"
    if checked is not None:
        error = f"attention calls left out of the fit were {checked['mape_percent']:.1f} % off in the mean"
    if profile.calibrated is not None:
        error += (
            f"; dense operators x {profile.calibrated.value:.4g}, calibrated on the {profile.calibrated.on}"
        )
    return f"step times are sums of kernels measured on {on} ({path}); {error}; launches and the host take no time"
