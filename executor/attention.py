"""Paged attention behind transformers' attention interface, and for layers of our own.

Writing K/V and attending are two custom operators. The second takes the (empty) result of the first as an
argument, so that a compiler, which sees neither the cache nor the forward context, keeps their order: every
K/V of a layer is written before any row of that layer reads.

Layers that are never compiled (`fused_attention.py`) call the kernels one after the other: a custom operator costs the
host some 10 µs a call, more than launching its kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from servetwin.executor.forward_context import ForwardContext, get_forward_context
from servetwin.kernels import ops

ATTENTION_NAME = "servetwin_paged"
"""Our name in transformers' attention interface. No mask function has it, so models build no mask."""


@torch.library.custom_op("servetwin::write_kv", mutates_args=())
def write_kv(key: torch.Tensor, value: torch.Tensor, layer_index: int) -> torch.Tensor:
    """Writes key and value `[tokens, kv_heads, dim]` into the layer's cache; gives an empty tensor."""
    context = get_forward_context()
    cache = context.kv_caches[layer_index]
    ops.reshape_and_cache(key, value, cache.key, cache.value, context.attention_metadata.slot_mapping)
    return key.new_empty(0)


@write_kv.register_fake
def _(key: torch.Tensor, value: torch.Tensor, layer_index: int) -> torch.Tensor:
    return key.new_empty(0)


@torch.library.custom_op("servetwin::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    written: torch.Tensor,
    layer_index: int,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of query `[tokens, heads, dim]` over the layer's cache; `written` is `write_kv`'s."""
    return _attend(query, get_forward_context(), layer_index, scale, sliding_window, softcap)


@attend.register_fake
def _(
    query: torch.Tensor,
    written: torch.Tensor,
    layer_index: int,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    return torch.empty_like(query)


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Signature of transformers' attention interface.

    query `[1, heads, tokens, dim]`, key and value `[1, kv_heads, tokens, dim]`: all tokens of the packed
    batch. Gives `[1, tokens, heads, dim]` and no weights. `attention_mask` is None: causality, the window
    and the bounds between requests follow from the batch's metadata.
    """
    layer_index: Any = module.layer_idx
    written = write_kv(_packed(key), _packed(value), layer_index)
    output = attend(_packed(query), written, layer_index, scaling, sliding_window, softcap)
    return output.unsqueeze(0), None


def rotate_and_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layer_index: int,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Rotary embedding, KV write and attention of a layer, for code that is not compiled.

    query `[tokens, heads, dim]`, key and value `[tokens, kv_heads, dim]` before the rotation, of any strides; cos and
    sin `[tokens, rotary_dim]`. Gives `[tokens, heads, dim]`.
    """
    context = get_forward_context()
    cache, slots = context.kv_caches[layer_index], context.attention_metadata.slot_mapping
    rotated = ops.rotary_and_cache(query, key, value, cos, sin, cache.key, cache.value, slots)
    return _attend(rotated, context, layer_index, scale, sliding_window, softcap)


def _attend(
    query: torch.Tensor,
    context: ForwardContext,
    layer_index: int,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    metadata, cache = context.attention_metadata, context.kv_caches[layer_index]
    return ops.paged_attention(
        query,
        cache.key,
        cache.value,
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
    )


def _packed(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens, dim] -> [tokens, heads, dim], contiguous for the kernels."""
    return x.squeeze(0).transpose(0, 1).contiguous()


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
