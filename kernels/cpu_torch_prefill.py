"""Attention of a prompt chunk in plain torch without a mask: over its context, over itself, and both merged.

No row of a chunk is barred from its context, and over itself the chunk is causal, which the fused kernel does without
a mask: a masked call costs more and computes what it then discards. The parts are merged by their log-sum-exps.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend_chunk(query: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> Tensor:
    """Causal attention of the last rows of a request.

    query         [q, heads, dim], of the last q positions
    keys, values  [kv_heads, n, dim], of all n >= q positions

    Returns [q, heads, dim]. With the context's result a and log-sum-exp s, and the chunk's own b and t, a row is

        (exp(s) a + exp(t) b) / (exp(s) + exp(t)) = b + sigmoid(s - t) (a - b)
    """
    context_len = keys.shape[1] - query.shape[0]
    own, own_lse = _attend_itself(query, keys[:, context_len:], values[:, context_len:], scale)
    if context_len == 0:
        return own.transpose(0, 1)
    before, before_lse = _attend_context(query, keys[:, :context_len], values[:, :context_len], scale)
    weight = torch.sigmoid(before_lse - own_lse)[..., None]
    return torch.lerp(own.float(), before.float(), weight).to(query.dtype).transpose(0, 1)


def _attend_itself(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention with as many keys [kv_heads, q, dim] as rows: [heads, q, dim], log-sum-exps [heads, q]."""
    group = query.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
    return _flash(query.transpose(0, 1), keys, values, scale, is_causal=True)


def _attend_context(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of every row to every key [kv_heads, n, dim]: [heads, q, dim], log-sum-exps [heads, q]."""
    rows, heads, dim = query.shape
    kv_heads, group = keys.shape[0], heads // keys.shape[0]
    # The query heads of a kv head become rows of one matrix.
    packed = query.reshape(rows, kv_heads, group, dim).transpose(0, 1).flatten(1, 2)
    output, lse = _flash(packed, keys, values, scale, is_causal=False)
    output = output.reshape(kv_heads, rows, group, dim).transpose(1, 2).reshape(heads, rows, dim)
    return output, lse.reshape(kv_heads, rows, group).transpose(1, 2).reshape(heads, rows)


def _flash(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """torch's fused CPU kernel, called by its own name since `scaled_dot_product_attention` keeps the log-sum-exps."""
    # It takes for granted what that function checks: the last dimension is contiguous.
    operands = (t[None] if t.stride(-1) == 1 else t[None].contiguous() for t in (query, keys, values))
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *operands, is_causal=is_causal, scale=scale
    )
    return output[0], lse[0]
