"""From bytes to blocks, tokens and concurrency, by vLLM's rules."""

from __future__ import annotations

from dataclasses import dataclass

from servetwin.sim.kv_bytes import KVBytes
from servetwin.sim.model_shape import ModelShape

PADDING_RATIO = 1.25
"""Kinds of layers whose numbers differ by less are padded to the larger number, not cut to the smaller."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a pool holds."""

    num_gpu_blocks: int
    """Blocks in the pool, the null block included."""
    blocks_per_request: int
    """Of a request of max_model_len tokens."""
    max_model_len: int

    @property
    def max_concurrency(self) -> float:
        return self.num_gpu_blocks / self.blocks_per_request

    @property
    def num_tokens(self) -> int:
        """As vLLM prints it: concurrency x max_model_len."""
        return self.num_gpu_blocks * self.max_model_len // self.blocks_per_request

    def lines(self, cache: str = "GPU KV cache") -> list[str]:
        """vLLM's two start-up lines."""
        return [
            f"{cache} size: {self.num_tokens:,} tokens",
            f"Maximum concurrency for {self.max_model_len:,} tokens per request: {self.max_concurrency:.2f}x",
        ]


def full_capacity(num_gpu_blocks: int, block_size: int, max_model_len: int) -> Capacity:
    """A pool whose every layer keeps every token of a request."""
    return Capacity(num_gpu_blocks, -(-max_model_len // block_size), max_model_len)


def hybrid_capacity(
    shape: ModelShape,
    kv: KVBytes,
    cache_bytes: int,
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> Capacity:
    """What vLLM's hybrid KV cache manager makes of the same bytes for a model with windowed layers.

    It cuts the layers into groups of one size and one kind. A block holds `block_size` tokens of one group, and a
    group of windowed layers keeps only window - 1 + max_num_batched_tokens tokens of a request (and a block more,
    since a window may begin inside one): `_get_kv_cache_groups_uniform_page_size` and `SlidingWindowSpec`.
    """
    window = min((shape.window_tokens or 0) - 1 + max_num_batched_tokens, max_model_len)
    windowed, full = shape.num_windowed_layers, shape.num_layers - shape.num_windowed_layers
    kinds = [n for n in (windowed, full) if n]
    size = max(kinds) if max(kinds) < min(kinds) * PADDING_RATIO else min(kinds)
    num_gpu_blocks = cache_bytes // (kv.per_layer() * block_size * size)
    blocks = -(-windowed // size) * (-(-window // block_size) + 1)
    blocks += -(-full // size) * -(-max_model_len // block_size)
    return Capacity(num_gpu_blocks, blocks, max_model_len)
