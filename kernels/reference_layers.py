"""The layer and block operations as their definitions read, in plain torch; what every other backend is tested against.

Arithmetic is in float32, rounded to the storage dtype where transformers rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from servetwin.kernels import reference
from servetwin.kernels.host_metadata import check_block_ids


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, residual: Tensor | None = None, weight_offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """Root mean square norm; arguments as in `ops.rms_norm`.

        norm(x) = x / sqrt(mean(x ** 2) + eps) * (weight + weight_offset)

    Llama (offset 0) rounds the normalised value before it is weighted, Gemma (offset 1) only the result.
    """
    if residual is None:
        return _norm(x, weight, eps, weight_offset)
    total = (x.float() + residual.float()).to(x.dtype)
    return _norm(total, weight, eps, weight_offset), total


def _norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    if weight_offset == 0:
        normalised = normalised.to(x.dtype).float()
    return (normalised * (weight.float() + weight_offset)).to(x.dtype)


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
    rotated_key = _rotate(key, cos, sin)
    reference.reshape_and_cache(
        rotated_key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    return _rotate(query, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x_i, x_{i + r/2}) of the first r = rotary_dim dimensions by the angle of dimension i:

    (a, b) -> (a * cos - b * sin, b * cos + a * sin)      each product and each sum rounded to the dtype
    """
    half = cos.shape[-1] // 2
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    c, s = cos[:, None, :half].float(), sin[:, None, :half].float()

    def rounded(product: Tensor) -> Tensor:
        return product.to(x.dtype).float()

    first = (rounded(a * c) - rounded(b * s)).to(x.dtype)
    second = (rounded(b * c) + rounded(a * s)).to(x.dtype)
    return torch.cat([first, second, rest], dim=-1)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Gated activation; arguments as in `ops.silu_and_mul`.

    out = silu(gate) * up,   silu(x) = x / (1 + exp(-x)), rounded to the dtype before the product
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    activated = functional.silu(gate).to(gate_up.dtype)
    return (activated.float() * up).to(gate_up.dtype)


def copy_blocks(key_cache: Tensor, value_cache: Tensor, block_mapping: Tensor) -> None:
    """Block copy; arguments as in `ops.copy_blocks`."""
    check_block_ids("block_mapping", block_mapping, key_cache.shape[0])
    for source, destination in block_mapping.tolist():
        if source >= 0 and destination >= 0:
            key_cache[destination] = key_cache[source]
            value_cache[destination] = value_cache[source]


def zero_blocks(key_cache: Tensor, value_cache: Tensor, block_ids: Tensor) -> None:
    """Block clearing; arguments as in `ops.zero_blocks`."""
    check_block_ids("block_ids", block_ids, key_cache.shape[0])
    for block in block_ids.tolist():
        if block >= 0:
            key_cache[block] = torch.zeros_like(key_cache[block])
            value_cache[block] = torch.zeros_like(value_cache[block])
