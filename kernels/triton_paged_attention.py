"""Triton kernel for attention over a paged KV cache: one kernel for prompt chunks and decode rows alike.

    out[t, h] = sum_j softmax(scale * q[t, h] . k_j)_j * v_j    over the positions j that token t sees

as `reference.paged_attention` spells out. query [tokens, heads, dim]; key and value cache [blocks, block_size,
kv_heads, dim] of the query's dtype or float8_e4m3fn; any block size, head dim and group of heads. A program computes
BLOCK_M rows of one kv head (`triton_attention_tiles`). Programs form one flat list over all requests; each finds its
request by binary search, so the grid depends on tensor shapes only. Small decode batches over long contexts take
`triton_split_kv` instead.

The scale of float8 keys is folded into that of the scores, that of the values into the output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servetwin.kernels import triton_split_kv
from servetwin.kernels.triton_attention_plan import AttentionCall
from servetwin.kernels.triton_attention_tiles import (
    attend_range,
    find_rows,
    key_range,
    load_query,
    row_indices,
)
from servetwin.kernels.triton_fp8 import check_target
from servetwin.kernels.triton_launch import Launch

__all__ = ["paged_attention", "plan_launch"]


@triton.jit(do_not_specialize=["num_reqs", "max_seq_len"])
def paged_attention_kernel(
    output_ptr,  # [tokens, heads, dim]
    output_strides,
    query_ptr,  # [tokens, heads, dim]
    key_cache_ptr,  # [blocks, block_size, kv_heads, dim]
    value_cache_ptr,  # [blocks, block_size, kv_heads, dim]
    block_table_ptr,  # [reqs, max_blocks] int32
    seq_lens_ptr,  # [reqs] int32
    query_start_loc_ptr,  # [reqs + 1] int32
    key_scale_ptr,  # [1] float32, or None
    value_scale_ptr,  # [1] float32, or None
    num_reqs,
    max_seq_len,  # tokens that a row of the block table holds
    score_scale,  # scale * log2(e), or scale / softcap
    score_cap,  # softcap * log2(e), or None
    query_strides,
    key_strides,
    value_strides,
    table_strides,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM padded to a power of two
    GROUP: tl.constexpr,  # query heads per kv head
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # BLOCK_M // GROUP
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,  # 0: none
    UPCAST: tl.constexpr,  # compute in float32: the interpreter's bfloat16 arithmetic is wrong
):
    q_block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    req, query_start, query_len, context_len, first_query = find_rows(
        q_block, seq_lens_ptr, query_start_loc_ptr, num_reqs, BLOCK_Q
    )
    if (first_query < 0) | (first_query >= query_len):
        return

    row_query, token, head, row_mask = row_indices(
        first_query, query_start, query_len, kv_head, GROUP, BLOCK_M, BLOCK_Q
    )
    dim = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None] & (dim < HEAD_DIM)[None, :]
    q = load_query(query_ptr, query_strides, token, head, dim, mask, UPCAST)
    if key_scale_ptr is not None:
        score_scale *= tl.load(key_scale_ptr)

    start, end = key_range(context_len, first_query, query_len, max_seq_len, BLOCK_Q, SLIDING_WINDOW)
    acc, _row_max, row_sum = attend_range(
        q, context_len + row_query, start, tl.minimum(context_len + first_query + 1, end), end,
        block_table_ptr + req.to(tl.int64) * table_strides[0], table_strides[1],
        key_cache_ptr + kv_head * key_strides[2], key_strides,
        value_cache_ptr + kv_head * value_strides[2], value_strides,
        score_scale, score_cap, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, SLIDING_WINDOW,
    )  # fmt: skip

    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if value_scale_ptr is not None:
        out *= tl.load(value_scale_ptr)
    output_offset = token * output_strides[0] + head * output_strides[1]
    pointers = output_ptr + output_offset[:, None] + dim[None, :] * output_strides[2]
    tl.store(pointers, out.to(output_ptr.dtype.element_ty), mask=mask)


def plan_launch(output: Tensor, call: AttentionCall) -> Launch:
    """The grid and the arguments of the kernel for these tensors, of which only shape, dtype and strides are used."""
    shape = call.tile_shape()
    return Launch(
        kernel=paged_attention_kernel,
        grid=call.grid(shape),
        args=(output, output.stride(), *call.arguments()),
        constants=call.constants(shape),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        max_registers=shape.max_registers,
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
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Paged causal attention; arguments as in `ops.paged_attention`."""
    # Zeros, not empty: rows of no request (graph padding) must not carry garbage into the next layer.
    output = query.new_zeros(query.shape)
    if not query.numel() or not block_table.shape[0]:
        return output
    call = AttentionCall(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    with torch.cuda.device_of(query):
        check_target(key_cache)
        if triton_split_kv.use_split_kv(call):
            triton_split_kv.attend(output, call)
        else:
            plan_launch(output, call).run()
    return output
