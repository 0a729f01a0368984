"""The kernels as their definitions read, in plain torch: slow, and what every other backend is tested against.

Arithmetic is in float32 whatever the storage. A float8 cache holds x / scale, and is read as stored * scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from servetwin.kernels.float8 import as_bits, quantize
from servetwin.kernels.host_metadata import check_block_ids, check_slots, request_spans


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
    """Paged causal attention; arguments as in `ops.paged_attention`.

    The row at position p of a request sees the positions j in visible(p) = {max(0, p - W + 1), ..., p}, whose keys
    and values lie in block block_table[request, j // block_size] at offset j % block_size. With g = heads / kv_heads
    query head h reads kv head h // g:

        x_j = scale * q . k_j            then, with softcap c,   x_j <- c * tanh(x_j / c)
        out = sum_j softmax(x)_j * v_j   over visible(p)
    """
    block_size = key_cache.shape[1]
    output = query.new_zeros(query.shape)
    max_seq_len = block_table.shape[1] * block_size
    spans = request_spans(seq_lens, query_start_loc, num_tokens=query.shape[0], max_seq_len=max_seq_len)
    for blocks, span in zip(block_table, spans, strict=True):
        for row in range(span.first_real_row, span.query_len):
            position = span.context_len + row
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            visible = torch.arange(first, position + 1, device=query.device)
            where = blocks[visible // block_size].long(), visible % block_size
            check_block_ids("block_table", where[0], len(key_cache), lowest=0)
            token = span.query_start + row
            keys, values = _read(key_cache, where, key_scale), _read(value_cache, where, value_scale)
            output[token] = _attend(query[token], keys, values, scale, softcap)
    return output


def _read(cache: Tensor, where: tuple[Tensor, Tensor], scale: Tensor | None) -> Tensor:
    """The cache at these blocks and offsets, [n, kv_heads, dim] in float32."""
    stored = as_bits(cache)[where].view(cache.dtype).float()
    return stored if scale is None else stored * scale


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None) -> Tensor:
    """One token, query [heads, dim], over exactly the keys it sees, [n, kv_heads, dim] float32: [heads, dim]."""
    group = query.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = scale * torch.einsum("hd,nhd->hn", query.float(), keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hn,nhd->hd", scores.softmax(dim=-1), values).to(query.dtype)


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
    """Cache write; arguments as in `ops.reshape_and_cache`.

    cache[slot // block_size, slot % block_size] = token   for every token with slot >= 0

    A float8 cache gets token / scale, clamped to its range of +-448.
    """
    block_size = key_cache.shape[1]
    check_slots(slot_mapping, key_cache.shape[0] * block_size)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            where = slot // block_size, slot % block_size
            key_cache[where] = quantize(key[token], key_scale)
            value_cache[where] = quantize(value[token], value_scale)
