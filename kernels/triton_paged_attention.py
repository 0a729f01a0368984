"""Triton kernel for attention over a paged KV cache: one kernel for prompt chunks and decode rows alike.

A program computes BLOCK_M rows of one kv head: BLOCK_Q queries of one request times the GROUP query heads that read
this kv head, so that a decode step fills a matrix tile too. Programs form one flat list over all requests; each
finds its request by binary search, so the grid depends on tensor shapes only and the host never reads the device.
Keys and values are walked in tiles of TILE positions, of any relation to the block size, with an online softmax
in base 2 (Dao et al., FlashAttention-2, 2023) and float32 accumulation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from servetwin.kernels.triton_launch import INTERPRETED, Launch, target_arch

__all__ = ["INTERPRETED", "paged_attention", "plan_launch"]

LOG2_E = math.log2(math.e)
MIN_DOT_SIZE = 16
"""Smallest side of a matrix product on the tensor cores."""


@triton.jit
def _find_request(query_start_loc_ptr, q_block, num_reqs, BLOCK_Q: tl.constexpr):
    """The last request whose first program is at or before `q_block`.

    Request i starts at program query_start_loc[i] // BLOCK_Q + i: the + i leaves each request the one program more
    that a partly filled last block can need.
    """
    low = 0
    high = num_reqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle <= q_block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _tanh(x):
    """From exp(-2|x|), which cannot overflow."""
    t = tl.exp2(tl.abs(x) * -2.8853900817779268)
    y = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0, -y, y)


@triton.jit(do_not_specialize=["num_reqs", "max_seq_len"])
def paged_attention_kernel(
    output_ptr,  # [tokens, heads, dim]
    query_ptr,  # [tokens, heads, dim]
    key_cache_ptr,  # [blocks, block_size, kv_heads, dim]
    value_cache_ptr,  # [blocks, block_size, kv_heads, dim]
    block_table_ptr,  # [reqs, max_blocks] int32
    seq_lens_ptr,  # [reqs] int32
    query_start_loc_ptr,  # [reqs + 1] int32
    num_reqs,
    max_seq_len,  # tokens that a row of the block table holds
    score_scale,  # scale * log2(e), or scale / softcap
    score_cap,  # softcap * log2(e), or unused
    stride_o_token,
    stride_o_head,
    stride_o_dim,
    stride_q_token,
    stride_q_head,
    stride_q_dim,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_k_dim,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_v_dim,
    stride_table_req,
    stride_table_block,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM padded to a power of two
    GROUP: tl.constexpr,  # query heads per kv head
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # BLOCK_M // GROUP
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,  # 0: none
    USE_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,  # compute in float32: the interpreter's bfloat16 arithmetic is wrong
):
    q_block = tl.program_id(0)
    # Everything that is multiplied by a stride is widened first: offsets pass 2^31 elements.
    kv_head = tl.program_id(1).to(tl.int64)

    req = _find_request(query_start_loc_ptr, q_block, num_reqs, BLOCK_Q)
    query_start = tl.load(query_start_loc_ptr + req)
    query_len = tl.load(query_start_loc_ptr + req + 1) - query_start
    first_query = (q_block - query_start // BLOCK_Q - req) * BLOCK_Q
    if first_query >= query_len:
        return
    context_len = tl.load(seq_lens_ptr + req) - query_len

    # Rows: query m // GROUP, head m % GROUP. When GROUP does not divide BLOCK_M the last rows have no query.
    row = tl.arange(0, BLOCK_M)
    row_query = first_query + row // GROUP
    row_mask = (row < BLOCK_Q * GROUP) & (row_query < query_len)
    row_position = context_len + row_query
    row_token = (query_start + row_query).to(tl.int64)
    row_head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_D)
    dim_mask = dim < HEAD_DIM
    query_mask = row_mask[:, None] & dim_mask[None, :]

    q = tl.load(
        query_ptr
        + row_token[:, None] * stride_q_token
        + row_head[:, None] * stride_q_head
        + dim[None, :] * stride_q_dim,
        mask=query_mask,
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)

    # Bounds over all rows of this program. Every position in between is seen by at least one of them, so nothing
    # outside the request's live tokens is ever loaded. A length beyond the table (a dummy of graph capture) is cut.
    key_start = 0
    if SLIDING_WINDOW > 0:
        key_start = tl.maximum(context_len + first_query - SLIDING_WINDOW + 1, 0)
    key_end = tl.minimum(context_len + tl.minimum(first_query + BLOCK_Q, query_len), max_seq_len)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table_row_ptr = block_table_ptr + req.to(tl.int64) * stride_table_req
    key_base = key_cache_ptr + kv_head * stride_k_head
    value_base = value_cache_ptr + kv_head * stride_v_head

    for tile_start in range(key_start, key_end, TILE):
        position = tile_start + tl.arange(0, TILE)
        live = position < key_end
        column = (position // BLOCK_SIZE).to(tl.int64)
        block = tl.load(table_row_ptr + column * stride_table_block, mask=live, other=0).to(tl.int64)
        slot = (position % BLOCK_SIZE).to(tl.int64)

        key_offset = block * stride_k_block + slot * stride_k_slot
        k = tl.load(
            key_base + key_offset[None, :] + dim[:, None] * stride_k_dim,
            mask=dim_mask[:, None] & live[None, :],
            other=0.0,
        )
        # Masking V matters as much as masking the scores: 0 * NaN of an unused slot would be NaN.
        value_offset = block * stride_v_block + slot * stride_v_slot
        v = tl.load(
            value_base + value_offset[:, None] + dim[None, :] * stride_v_dim,
            mask=live[:, None] & dim_mask[None, :],
            other=0.0,
        )
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)

        scores = tl.dot(q, k, input_precision="ieee") * score_scale
        if USE_SOFTCAP:
            scores = _tanh(scores) * score_cap
        visible = live[None, :] & (position[None, :] <= row_position[:, None])
        if SLIDING_WINDOW > 0:
            visible = visible & (position[None, :] > row_position[:, None] - SLIDING_WINDOW)
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row that has seen nothing yet: -inf minus -inf would be NaN.
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - safe_max[:, None])
        correction = tl.exp2(row_max - safe_max)
        row_sum = row_sum * correction + tl.sum(weights, axis=1)
        acc = acc * correction[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        row_max = new_max

    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(
        output_ptr
        + row_token[:, None] * stride_o_token
        + row_head[:, None] * stride_o_head
        + dim[None, :] * stride_o_dim,
        out.to(output_ptr.dtype.element_ty),
        mask=query_mask,
    )


class TileShape(NamedTuple):
    """How much one program does; see the kernel's constants of the same names."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


def choose_tile_shape(
    *, decode_only: bool, group: int, head_dim: int, dtype: torch.dtype, arch: int
) -> TileShape:
    """The tile shape for a batch, chosen so that no variant spills registers (benchmarks/compile_kernels.py).

    A decode batch reads much memory for few rows: the smallest matrix tile. Prompt chunks want more rows per loaded
    key. A group larger than either must still fit. `arch` is the compute capability times ten.
    """
    group_rows = triton.next_power_of_2(group)
    if dtype == torch.float32:
        # No tensor core multiplies float32 exactly, so the products run on the plain units, out of registers.
        return TileShape(max(MIN_DOT_SIZE, group_rows), tile=16, num_warps=8, num_stages=2)
    if decode_only:
        return TileShape(max(MIN_DOT_SIZE, group_rows), tile=32, num_warps=4, num_stages=2)
    if head_dim > 128:
        return TileShape(max(32, group_rows), tile=32, num_warps=4, num_stages=2)
    # The matrix units of sm_90 and sm_100 take operands from shared memory; elsewhere they take up registers.
    return TileShape(max(64, group_rows), tile=64 if 90 <= arch < 120 else 32, num_warps=4, num_stages=3)


def plan_launch(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Launch:
    """The grid and the arguments of the kernel for these tensors, of which only shape, dtype and strides are used."""
    tokens, heads, dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    reqs, max_blocks = block_table.shape
    group = heads // kv_heads
    shape = choose_tile_shape(
        decode_only=tokens <= reqs, group=group, head_dim=dim, dtype=query.dtype, arch=target_arch()
    )
    block_q = shape.block_m // group
    return Launch(
        kernel=paged_attention_kernel,
        # An upper bound of the blocks of BLOCK_Q queries; surplus programs return at once.
        grid=(tokens // block_q + reqs, kv_heads),
        args=(
            *(output, query, key_cache, value_cache),
            *(
                block_table,
                seq_lens.contiguous(),
                query_start_loc.contiguous(),
                reqs,
                max_blocks * block_size,
            ),
            *((scale * LOG2_E, 1.0) if softcap is None else (scale / softcap, softcap * LOG2_E)),
            *(*output.stride(), *query.stride(), *key_cache.stride(), *value_cache.stride()),
            *block_table.stride(),
        ),
        constants={
            "HEAD_DIM": dim,
            "BLOCK_D": max(MIN_DOT_SIZE, triton.next_power_of_2(dim)),
            "GROUP": group,
            "BLOCK_SIZE": block_size,
            "BLOCK_M": shape.block_m,
            "BLOCK_Q": block_q,
            "TILE": shape.tile,
            "SLIDING_WINDOW": sliding_window or 0,
            "USE_SOFTCAP": softcap is not None,
            "UPCAST": INTERPRETED and query.dtype == torch.bfloat16,
        },
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Paged causal attention; arguments as in `ops.paged_attention`."""
    # Zeros, not empty: rows of no request (graph padding) must not carry garbage into the next layer.
    output = query.new_zeros(query.shape)
    if query.numel() and block_table.shape[0]:
        with torch.cuda.device_of(query):
            plan_launch(
                output,
                query,
                key_cache,
                value_cache,
                block_table,
                seq_lens,
                query_start_loc,
                scale=scale,
                sliding_window=sliding_window,
                softcap=softcap,
            ).run()
    return output
