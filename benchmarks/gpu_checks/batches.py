"""Shapes of attention layers, and packed batches over a paged cache for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerShape:
    """The attention of one layer."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


LLAMA_8B = LayerShape("Llama-3.1-8B", heads=32, kv_heads=8, head_dim=128)
QWEN3_06B = LayerShape("Qwen3-0.6B", heads=16, kv_heads=8, head_dim=128)


@dataclass(frozen=True)
class PagedBatch:
    """The operands of `ops.paged_attention`."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return (
            self.query, self.key_cache, self.value_cache, self.block_table, self.seq_lens, self.query_start_loc
        )  # fmt: skip


def random_cache(
    shape: LayerShape, num_blocks: int, block_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Keys and values `[num_blocks, block_size, kv_heads, dim]`, filled in place, so that no copy is needed."""
    size = (num_blocks, block_size, shape.kv_heads, shape.head_dim)
    key, value = (torch.empty(size, dtype=shape.dtype, device=device) for _ in range(2))
    return key.normal_(), value.normal_()


def packed_batch(
    shape: LayerShape,
    cache: tuple[Tensor, Tensor],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    generator: torch.Generator,
    first_block: int = 0,
) -> PagedBatch:
    """Requests over blocks of the cache from `first_block` on, in random order; every block belongs to one request."""
    key_cache, value_cache = cache
    device, block_size = key_cache.device, key_cache.shape[1]
    seq_lens = torch.tensor([q + c for q, c in zip(query_lens, context_lens, strict=True)])
    num_blocks = (seq_lens + block_size - 1) // block_size
    blocks = torch.randperm(int(num_blocks.sum()), generator=generator, device=device) + first_block
    table = torch.zeros(len(query_lens), int(num_blocks.max()), dtype=torch.int32, device=device)
    rows = torch.arange(table.shape[1], device=device) < num_blocks.to(device)[:, None]
    table[rows] = blocks.int()
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    query = torch.randn(sum(query_lens), shape.heads, shape.head_dim, generator=generator, device=device)
    return PagedBatch(
        query.to(shape.dtype),
        key_cache,
        value_cache,
        table,
        seq_lens.int().to(device),
        starts.int().to(device),
    )
