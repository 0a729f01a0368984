"""Triton kernels that copy and clear whole blocks of the paged cache.

key_cache, value_cache [blocks, block_size, kv_heads, dim]; block_mapping [n, 2] and block_ids [n]. A program moves or
clears a piece of one block of both caches. Elements are handled as integers of their size, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servetwin.kernels.triton_launch import Launch, warps_for

__all__ = ["copy_blocks", "plan_copy", "plan_zero", "zero_blocks"]

MAX_PROGRAM_ELEMENTS = 2048
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""By element size in bytes."""


@triton.jit
def element_offsets(strides, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ELEMENTS: tl.constexpr):
    """Offsets within a block, [ELEMENTS], of the piece that this program takes; elements counted in order."""
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    slot = (element // (KV_HEADS * HEAD_DIM)).to(tl.int64)
    head = (element // HEAD_DIM % KV_HEADS).to(tl.int64)
    dim = (element % HEAD_DIM).to(tl.int64)
    return slot * strides[1] + head * strides[2] + dim * strides[3]


@triton.jit
def element_mask(BLOCK_ELEMENTS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Which elements of the piece the block has, [ELEMENTS]."""
    return tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS) < BLOCK_ELEMENTS


@triton.jit(do_not_specialize=["num_blocks"])
def copy_blocks_kernel(
    key_cache_ptr,
    value_cache_ptr,
    block_mapping_ptr,  # [n, 2] int64, contiguous
    num_blocks,
    key_strides,
    value_strides,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    pair_ptr = block_mapping_ptr + tl.program_id(0) * 2
    source = tl.load(pair_ptr).to(tl.int64)
    destination = tl.load(pair_ptr + 1).to(tl.int64)
    if (tl.minimum(source, destination) < 0) | (tl.maximum(source, destination) >= num_blocks):
        return
    mask = element_mask(BLOCK_SIZE * KV_HEADS * HEAD_DIM, ELEMENTS)
    key_ptr = key_cache_ptr + element_offsets(key_strides, KV_HEADS, HEAD_DIM, ELEMENTS)
    value_ptr = value_cache_ptr + element_offsets(value_strides, KV_HEADS, HEAD_DIM, ELEMENTS)
    key = tl.load(key_ptr + source * key_strides[0], mask=mask)
    value = tl.load(value_ptr + source * value_strides[0], mask=mask)
    tl.store(key_ptr + destination * key_strides[0], key, mask=mask)
    tl.store(value_ptr + destination * value_strides[0], value, mask=mask)


@triton.jit(do_not_specialize=["num_blocks"])
def zero_blocks_kernel(
    key_cache_ptr,
    value_cache_ptr,
    block_ids_ptr,  # [n] int64, contiguous
    num_blocks,
    key_strides,
    value_strides,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    block = tl.load(block_ids_ptr + tl.program_id(0)).to(tl.int64)
    if (block < 0) | (block >= num_blocks):
        return
    mask = element_mask(BLOCK_SIZE * KV_HEADS * HEAD_DIM, ELEMENTS)
    key_ptr = key_cache_ptr + block * key_strides[0]
    value_ptr = value_cache_ptr + block * value_strides[0]
    tl.store(key_ptr + element_offsets(key_strides, KV_HEADS, HEAD_DIM, ELEMENTS), 0, mask=mask)
    tl.store(value_ptr + element_offsets(value_strides, KV_HEADS, HEAD_DIM, ELEMENTS), 0, mask=mask)


def plan_copy(key_cache: Tensor, value_cache: Tensor, block_mapping: Tensor) -> Launch:
    """The launch that copies blocks; of the tensors only shape, dtype and strides are used."""
    return _plan(copy_blocks_kernel, key_cache, value_cache, block_mapping)


def plan_zero(key_cache: Tensor, value_cache: Tensor, block_ids: Tensor) -> Launch:
    """The launch that clears blocks; of the tensors only shape, dtype and strides are used."""
    return _plan(zero_blocks_kernel, key_cache, value_cache, block_ids)


def _plan(kernel: object, key_cache: Tensor, value_cache: Tensor, block_ids: Tensor) -> Launch:
    blocks, block_size, kv_heads, dim = key_cache.shape
    block_elements = block_size * kv_heads * dim
    elements = min(triton.next_power_of_2(block_elements), MAX_PROGRAM_ELEMENTS)
    key_bits, value_bits = (c.view(INTEGERS[c.element_size()]) for c in (key_cache, value_cache))
    return Launch(
        kernel=kernel,
        grid=(block_ids.shape[0], triton.cdiv(block_elements, elements)),
        args=(
            *(key_bits, value_bits, block_ids.contiguous(), blocks),
            *(key_cache.stride(), value_cache.stride()),
        ),
        constants={
            "BLOCK_SIZE": block_size,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": dim,
            "ELEMENTS": elements,
        },
        num_warps=warps_for(elements),
        num_stages=1,
    )


def copy_blocks(key_cache: Tensor, value_cache: Tensor, block_mapping: Tensor) -> None:
    """Block copy; arguments as in `ops.copy_blocks`."""
    if block_mapping.numel() and key_cache.numel():
        with torch.cuda.device_of(key_cache):
            plan_copy(key_cache, value_cache, block_mapping).run()


def zero_blocks(key_cache: Tensor, value_cache: Tensor, block_ids: Tensor) -> None:
    """Block clearing; arguments as in `ops.zero_blocks`."""
    if block_ids.numel() and key_cache.numel():
        with torch.cuda.device_of(key_cache):
            plan_zero(key_cache, value_cache, block_ids).run()
