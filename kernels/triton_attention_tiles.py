"""What the attention kernels share: which rows a program has, and how it attends them to a range of positions.

A program holds BLOCK_M rows of one kv head: BLOCK_Q queries of one request times the GROUP query heads that read
this kv head, so that a decode step fills a matrix tile too. Keys and values are walked in tiles of TILE positions,
of any relation to the block size, with an online softmax in base 2 (Dao, FlashAttention-2, 2023) and float32
accumulation. Everything that is multiplied by a stride is 64 bits wide: offsets pass 2^31 elements.

Strides come as one tuple per tensor, in the order of its dimensions.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_request(query_start_loc_ptr, q_block, num_reqs, BLOCK_Q: tl.constexpr):
    """The last request whose first program is at or before `q_block`, or the first request.

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
    return tl.maximum(low - 1, 0)


@triton.jit
def find_rows(q_block, seq_lens_ptr, query_start_loc_ptr, num_reqs, BLOCK_Q: tl.constexpr):
    """The request of program `q_block`, where its queries start, how many it has, its context, and the first of
    them that this program computes. A surplus program gets one beyond the last, or, of rows before those of the first
    request, a negative one.
    """
    req = find_request(query_start_loc_ptr, q_block, num_reqs, BLOCK_Q)
    query_start = tl.load(query_start_loc_ptr + req)
    query_len = tl.load(query_start_loc_ptr + req + 1) - query_start
    context_len = tl.load(seq_lens_ptr + req) - query_len
    first_query = (q_block - query_start // BLOCK_Q - req) * BLOCK_Q
    return req, query_start, query_len, context_len, first_query


@triton.jit
def row_indices(
    first_query,
    query_start,
    query_len,
    kv_head,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Query, token and head of each row, [BLOCK_M], and whether there is such a row.

    Row m is query m // GROUP, head m % GROUP; when GROUP does not divide BLOCK_M the last rows have no query.
    """
    row = tl.arange(0, BLOCK_M)
    query = first_query + row // GROUP
    mask = (row < BLOCK_Q * GROUP) & (query < query_len)
    token = (query_start + query).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    return query, token, head, mask


@triton.jit
def load_query(query_ptr, strides, token, head, dim, mask, UPCAST: tl.constexpr):
    """The rows' queries, [BLOCK_M, BLOCK_D]; 0 where there is no row or no dim."""
    offset = token * strides[0] + head * strides[1]
    q = tl.load(query_ptr + offset[:, None] + dim[None, :] * strides[2], mask=mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    return q


@triton.jit
def key_range(
    context_len, first_query, query_len, max_seq_len, BLOCK_Q: tl.constexpr, SLIDING_WINDOW: tl.constexpr
):
    """The positions that the program's rows see between them, start .. end - 1.

    Each is seen by at least one row, so nothing outside the request's live tokens is ever loaded. A length beyond
    the block table (a dummy of graph capture) is cut.
    """
    start = 0
    if SLIDING_WINDOW > 0:
        start = tl.maximum(context_len + first_query - SLIDING_WINDOW + 1, 0)
    end = tl.minimum(context_len + tl.minimum(first_query + BLOCK_Q, query_len), max_seq_len)
    return start, end


@triton.jit
def attend_range(
    q,  # [BLOCK_M, BLOCK_D]
    row_position,  # [BLOCK_M]
    start,
    all_see_end,  # every row sees start .. all_see_end - 1; not used with a sliding window
    end,
    table_row_ptr,  # the request's row of the block table
    table_stride,
    key_ptr,  # the kv head's part of the cache
    key_strides,
    value_ptr,
    value_strides,
    score_scale,
    score_cap,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
):
    """Attention of the rows to positions start .. end - 1: weighted values, largest score, sum of weights.

    A row that sees none of them gets (0, -inf, 0). Scores are in base 2, the weighted values not yet divided.
    """
    acc = tl.zeros([q.shape[0], BLOCK_D], tl.float32)
    row_max = tl.full([q.shape[0]], float("-inf"), tl.float32)
    row_sum = tl.zeros([q.shape[0]], tl.float32)
    masked_start = start
    if SLIDING_WINDOW == 0:
        # Whole tiles that every row sees, most of a long context, need no mask.
        masked_start = start + tl.maximum(all_see_end - start, 0) // TILE * TILE
        for tile_start in range(start, masked_start, TILE):
            acc, row_max, row_sum = attend_tile(
                acc, row_max, row_sum, q, row_position, tile_start, end,
                table_row_ptr, table_stride, key_ptr, key_strides, value_ptr, value_strides, score_scale, score_cap,
                HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, SLIDING_WINDOW, MASKED=False,
            )  # fmt: skip
    for tile_start in range(masked_start, end, TILE):
        acc, row_max, row_sum = attend_tile(
            acc, row_max, row_sum, q, row_position, tile_start, end,
            table_row_ptr, table_stride, key_ptr, key_strides, value_ptr, value_strides, score_scale, score_cap,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, SLIDING_WINDOW, MASKED=True,
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def attend_tile(
    acc,
    row_max,
    row_sum,
    q,
    row_position,
    tile_start,
    end,
    table_row_ptr,
    table_stride,
    key_ptr,
    key_strides,
    value_ptr,
    value_strides,
    score_scale,
    score_cap,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees every position of the tile
):
    """One step of the online softmax: the sums over positions before `tile_start` become those over the tile too."""
    position = tile_start + tl.arange(0, TILE)
    live = position < end
    column = (position // BLOCK_SIZE).to(tl.int64) * table_stride
    if MASKED:
        block = tl.load(table_row_ptr + column, mask=live, other=0).to(tl.int64)
    else:
        block = tl.load(table_row_ptr + column).to(tl.int64)
    slot = (position % BLOCK_SIZE).to(tl.int64)
    k = load_tile(key_ptr, key_strides, block, slot, live, HEAD_DIM, BLOCK_D, MASKED).to(q.dtype)
    v = load_tile(value_ptr, value_strides, block, slot, live, HEAD_DIM, BLOCK_D, MASKED).to(q.dtype)

    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scale
    if score_cap is not None:
        scores = tanh(scores) * score_cap
    if MASKED:
        visible = live[None, :] & (position[None, :] <= row_position[:, None])
        if SLIDING_WINDOW > 0:
            visible = visible & (position[None, :] > row_position[:, None] - SLIDING_WINDOW)
        scores = tl.where(visible, scores, float("-inf"))

    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    base = new_max
    if MASKED:
        base = finite_max(new_max)
    weights = tl.exp2(scores - base[:, None])
    correction = tl.exp2(row_max - base)
    row_sum = row_sum * correction + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def load_tile(
    cache_ptr, strides, block, slot, live, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr
):
    """Keys or values of one tile, [TILE, BLOCK_D]; positions that are not live and padded dims are 0.

    Values need the mask as much as keys: the 0 weight of an unused slot times its NaN would be NaN.
    """
    dim = tl.arange(0, BLOCK_D)
    offset = block * strides[0] + slot * strides[1]
    pointers = cache_ptr + offset[:, None] + dim[None, :] * strides[3]
    if MASKED:
        return tl.load(pointers, mask=live[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM < BLOCK_D:
        return tl.load(pointers, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def finite_max(x):
    """`x`, and 0 for -inf: the largest score of a row that has seen nothing, where -inf minus -inf would be NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def tanh(x):
    """From exp(-2|x|), which cannot overflow; near 0, where that cancels, from the first terms of its series."""
    t = tl.exp2(tl.abs(x) * -2.8853900817779268)
    y = (1.0 - t) / (1.0 + t)
    s = x * x
    series = x * (1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835)))))
    return tl.where(s < 0.0625, series, tl.where(x < 0, -y, y))
