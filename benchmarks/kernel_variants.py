"""The variants of the Triton kernels that are compiled for GPUs without one: shapes and dtypes of models in use.

Kernels are specialised through the same launch plans as on a device, on meta tensors, which have no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from servetwin.kernels import (
    triton_block_ops,
    triton_paged_attention,
    triton_reshape_and_cache,
    triton_rms_norm,
    triton_rotary_and_cache,
    triton_silu_and_mul,
    triton_split_kv,
)
from servetwin.kernels.triton_attention_plan import AttentionCall
from servetwin.kernels.triton_fp8 import MIN_FP8_ARCH
from servetwin.kernels.triton_launch import Launch

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


@dataclass(frozen=True)
class Variant:
    """One specialisation of one kernel."""

    kernel: str
    name: str
    plan: Callable[[], Launch]
    """Plans the launch for the active target."""
    min_arch: int = 80
    """Compute capability, times ten, that it needs."""

    @property
    def id(self) -> str:
        """What names it on the command line."""
        return f"{self.kernel}/{self.name}"


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def cache(block_size: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A key cache inside a pool in which the keys and values of a block are side by side."""
    return meta(4096, 2, block_size, kv_heads, dim, dtype=dtype)[:, 0]


def scale(cache_dtype: torch.dtype) -> Tensor | None:
    """The scale of such a cache."""
    return meta(1, dtype=FP32) if cache_dtype == FP8 else None


# ---------------------------------------------------------------- attention


def attention_call(
    *,
    tokens: int,
    reqs: int = 8,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    dim: int = 128,
    heads: int = 32,
    kv_heads: int = 8,
    block_size: int = 16,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> AttentionCall:
    """A call for `tokens` rows of `reqs` requests, of which a row of the block table holds 1024 blocks."""
    kv = cache(block_size, kv_heads, dim, cache_dtype or dtype)
    return AttentionCall(
        query=meta(tokens, heads, dim, dtype=dtype),
        key_cache=kv,
        value_cache=kv,
        block_table=meta(reqs, 1024, dtype=torch.int32),
        seq_lens=meta(reqs, dtype=torch.int32),
        query_start_loc=meta(reqs + 1, dtype=torch.int32),
        scale=dim**-0.5,
        sliding_window=sliding_window,
        softcap=softcap,
        key_scale=scale(kv.dtype),
        value_scale=scale(kv.dtype),
    )


def attention_plan(kernel: str, make_call: Callable[[], AttentionCall]) -> Launch:
    """The launch of one of the attention kernels for a call."""
    call = make_call()
    output = torch.empty_like(call.query)
    if kernel == "paged_attention":
        return triton_paged_attention.plan_launch(output, call)
    partials = triton_split_kv.new_partials(call)
    if kernel == "split_kv_decode":
        return triton_split_kv.plan_decode(partials, call)
    return triton_split_kv.plan_merge(output, partials, call)


PREFILL, DECODE, VERIFY = (partial(attention_call, tokens=tokens) for tokens in (2048, 8, 32))

ATTENTION: dict[str, dict[str, Callable[[], AttentionCall]]] = {
    "paged_attention": {
        "prefill-bf16-d128-g4": PREFILL,
        "prefill-fp16-d128-g4": partial(PREFILL, dtype=FP16),
        "prefill-bf16-d64-g8": partial(PREFILL, dim=64, heads=64),
        "prefill-bf16-d96-g5-block12": partial(PREFILL, dim=96, heads=40, block_size=12),
        "prefill-bf16-d128-window-softcap": partial(PREFILL, sliding_window=4096, softcap=50.0),
        "prefill-bf16-d256-g2": partial(PREFILL, dim=256, heads=8, kv_heads=4),
        "prefill-bf16-d128-g48": partial(PREFILL, heads=48, kv_heads=1),
        "prefill-fp32-d128-g4": partial(PREFILL, dtype=FP32),
        "prefill-bf16-fp8-d128-g4": partial(PREFILL, cache_dtype=FP8),
        "decode-bf16-d128-g4": DECODE,
        "decode-bf16-d64-g8": partial(DECODE, dim=64, heads=64),
        "decode-bf16-d80-g1-block12": partial(DECODE, dim=80, kv_heads=32, block_size=12),
        "decode-bf16-d128-g48": partial(DECODE, heads=48, kv_heads=1),
        "decode-bf16-d256-g2": partial(DECODE, dim=256, heads=8, kv_heads=4),
        "decode-bf16-d256-g48": partial(DECODE, dim=256, heads=48, kv_heads=1),
        "decode-fp32-d128-g4": partial(DECODE, dtype=FP32),
        "decode-fp32-d256-g48": partial(DECODE, dtype=FP32, dim=256, heads=48, kv_heads=1),
        "decode-bf16-fp8-d128-g4": partial(DECODE, cache_dtype=FP8),
        "verify-bf16-d128-g4": VERIFY,
    },
    "split_kv_decode": {
        "bf16-d128-g4": DECODE,
        "bf16-d64-g8": partial(DECODE, dim=64, heads=64),
        "bf16-d80-g1-block12": partial(DECODE, dim=80, kv_heads=32, block_size=12),
        "bf16-d128-g48": partial(DECODE, heads=48, kv_heads=1),
        "bf16-d256-g2": partial(DECODE, dim=256, heads=8, kv_heads=4),
        "bf16-d128-window-softcap": partial(DECODE, sliding_window=4096, softcap=50.0),
        "fp32-d128-g4": partial(DECODE, dtype=FP32),
        "bf16-fp8-d128-g4": partial(DECODE, cache_dtype=FP8),
        "bf16-fp8-d256-g32": partial(DECODE, cache_dtype=FP8, dim=256, heads=32, kv_heads=1),
        "verify-bf16-d128-g4": VERIFY,
    },
    "merge_splits": {
        "bf16-d128": DECODE,
        "bf16-d256": partial(DECODE, dim=256, heads=8, kv_heads=4),
        "fp32-d80-window": partial(DECODE, dtype=FP32, dim=80, sliding_window=4096),
        "bf16-fp8-d128": partial(DECODE, cache_dtype=FP8),
    },
}


def attention_variants() -> Iterator[Variant]:
    """Those of all kernels that attend."""
    for kernel, calls in ATTENTION.items():
        for name, call in calls.items():
            fp8 = "fp8" in name
            yield Variant(
                kernel,
                name,
                partial(attention_plan, kernel, call),
                min_arch=MIN_FP8_ARCH if fp8 else 80,
            )


# ---------------------------------------------------------------- cache


def cache_write(
    *,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    dim: int = 128,
    kv_heads: int = 8,
    block_size: int = 16,
) -> Launch:
    """The write of 64 tokens."""
    key = meta(64, kv_heads, dim, dtype=dtype)
    kv = cache(block_size, kv_heads, dim, cache_dtype or dtype)
    slots = meta(64, dtype=torch.int64)
    scales = {"key_scale": scale(kv.dtype), "value_scale": scale(kv.dtype)}
    return triton_reshape_and_cache.plan_launch(key, key, kv, kv, slots, **scales)


def copy(dtype: torch.dtype, dim: int = 128, block_size: int = 16) -> Launch:
    """The copy of 4 blocks."""
    kv = cache(block_size, 8, dim, dtype)
    return triton_block_ops.plan_copy(kv, kv, meta(4, 2, dtype=torch.int64))


def zero(dtype: torch.dtype, dim: int = 128, block_size: int = 16) -> Launch:
    """The clearing of 4 blocks."""
    kv = cache(block_size, 8, dim, dtype)
    return triton_block_ops.plan_zero(kv, kv, meta(4, dtype=torch.int64))


def cache_variants() -> Iterator[Variant]:
    """Those of the kernels that write the cache."""
    write = partial(Variant, "reshape_and_cache")
    yield write("bf16-d128", cache_write)
    yield write("fp32-d80-block12", partial(cache_write, dtype=FP32, dim=80, block_size=12))
    yield write("bf16-fp8-d128", partial(cache_write, cache_dtype=FP8), MIN_FP8_ARCH)
    for kernel, plan in (("copy_blocks", copy), ("zero_blocks", zero)):
        yield Variant(kernel, "bf16-d128", partial(plan, BF16))
        yield Variant(kernel, "fp32-d80-block12", partial(plan, FP32, dim=80, block_size=12))
        yield Variant(kernel, "fp8-d128", partial(plan, FP8))


# ---------------------------------------------------------------- layers


def rms_norm(
    hidden: int, *, dtype: torch.dtype = BF16, residual: bool = False, offset: float = 0.0, heads: int = 0
) -> Launch:
    """The norm of 64 tokens, or of so many heads of 64 tokens."""
    x = meta(64, heads, hidden, dtype=dtype) if heads else meta(64, hidden, dtype=dtype)
    rows = x.view(-1, hidden)
    extra = x if residual else None
    weight = meta(hidden, dtype=dtype)
    return triton_rms_norm.plan_launch(
        rows, rows if residual else None, x, extra, weight, eps=1e-6, weight_offset=offset
    )


def rotary(
    *,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    dim: int = 128,
    rotary_dim: int | None = None,
    heads: int = 32,
    kv_heads: int = 8,
) -> Launch:
    """The rotation and cache write of 64 tokens of a fused projection."""
    fused = meta(64, heads + 2 * kv_heads, dim, dtype=dtype)
    query, key, value = fused.split([heads, kv_heads, kv_heads], dim=1)
    cos = meta(64, rotary_dim or dim, dtype=dtype)
    kv = cache(16, kv_heads, dim, cache_dtype or dtype)
    output = meta(64, heads, dim, dtype=dtype)
    slots = meta(64, dtype=torch.int64)
    return triton_rotary_and_cache.plan_launch(
        output, query, key, value, cos, cos, kv, kv, slots, scale(kv.dtype), scale(kv.dtype)
    )


def silu(n: int, dtype: torch.dtype = BF16) -> Launch:
    """The activation of 64 tokens."""
    return triton_silu_and_mul.plan_launch(meta(64, n, dtype=dtype), meta(64, 2 * n, dtype=dtype))


def layer_variants() -> Iterator[Variant]:
    """Those of the kernels between the matrix products."""
    norm = partial(Variant, "rms_norm")
    yield norm("bf16-h4096-residual", partial(rms_norm, 4096, residual=True))
    yield norm("bf16-h4096", partial(rms_norm, 4096))
    yield norm("bf16-h16384-residual", partial(rms_norm, 16384, residual=True))
    yield norm("fp32-h16384-residual", partial(rms_norm, 16384, dtype=FP32, residual=True))
    yield norm("bf16-h2560-offset-residual", partial(rms_norm, 2560, residual=True, offset=1.0))
    yield norm("bf16-d128-heads16", partial(rms_norm, 128, heads=16))
    turn = partial(Variant, "rotary_and_cache")
    yield turn("bf16-d128", rotary)
    yield turn("fp32-d64", partial(rotary, dtype=FP32, dim=64))
    yield turn("bf16-d80-rotary32", partial(rotary, dim=80, rotary_dim=32, kv_heads=32))
    yield turn("bf16-d256", partial(rotary, dim=256, heads=8, kv_heads=4))
    yield turn("bf16-fp8-d128", partial(rotary, cache_dtype=FP8), MIN_FP8_ARCH)
    activation = partial(Variant, "silu_and_mul")
    yield activation("bf16-n14336", partial(silu, 14336))
    yield activation("fp32-n1408", partial(silu, 1408, FP32))


VARIANTS: tuple[Variant, ...] = (*attention_variants(), *cache_variants(), *layer_variants())
