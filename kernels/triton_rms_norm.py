"""Triton kernel of the root mean square norm, with the residual sum before it if asked for.

    norm(x) = x / sqrt(mean(x ** 2) + eps) * (weight + weight_offset)

x [..., hidden]; float32 inside, rounded to the dtype where `reference_layers.rms_norm` rounds. A program takes whole
rows: one long row, or as many short ones (the norm of each query head, say) as make up a similar amount of work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servetwin.kernels.triton_launch import Launch, warps_for

__all__ = ["plan_launch", "rms_norm"]

MIN_PROGRAM_ELEMENTS = 1024
"""Elements that a program takes at least, where there are so many."""


@triton.jit(do_not_specialize=["num_rows", "inner"])
def rms_norm_kernel(
    output_ptr,  # [num_rows, hidden]
    total_ptr,  # alike, or None
    x_ptr,  # [outer, inner, hidden]
    residual_ptr,  # alike, or None
    weight_ptr,  # [hidden]
    num_rows,
    inner,
    eps,
    weight_offset,
    x_strides,  # of outer and inner
    residual_strides,  # alike
    HIDDEN: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,  # HIDDEN padded to a power of two
    BLOCK_ROWS: tl.constexpr,
    ROUND_NORMALISED: tl.constexpr,  # before it is weighted
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_HIDDEN)[None, :]
    mask = (row < num_rows) & (column < HIDDEN)
    # Everything that is multiplied by a stride is widened first: offsets pass 2^31 elements.
    outer, within = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    output_offset = row.to(tl.int64) * HIDDEN + column

    x_offset = outer * x_strides[0] + within * x_strides[1] + column
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + x_offset, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual_offset = outer * residual_strides[0] + within * residual_strides[1] + column
        residual = tl.load(residual_ptr + residual_offset, mask=mask, other=0.0).to(tl.float32)
        total = (x + residual).to(dtype)
        tl.store(total_ptr + output_offset, total, mask=mask)
        x = total.to(tl.float32)

    mean_square = tl.sum(x * x, axis=1, keep_dims=True) / HIDDEN
    normalised = x * tl.rsqrt(mean_square + eps)
    if ROUND_NORMALISED:
        normalised = normalised.to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < HIDDEN, other=0.0).to(tl.float32) + weight_offset
    tl.store(output_ptr + output_offset, (normalised * weight).to(dtype), mask=mask)


def plan_launch(
    output: Tensor,
    total: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    weight_offset: float,
) -> Launch:
    """The grid and the arguments of the kernel; output and total are contiguous, of shape [rows, hidden]."""
    rows, hidden = output.shape
    block_hidden = triton.next_power_of_2(hidden)
    block_rows = max(1, MIN_PROGRAM_ELEMENTS // block_hidden)
    x = _three_dimensions(x)
    residual = None if residual is None else _three_dimensions(residual)
    return Launch(
        kernel=rms_norm_kernel,
        grid=(triton.cdiv(rows, block_rows),),
        args=(
            *(output, total, x, residual, weight.contiguous(), rows, x.shape[1]),
            *(eps, weight_offset, x.stride()[:2], (0, 0) if residual is None else residual.stride()[:2]),
        ),
        constants={
            "HIDDEN": hidden,
            "BLOCK_HIDDEN": block_hidden,
            "BLOCK_ROWS": block_rows,
            "ROUND_NORMALISED": weight_offset == 0,
        },
        num_warps=warps_for(block_rows * block_hidden),
        num_stages=1,
    )


def _three_dimensions(x: Tensor) -> Tensor:
    """x [..., hidden] as [outer, inner, hidden] with hidden contiguous; copies only what strides cannot express."""
    x = x[(None,) * (3 - x.ndim)] if x.ndim < 3 else x.flatten(0, -3)
    return x if x.stride(-1) == 1 else x.contiguous()


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, residual: Tensor | None = None, weight_offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """Root mean square norm; arguments as in `ops.rms_norm`."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(output)
    if x.numel():
        hidden = x.shape[-1]
        with torch.cuda.device_of(x):
            plan_launch(
                output.view(-1, hidden),
                None if total is None else total.view(-1, hidden),
                x,
                residual,
                weight,
                eps=eps,
                weight_offset=weight_offset,
            ).run()
    return output if total is None else (output, total)
