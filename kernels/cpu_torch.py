"""The kernels in plain torch, for CPUs: whole blocks are gathered once per request, then attended in large calls.

Two choices matter for speed on a CPU. The query heads that share a kv head become rows of one matrix, since
`scaled_dot_product_attention(enable_gqa=True)` is several times slower. And requests are taken one by one, except
decode rows of similar length, which are padded into groups as long as a group stays in the cache of a core: then
the calls it saves outweigh the padding (4 to 9 times faster below 256 tokens), beyond it memory traffic wins.
Prompt chunks without window or softcap need no mask (`cpu_torch_prefill`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from servetwin.kernels.cpu_torch_prefill import attend_chunk
from servetwin.kernels.float8 import as_bits, gather_blocks, quantize
from servetwin.kernels.host_metadata import RequestSpan, check_slots, request_spans

MAX_TILE_QUERIES = 256
"""Query rows per masked attention call: later keys are then skipped for most rows of a long prompt chunk."""
MAX_GROUP_TOKENS = 512
"""Decode rows over longer contexts are attended one by one."""
MAX_GROUP_ELEMENTS = 1 << 19
"""Gathered key elements (padding included) of a group of decode rows; 2 MiB in float32."""
MAX_TILE_SCORES = 1 << 24
"""Mask or score elements that one call may hold (64 MiB in float32), which shortens the tiles of long contexts."""


class Scoring(NamedTuple):
    """What turns dot products into scores, and which keys a position sees; as in `ops.paged_attention`."""

    scale: float
    sliding_window: int | None
    softcap: float | None

    def first_visible(self, position: int) -> int:
        """The first position that the query at `position` sees."""
        return 0 if self.sliding_window is None else max(0, position - self.sliding_window + 1)


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
    output = query.new_zeros(query.shape)
    if key_scale is not None:
        # Scaling the scores scales the keys, and scaling the output below the values: one product each.
        scale *= float(key_scale)
    scoring = Scoring(scale, sliding_window, softcap)
    max_seq_len = block_table.shape[1] * key_cache.shape[1]
    spans = request_spans(seq_lens, query_start_loc, num_tokens=query.shape[0], max_seq_len=max_seq_len)
    grouped = _decode_groups(spans, key_cache, scoring)
    for group in grouped:
        _attend_decode_group(query, key_cache, value_cache, block_table, spans, group, scale, output)
    done = {request for group in grouped for request in group}
    for request, (blocks, span) in enumerate(zip(block_table, spans, strict=True)):
        if span.first_real_row >= span.query_len or request in done:
            continue
        first_key = scoring.first_visible(span.context_len + span.first_real_row)
        keys = _gather(key_cache, blocks, first_key, span.seq_len, query.dtype)
        values = _gather(value_cache, blocks, first_key, span.seq_len, query.dtype)
        rows = slice(span.query_start, span.query_start + span.query_len)
        _attend_request(query[rows], keys, values, first_key, span, scoring, output[rows])
    return output if value_scale is None else output.mul_(value_scale)


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
    block_size = key_cache.shape[1]
    check_slots(slot_mapping, key_cache.shape[0] * block_size)
    written = slot_mapping >= 0
    if not bool(written.all()):
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    where = slot_mapping // block_size, slot_mapping % block_size
    as_bits(key_cache).index_put_(where, as_bits(quantize(key, key_scale)))
    as_bits(value_cache).index_put_(where, as_bits(quantize(value, value_scale)))


def _decode_groups(spans: list[RequestSpan], cache: Tensor, scoring: Scoring) -> list[list[int]]:
    """Requests (indices) whose single row can be attended together: groups of two and more, alike in length."""
    if scoring.softcap is not None:
        return []
    # Within a sliding window a row sees all of its context.
    longest = min(MAX_GROUP_TOKENS, scoring.sliding_window or MAX_GROUP_TOKENS)
    rows = [i for i, s in enumerate(spans) if s.query_len == 1 <= s.seq_len <= longest]
    rows.sort(key=lambda i: -spans[i].seq_len)
    groups: list[list[int]] = []
    start = 0
    while start < len(rows):
        padded = -(-spans[rows[start]].seq_len // cache.shape[1]) * cache.shape[1]
        size = max(1, MAX_GROUP_ELEMENTS // (padded * cache.shape[2] * cache.shape[3]))
        groups.append(rows[start : start + size])
        start += size
    return [g for g in groups if len(g) > 1]


def _attend_decode_group(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    spans: list[RequestSpan],
    group: list[int],
    scale: float,
    output: Tensor,
) -> None:
    """Attends one row of each request of the group, padded to the longest; writes into `output`."""
    block_size, kv_heads, dim = key_cache.shape[1:]
    lengths = torch.tensor([spans[i].seq_len for i in group], device=query.device)[:, None]
    num_blocks = -(-spans[group[0]].seq_len // block_size)
    positions = torch.arange(num_blocks * block_size, device=query.device)
    # Columns beyond a request's blocks hold anything; the null block stands in for them.
    used = positions[::block_size] < lengths
    blocks = torch.where(used, block_table[group, :num_blocks], 0).flatten()
    visible = positions < lengths
    hidden = ~visible[..., None, None]
    shape = (len(group), num_blocks * block_size, kv_heads, dim)
    # Zeroed, not only masked: a slot that was never written may hold NaN, and 0 times NaN is NaN.
    keys = gather_blocks(key_cache, blocks, query.dtype).view(shape).masked_fill_(hidden, 0)
    values = gather_blocks(value_cache, blocks, query.dtype).view(shape).masked_fill_(hidden, 0)
    rows = torch.tensor([spans[i].query_start for i in group], device=query.device)
    packed = query[rows].view(len(group), kv_heads, -1, dim)
    out = scaled_dot_product_attention(
        packed, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=visible[:, None, None], scale=scale
    )
    output[rows] = out.reshape(len(group), -1, dim)


def _gather(cache: Tensor, blocks: Tensor, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """Positions first .. end - 1 of one request, [kv_heads, end - first, dim], read block by block.

    Only the columns of `blocks` [max_blocks] that hold these positions are read.
    """
    block_size = cache.shape[1]
    first_block = first // block_size
    gathered = gather_blocks(cache, blocks[first_block : -(-end // block_size)], dtype)
    start = first - first_block * block_size
    return gathered.flatten(0, 1)[start : start + end - first].transpose(0, 1)


def _attend_request(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first_key: int,
    span: RequestSpan,
    scoring: Scoring,
    output: Tensor,
) -> None:
    """Attends the rows of one request, query [query_len, heads, dim]; writes into `output`, alike.

    keys, values: [kv_heads, n, dim], whose first position is `first_key`.
    """
    plain = scoring.sliding_window is None and scoring.softcap is None
    if plain and span.query_len - span.first_real_row > 1:
        rows = slice(span.first_real_row, None)
        output[rows] = attend_chunk(query[rows], keys, values, scale=scoring.scale)
    else:
        _attend_in_tiles(query, keys, values, first_key, span, scoring, output)


def _attend_in_tiles(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first_key: int,
    span: RequestSpan,
    scoring: Scoring,
    output: Tensor,
) -> None:
    """As `_attend_request`, with a mask where a tile has more than one row."""
    kv_heads, num_keys = keys.shape[:2]
    score_rows = query.shape[1] if scoring.softcap is not None else query.shape[1] // kv_heads
    tile = max(1, min(MAX_TILE_QUERIES, MAX_TILE_SCORES // (score_rows * num_keys)))
    for start in range(span.first_real_row, span.query_len, tile):
        stop = min(start + tile, span.query_len)
        first, last = span.context_len + start, span.context_len + stop - 1
        low = scoring.first_visible(first)
        seen = slice(low - first_key, last + 1 - first_key)
        mask = None if stop - start == 1 else _mask(first, last, low, scoring.sliding_window, query.device)
        output[start:stop] = _attend(query[start:stop], keys[:, seen], values[:, seen], mask, scoring)


def _mask(first: int, last: int, low: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """True where the query at position first .. last (rows) sees the key at position low .. last (columns)."""
    queries = torch.arange(first, last + 1, device=device)[:, None]
    keys = torch.arange(low, last + 1, device=device)
    visible = keys <= queries
    return visible if sliding_window is None else visible & (keys > queries - sliding_window)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Query [q, heads, dim] over keys and values [kv_heads, n, dim] with mask [q, n]: [q, heads, dim]."""
    num_queries, heads, dim = query.shape
    kv_heads, group = keys.shape[0], heads // keys.shape[0]
    packed = query.reshape(num_queries, kv_heads, group, dim).transpose(0, 1).flatten(1, 2)
    if mask is not None:
        mask = mask.repeat_interleave(group, dim=0)
    if scoring.softcap is None:
        # A batch dimension of 1: the fused CPU kernel takes four dimensions only.
        batched = packed[None], keys[None], values[None]
        out = scaled_dot_product_attention(*batched, attn_mask=mask, scale=scoring.scale).squeeze(0)
    else:
        out = _softcap_attention(packed, keys, values, mask, scoring.scale, scoring.softcap)
    return out.reshape(kv_heads, num_queries, group, dim).transpose(0, 1).reshape(num_queries, heads, dim)


def _softcap_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Attention with capped scores, which `scaled_dot_product_attention` does not offer; float32 throughout."""
    scores = query.float() @ keys.float().transpose(1, 2)
    scores = scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    return (scores.softmax(dim=-1) @ values.float()).to(query.dtype)
