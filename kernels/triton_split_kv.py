"""Triton kernels for decode over long contexts: many programs per row, then a merge ("flash decoding").

A small batch gives the plain kernel fewer programs than a card has processors, each with a long context to walk.
Here the positions of a request are cut into splits of SPLIT_SIZE, and for split s of a row the first kernel stores

    m_s = max_j x_j        l_s = sum_j 2^(x_j - m_s)        a_s = sum_j 2^(x_j - m_s) v_j        over its positions j

with scores x_j in base 2: part_max and part_sum [tokens, heads, splits], part_acc [tokens, heads, splits, dim], all
float32. The second kernel merges them: with m = max_s m_s and w_s = 2^(m_s - m),

    out = sum_s w_s a_s / sum_s w_s l_s

A split of which a row sees nothing holds (0, -inf, 0) and changes nothing. The size of a split is fixed and splits
begin at its multiples, so the bits of a row depend on neither the rest of the batch nor the width of the block table,
as long as `use_split_kv` says the same; a row within its first split gets the bits of the plain kernel, too.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from servetwin.kernels.triton_attention_plan import MAX_DECODE_QUERIES, AttentionCall, padded_dim
from servetwin.kernels.triton_attention_tiles import (
    attend_range,
    find_rows,
    finite_max,
    key_range,
    load_query,
    row_indices,
)
from servetwin.kernels.triton_launch import Launch

__all__ = ["SPLIT_SIZE", "Partials", "attend", "new_partials", "plan_decode", "plan_merge", "use_split_kv"]

SPLIT_SIZE = 256
"""Positions per split: 128 KiB of bfloat16 keys and values of dim 128, and 1/64 of that to store and merge a row."""
ENOUGH_PROGRAMS = 512
"""Programs with which the plain kernel fills a card: about four for each of the 132 processors of an H200."""
MAX_PROGRAMS = 2048
"""Programs of a split launch. Surplus ones, where contexts are shorter than the table, cost a little each."""
MAX_TILE_ELEMENTS = 64 * 128
"""Rows times (padded) dim of a program: the walk over splits leaves no registers for more."""
MAX_PARTIAL_BYTES = 1 << 28
"""Memory for the partial results of one call."""
SPLITS_PER_STEP = 16
"""Splits that the merge loads at a time."""


class Partials(NamedTuple):
    """Results per split; see the top of this file."""

    acc: Tensor
    max: Tensor
    sum: Tensor


def use_split_kv(call: AttentionCall) -> bool:
    """The rule: split when all of these hold, each known on the host from shapes alone.

    - It is a decode batch: at most MAX_DECODE_QUERIES rows a request, on average (vLLM #51995: a few draft tokens
      suffer as much as one).
    - The plain grid is below ENOUGH_PROGRAMS, counted with the kv heads of this call (vLLM #54191: counted with
      those of the whole model, it never splits under tensor parallelism).
    - The block table, and the window if there is one, leave room for more than one split.
    - A program's rows times dim are at most MAX_TILE_ELEMENTS: all but groups above 32 of dims above 128.
    - The partial results take at most MAX_PARTIAL_BYTES.
    """
    tokens, heads, dim = call.query.shape
    shape = call.tile_shape()
    q_blocks, kv_heads = call.grid(shape)
    partial_bytes = tokens * heads * _num_splits(call) * (dim + 2) * 4
    return (
        call.mean_queries <= MAX_DECODE_QUERIES
        and q_blocks * kv_heads < ENOUGH_PROGRAMS
        and _max_visible(call) > SPLIT_SIZE
        and shape.block_m * padded_dim(dim) <= MAX_TILE_ELEMENTS
        and partial_bytes <= MAX_PARTIAL_BYTES
    )


def _max_visible(call: AttentionCall) -> int:
    """Positions that a row can see."""
    return min(call.max_seq_len, call.sliding_window or call.max_seq_len)


def _num_splits(call: AttentionCall) -> int:
    return -(-call.max_seq_len // SPLIT_SIZE)


@triton.jit(do_not_specialize=["num_splits", "num_reqs", "max_seq_len"])
def split_kv_decode_kernel(
    part_acc_ptr,  # [tokens, heads, splits, dim] float32
    part_max_ptr,  # [tokens, heads, splits] float32
    part_sum_ptr,  # [tokens, heads, splits] float32
    num_splits,
    query_ptr,  # from here on as in paged_attention_kernel
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    key_scale_ptr,
    value_scale_ptr,
    num_reqs,
    max_seq_len,
    score_scale,
    score_cap,
    query_strides,
    key_strides,
    value_strides,
    table_strides,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
):
    q_block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    req, query_start, query_len, context_len, first_query = find_rows(
        q_block, seq_lens_ptr, query_start_loc_ptr, num_reqs, BLOCK_Q
    )
    if (first_query < 0) | (first_query >= query_len):
        return
    start, end = key_range(context_len, first_query, query_len, max_seq_len, BLOCK_Q, SLIDING_WINDOW)
    first_split = start // SPLIT_SIZE + tl.program_id(2)
    if first_split * SPLIT_SIZE >= end:
        return

    row_query, token, head, row_mask = row_indices(
        first_query, query_start, query_len, kv_head, GROUP, BLOCK_M, BLOCK_Q
    )
    dim = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None] & (dim < HEAD_DIM)[None, :]
    q = load_query(query_ptr, query_strides, token, head, dim, mask, UPCAST)
    if key_scale_ptr is not None:
        score_scale *= tl.load(key_scale_ptr)
    all_see_end = context_len + first_query + 1
    first_part = (token * tl.num_programs(1) * GROUP + head) * num_splits

    # A program takes every num_programs-th split: there are fewer programs than splits when the table is wide.
    for split in range(first_split, tl.cdiv(end, SPLIT_SIZE), tl.num_programs(2)):
        split_end = tl.minimum(end, (split + 1) * SPLIT_SIZE)
        acc, row_max, row_sum = attend_range(
            q, context_len + row_query,
            tl.maximum(start, split * SPLIT_SIZE), tl.minimum(all_see_end, split_end), split_end,
            block_table_ptr + req.to(tl.int64) * table_strides[0], table_strides[1],
            key_cache_ptr + kv_head * key_strides[2], key_strides,
            value_cache_ptr + kv_head * value_strides[2], value_strides,
            score_scale, score_cap, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, SLIDING_WINDOW,
        )  # fmt: skip
        part = first_part + split
        tl.store(part_max_ptr + part, row_max, mask=row_mask)
        tl.store(part_sum_ptr + part, row_sum, mask=row_mask)
        tl.store(part_acc_ptr + part[:, None] * HEAD_DIM + dim[None, :], acc, mask=mask)


@triton.jit
def request_of_token(query_start_loc_ptr, token, num_reqs):
    """The last request whose first row is at or before `token`, or the first request."""
    low = 0
    high = num_reqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc_ptr + middle) <= token:
            low = middle + 1
        else:
            high = middle
    return tl.maximum(low - 1, 0)


@triton.jit(do_not_specialize=["num_splits", "num_reqs", "max_seq_len"])
def merge_splits_kernel(
    output_ptr,  # [tokens, heads, dim]
    output_strides,
    part_acc_ptr,  # [tokens, heads, splits, dim] float32
    part_max_ptr,  # [tokens, heads, splits] float32
    part_sum_ptr,  # [tokens, heads, splits] float32
    num_splits,
    seq_lens_ptr,  # [reqs] int32
    query_start_loc_ptr,  # [reqs + 1] int32
    value_scale_ptr,  # [1] float32, or None
    num_reqs,
    max_seq_len,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    req = request_of_token(query_start_loc_ptr, token, num_reqs)
    query_end = tl.load(query_start_loc_ptr + req + 1)
    if (token < tl.load(query_start_loc_ptr + req)) | (token >= query_end):
        return
    # Only splits that this row sees a position of are read: nothing wrote the others.
    end = tl.load(seq_lens_ptr + req) - query_end + token + 1
    start = 0
    if SLIDING_WINDOW > 0:
        start = tl.maximum(end - SLIDING_WINDOW, 0)
    end = tl.minimum(end, max_seq_len)

    # The row's place goes into scalar bases before the two-dimensional offsets are formed: with one offset for all,
    # Triton 3.5 and 3.6 compiled such a sum wrongly for H200 (lmdeploy #4920).
    row = (token.to(tl.int64) * tl.num_programs(1) + head) * num_splits
    row_max_ptr = part_max_ptr + row
    row_sum_ptr = part_sum_ptr + row
    row_acc_ptr = part_acc_ptr + row * HEAD_DIM

    dim = tl.arange(0, BLOCK_D)
    dim_mask = dim < HEAD_DIM
    largest = float("-inf")
    weight_sum = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    num_live = tl.cdiv(end, SPLIT_SIZE)
    for first in range(start // SPLIT_SIZE, num_live, SPLITS):
        split = first + tl.arange(0, SPLITS)
        live = split < num_live
        split_max = tl.load(row_max_ptr + split, mask=live, other=float("-inf"))
        split_sum = tl.load(row_sum_ptr + split, mask=live, other=0.0)
        split_acc = tl.load(
            row_acc_ptr + split[:, None] * HEAD_DIM + dim[None, :],
            mask=live[:, None] & dim_mask[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(split_max, axis=0))
        base = finite_max(new_largest)
        weight = tl.exp2(split_max - base)
        correction = tl.exp2(largest - base)
        weight_sum = weight_sum * correction + tl.sum(weight * split_sum, axis=0)
        acc = acc * correction + tl.sum(weight[:, None] * split_acc, axis=0)
        largest = new_largest

    out = acc / tl.where(weight_sum == 0.0, 1.0, weight_sum)
    if value_scale_ptr is not None:
        out *= tl.load(value_scale_ptr)
    pointers = output_ptr + token.to(tl.int64) * output_strides[0] + head * output_strides[1]
    tl.store(pointers + dim * output_strides[2], out.to(output_ptr.dtype.element_ty), mask=dim_mask)


def new_partials(call: AttentionCall) -> Partials:
    """Memory for the partial results of a call, not initialised: the merge reads only what was written."""
    tokens, heads, dim = call.query.shape
    shape = (tokens, heads, _num_splits(call))
    empty = partial(call.query.new_empty, dtype=torch.float32)
    return Partials(empty((*shape, dim)), empty(shape), empty(shape))


def plan_decode(partials: Partials, call: AttentionCall) -> Launch:
    """The launch that fills the partial results; the grid is bounded, whatever the width of the table."""
    shape = call.tile_shape()
    q_blocks, kv_heads = call.grid(shape)
    # A window that does not begin at a multiple of the split size touches one split more than it fills.
    splits = min(_num_splits(call), -(-_max_visible(call) // SPLIT_SIZE) + 1)
    walkers = max(1, min(splits, MAX_PROGRAMS // (q_blocks * kv_heads)))
    return Launch(
        kernel=split_kv_decode_kernel,
        grid=(q_blocks, kv_heads, walkers),
        args=(*partials, partials.max.shape[2], *call.arguments()),
        constants=call.constants(shape) | {"SPLIT_SIZE": SPLIT_SIZE},
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        max_registers=shape.max_registers,
    )


def plan_merge(output: Tensor, partials: Partials, call: AttentionCall) -> Launch:
    """The launch that merges the partial results of each row into `output` [tokens, heads, dim]."""
    tokens, heads, dim = output.shape
    return Launch(
        kernel=merge_splits_kernel,
        grid=(tokens, heads),
        args=(
            *(output, output.stride(), *partials, partials.max.shape[2]),
            *(call.seq_lens.contiguous(), call.query_start_loc.contiguous(), call.value_scale),
            *(call.block_table.shape[0], call.max_seq_len),
        ),
        constants={
            "HEAD_DIM": dim,
            "BLOCK_D": padded_dim(dim),
            "SLIDING_WINDOW": call.sliding_window or 0,
            "SPLIT_SIZE": SPLIT_SIZE,
            "SPLITS": SPLITS_PER_STEP,
        },
        num_warps=4,
        num_stages=1,
    )


def attend(output: Tensor, call: AttentionCall) -> None:
    """Attention as in `ops.paged_attention`, written into `output`; rows of no request are left as they are."""
    partials = new_partials(call)
    plan_decode(partials, call).run()
    plan_merge(output, partials, call).run()
