"""Caches that may be float8: which GPUs can convert it, and storing for kernels that write keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servetwin.kernels.triton_launch import target_arch

MIN_FP8_ARCH = 89
"""Compute capability, times ten, from which Triton converts float8_e4m3fn."""


def check_target(cache: Tensor) -> None:
    """Raises ValueError for a float8 cache on a GPU that cannot convert it."""
    if cache.dtype == torch.float8_e4m3fn and 0 < (arch := target_arch()) < MIN_FP8_ARCH:
        raise ValueError(
            f"key_cache: got float8_e4m3fn on a GPU of compute capability {arch / 10}, expected 8.9 or higher"
        )


@triton.jit
def store_scaled(pointers, x, scale_ptr, mask):
    """Stores x, or with a scale x / scale clamped to the range of float8_e4m3fn, +-448; NaN stays NaN."""
    if scale_ptr is not None:
        # Rounded to nearest as torch divides: `/` is approximate on a card, and half-way cases would round otherwise.
        scaled = tl.div_rn(x.to(tl.float32), tl.load(scale_ptr))
        x = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)
