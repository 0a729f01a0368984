"""Triton kernel of the rotary embedding, which also writes the rotated keys and the values into the paged cache.

    (a, b) -> (a * cos - b * sin, b * cos + a * sin)    for dimensions (i, i + r/2), i < r/2

query [tokens, heads, dim], key and value [tokens, kv_heads, dim], cos and sin [tokens, r] with r <= dim even; slots,
scales and strides as in `triton_reshape_and_cache`. float32 inside, rounded to the dtype where
`reference_layers.rotary_and_cache` rounds. A program takes a few heads of one token: query heads, or kv heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servetwin.kernels.triton_fp8 import check_target, store_scaled
from servetwin.kernels.triton_launch import Launch, warps_for

__all__ = ["plan_launch", "rotary_and_cache"]

PROGRAM_ELEMENTS = 1024


@triton.jit
def rotate_pairs(x_ptr, offset, half, mask, cos, sin):
    """The rotated first and second elements of pairs, of which the first lie at `offset`; rounded, in float32."""
    dtype = x_ptr.dtype.element_ty
    a = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + offset + half, mask=mask, other=0.0).to(tl.float32)
    first = (a * cos).to(dtype).to(tl.float32) - (b * sin).to(dtype).to(tl.float32)
    second = (b * cos).to(dtype).to(tl.float32) + (a * sin).to(dtype).to(tl.float32)
    return first.to(dtype), second.to(dtype)


@triton.jit
def rotate_heads(
    output_ptr,
    output_strides,  # of head and dim
    x_ptr,
    stride_head,
    scale_ptr,
    first_head,
    cos_ptr,
    sin_ptr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rotates BLOCK_HEADS heads of one token and stores them, scaled if there is a scale."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    head = first_head + tl.arange(0, BLOCK_HEADS)[:, None].to(tl.int64)
    output_head_ptr = output_ptr + head * output_strides[0]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    mask = (head < HEADS) & (pair < HALF)
    cos = tl.load(cos_ptr + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    first, second = rotate_pairs(x_ptr, head * stride_head + pair, HALF, mask, cos, sin)
    store_scaled(output_head_ptr + pair * output_strides[1], first, scale_ptr, mask)
    store_scaled(output_head_ptr + (pair + HALF) * output_strides[1], second, scale_ptr, mask)
    if ROTARY_DIM < HEAD_DIM:
        dim = ROTARY_DIM + tl.arange(0, BLOCK_REST)[None, :]
        mask = (head < HEADS) & (dim < HEAD_DIM)
        rest = tl.load(x_ptr + head * stride_head + dim, mask=mask, other=0.0)
        store_scaled(output_head_ptr + dim * output_strides[1], rest, scale_ptr, mask)


@triton.jit(do_not_specialize=["num_slots"])
def rotary_and_cache_kernel(
    output_ptr,  # [tokens, heads, dim], contiguous
    query_ptr,  # [tokens, heads, dim], as key and value with dim contiguous
    key_ptr,  # [tokens, kv_heads, dim]
    value_ptr,  # [tokens, kv_heads, dim]
    cos_ptr,  # [tokens, rotary_dim], contiguous, as is sin
    sin_ptr,
    key_cache_ptr,  # [blocks, block_size, kv_heads, dim]
    value_cache_ptr,  # [blocks, block_size, kv_heads, dim]
    slot_mapping_ptr,  # [tokens] int64
    key_scale_ptr,  # [1] float32, or None, as is value_scale
    value_scale_ptr,
    num_slots,
    query_strides,
    key_strides,
    value_strides,
    key_cache_strides,
    value_cache_strides,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,  # ROTARY_DIM / 2 padded to a power of two
    BLOCK_REST: tl.constexpr,  # HEAD_DIM - ROTARY_DIM alike
    BLOCK_DIM: tl.constexpr,  # HEAD_DIM alike
    QUERY_PROGRAMS: tl.constexpr,  # per token; those after them take kv heads
):
    # Everything that is multiplied by a stride is widened first: token and block offsets pass 2^31 elements.
    token = tl.program_id(0).to(tl.int64)
    cos_ptr += token * ROTARY_DIM
    sin_ptr += token * ROTARY_DIM
    if tl.program_id(1) < QUERY_PROGRAMS:
        rotate_heads(
            output_ptr + token * HEADS * HEAD_DIM,
            (HEAD_DIM, 1),
            query_ptr + token * query_strides[0],
            query_strides[1],
            None,
            tl.program_id(1) * BLOCK_HEADS,
            cos_ptr,
            sin_ptr,
            HEADS,
            HEAD_DIM,
            ROTARY_DIM,
            BLOCK_HEADS,
            BLOCK_PAIRS,
            BLOCK_REST,
        )
    else:
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        if (slot >= 0) & (slot < num_slots):
            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            first_head = (tl.program_id(1) - QUERY_PROGRAMS) * BLOCK_HEADS
            rotate_heads(
                key_cache_ptr + block * key_cache_strides[0] + offset * key_cache_strides[1],
                (key_cache_strides[2], key_cache_strides[3]),
                key_ptr + token * key_strides[0],
                key_strides[1],
                key_scale_ptr,
                first_head,
                cos_ptr,
                sin_ptr,
                KV_HEADS,
                HEAD_DIM,
                ROTARY_DIM,
                BLOCK_HEADS,
                BLOCK_PAIRS,
                BLOCK_REST,
            )
            head = first_head + tl.arange(0, BLOCK_HEADS)[:, None].to(tl.int64)
            dim = tl.arange(0, BLOCK_DIM)[None, :]
            mask = (head < KV_HEADS) & (dim < HEAD_DIM)
            value_row_ptr = value_ptr + token * value_strides[0]
            value = tl.load(value_row_ptr + head * value_strides[1] + dim, mask=mask, other=0.0)
            slot_ptr = value_cache_ptr + block * value_cache_strides[0] + offset * value_cache_strides[1]
            pointers = slot_ptr + head * value_cache_strides[2] + dim * value_cache_strides[3]
            store_scaled(pointers, value, value_scale_ptr, mask)


def plan_launch(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> Launch:
    """The grid and the arguments of the kernel for these tensors, of which only shape, dtype and strides are used."""
    tokens, heads, dim = query.shape
    blocks, block_size, kv_heads = key_cache.shape[:3]
    rotary_dim = cos.shape[1]
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    block_heads = max(1, PROGRAM_ELEMENTS // triton.next_power_of_2(dim))
    block_heads = min(block_heads, triton.next_power_of_2(max(heads, kv_heads)))
    query_programs = triton.cdiv(heads, block_heads)
    return Launch(
        kernel=rotary_and_cache_kernel,
        grid=(tokens, query_programs + triton.cdiv(kv_heads, block_heads)),
        args=(
            *(output, query, key, value, cos.contiguous(), sin.contiguous(), key_cache, value_cache),
            *(slot_mapping.contiguous(), key_scale, value_scale, blocks * block_size),
            *(query.stride(), key.stride(), value.stride(), key_cache.stride(), value_cache.stride()),
        ),
        constants={
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": dim,
            "ROTARY_DIM": rotary_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_HEADS": block_heads,
            "BLOCK_PAIRS": triton.next_power_of_2(rotary_dim // 2),
            "BLOCK_REST": triton.next_power_of_2(max(1, dim - rotary_dim)),
            "BLOCK_DIM": triton.next_power_of_2(dim),
            "QUERY_PROGRAMS": query_programs,
        },
        num_warps=warps_for(block_heads * dim),
        num_stages=1,
    )


def rotary_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Rotary embedding and cache write; arguments as in `ops.rotary_and_cache`."""
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if query.shape[0]:
        caches = key_cache, value_cache, slot_mapping, key_scale, value_scale
        with torch.cuda.device_of(query):
            check_target(key_cache)
            plan_launch(output, query, key, value, cos, sin, *caches).run()
    return output
