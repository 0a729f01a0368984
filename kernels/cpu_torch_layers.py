"""The layer and block operations in plain torch, for CPUs: few calls, for at small batches dispatch is what costs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from servetwin.kernels import cpu_torch
from servetwin.kernels.float8 import as_bits
from servetwin.kernels.host_metadata import check_block_ids


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, residual: Tensor | None = None, weight_offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """Root mean square norm; arguments as in `ops.rms_norm`."""
    if residual is None:
        return _norm(x, weight, eps, weight_offset)
    total = x + residual
    return _norm(total, weight, eps, weight_offset), total


def _norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    # Weighted here rather than by torch, which rounds in between for no dtype.
    if weight_offset == 0:
        return functional.rms_norm(x, weight.shape, eps=eps) * weight
    wide = functional.rms_norm(x.float(), weight.shape, eps=eps)
    return wide.mul_(weight.float() + weight_offset).to(x.dtype)


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
) -> Tensor:
    """Rotary embedding and cache write; arguments as in `ops.rotary_and_cache`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    cpu_torch.reshape_and_cache(
        _rotate(key, cos, sin),
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    return _rotate(query, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [tokens, heads, dim] by cos and sin [tokens, 1, rotary_dim]; contiguous."""
    rotary_dim = cos.shape[-1]
    half = rotary_dim // 2
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotated = output[..., :rotary_dim]
    torch.mul(x[..., :rotary_dim], cos, out=rotated)
    rotated[..., :half] -= x[..., half:rotary_dim] * sin[..., :half]
    rotated[..., half:] += x[..., :half] * sin[..., half:]
    if rotary_dim < x.shape[-1]:
        output[..., rotary_dim:] = x[..., rotary_dim:]
    return output


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Gated activation; arguments as in `ops.silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def copy_blocks(key_cache: Tensor, value_cache: Tensor, block_mapping: Tensor) -> None:
    """Block copy; arguments as in `ops.copy_blocks`."""
    check_block_ids("block_mapping", block_mapping, key_cache.shape[0])
    sources, destinations = block_mapping[(block_mapping >= 0).all(dim=1)].unbind(dim=1)
    for cache in (as_bits(key_cache), as_bits(value_cache)):
        cache.index_copy_(0, destinations, cache.index_select(0, sources))


def zero_blocks(key_cache: Tensor, value_cache: Tensor, block_ids: Tensor) -> None:
    """Block clearing; arguments as in `ops.zero_blocks`."""
    check_block_ids("block_ids", block_ids, key_cache.shape[0])
    named = block_ids[block_ids >= 0]
    for cache in (as_bits(key_cache), as_bits(value_cache)):
        cache.index_fill_(0, named, 0)
