"""The answer of `servetwin kv`: as lines for people, as one JSON object."""

from __future__ import annotations

from typing import Any

from servetwin.sim.cards import GIB
from servetwin.sim.commands.kv_answer import Answer
from servetwin.sim.kv_capacity import Capacity
from servetwin.sim.length_mix import FORMULA

RESERVE_NOTE = (
    "the reserve is an estimate: vLLM measures activations and CUDA graphs at start-up, its log is the truth"
)
WINDOW_NOTE = (
    "every layer is counted with all tokens of a request, as the scheduler here does; vLLM's hybrid KV cache manager "
    "frees what lies outside the windows, its figures are given beside"
)


def notes(answer: Answer) -> list[str]:
    """Where the figures may differ from those of the real engine."""
    said = [RESERVE_NOTE] if answer.sizing.reserve else []
    return said + ([WINDOW_NOTE] if answer.hybrid else [])


def lines(answer: Answer) -> list[str]:
    """For people; sizes in GiB (2^30 bytes)."""
    shape, sizing = answer.shape, answer.sizing
    rows = [
        (
            "model",
            f"{shape.name}: {shape.num_parameters / 1e9:.3g} billion parameters, "
            f"{shape.num_active_parameters / 1e9:.3g} active per token, {_stored(answer)}",
        ),
        ("weights", f"{_gib(sizing.weight_bytes)}{_per_card(answer)}"),
        *_memory_rows(answer),
        ("KV per token", f"{sizing.kv.formula}{_per_card(answer)}"),
        (
            "blocks",
            f"{sizing.cache_bytes:,} bytes // ({sizing.kv.per_token:,} x {sizing.block_size}) = "
            f"{sizing.num_gpu_blocks:,} blocks of {sizing.block_size} tokens",
        ),
    ]
    width = max(len(name) for name, _ in rows)
    return [
        *(f"{name:<{width}}  {text}" for name, text in rows),
        f"Available KV cache memory: {_gib(sizing.cache_bytes)}",
        *answer.capacity.lines(),
        *_hybrid_lines(answer.hybrid),
        *_mix_lines(answer),
        *(f"note: {text}" for text in notes(answer)),
    ]


def to_json(answer: Answer) -> dict[str, Any]:
    """All figures; bytes are those of one card."""
    shape, sizing, settings = answer.shape, answer.sizing, answer.settings
    return {
        "model": shape.name,
        "num_parameters": shape.num_parameters,
        "num_active_parameters": shape.num_active_parameters,
        "gpu": answer.card.name if answer.card else None,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "dtype": sizing.dtype,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "quantization": shape.quantization.method if shape.quantization else None,
        "weight_bytes": sizing.weight_bytes,
        **_memory_json(answer),
        "kv_cache_bytes": sizing.cache_bytes,
        "kv_bytes_per_token": sizing.kv.per_token,
        "kv_formula": sizing.kv.formula,
        "block_size": sizing.block_size,
        **_capacity_json(answer.capacity),
        "max_model_len": answer.capacity.max_model_len,
        "hybrid_kv_cache_manager": _capacity_json(answer.hybrid) if answer.hybrid else None,
        "length_mix": _mix_json(answer),
        "notes": notes(answer),
    }


def _stored(answer: Answer) -> str:
    shape, dtype = answer.shape, answer.sizing.dtype
    cast = f" (checkpoint: {shape.dtype})" if shape.dtype != dtype else ""
    return dtype + cast + (f", {shape.quantization.method} weights" if shape.quantization else "")


def _memory_rows(answer: Answer) -> list[tuple[str, str]]:
    kept, card = answer.sizing.reserve, answer.card
    if kept is None or card is None:
        return []
    share = answer.settings.gpu_memory_utilization
    parts = f"activations {_gib(kept.activations)}, CUDA graphs {_gib(kept.graphs)}"
    return [
        (
            "reserve",
            f"{_gib(kept.total)} (estimate: {parts}, driver and libraries {_gib(kept.outside_torch)})",
        ),
        ("memory", f"{share:g} x {_gib(card.memory_bytes)} of a {card.name}, less weights and reserve"),
    ]


def _memory_json(answer: Answer) -> dict[str, Any]:
    kept, card = answer.sizing.reserve, answer.card
    if kept is None or card is None:
        return {"memory_bytes": None, "gpu_memory_utilization": None, "reserve": None}
    return {
        "memory_bytes": card.memory_bytes,
        "gpu_memory_utilization": answer.settings.gpu_memory_utilization,
        "reserve": {
            "estimate": True,
            "activation_bytes": kept.activations,
            "cuda_graph_bytes": kept.graphs,
            "outside_torch_bytes": kept.outside_torch,
        },
    }


def _capacity_json(capacity: Capacity) -> dict[str, Any]:
    return {
        "num_gpu_blocks": capacity.num_gpu_blocks,
        "num_tokens": capacity.num_tokens,
        "max_concurrency": capacity.max_concurrency,
    }


def _hybrid_lines(hybrid: Capacity | None) -> list[str]:
    return [f"{line} (hybrid KV cache manager)" for line in hybrid.lines()] if hybrid else []


def _mix_lines(answer: Answer) -> list[str]:
    mix, concurrency = answer.mix, answer.mix_concurrency
    if mix is None or concurrency is None:
        return []
    seats = answer.settings.max_num_seqs
    limit = "the KV cache" if concurrency < seats else f"max_num_seqs {seats:,}"
    return [
        f"Expected concurrency for this length mix: {concurrency:.1f} requests (limited by {limit}); a running request "
        f"holds {mix.tokens:,.1f} tokens, {mix.blocks:,.2f} blocks in the mean",
        f"    = {FORMULA}",
    ]


def _mix_json(answer: Answer) -> dict[str, Any] | None:
    if (mix := answer.mix) is None:
        return None
    return {
        "requests": mix.requests,
        "mean_tokens_held": mix.tokens,
        "mean_blocks_held": mix.blocks,
        "kv_concurrency": mix.concurrency(answer.capacity.num_gpu_blocks),
        "max_num_seqs": answer.settings.max_num_seqs,
        "expected_concurrency": answer.mix_concurrency,
        "formula": FORMULA,
    }


def _per_card(answer: Answer) -> str:
    return " per card" if answer.settings.tensor_parallel_size > 1 else ""


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
