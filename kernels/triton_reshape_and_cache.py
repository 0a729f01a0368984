"""Triton kernel that writes this step's keys and values into the paged cache.

One program copies one token (or a part of it, when kv_heads * dim is large) of both K and V.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servetwin.kernels.triton_launch import INTERPRETED, Launch

__all__ = ["INTERPRETED", "plan_launch", "reshape_and_cache"]

MAX_BLOCK_ELEMENTS = 2048


@triton.jit(do_not_specialize=["num_slots"])
def reshape_and_cache_kernel(
    key_ptr,  # [tokens, kv_heads, dim]
    value_ptr,  # [tokens, kv_heads, dim]
    key_cache_ptr,  # [blocks, block_size, kv_heads, dim]
    value_cache_ptr,  # [blocks, block_size, kv_heads, dim]
    slot_mapping_ptr,  # [tokens] int64
    num_slots,
    stride_k_token,
    stride_k_head,
    stride_k_dim,
    stride_v_token,
    stride_v_head,
    stride_v_dim,
    stride_kc_block,
    stride_kc_slot,
    stride_kc_head,
    stride_kc_dim,
    stride_vc_block,
    stride_vc_slot,
    stride_vc_head,
    stride_vc_dim,
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

    key = tl.load(
        key_ptr + token * stride_k_token + head * stride_k_head + dim * stride_k_dim, mask=mask, other=0.0
    )
    value = tl.load(
        value_ptr + token * stride_v_token + head * stride_v_head + dim * stride_v_dim, mask=mask, other=0.0
    )
    key_base = key_cache_ptr + block * stride_kc_block + offset * stride_kc_slot
    value_base = value_cache_ptr + block * stride_vc_block + offset * stride_vc_slot
    tl.store(key_base + head * stride_kc_head + dim * stride_kc_dim, key, mask=mask)
    tl.store(value_base + head * stride_vc_head + dim * stride_vc_dim, value, mask=mask)


def plan_launch(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
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
            *(key, value, key_cache, value_cache, slot_mapping.contiguous(), blocks * block_size),
            *(*key.stride(), *value.stride(), *key_cache.stride(), *value_cache.stride()),
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
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Cache write; arguments as in `ops.reshape_and_cache`."""
    if key.numel():
        with torch.cuda.device_of(key):
            plan_launch(key, value, key_cache, value_cache, slot_mapping).run()
