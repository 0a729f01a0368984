"""The public kernel functions: one per operation, each with several backends that compute the same.

`backend=` is "triton" (CUDA tensors, or any tensor under Triton's interpreter), "cpu" (C++ where it can be compiled and
covers the call, else plain torch built for speed) or "reference" (plain torch, built to be read). None picks "triton"
for CUDA tensors and "cpu" for all others. Arguments are checked by shape, dtype and device only, so a call never waits
for the device. Nothing here is differentiable. A process that is forked after a call must not call again: the
OpenMP threads of both torch and the C++ kernels stay behind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from servetwin.kernels import argument_checks as checks
from servetwin.kernels.backends import Backend, implementation

MAX_WINDOW = 2**31 - 1
"""A longer window hides nothing: lengths are int32."""

__all__ = [
    "Backend",
    "copy_blocks",
    "paged_attention",
    "reshape_and_cache",
    "rms_norm",
    "rotary_and_cache",
    "silu_and_mul",
    "zero_blocks",
]


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
    backend: Backend | None = None,
) -> Tensor:
    """Causal attention of a packed batch over a paged KV cache; prompt chunks and decode rows may mix.

    query            [tokens, heads, dim], the tokens of all requests one after the other
    key_cache        [blocks, block_size, kv_heads, dim], any strides, of the query's dtype or float8_e4m3fn; heads is
                     a multiple of kv_heads
    value_cache      like key_cache
    block_table      [reqs, max_blocks] int32, the blocks of each request in order; unused entries are not read
    seq_lens         [reqs] int32, tokens in the cache per request, those of this step included
    query_start_loc  [reqs + 1] int32, first query row of each request, then the end; a request may have no row
    scale            factor on the dot products, above 0, usually dim ** -0.5
    sliding_window   W: position p sees p - W + 1 .. p; None: 0 .. p
    softcap          c, 1e-30 to 1e30: a score x becomes c * tanh(x / c); None: off
    key_scale        float32 tensor of one element: a key is the stored one times this; value_scale alike. Required
                     with float8 caches, refused with others

    Returns [tokens, heads, dim] of the query's dtype. Rows that belong to no request, or that see no key (padding:
    seq_len 0), are 0. The K/V of this step must be in the cache already (`reshape_and_cache`). Slots that hold no token
    may hold anything; a NaN among the keys or values of a token may reach every row of its request in this call.

    Raises ValueError naming the argument, what came and what is expected; ModuleNotFoundError without triton.
    """
    checks.check_float("query", query, 3)
    checks.check_caches("query", query, key_cache, value_cache, key_scale, value_scale)
    checks.check_query_heads(query, key_cache)
    checks.check_shape("block_table", block_table, torch.int32, (None, None), query)
    reqs = block_table.shape[0]
    checks.check_shape("seq_lens", seq_lens, torch.int32, (reqs,), query)
    checks.check_shape("query_start_loc", query_start_loc, torch.int32, (reqs + 1,), query)
    checks.check_scoring(scale, sliding_window, softcap)
    if sliding_window is not None and sliding_window > MAX_WINDOW:
        sliding_window = None
    attend = implementation("paged_attention", backend, key_cache)
    output: Tensor = attend(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    return output


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """Writes the keys and values of this step's tokens into the paged cache, in place.

    key, value    [tokens, kv_heads, dim]
    key_cache     [blocks, block_size, kv_heads, dim], any strides, of the dtype of key or float8_e4m3fn; value_cache
                  alike
    slot_mapping  [tokens] int64, block * block_size + offset of each token; -1 (padding) writes nothing
    key_scale     float32 tensor of one element: key / key_scale is stored, clamped to +-448; value_scale alike.
                  Required with float8 caches, refused with others

    A slot beyond the cache is the caller's error: the torch backends raise ValueError, the Triton kernel, which
    cannot report it without waiting for the device, leaves the token out rather than write outside the cache.

    Raises ValueError naming the argument, what came and what is expected; ModuleNotFoundError without triton.
    """
    checks.check_new_tokens(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    write = implementation("reshape_and_cache", backend, key_cache)
    write(key, value, key_cache, value_cache, slot_mapping, key_scale=key_scale, value_scale=value_scale)


def copy_blocks(
    key_cache: Tensor, value_cache: Tensor, block_mapping: Tensor, *, backend: Backend | None = None
) -> None:
    """Copies whole blocks within the caches, in place.

    key_cache, value_cache  [blocks, block_size, kv_heads, dim], any strides
    block_mapping           [n, 2] int64, source and destination of each copy; a pair with a negative id is padding
                            and does nothing. No destination is named twice or is also a source.

    A block beyond the cache: as a slot in `reshape_and_cache`.
    Raises ValueError naming the argument, what came and what is expected; ModuleNotFoundError without triton.
    """
    checks.check_cache_pair(key_cache, value_cache)
    checks.check_shape("block_mapping", block_mapping, torch.int64, (None, 2), key_cache)
    implementation("copy_blocks", backend, key_cache)(key_cache, value_cache, block_mapping)


def zero_blocks(
    key_cache: Tensor, value_cache: Tensor, block_ids: Tensor, *, backend: Backend | None = None
) -> None:
    """Fills whole blocks of the caches with zeros, in place.

    key_cache, value_cache  [blocks, block_size, kv_heads, dim], any strides
    block_ids               [n] int64; a negative id is padding and does nothing

    A block beyond the cache: as a slot in `reshape_and_cache`.
    Raises ValueError naming the argument, what came and what is expected; ModuleNotFoundError without triton.
    """
    checks.check_cache_pair(key_cache, value_cache)
    checks.check_shape("block_ids", block_ids, torch.int64, (None,), key_cache)
    implementation("zero_blocks", backend, key_cache)(key_cache, value_cache, block_ids)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Root mean square norm of each row, and before it, if asked for, the sum with the residual stream.

    x              [..., hidden]
    weight         [hidden] of the dtype of x
    eps            added to the mean of the squares
    residual       like x
    weight_offset  added to the weight: 0 for Llama and most others, 1 for Gemma

    Returns norm(x), or with `residual` the pair (norm(s), s) where s = x + residual; new tensors like x.
    Computes in float32 and rounds where transformers does (`reference_layers.rms_norm`).

    Raises ValueError naming the argument, what came and what is expected; ModuleNotFoundError without triton.
    """
    checks.check_rows("x", x)
    checks.check_number("eps", eps, 0.0)
    checks.check_number("weight_offset", weight_offset)
    checks.check_shape("weight", weight, x.dtype, x.shape[-1:], x)
    if residual is not None:
        checks.check_like("residual", residual, "x", x)
    norm = implementation("rms_norm", backend, x)
    normed: Tensor | tuple[Tensor, Tensor] = norm(
        x, weight, eps=eps, residual=residual, weight_offset=weight_offset
    )
    return normed


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
    backend: Backend | None = None,
) -> Tensor:
    """Rotary position embedding of queries and keys, and `reshape_and_cache` of the rotated keys and the values.

    query         [tokens, heads, dim], any strides: query, key and value may be views of one fused projection
    key, value    [tokens, kv_heads, dim], any strides
    cos, sin      [tokens, rotary_dim] of the query's dtype, as transformers' rotary embeddings give them: both halves
                  are equal, and dimensions i and i + rotary_dim / 2 form a pair; those from rotary_dim on pass through
    The caches, slot_mapping and the scales are as in `reshape_and_cache`.

    Returns the rotated query, contiguous; `key` itself is left as it was. Rounds where transformers does
    (`reference_layers.rotary_and_cache`).

    Raises ValueError naming the argument, what came and what is expected; ModuleNotFoundError without triton.
    """
    checks.check_float("query", query, 3)
    checks.check_rotary(cos, sin, query)
    checks.check_float("key", key, 3)
    if (key.shape[0], key.shape[2], key.dtype) != (query.shape[0], query.shape[2], query.dtype):
        raise ValueError(
            f"key: got {checks.describe(key)}, expected the tokens, head dim and dtype of query, "
            f"{checks.describe(query)}"
        )
    checks.check_new_tokens(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    rotate = implementation("rotary_and_cache", backend, key_cache)
    rotated: Tensor = rotate(
        query,
        key,
        value,
        cos,
        sin,
        key_cache,
        value_cache,
        slot_mapping,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    return rotated


def silu_and_mul(gate_up: Tensor, *, backend: Backend | None = None) -> Tensor:
    """The gated activation of a Llama MLP, silu(gate) * up.

    gate_up  [tokens, 2n], gate in the first n columns and up in the last n

    Returns [tokens, n], a new tensor. Rounds where transformers does (`reference_layers.silu_and_mul`).

    Raises ValueError naming the argument, what came and what is expected; ModuleNotFoundError without triton.
    """
    checks.check_float("gate_up", gate_up, 2)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up: got {gate_up.shape[1]} columns, expected an even number")
    activated: Tensor = implementation("silu_and_mul", backend, gate_up)(gate_up)
    return activated
