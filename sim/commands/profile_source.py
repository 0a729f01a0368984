"""`--executor PROFILE`: step times from a profile of kernels, or from a folder of per-kernel tables."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from servetwin.sim.cards import Card, card_names, find_card
from servetwin.sim.commands.card_checks import named_card
from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flags import EngineFlags
from servetwin.sim.commands.roofline_source import OF_PROFILES, StepSource
from servetwin.sim.config import ASSUMED_NUM_GPU_BLOCKS, explain
from servetwin.sim.cuda_graph_sizes import cuda_graph_sizes
from servetwin.sim.engine_options import EngineOptions
from servetwin.sim.model_shape import ModelShape
from servetwin.sim.model_shape_reader import read_model_shape
from servetwin.sim.steptime.profiles import KernelProfile
from servetwin.sim.steptime.tensor_parallel import TensorParallel

HEEDED = (*OF_PROFILES, "--enforce-eager", "--cudagraph-capture-sizes", "--max-cudagraph-capture-size")
"""Flags of a card or of a real model that these step times heed."""


def kernels_source(
    flags: EngineFlags, options: EngineOptions, profile: KernelProfile, path: Path
) -> StepSource:
    """Step times as sums of kernels. Raises UsageError, ModelFolderError."""
    if flags.model is None:
        raise UsageError(
            f"--executor {path} needs --model FOLDER (its config.json says how many layers there are)"
        )
    shape = read_model_shape(flags.model)
    parallel = tensor_parallel(profile, shape, flags.tensor_parallel_size, flags.gpu)
    sizes = asked_graph_sizes(options)
    assumed = []
    if flags.num_gpu_blocks_override is None:
        assumed.append(f"num_gpu_blocks {ASSUMED_NUM_GPU_BLOCKS} (`servetwin kv` says how many a card holds)")
    return StepSource(
        "profile",
        profile.step_model(shape.num_layers, parallel=parallel, capture_sizes=sizes),
        flags.num_gpu_blocks_override or ASSUMED_NUM_GPU_BLOCKS,
        {
            "note": _note(profile, path, parallel),
            "profile": str(path),
            "measured": profile.about,
            "errors": profile.errors,
            "model": shape.name,
            "tensor_parallel_size": flags.tensor_parallel_size,
            "cudagraph_capture_sizes": list(sizes),
        },
        tuple(assumed),
    )


def tensor_parallel(
    profile: KernelProfile, shape: ModelShape, cards: int, gpu: str | None
) -> TensorParallel | None:
    """How the cards share the model; None: there is one. Raises UsageError."""
    measured = profile.measured_cards
    if cards < measured:
        raise UsageError(
            f"--tensor-parallel-size {cards}: must be {measured} or more, as the profile was measured"
        )
    if cards == 1:
        if gpu is not None:
            raise UsageError(
                f"--gpu {gpu} has no effect with a profile on one card: it says how cards are linked"
            )
        return None
    link = _measured_card(profile, cards) if gpu is None else named_card(gpu)
    try:
        return TensorParallel(shape, cards, measured, link)
    except ValueError as e:
        raise UsageError(f"--tensor-parallel-size: {e}") from e


def asked_graph_sizes(options: EngineOptions) -> tuple[int, ...]:
    """The sizes that steps are padded to: none, unless flags ask for some. Raises UsageError."""
    if options.cudagraph_capture_sizes is None and options.max_cudagraph_capture_size is None:
        return ()
    try:
        asked = options.executor_options()
    except ValidationError as e:
        raise UsageError(explain(e)) from e
    budget = asked.max_num_batched_tokens
    sizes = cuda_graph_sizes(
        asked.max_num_seqs, budget, asked.cudagraph_capture_sizes, asked.max_cudagraph_capture_size
    )
    if not sizes:
        raise UsageError(f"--cudagraph-capture-sizes: none is at most max_num_batched_tokens, {budget}")
    return sizes


def _measured_card(profile: KernelProfile, cards: int) -> Card:
    measured = profile.about.get("gpu")
    try:
        return find_card(str(measured))
    except ValueError as e:
        said = "the profile names no card" if measured is None else f"its card {measured!r} is not known"
        raise UsageError(
            f"--tensor-parallel-size {cards} needs the speed of the link between cards, and {said}: give --gpu, one of "
            f"{', '.join(card_names())}"
        ) from e


def _note(profile: KernelProfile, path: Path, parallel: TensorParallel | None) -> str:
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
    if parallel is not None:
        error += f"; {parallel.describe()}"
    return f"step times are sums of kernels measured on {on} ({path}); {error}; launches and the host take no time"
