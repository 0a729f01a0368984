"""The public kernel functions: one per operation, each with several backends that compute the same.

`backend=` is "triton" (CUDA tensors, or any tensor under Triton's interpreter), "cpu" (plain torch, built for
speed on a CPU) or "reference" (plain torch, built to be read). None picks "triton" for CUDA tensors and "cpu"
for all others. Arguments are checked by shape, dtype and device only, so a call never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Literal, get_args

import torch
from torch import Tensor

from servetwin.kernels import cpu_torch, reference

Backend = Literal["triton", "cpu", "reference"]

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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
    backend: Backend | None = None,
) -> Tensor:
    """Causal attention of a packed batch over a paged KV cache; prompt chunks and decode rows may mix.

    query            [tokens, heads, dim], the tokens of all requests one after the other
    key_cache        [blocks, block_size, kv_heads, dim], any strides; heads is a multiple of kv_heads
    value_cache      like key_cache
    block_table      [reqs, max_blocks] int32, the blocks of each request in order; unused entries are not read
    seq_lens         [reqs] int32, tokens in the cache per request, those of this step included
    query_start_loc  [reqs + 1] int32, first query row of each request, then the end; a request may have no row
    scale            factor on the dot products, usually dim ** -0.5
    sliding_window   W: position p sees p - W + 1 .. p; None: 0 .. p
    softcap          c: a score x becomes c * tanh(x / c); None: off

    Returns [tokens, heads, dim] of the query's dtype. Rows that belong to no request, or that see no key (padding:
    seq_len 0), are 0. The K/V of this step must be in the cache already (`reshape_and_cache`).

    Raises ValueError naming the argument, what came and what is expected; ModuleNotFoundError without triton.
    """
    _check_float("query", query, 3)
    _check_caches(query, "query", key_cache, value_cache)
    _check_heads(query, key_cache)
    reqs = block_table.shape[0]
    _check_index("block_table", block_table, torch.int32, (reqs, None), query)
    _check_index("seq_lens", seq_lens, torch.int32, (reqs,), query)
    _check_index("query_start_loc", query_start_loc, torch.int32, (reqs + 1,), query)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window: got {sliding_window}, expected 1 or more, or None for no window")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: got {softcap}, expected more than 0, or None for no softcap")
    name = _resolve(backend, query)
    attend = _triton("paged_attention", query) if name == "triton" else _TORCH[name]
    output: Tensor = attend.paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return output


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Writes the keys and values of this step's tokens into the paged cache, in place.

    key, value    [tokens, kv_heads, dim]
    key_cache     [blocks, block_size, kv_heads, dim], any strides; value_cache alike
    slot_mapping  [tokens] int64, block * block_size + offset of each token; -1 (padding) writes nothing

    A slot beyond the cache is the caller's error: the torch backends raise ValueError, the Triton kernel, which
    cannot report it without waiting for the device, leaves the token out rather than write outside the cache.

    Raises ValueError naming the argument, what came and what is expected; ModuleNotFoundError without triton.
    """
    _check_float("key", key, 3)
    if value.shape != key.shape or value.dtype != key.dtype:
        raise ValueError(
            f"value: got {_describe(value)}, expected the shape and dtype of key, {_describe(key)}"
        )
    _check_device("value", value, key)
    _check_caches(key, "key", key_cache, value_cache)
    if key.shape[1] != key_cache.shape[2]:
        raise ValueError(
            f"key: got {key.shape[1]} heads, expected the {key_cache.shape[2]} kv_heads of key_cache"
        )
    _check_index("slot_mapping", slot_mapping, torch.int64, (key.shape[0],), key)
    name = _resolve(backend, key)
    write = _triton("reshape_and_cache", key) if name == "triton" else _TORCH[name]
    write.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


# ---------------------------------------------------------------- backends

_TORCH = {"cpu": cpu_torch, "reference": reference}


def _resolve(backend: Backend | None, tensor: Tensor) -> Backend:
    if backend is None:
        return "triton" if tensor.is_cuda else "cpu"
    if backend not in get_args(Backend):
        allowed = ", ".join(map(repr, get_args(Backend)))
        raise ValueError(f"backend: got {backend!r}, expected {allowed}, or None to choose by device")
    return backend


def _triton(operation: str, tensor: Tensor) -> ModuleType:
    """The module of the Triton kernel for `operation`; triton is an optional package, so it is imported here."""
    try:
        from servetwin.kernels import triton_paged_attention, triton_reshape_and_cache
    except ModuleNotFoundError as e:
        if e.name != "triton":
            raise
        raise ModuleNotFoundError(
            "backend 'triton' needs the package triton: pip install 'servetwin[executor]'", name="triton"
        ) from e
    module = {
        "paged_attention": triton_paged_attention,
        "reshape_and_cache": triton_reshape_and_cache,
    }[operation]
    if not tensor.is_cuda and not module.INTERPRETED:
        raise ValueError(
            f"backend: got 'triton' with tensors on {tensor.device}, expected CUDA tensors "
            "(or TRITON_INTERPRET=1 set before triton is first imported)"
        )
    return module


# ---------------------------------------------------------------- checks


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}".replace("torch.", "")


def _check_float(name: str, tensor: Tensor, ndim: int) -> None:
    if tensor.ndim != ndim or tensor.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"{name}: got {_describe(tensor)}, expected {ndim} dimensions of float32, float16 or bfloat16"
        )


def _check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, expected all tensors on {like.device}")


def _check_caches(tokens: Tensor, tokens_name: str, key_cache: Tensor, value_cache: Tensor) -> None:
    _check_float("key_cache", key_cache, 4)
    if value_cache.shape != key_cache.shape or value_cache.dtype != key_cache.dtype:
        raise ValueError(
            f"value_cache: got {_describe(value_cache)}, expected the shape and dtype of key_cache, "
            f"{_describe(key_cache)}"
        )
    if tokens.shape[-1] != key_cache.shape[-1] or tokens.dtype != key_cache.dtype:
        raise ValueError(
            f"key_cache: got {_describe(key_cache)}, expected the head dim and dtype of {tokens_name}, "
            f"{_describe(tokens)}"
        )
    _check_device("key_cache", key_cache, tokens)
    _check_device("value_cache", value_cache, tokens)


def _check_heads(query: Tensor, key_cache: Tensor) -> None:
    heads, kv_heads = query.shape[1], key_cache.shape[2]
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(
            f"query: got {heads} heads, expected a multiple of the {kv_heads} kv_heads of key_cache"
        )


def _check_index(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int | None], like: Tensor
) -> None:
    """Checks an index tensor; None in `shape` stands for any length."""
    fits = tensor.ndim == len(shape) and all(
        want in (None, got) for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype != dtype:
        want = ", ".join("any" if n is None else str(n) for n in shape)
        expected = f"[{want}] {dtype}".replace("torch.", "")
        raise ValueError(f"{name}: got {_describe(tensor)}, expected {expected}")
    _check_device(name, tensor, like)
