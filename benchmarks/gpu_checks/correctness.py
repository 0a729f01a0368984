"""Part `correctness`: every operation of the kernels against its definition, on fresh random data.

Slots that hold no token are NaN, so whatever is read before it was written shows. `difference` is the
largest one from the definition, relative to its largest value, and `limit` what the rounding of the type explains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_checks.batches import LayerShape, PagedBatch, packed_batch
from gpu_checks.session import Row, Session
from servetwin.kernels import ops

LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
FP8_NAN = 0x7F
HUGE = 1e30
TOY_DIVISOR = 64
"""Contexts are so many times shorter at toy size."""
PAST_INT32 = 2**31 + 2**27
"""Elements of a cache whose last blocks lie beyond 32-bit offsets."""
HEADS_OF_GROUPS = ((4, 4), (6, 2), (5, 1), (14, 2), (32, 2), (48, 1))


@dataclass(frozen=True)
class Case:
    """One call of paged attention, preceded by the writes of its cache."""

    name: str
    query_lens: Sequence[int] = (130, 1, 1, 17, 1)
    context_lens: Sequence[int] = (0, 1000, 63, 300, 0)
    shape: LayerShape = LayerShape("", heads=8, kv_heads=2, head_dim=128)  # noqa: RUF009 (frozen)
    block_size: int = 16
    sliding_window: int | None = None
    softcap: float | None = None
    fp8: bool = False
    cache_elements: int = 0
    """The cache has at least so many, and the batch lies at its end."""


def attention_cases() -> Iterator[Case]:
    """The variants that kernels get wrong, at full size: prompt chunks beside decode rows, then decode alone."""
    base = Case("mixed").shape
    for dtype in (BF16, FP16, FP32):
        yield Case(f"mixed {str(dtype)[6:]}", shape=replace(base, dtype=dtype))
    for block_size in (4, 8, 12, 32, 544):
        yield Case(f"block size {block_size}", block_size=block_size)
    for dim in (16, 64, 72, 80, 96, 112, 256):
        yield Case(f"head size {dim}", shape=replace(base, head_dim=dim))
    for heads, kv_heads in HEADS_OF_GROUPS:
        yield Case(f"{heads} on {kv_heads} heads", shape=replace(base, heads=heads, kv_heads=kv_heads))
    yield Case("sliding window", sliding_window=100)
    yield Case("softcap", softcap=30.0)
    yield Case("fp8 mixed", fp8=True)
    yield Case("offsets past 2^31", cache_elements=PAST_INT32)
    for variant in DECODE_VARIANTS:
        yield from _decode_cases(*variant)
    yield Case("decode, rows of many lengths", (1,) * 128, tuple(range(0, 128 * 16, 16)))
    yield Case("decode, 32k", (1, 1), (32_767, 5))
    yield Case("decode, 128k", (1,), (131_071,))
    yield Case("decode, 128k in a window", (1,), (131_071,), sliding_window=4096)
    yield Case("few queries, 32k", (5,), (32_000,))
    yield Case("few queries, many rows", (1, 8, 7, 6) * 64, (700, 3, 90, 0) * 64, LayerShape("", 32, 8, 128))
    yield Case("padding rows", (1, 1, 1, 0, 1), (500, -1, -1, 0, -1))
    yield Case("fp8 decode, 32k", (1, 1), (32_767, 100), fp8=True)
    yield Case("decode, offsets past 2^31", (1, 1), (3000, 5), cache_elements=PAST_INT32)


DECODE_VARIANTS: tuple[tuple[int, int, int, torch.dtype, dict[str, Any]], ...] = (
    (128, 4, 16, BF16, {}),
    (64, 7, 8, FP16, {}),
    (80, 1, 12, FP32, {}),
    (256, 3, 32, BF16, {}),
    (96, 5, 544, BF16, {"fp8": True}),
    (112, 16, 4, BF16, {"softcap": 30.0}),
    (16, 48, 16, FP16, {}),
    (72, 4, 16, BF16, {"sliding_window": 700}),
    (256, 32, 16, BF16, {"fp8": True}),
    (128, 48, 16, FP32, {"softcap": 30.0}),
)
"""Head size, query heads per kv head, block size, type of the query, and more. Not every combination, since each is
three kernels to compile, of 0.5 to 4 s, but every value that the mixed cases have is in one of them. The last two are
the largest tiles that are still split.
"""


def _decode_cases(
    dim: int, group: int, block_size: int, dtype: torch.dtype, options: dict[str, Any]
) -> Iterator[Case]:
    """A variant as a batch with programs enough for the plain kernel, and as one so small that its rows are split."""
    name = ", ".join(
        [str(dtype)[6:], f"head size {dim}", f"group {group}", f"block size {block_size}", *options]
    )
    few = LayerShape("", 2 * group, 2, dim, dtype)
    many = replace(few, heads=8 * group, kv_heads=8)
    lengths = tuple(i * 131 % 1400 for i in range(128))
    yield Case(f"decode, {name}", (1,) * 128, lengths, many, block_size, **options)
    yield Case(f"split decode, {name}", (1,) * 4, (5000, 0, 256, 1300), few, block_size, **options)


@dataclass(frozen=True)
class Check:
    """A row of this part."""

    name: str
    run: Callable[[], Row]
    fp8: bool = False
    cache_bytes: int = 0
    """Memory that its cache needs if it is a large one."""


def run(session: Session) -> None:
    """All checks; a row each."""
    checks = [*_attention_checks(session), *_layer_checks(session)]
    session.announce([check.name for check in checks])
    lacks_fp8 = _lacks_fp8(session)
    for check in checks:
        if check.fp8 and lacks_fp8:
            session.leave_out(check.name, lacks_fp8, applies=False)
        elif check.cache_bytes and check.cache_bytes > session.free_bytes() // 2:
            session.leave_out(check.name, f"needs {check.cache_bytes} bytes for its cache")
        else:
            session.measure(check.name, check.run)


def _lacks_fp8(session: Session) -> str:
    """Why the kernels refuse float8 on this device; empty where they do not."""
    if session.arch is None:
        return ""
    from servetwin.kernels.triton_fp8 import MIN_FP8_ARCH

    if session.arch >= MIN_FP8_ARCH:
        return ""
    return f"float8 needs compute capability {MIN_FP8_ARCH / 10}, and this device has {session.arch / 10}"


def _attention_checks(session: Session) -> Iterator[Check]:
    for case in attention_cases():
        small = _small(case) if session.toy else case
        cache_bytes = 2 * small.cache_elements * small.shape.dtype.itemsize
        yield Check(f"attention: {case.name}", partial(_attention, session, small), case.fp8, cache_bytes)


def _layer_checks(session: Session) -> Iterator[Check]:
    checks: dict[str, Callable[[Session, torch.dtype], Row]] = {
        "rms_norm": _rms_norm,
        "silu_and_mul": _silu_and_mul,
        "rotary_and_cache": _rotary_and_cache,
        "reshape_and_cache": partial(_cache_write, fp8=False),
        "reshape_and_cache as fp8": partial(_cache_write, fp8=True),
        "copy_blocks": _copy_blocks,
        "zero_blocks": _zero_blocks,
    }
    for name, check in checks.items():
        for dtype in (BF16, FP32):
            yield Check(f"{name} {str(dtype)[6:]}", partial(check, session, dtype), fp8="fp8" in name)


def _small(case: Case) -> Case:
    return replace(
        case,
        query_lens=tuple(min(q, 9) for q in case.query_lens[:8]),
        context_lens=tuple(c if c < 0 else c // TOY_DIVISOR for c in case.context_lens[:8]),
        cache_elements=min(case.cache_elements, 2**16),
    )


def _verdict(actual: Tensor, expected: Tensor, limit: float) -> Row:
    """NaN in one of them is a huge difference; in both (slots that nobody has written) it is none."""
    actual, expected = actual.float(), expected.float()
    both_nan = actual.isnan() & expected.isnan()
    difference = (actual - expected).masked_fill(both_nan, 0).abs().nan_to_num(nan=HUGE)
    largest = expected.nan_to_num().abs().amax().clamp(min=1e-6)
    error = float((difference.amax() / largest).item()) if difference.numel() else 0.0
    return {"difference": error, "limit": limit, "ok": error <= limit}


def _worst(*verdicts: Row) -> Row:
    return max(verdicts, key=lambda row: (not row["ok"], row["difference"] / max(row["limit"], 1e-30)))


def _attention(session: Session, case: Case) -> Row:
    generator = session.generator(hash_of(case.name))
    batch, scales = _batch(session, case, generator)
    options: dict[str, Any] = {
        "scale": case.shape.scale,
        "sliding_window": case.sliding_window,
        "softcap": case.softcap,
        **scales,
    }
    actual = ops.paged_attention(*batch.operands, **options)
    expected = ops.paged_attention(*batch.operands, **options, backend="reference")
    return _verdict(actual, expected, LIMITS[case.shape.dtype])


def hash_of(name: str) -> int:
    """The same number for a name in every process."""
    return sum((i + 1) * byte for i, byte in enumerate(name.encode()))


def _batch(session: Session, case: Case, generator: torch.Generator) -> tuple[PagedBatch, dict[str, Any]]:
    """The operands, their cache written by our own kernel; and the scales that an fp8 cache takes."""
    shape, device = case.shape, session.device
    lengths = [q + c for q, c in zip(case.query_lens, case.context_lens, strict=True)]
    elements_per_block = case.block_size * shape.kv_heads * shape.head_dim
    used = 1 + sum(-(-n // case.block_size) for n in lengths)
    num_blocks = max(used, -(-case.cache_elements // elements_per_block))
    size = (num_blocks, case.block_size, shape.kv_heads, shape.head_dim)
    cache = _nan_caches(size, shape.dtype, case.fp8, device)
    batch = packed_batch(
        shape, cache, case.query_lens, case.context_lens, generator, first_block=num_blocks - used + 1
    )
    scale = torch.tensor([0.02], device=device) if case.fp8 else None
    scales: dict[str, Any] = {"key_scale": scale, "value_scale": scale}
    slots = _slots(batch)
    key, value = (
        torch.randn(len(slots), *size[2:], generator=generator, device=device).to(shape.dtype)
        for _ in range(2)
    )
    ops.reshape_and_cache(key, value, *cache, slots, **scales)
    return batch, scales


def _nan_caches(
    size: tuple[int, ...], dtype: torch.dtype, fp8: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Keys and values, all NaN."""
    if fp8:
        key, value = (torch.full(size, FP8_NAN, dtype=torch.uint8, device=device).view(FP8) for _ in range(2))
    else:
        key, value = (torch.full(size, torch.nan, dtype=dtype, device=device) for _ in range(2))
    return key, value


def _slots(batch: PagedBatch) -> Tensor:
    """The slot of every token of every request."""
    block_size = batch.key_cache.shape[1]
    lengths = batch.seq_lens.long()
    rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    positions = torch.arange(len(rows), device=lengths.device) - (lengths.cumsum(0) - lengths)[rows]
    return batch.block_table[rows, positions // block_size].long() * block_size + positions % block_size


# ---------------------------------------------------------------- other operations


def _rms_norm(session: Session, dtype: torch.dtype) -> Row:
    verdicts = []
    for hidden, offset, with_residual in ((4096, 0.0, True), (128, 0.0, False), (2304, 1.0, False)):
        x, residual = (_random(session, (33, 3, hidden), dtype, seed) for seed in (1, 2))
        weight = _random(session, (hidden,), dtype, 3)
        norm: Callable[..., Any] = partial(
            ops.rms_norm,
            x,
            weight,
            eps=1e-6,
            weight_offset=offset,
            residual=residual if with_residual else None,
        )
        actual, expected = norm(), norm(backend="reference")
        for ours, theirs in zip(_tensors(actual), _tensors(expected), strict=True):
            verdicts.append(_verdict(ours, theirs, LIMITS[dtype]))
    return _worst(*verdicts)


def _tensors(result: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _silu_and_mul(session: Session, dtype: torch.dtype) -> Row:
    gate_up = _random(session, (33, 2 * 1408), dtype, 1)
    return _verdict(ops.silu_and_mul(gate_up), ops.silu_and_mul(gate_up, backend="reference"), LIMITS[dtype])


def _rotary_and_cache(session: Session, dtype: torch.dtype) -> Row:
    """On views of one fused projection, with padding slots, over part of the dimensions."""
    tokens, heads, kv_heads, dim = 40, 8, 2, 128
    fused = _random(session, (tokens, heads + 2 * kv_heads, dim), dtype, 1)
    query, key, value = torch.split(fused, [heads, kv_heads, kv_heads], dim=1)
    angles = _random(session, (tokens, 32), torch.float32, 2).repeat(1, 2)
    slots = _some_slots(session, tokens, 16 * 10)

    def call(backend: ops.Backend | None) -> Sequence[Tensor]:
        caches = _nan_caches((10, 16, kv_heads, dim), dtype, False, session.device)
        angle = angles.cos().to(dtype), angles.sin().to(dtype)
        rotated = ops.rotary_and_cache(query, key, value, *angle, *caches, slots, backend=backend)
        return rotated, *caches

    return _compare(call, LIMITS[dtype])


def _cache_write(session: Session, dtype: torch.dtype, fp8: bool) -> Row:
    """In the given type, or as fp8."""
    key, value = (_random(session, (40, 3, 80), dtype, seed) for seed in (1, 2))
    slots = _some_slots(session, 40, 12 * 9)
    scale = torch.tensor([0.01], device=session.device)
    scales: dict[str, Any] = {"key_scale": scale, "value_scale": scale} if fp8 else {}

    def call(backend: ops.Backend | None) -> Sequence[Tensor]:
        caches = _nan_caches((9, 12, 3, 80), dtype, fp8, session.device)
        ops.reshape_and_cache(key, value, *caches, slots, backend=backend, **scales)
        return caches

    return _compare(call, 0.0)


def _copy_blocks(session: Session, dtype: torch.dtype) -> Row:
    def call(backend: ops.Backend | None) -> Sequence[Tensor]:
        caches = _random(session, (9, 12, 3, 80), dtype, 1), _random(session, (9, 12, 3, 80), dtype, 2)
        mapping = torch.tensor([[0, 8], [3, 5], [0, 7], [-1, 2]], device=session.device)
        ops.copy_blocks(*caches, mapping, backend=backend)
        return caches

    return _compare(call, 0.0)


def _zero_blocks(session: Session, dtype: torch.dtype) -> Row:
    def call(backend: ops.Backend | None) -> Sequence[Tensor]:
        caches = _random(session, (9, 12, 3, 80), dtype, 1), _random(session, (9, 12, 3, 80), dtype, 2)
        ops.zero_blocks(*caches, torch.tensor([8, 0, -1], device=session.device), backend=backend)
        return caches

    return _compare(call, 0.0)


def _compare(call: Callable[[ops.Backend | None], Sequence[Tensor]], limit: float) -> Row:
    """The kernels of the device against the definitions, tensor by tensor."""
    pairs = zip(call(None), call("reference"), strict=True)
    return _worst(*(_verdict(actual, expected, limit) for actual, expected in pairs))


def _random(session: Session, size: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(size, generator=session.generator(seed), device=session.device).to(dtype)


def _some_slots(session: Session, tokens: int, num_slots: int) -> Tensor:
    """Different slots, every fifth of them padding."""
    slots = torch.randperm(num_slots, generator=session.generator(5), device=session.device)[:tokens]
    slots[::5] = -1
    return slots
