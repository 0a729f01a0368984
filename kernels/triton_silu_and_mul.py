"""Triton kernel of the gated activation of a Llama MLP.

    out = silu(gate) * up,   silu(x) = x / (1 + exp(-x))

gate_up [tokens, 2n] -> out [tokens, n]; float32 inside, rounded to the dtype before and after the product. A program
takes a piece of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servetwin.kernels.triton_launch import Launch, warps_for

__all__ = ["plan_launch", "silu_and_mul"]

MAX_BLOCK = 1024


@triton.jit
def silu_and_mul_kernel(
    output_ptr,  # [tokens, n]
    gate_up_ptr,  # [tokens, 2n]
    gate_up_strides,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Everything that is multiplied by a stride is widened first: offsets pass 2^31 elements.
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    gate_ptr = gate_up_ptr + token * gate_up_strides[0]
    up_ptr = gate_ptr + N * gate_up_strides[1]
    gate = tl.load(gate_ptr + column * gate_up_strides[1], mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + column * gate_up_strides[1], mask=mask, other=0.0).to(tl.float32)
    dtype = output_ptr.dtype.element_ty
    # From exp(-|gate|), which cannot overflow.
    decay = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate < 0, decay, 1.0) / (1.0 + decay)
    activated = (gate * sigmoid).to(dtype).to(tl.float32)
    tl.store(output_ptr + token * N + column, (activated * up).to(dtype), mask=mask)


def plan_launch(output: Tensor, gate_up: Tensor) -> Launch:
    """The grid and the arguments of the kernel for these tensors, of which only shape, dtype and strides are used."""
    tokens, n = output.shape
    block = min(triton.next_power_of_2(n), MAX_BLOCK)
    return Launch(
        kernel=silu_and_mul_kernel,
        grid=(tokens, triton.cdiv(n, block)),
        args=(output, gate_up, gate_up.stride()),
        constants={"N": n, "BLOCK": block},
        num_warps=warps_for(block),
        num_stages=1,
    )


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Gated activation; arguments as in `ops.silu_and_mul`."""
    tokens, columns = gate_up.shape
    output = gate_up.new_empty(tokens, columns // 2)
    if output.numel():
        with torch.cuda.device_of(gate_up):
            plan_launch(output, gate_up).run()
    return output
