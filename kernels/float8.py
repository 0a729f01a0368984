"""Keys and values stored as float8_e4m3fn with one scale per cache: stored = x / scale, read back = stored * scale."""

from __future__ import annotations

import torch
from torch import Tensor

MAX = torch.finfo(torch.float8_e4m3fn).max
"""448: there is no infinity, so larger values are clamped."""


def quantize(x: Tensor, scale: Tensor | None) -> Tensor:
    """What a cache stores of `x`: float8_e4m3fn with a scale (float32, one element), `x` itself without."""
    return x if scale is None else (x.float() / scale).clamp_(-MAX, MAX).to(torch.float8_e4m3fn)


def as_bits(cache: Tensor) -> Tensor:
    """The same memory, as integers if it is float8, which torch's indexing functions refuse."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def gather_blocks(cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks [n] of a cache [blocks, ...], [n, ...] in `dtype`, unscaled: every float8 is exact in wider dtypes."""
    try:
        return as_bits(cache).index_select(0, blocks).view(cache.dtype).to(dtype)
    except IndexError as e:
        wrong = blocks[(blocks < 0) | (blocks >= len(cache))]
        raise ValueError(f"block_table: got block {int(wrong[0])}, expected 0 to {len(cache) - 1}") from e
