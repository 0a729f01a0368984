"""Checks of kernel arguments by shape, dtype and device only: none reads a value, so none waits for the device.

Each raises ValueError that names the argument, what came and what is expected.
"""

from __future__ import annotations

import math
from numbers import Integral, Real

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8_DTYPE = torch.float8_e4m3fn
"""The dtype of caches that are stored with scales."""
MAX_SCALE = 1e30
SOFTCAPS = (1e-30, 1e30)
"""What the squares of scores survive in float32."""
CACHE_DTYPES = (*FLOAT_DTYPES, FP8_DTYPE)


def describe(tensor: Tensor) -> str:
    """Shape and dtype as error messages give them, for example "[3, 64] float32"."""
    return f"{list(tensor.shape)} {tensor.dtype}".replace("torch.", "")


def check_tensor(name: str, value: object) -> None:
    """A tensor at all."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: got {type(value).__name__}, expected a tensor")


def check_number(name: str, value: float, lowest: float = -math.inf) -> None:
    """A finite number, `lowest` or more."""
    if not _is_number(value) or not lowest <= value < math.inf or value == -math.inf:
        least = f", {lowest:g} or more" if lowest > -math.inf else ""
        raise ValueError(f"{name}: got {value!r}, expected a finite number{least}")


def check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    """All tensors of a call are on one device."""
    if tensor.device != like.device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, expected all tensors on {like.device}")


def check_float(name: str, tensor: Tensor, ndim: int) -> None:
    """A tensor of `ndim` dimensions of one of `FLOAT_DTYPES`."""
    check_tensor(name, tensor)
    if tensor.ndim != ndim or tensor.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"{name}: got {describe(tensor)}, expected {ndim} dimensions of float32, float16 or bfloat16"
        )


def check_rows(name: str, tensor: Tensor) -> None:
    """A tensor [..., n] of at least one dimension, n at least 1, of one of `FLOAT_DTYPES`."""
    check_tensor(name, tensor)
    if tensor.ndim == 0 or tensor.shape[-1] == 0 or tensor.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"{name}: got {describe(tensor)}, expected rows of at least one float32, float16 or bfloat16"
        )


def check_like(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """The shape, dtype and device of another tensor."""
    check_tensor(name, tensor)
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise ValueError(
            f"{name}: got {describe(tensor)}, expected the shape and dtype of {like_name}, {describe(like)}"
        )
    check_device(name, tensor, like)


def check_shape(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...], like: Tensor
) -> None:
    """A tensor of this dtype and shape on the device of `like`; None in `shape` stands for any length."""
    check_tensor(name, tensor)
    if tensor.dtype != dtype or not _fits(tensor.shape, shape):
        want = ", ".join("any" if n is None else str(n) for n in shape)
        expected = f"[{want}] {dtype}".replace("torch.", "")
        raise ValueError(f"{name}: got {describe(tensor)}, expected {expected}")
    check_device(name, tensor, like)


def _fits(got: torch.Size, wanted: tuple[int | None, ...]) -> bool:
    if None not in wanted:
        return got == wanted
    return len(got) == len(wanted) and all(w in (None, n) for w, n in zip(wanted, got, strict=True))


def check_cache_pair(key_cache: Tensor, value_cache: Tensor) -> None:
    """A key and a value cache [blocks, block_size, kv_heads, dim] of one shape, dtype and device."""
    check_tensor("key_cache", key_cache)
    if key_cache.ndim != 4 or key_cache.shape[3] == 0 or key_cache.dtype not in CACHE_DTYPES:
        raise ValueError(
            f"key_cache: got {describe(key_cache)}, expected 4 dimensions of float32, float16, bfloat16 or "
            "float8_e4m3fn, the last one not 0"
        )
    check_like("value_cache", value_cache, "key_cache", key_cache)


def check_caches(
    name: str,
    tokens: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> None:
    """Caches that hold heads like those of the argument `name`, tokens [..., dim], and their scales.

    A float8_e4m3fn cache goes with tokens of any float dtype and needs both scales, float32 tensors of one element.
    Any other has the dtype of the tokens and takes no scale.
    """
    check_cache_pair(key_cache, value_cache)
    scaled = key_cache.dtype == FP8_DTYPE
    if tokens.shape[-1] != key_cache.shape[-1] or (not scaled and tokens.dtype != key_cache.dtype):
        raise ValueError(
            f"key_cache: got {describe(key_cache)}, expected the head dim and dtype of {name}, {describe(tokens)}"
        )
    check_device("key_cache", key_cache, tokens)
    _check_scale("key_scale", key_scale, key_cache)
    _check_scale("value_scale", value_scale, key_cache)


def _check_scale(name: str, scale: Tensor | None, cache: Tensor) -> None:
    if cache.dtype != FP8_DTYPE:
        if scale is not None:
            raise ValueError(
                f"{name}: got a scale, expected None with caches of {str(cache.dtype).removeprefix('torch.')}"
            )
        return
    if scale is None:
        raise ValueError(f"{name}: got None, expected a float32 tensor of one element with float8 caches")
    check_tensor(name, scale)
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ValueError(f"{name}: got {describe(scale)}, expected a float32 tensor of one element")
    check_device(name, scale, cache)


def check_new_tokens(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> None:
    """Keys and values [tokens, kv_heads, dim] of new tokens, the caches they go to, and their slots [tokens]."""
    check_float("key", key, 3)
    check_like("value", value, "key", key)
    check_caches("key", key, key_cache, value_cache, key_scale, value_scale)
    if key.shape[1] != key_cache.shape[2]:
        raise ValueError(
            f"key: got {key.shape[1]} heads, expected the {key_cache.shape[2]} kv_heads of key_cache"
        )
    check_shape("slot_mapping", slot_mapping, torch.int64, (key.shape[0],), key)


def check_query_heads(query: Tensor, key_cache: Tensor) -> None:
    """Query heads [tokens, heads, dim] that share out evenly over the kv_heads of the cache."""
    heads, kv_heads = query.shape[1], key_cache.shape[2]
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(
            f"query: got {heads} heads, expected a multiple of the {kv_heads} kv_heads of key_cache"
        )


def check_scoring(scale: float, sliding_window: int | None, softcap: float | None) -> None:
    """What `ops.paged_attention` takes beside tensors."""
    if not (_is_number(scale) and 0 < scale <= MAX_SCALE):
        raise ValueError(f"scale: got {scale!r}, expected a number above 0, at most {MAX_SCALE:g}")
    if sliding_window is not None and not (_is_whole(sliding_window) and sliding_window >= 1):
        raise ValueError(
            f"sliding_window: got {sliding_window!r}, expected a whole number, 1 or more, or None for no window"
        )
    low, high = SOFTCAPS
    if softcap is not None and not (_is_number(softcap) and low <= softcap <= high):
        raise ValueError(
            f"softcap: got {softcap!r}, expected a number from {low:g} to {high:g}, or None for no softcap"
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_rotary(cos: Tensor, sin: Tensor, query: Tensor) -> None:
    """cos and sin [tokens, rotary_dim] of the query's dtype; rotary_dim is even and at most the head dim."""
    tokens, _, dim = query.shape
    check_shape("cos", cos, query.dtype, (tokens, None), query)
    check_like("sin", sin, "cos", cos)
    rotary_dim = cos.shape[1]
    if rotary_dim % 2 or not 0 < rotary_dim <= dim:
        raise ValueError(
            f"cos: got {rotary_dim} dimensions, expected an even number from 2 to the head dim, {dim}"
        )
