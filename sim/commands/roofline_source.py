"""`--executor roofline`: from its flags to a step model and a number of blocks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from servetwin.sim.cards import GIB, Card
from servetwin.sim.commands.card_checks import check_sizes, kv_settings, named_card
from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flags import EngineFlags
from servetwin.sim.host_model import HostModel
from servetwin.sim.kv_bytes import KV_DTYPE_BYTES
from servetwin.sim.kv_sizing import KVSettings, KVSizing, cache_on, given_cache
from servetwin.sim.model_shape import ModelShape
from servetwin.sim.model_shape_reader import read_model_shape
from servetwin.sim.steptime.features import StepModel
from servetwin.sim.steptime.roofline import Efficiencies, RooflineStepModel

OF_PROFILES = ("--gpu", "--tensor-parallel-size")
"""Flags of a card that step times of a profile heed."""


@dataclass(frozen=True)
class StepSource:
    """Where modelled step times come from, and the pool that goes with them."""

    name: str
    model: StepModel
    num_gpu_blocks: int
    described: dict[str, Any] = field(default_factory=dict)
    """For run.json; `note` is what every output says."""
    assumed: tuple[str, ...] = ()
    host: HostModel | None = None
    """Time between steps; None: none."""


def refuse_card_flags(flags: EngineFlags, executor: str, heeded: Collection[str] = ()) -> None:
    """Raises UsageError for a flag that describes a card: only the roofline asks for one, and profiles for some."""
    given = {
        "--gpu": flags.gpu is not None,
        "--tensor-parallel-size": flags.tensor_parallel_size != 1,
        "--kv-cache-dtype": flags.kv_cache_dtype != "auto",
    }
    for name in (n for n, is_given in given.items() if is_given and n not in heeded):
        allowed = "roofline or a profile" if name in OF_PROFILES else "roofline"
        raise UsageError(f"{name} goes with --executor {allowed} only, not with {executor}")


def required_card(flags: EngineFlags) -> tuple[Card, Path]:
    """The card, and the model's folder. Raises UsageError for what is missing, unknown, or without effect."""
    if flags.gpu is None or flags.model is None:
        missing = "--gpu NAME" if flags.gpu is None else "--model FOLDER (its config.json)"
        raise UsageError(f"--executor roofline needs {missing}")
    _refuse_inert(flags)
    return named_card(flags.gpu), flags.model


def roofline_source(flags: EngineFlags, card: Card, folder: Path) -> StepSource:
    """Raises UsageError and ModelFolderError (wrong input), InfeasibleError (the model does not fit on the card)."""
    shape = read_model_shape(folder)
    settings = _settings(flags)
    try:
        sizing = _sizing(flags, shape, card, settings)
    except ValueError as e:
        raise UsageError(f"--tensor-parallel-size: {e}") from e
    model = RooflineStepModel(
        shape,
        card,
        dtype=sizing.dtype,
        kv_cache_dtype=flags.kv_cache_dtype,
        tensor_parallel_size=flags.tensor_parallel_size,
    )
    assumed = []
    if flags.num_gpu_blocks_override is None:
        assumed.append(f"num_gpu_blocks {sizing.num_gpu_blocks} (by the rule of `servetwin kv`, an estimate)")
    described = {
        "note": _note(shape, card, flags.tensor_parallel_size),
        "gpu": card.name,
        "tensor_parallel_size": flags.tensor_parallel_size,
        "dtype": sizing.dtype,
        "kv_cache_dtype": flags.kv_cache_dtype,
        "model": shape.name,
        "num_parameters": shape.num_parameters,
        "kv_bytes_per_token": sizing.kv.per_token,
        "efficiencies": asdict(Efficiencies()),
    }
    num_gpu_blocks = flags.num_gpu_blocks_override or sizing.num_gpu_blocks
    return StepSource("roofline", model, num_gpu_blocks, described, tuple(assumed))


def _refuse_inert(flags: EngineFlags) -> None:
    inert = {
        "--load-format": flags.load_format != "auto",
        "--zero-fresh-blocks": flags.zero_fresh_blocks,
        "--compile": flags.compile,
        "--threads": flags.threads is not None,
        "--cudagraph-capture-sizes": flags.cudagraph_capture_sizes is not None,
        "--max-cudagraph-capture-size": flags.max_cudagraph_capture_size is not None,
    }
    for name in (n for n, given in inert.items() if given):
        raise UsageError(f"{name} has no effect with --executor roofline, which runs no model")
    pool = {
        "--num-gpu-blocks-override": flags.num_gpu_blocks_override is not None,
        "--kv-cache-memory-bytes": flags.kv_cache_memory_bytes is not None,
        "--gpu-memory-utilization": flags.gpu_memory_utilization is not None,
        "--enforce-eager": flags.enforce_eager,
    }
    names = [name for name, given in pool.items() if given]
    if len(names) > 1 and names[0] in ("--num-gpu-blocks-override", "--kv-cache-memory-bytes"):
        raise UsageError(f"{names[1]} has no effect beside {names[0]}, which gives the size of the pool")


def _settings(flags: EngineFlags) -> KVSettings:
    if flags.kv_cache_dtype not in ("auto", *KV_DTYPE_BYTES):
        raise UsageError(
            f"--kv-cache-dtype {flags.kv_cache_dtype}: allowed are auto, {', '.join(KV_DTYPE_BYTES)}"
        )
    check_sizes(flags, "block_size", "tensor_parallel_size", "kv_cache_memory_bytes")
    assert flags.max_num_batched_tokens is not None and flags.max_num_seqs is not None, "resolved before"
    return kv_settings(flags, flags.max_num_seqs, flags.max_num_batched_tokens)


def _sizing(flags: EngineFlags, shape: ModelShape, card: Card, settings: KVSettings) -> KVSizing:
    if flags.kv_cache_memory_bytes is not None:
        return given_cache(shape, flags.kv_cache_memory_bytes, settings)
    if flags.num_gpu_blocks_override is not None:
        return given_cache(shape, 0, settings)
    return cache_on(shape, card, settings)


def _note(shape: ModelShape, card: Card, cards: int) -> str:
    """What every output of such a run says."""
    many = f"{cards} x " if cards > 1 else ""
    note = (
        f"estimate: step times are a roofline of {many}{card.name} ({card.memory_bytes / GIB:.0f} GiB) from published "
        "peaks and stated efficiencies, nothing was measured"
    )
    if shape.window_tokens is not None:
        note += (
            f"; sliding window of {shape.window_tokens} tokens: step times honour it, the scheduler treats every layer "
            "as full attention"
        )
    return note
