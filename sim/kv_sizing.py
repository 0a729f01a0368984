"""How large the KV cache of a model on a card is: memory less weights and a reserve, cut into blocks."""

from __future__ import annotations

from dataclasses import dataclass

from servetwin.sim.cards import GIB, Card
from servetwin.sim.infeasible import InfeasibleError
from servetwin.sim.kv_bytes import KVBytes, kv_bytes
from servetwin.sim.memory_reserve import Reserve, reserve
from servetwin.sim.model_shape import ModelShape

GPU_MEMORY_UTILIZATION = 0.92
"""Part of a card's memory that the engine may use (default of vLLM 0.22.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSettings:
    """What the size of the cache depends on, besides model and card; names and meaning are vLLM's."""

    max_num_batched_tokens: int
    max_num_seqs: int
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    graphs: bool = True
    """CUDA graphs are captured (not --enforce-eager)."""


@dataclass(frozen=True, slots=True)
class KVSizing:
    """Bytes on each card."""

    dtype: str
    """The model runs in it."""
    kv: KVBytes
    weight_bytes: int
    reserve: Reserve | None
    """None where the bytes of the cache were given."""
    cache_bytes: int
    block_size: int

    @property
    def num_gpu_blocks(self) -> int:
        """Whole blocks, the null block included."""
        return self.cache_bytes // (self.kv.per_token * self.block_size)


def running_dtype(shape: ModelShape, dtype: str) -> str:
    """The type that vLLM runs the model in: `auto` is the checkpoint's, bfloat16 for a float32 one."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if shape.dtype == "float32" else shape.dtype


def given_cache(shape: ModelShape, cache_bytes: int, settings: KVSettings) -> KVSizing:
    """A cache of so many bytes on each card. Raises ValueError where heads cannot be divided among the cards."""
    return _sizing(shape, settings, None, cache_bytes)


def cache_on(shape: ModelShape, card: Card, settings: KVSettings) -> KVSizing:
    """The share of the card's memory that the engine may use, less weights and reserve.

    Raises InfeasibleError with the numbers when nothing is left; ValueError as `given_cache`.
    """
    kept = reserve(
        shape,
        running_dtype(shape, settings.dtype),
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        tensor_parallel_size=settings.tensor_parallel_size,
        graphs=settings.graphs,
    )
    share = int(card.memory_bytes * settings.gpu_memory_utilization)
    sizing = _sizing(shape, settings, kept, 0)
    left = share - sizing.weight_bytes - kept.total
    if left <= 0:
        raise InfeasibleError(
            f"nothing is left for the KV cache: gpu_memory_utilization {settings.gpu_memory_utilization:g} of the "
            f"{card.memory_bytes / GIB:.2f} GiB of a {card.name} is {share / GIB:.2f} GiB; weights take "
            f"{sizing.weight_bytes / GIB:.2f} GiB on each of {settings.tensor_parallel_size} cards, activations, CUDA "
            f"graphs and libraries about {kept.total / GIB:.2f} GiB"
        )
    return _sizing(shape, settings, kept, left)


def _sizing(shape: ModelShape, settings: KVSettings, kept: Reserve | None, cache_bytes: int) -> KVSizing:
    dtype = running_dtype(shape, settings.dtype)
    return KVSizing(
        dtype=dtype,
        kv=kv_bytes(shape, dtype, settings.kv_cache_dtype, settings.tensor_parallel_size),
        weight_bytes=-(-shape.weight_bytes(dtype) // settings.tensor_parallel_size),
        reserve=kept,
        cache_bytes=cache_bytes,
        block_size=settings.block_size,
    )
