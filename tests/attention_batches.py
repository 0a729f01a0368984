"""Batches for tests of paged attention, and what they must give, computed densely in float64.

Batches are built hostile: every slot that no row may see holds NaN, and every table column that no row needs holds
a block id that does not exist.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from servetwin.kernels import float8, ops

FP8 = torch.float8_e4m3fn
IMPOSSIBLE_BLOCK = 2**30
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}

Requests = tuple[tuple[int, int], ...]
"""(query_len, context_len) of each request."""

MIXED: Requests = ((5, 10), (1, 20), (0, 7), (1, 0), (0, 0), (1, 13))
"""Chunks with and without context, decode rows, requests without rows."""


@dataclass
class Batch:
    """The arguments of one call of `ops.paged_attention`."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    sliding_window: int | None = None
    softcap: float | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    def attend(self, backend: ops.Backend) -> Tensor:
        """The output of this backend."""
        return ops.paged_attention(
            *(self.query, self.key_cache, self.value_cache),
            *(self.block_table, self.seq_lens, self.query_start_loc),
            scale=self.query.shape[-1] ** -0.5,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
            backend=backend,
        )

    def expected(self) -> Tensor:
        """The output in float64; rows of no request are 0."""
        output = torch.zeros(self.query.shape, dtype=torch.float64)
        for request, (start, end) in enumerate(itertools.pairwise(self.query_start_loc.tolist())):
            length = int(self.seq_lens[request])
            rows = max(start, end - length)
            if rows < end:
                output[rows:end] = self._attend_request(request, rows, end, length)
        return output

    def _attend_request(self, request: int, start: int, end: int, length: int) -> Tensor:
        window = self.sliding_window or length
        row_position = torch.arange(length - (end - start), length)[:, None]
        position = torch.arange(max(0, int(row_position[0]) - window + 1), length)
        keys, values = self._read(request, position)
        query = self.query[start:end].double() * self.query.shape[-1] ** -0.5
        scores = torch.einsum("qhd,khd->hqk", query, keys)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        visible = (position <= row_position) & (position > row_position - window)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)

    def _read(self, request: int, position: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at these positions, [n, heads, dim]."""
        block_size, kv_heads = self.key_cache.shape[1:3]
        where = self.block_table[request, position // block_size].long(), position % block_size
        group = self.query.shape[1] // kv_heads
        keys, values = (
            cache[where].double().repeat_interleave(group, dim=1) * (1.0 if scale is None else scale.double())
            for cache, scale in ((self.key_cache, self.key_scale), (self.value_cache, self.value_scale))
        )
        return keys, values

    def alone(self, request: int) -> Batch:
        """The batch of this request only."""
        start, end = self.query_start_loc[request : request + 2].tolist()
        fields = self.__dict__ | {
            "query": self.query[start:end],
            "block_table": self.block_table[request : request + 1],
            "seq_lens": self.seq_lens[request : request + 1],
            "query_start_loc": torch.tensor([0, end - start], dtype=torch.int32),
        }
        return Batch(**fields)

    def check(self, backend: ops.Backend, tolerance: float | None = None) -> None:
        """Asserts that this backend gives what it must, to rounding."""
        limit = tolerance or TOLERANCE[self.query.dtype]
        torch.testing.assert_close(self.attend(backend).double(), self.expected(), rtol=limit, atol=limit)


def make_batch(
    requests: Requests = MIXED,
    *,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 32,
    block_size: int = 12,
    dtype: torch.dtype = torch.float32,
    sliding_window: int | None = None,
    softcap: float | None = None,
    query_factor: float = 1.0,
    scales: tuple[float, float] | None = None,
    spare_blocks: int = 2,
) -> Batch:
    """A random batch. scales: of keys and values in float8 caches; spare_blocks: unused columns of the table."""
    rng = torch.Generator().manual_seed(sum(q + 3 * c for q, c in requests) + dim + group)
    max_blocks = max((-(-(q + c) // block_size) for q, c in requests), default=0) + spare_blocks
    pool = torch.randperm(len(requests) * max_blocks, generator=rng).view(len(requests), max_blocks)
    block_table = torch.full(pool.shape, IMPOSSIBLE_BLOCK, dtype=torch.int32)
    key_scale, value_scale = map(torch.tensor, scales) if scales else (None, None)
    shape = (pool.numel() + 1, block_size, kv_heads, dim)
    caches = [torch.full(shape, torch.nan).to(FP8 if scales else dtype) for _ in range(2)]
    for row, (query_len, context_len) in enumerate(requests):
        first = 0 if sliding_window is None else max(0, context_len - sliding_window + 1)
        positions = torch.arange(first, context_len + query_len if query_len else first)
        columns, offsets = positions // block_size, positions % block_size
        block_table[row, columns] = pool[row, columns].int()
        for cache, scale in zip(caches, (key_scale, value_scale), strict=True):
            live = torch.randn(len(positions), kv_heads, dim, generator=rng)
            cache[pool[row, columns], offsets] = float8.quantize(live, scale).to(cache.dtype)
    query_lens = [q for q, _ in requests]
    query = torch.randn(sum(query_lens), kv_heads * group, dim, generator=rng) * query_factor
    return Batch(
        query.to(dtype),
        *caches,
        block_table,
        seq_lens=torch.tensor([q + c for q, c in requests], dtype=torch.int32),
        query_start_loc=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
        sliding_window=sliding_window,
        softcap=softcap,
        key_scale=key_scale,
        value_scale=value_scale,
    )
