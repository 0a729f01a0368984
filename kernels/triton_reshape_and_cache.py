"""Triton kernel that writes this step's keys and values into the paged cache.

    cache[slot // block_size, slot % block_size] = x, or x / scale as float8_e4m3fn, for every token with a slot >= 0

key and value [tokens, kv_heads, dim]; key and value cache [blocks, block_size, kv_heads, dim]; slots [tokens]. The
reference is `reference.reshape_and_cache`. One program copies one token (or a part of it, when kv_heads * dim is
large) of both K and V. Strides come as one tuple per tensor, in the order of its dimensions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servetwin.kernels.triton_fp8 import check_target, store_scaled
from servetwin.kernels.triton_launch import Launch

__all__ = ["plan_launch", "reshape_and_cache"]

MAX_BLOCK_ELEMENTS = 2048


@triton.jit(do_not_specialize=["num_slots"])
def reshape_and_cache_kernel(
    key_ptr,  # [tokens, kv_heads, dim]
    value_ptr,  # [tokens, kv_heads, dim]
    key_cache_ptr,  # [blocks, block_size, kv_heads, dim]
    value_cache_ptr,  # [blocks, block_size, kv_heads, dim]
    slot_mapping_ptr,  # [tokens] int64
    key_scale_ptr,  # [1] float32, or None
    value_scale_ptr,  # [1] float32, or None
    num_slots,
    key_strides,
    value_strides,
    key_cache_strides,
    value_cache_strides,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
):
    # Everything that is multiplied by a stride is widened first: token and block offsets pass 2^31 elements.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE

    element = tl.program_id(1) * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)
    mask = element < KV_HEADS * HEAD_DIM
    head = (element // HEAD_DIM).to(tl.int64)
    dim = (element % HEAD_DIM).to(tl.int64)

    key_base = key_ptr + token * key_strides[0]
    value_base = value_ptr + token * value_strides[0]
    key = tl.load(key_base + head * key_strides[1] + dim * key_strides[2], mask=mask, other=0.0)
    value = tl.load(value_base + head * value_strides[1] + dim * value_strides[2], mask=mask, other=0.0)
    key_slot = key_cache_ptr + block * key_cache_strides[0] + offset * key_cache_strides[1]
    value_slot = value_cache_ptr + block * value_cache_strides[0] + offset * value_cache_strides[1]
    key_pointers = key_slot + head * key_cache_strides[2] + dim * key_cache_strides[3]
    value_pointers = value_slot + head * value_cache_strides[2] + dim * value_cache_strides[3]
    store_scaled(key_pointers, key, key_scale_ptr, mask)
    store_scaled(value_pointers, value, value_scale_ptr, mask)


def plan_launch(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Launch:
    """The grid and the arguments of the kernel for these tensors, of which only shape, dtype and strides are used."""
    tokens, kv_heads, dim = key.shape
    blocks, block_size = key_cache.shape[:2]
    elements = kv_heads * dim
    block_elements = min(triton.next_power_of_2(elements), MAX_BLOCK_ELEMENTS)
    return Launch(
        kernel=reshape_and_cache_kernel,
        grid=(tokens, triton.cdiv(elements, block_elements)),
        args=(
            *(key, value, key_cache, value_cache, slot_mapping.contiguous()),
            *(key_scale, value_scale, blocks * block_size),
            *(key.stride(), value.stride(), key_cache.stride(), value_cache.stride()),
        ),
        constants={
            "KV_HEADS": kv_heads,
            "HEAD_DIM": dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_ELEMENTS": block_elements,
        },
        num_warps=4,
        num_stages=1,
    )


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Cache write; arguments as in `ops.reshape_and_cache`."""
    if key.numel():
        scales = {"key_scale": key_scale, "value_scale": value_scale}
        with torch.cuda.device_of(key):
            check_target(key_cache)
            plan_launch(key, value, key_cache, value_cache, slot_mapping, **scales).run()
