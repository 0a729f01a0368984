"""The host's part of the attention kernels: one call's arguments, and how much of it one program does.

Everything here comes from shapes, dtypes and strides: the host never reads the device, so that a call can be
captured in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from servetwin.kernels.triton_launch import INTERPRETED, target_arch

LOG2_E = math.log2(math.e)
MIN_DOT_SIZE = 16
"""Smallest side of a matrix product on the tensor cores."""
MAX_DECODE_QUERIES = 8
"""Up to so many queries a request, on average, a batch counts as decode: draft tokens to verify come in such rows."""


class TileShape(NamedTuple):
    """How much one program does; see the kernels' constants of the same names."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """The arguments of `ops.paged_attention`, as the kernels take them."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.query.shape[1] // self.key_cache.shape[2]

    @property
    def max_seq_len(self) -> int:
        """Tokens that a row of the block table holds."""
        return self.block_table.shape[1] * self.key_cache.shape[1]

    @property
    def mean_queries(self) -> int:
        """Queries per request, rounded up: all that shapes tell of the query lengths."""
        return -(-self.query.shape[0] // self.block_table.shape[0])

    def tile_shape(self) -> TileShape:
        """The tile shape for this call on the active target."""
        return choose_tile_shape(
            queries=self.mean_queries,
            group=self.group,
            head_dim=self.query.shape[2],
            dtype=self.query.dtype,
            arch=target_arch(),
        )

    def grid(self, shape: TileShape) -> tuple[int, int]:
        """Blocks of BLOCK_Q queries, an upper bound whose surplus programs return at once, and kv heads."""
        tokens, reqs = self.query.shape[0], self.block_table.shape[0]
        return tokens // (shape.block_m // self.group) + reqs, self.key_cache.shape[2]

    def arguments(self) -> tuple[Any, ...]:
        """The run-time arguments that all attention kernels begin with, after their outputs."""
        log2_scale = (self.scale * LOG2_E, None)
        capped = None if self.softcap is None else (self.scale / self.softcap, self.softcap * LOG2_E)
        return (
            *(self.query, self.key_cache, self.value_cache, self.block_table),
            *(
                self.seq_lens.contiguous(),
                self.query_start_loc.contiguous(),
                self.key_scale,
                self.value_scale,
            ),
            *(self.block_table.shape[0], self.max_seq_len),
            *(capped or log2_scale),
            *(
                self.query.stride(),
                self.key_cache.stride(),
                self.value_cache.stride(),
                self.block_table.stride(),
            ),
        )

    def constants(self, shape: TileShape) -> dict[str, int | bool]:
        """The constexpr parameters that all attention kernels share."""
        dim = self.query.shape[2]
        return {
            "HEAD_DIM": dim,
            "BLOCK_D": padded_dim(dim),
            "GROUP": self.group,
            "BLOCK_SIZE": self.key_cache.shape[1],
            "BLOCK_M": shape.block_m,
            "BLOCK_Q": shape.block_m // self.group,
            "TILE": shape.tile,
            "SLIDING_WINDOW": self.sliding_window or 0,
            "UPCAST": INTERPRETED and self.query.dtype == torch.bfloat16,
        }


def padded_dim(dim: int) -> int:
    """The head dim as the kernels lay it out: a power of two that a matrix product takes."""
    return max(MIN_DOT_SIZE, int(triton.next_power_of_2(dim)))


def choose_tile_shape(*, queries: int, group: int, head_dim: int, dtype: torch.dtype, arch: int) -> TileShape:
    """The tile shape for a batch, chosen so that no variant spills registers (benchmarks/compile_kernels.py).

    A decode batch reads much memory for few rows: the smallest matrix tile that holds them. Prompt chunks want more
    rows per loaded key. A group larger than either must still fit. `arch` is the compute capability times ten.
    """
    group_rows = triton.next_power_of_2(group)
    # The weighted values of many rows of a large head take up twice the registers.
    num_warps = 8 if head_dim > 128 else 4
    if dtype == torch.float32:
        # No tensor core multiplies float32 exactly, so the products run on the plain units, out of registers: left to
        # choose, the assembler spills some of them to fit more programs on a processor.
        rows = max(MIN_DOT_SIZE, group_rows)
        return TileShape(rows, tile=16, num_warps=8, num_stages=2, max_registers=255)
    if queries <= MAX_DECODE_QUERIES:
        rows = min(triton.next_power_of_2(queries * group), 32)
        # Five stages: a tile's block numbers, then its keys and values, are each loaded two tiles ahead.
        tile = 64 if head_dim <= 64 else 32
        return TileShape(max(MIN_DOT_SIZE, rows, group_rows), tile, num_warps, num_stages=5)
    if head_dim > 128:
        return TileShape(max(64, group_rows), tile=32, num_warps=num_warps, num_stages=3)
    # The matrix units of sm_90 and sm_100 take operands from shared memory; elsewhere they take up registers.
    tile = 64 if 90 <= arch < 120 else 32
    return TileShape(max(64, group_rows), tile, num_warps, num_stages=3)
