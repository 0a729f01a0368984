"""The layer kernels: every path computes what the reference computes, and the reference what transformers computes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from servetwin.kernels import cpu_native, cpu_torch_layers, ops, reference_layers

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Relative, a few units in the last place: the interpreter truncates where devices round to bfloat16."""
DTYPES = tuple(TOLERANCE)
OPERATIONS = ("rms_norm", "rotary_and_cache", "silu_and_mul")

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def through_ops(backend: ops.Backend) -> SimpleNamespace:
    return SimpleNamespace(**{name: partial(getattr(ops, name), backend=backend) for name in OPERATIONS})


@pytest.fixture(params=["torch", "cpu", "triton"])
def layers(request: pytest.FixtureRequest) -> Any:
    """What computes: plain torch, what the cpu backend chooses (C++ where there is a compiler), or Triton."""
    if request.param == "torch":
        return cpu_torch_layers
    if request.param == "triton":
        pytest.importorskip("triton")
    elif not cpu_native.available():
        pytest.skip(f"the cpu backend is plain torch here: {cpu_native.status()}")
    return through_ops(request.param)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    limit = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit, equal_nan=True)


def far_apart(rows: int, width: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Rows [rows, width] that lie 2^31 elements apart, in virtual memory of which only they are touched."""
    step = 2**31
    pool = torch.empty((rows - 1) * step + width, dtype=dtype)
    view = pool.as_strided((rows, width), (step, 1))
    view.copy_(randn(rows, width))
    return view


# ---------------------------------------------------------------- rms_norm

ROWS = [(3, 10), (5, 7, 80), (2, 3000), (7,), (2, 3, 4, 6), (1, 1), (130, 8)]


@every_dtype
@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_rms_norm_of_any_shape(
    layers: Any, dtype: torch.dtype, shape: tuple[int, ...], weight_offset: float
) -> None:
    """Rows of any length and any leading dimensions, more of them than one program takes."""
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    arguments: dict[str, Any] = {"eps": 1e-6, "weight_offset": weight_offset}
    expected = reference_layers.rms_norm(x, weight, **arguments)
    assert isinstance(expected, Tensor)
    assert_close(layers.rms_norm(x, weight, **arguments), expected)


@every_dtype
@pytest.mark.parametrize("shape", [(3, 10), (2, 5, 72), (2, 3000)], ids=str)
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_rms_norm_with_residual(
    layers: Any, dtype: torch.dtype, shape: tuple[int, ...], weight_offset: float
) -> None:
    """The sum is rounded to the dtype, then normalised; both come back and the inputs stay as they were."""
    x, residual, weight = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate((shape, shape, shape[-1:])))
    before = x.clone(), residual.clone()
    expected = reference_layers.rms_norm(x, weight, eps=1e-5, residual=residual, weight_offset=weight_offset)
    normed, total = layers.rms_norm(x, weight, eps=1e-5, residual=residual, weight_offset=weight_offset)
    assert_close(normed, expected[0])
    assert_close(total, expected[1])
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_rms_norm_of_views(layers: Any) -> None:
    """The query heads of a fused projection, and rows whose elements are not side by side."""
    weight = randn(16)
    fused = randn(5, 96)
    for x in (fused[:, :64].view(5, 4, 16), randn(16, 7).T, randn(3, 5, 16).transpose(0, 1)):
        expected = reference_layers.rms_norm(x.contiguous(), weight, eps=1e-6)
        assert isinstance(expected, Tensor)
        assert_close(layers.rms_norm(x, weight, eps=1e-6), expected)


def test_rms_norm_residual_of_other_strides(layers: Any) -> None:
    """x and its residual need not lie alike in memory."""
    x, residual, weight = randn(6, 5).T, randn(5, 12)[:, ::2], randn(6)
    expected = reference_layers.rms_norm(x, weight, eps=1e-6, residual=residual)
    for actual, wanted in zip(layers.rms_norm(x, weight, eps=1e-6, residual=residual), expected, strict=True):
        assert_close(actual, wanted)


def test_rms_norm_neither_overflows_nor_leaks(layers: Any) -> None:
    """Squares beyond float16's range are summed in float32; a NaN stays in its row; a row of zeros stays zero."""
    x = torch.full((3, 40), 3000.0, dtype=torch.float16)
    x[1, 5], x[2] = torch.nan, 0.0
    normed = layers.rms_norm(x, torch.ones(40, dtype=torch.float16), eps=1e-6)
    assert normed[0].eq(1).all()
    assert normed[1].isnan().all()
    assert normed[2].eq(0).all()


@pytest.mark.parametrize("offset", [0.0, 1.0])
@every_dtype
def test_rms_norm_is_that_of_transformers(dtype: torch.dtype, offset: float) -> None:
    """Bit for bit Llama's norm, and Gemma's with offset 1, both as reference and as plain torch."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = (GemmaRMSNorm if offset else LlamaRMSNorm)(96, eps=1e-5).to(dtype)
    norm.weight.data.copy_(randn(96))
    x = randn(7, 96, dtype=dtype, seed=1)
    with torch.no_grad():
        expected = norm(x)
        for module in (reference_layers, cpu_torch_layers):
            actual = module.rms_norm(x, norm.weight, eps=1e-5, weight_offset=offset)
            assert isinstance(actual, Tensor)
            assert torch.equal(actual, expected), module.__name__


# ---------------------------------------------------------------- rotary_and_cache


class Step:
    """The arguments of one call of `rotary_and_cache`: query, key and value are views of one fused projection."""

    def __init__(
        self,
        *,
        tokens: int = 4,
        heads: int = 6,
        kv_heads: int = 2,
        dim: int = 16,
        rotary_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.slots = torch.tensor([7, -1, 0, 19])[:tokens]
        fused = randn(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
        self.query, self.key, self.value = fused.split([heads, kv_heads, kv_heads], dim=1)
        angles = randn(tokens, (rotary_dim or dim) // 2, seed=1).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        shape = (4, 5, kv_heads, dim)
        self.key_cache, self.value_cache = (
            torch.full(shape, torch.nan).to(cache_dtype or dtype) for _ in range(2)
        )
        self.scales: dict[str, Tensor] = {}
        if cache_dtype is not None:
            self.scales = {"key_scale": torch.tensor([0.125]), "value_scale": torch.tensor(2.0)}

    def run(self, layers: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The rotated query and fresh copies of the caches after the write."""
        caches = self.key_cache.clone(), self.value_cache.clone()
        rotated = layers.rotary_and_cache(
            *(self.query, self.key, self.value, self.cos, self.sin),
            *caches,
            self.slots,
            **self.scales,
        )
        return rotated, *caches


def assert_steps_agree(step: Step, layers: Any) -> None:
    before = step.key.clone()
    for actual, expected in zip(step.run(layers), step.run(reference_layers), strict=True):
        assert_close(actual, expected)
    assert torch.equal(step.key, before)


@every_dtype
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"),
    [(6, 2, 16, 16), (3, 3, 80, 32), (5, 1, 10, 6), (48, 1, 96, 96), (20, 10, 72, 2)],
)
def test_rotary_and_cache_of_any_shape(
    layers: Any, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, rotary_dim: int
) -> None:
    """All or part of each head is rotated, heads of one fused projection, any number of them."""
    assert_steps_agree(
        Step(heads=heads, kv_heads=kv_heads, dim=dim, rotary_dim=rotary_dim, dtype=dtype), layers
    )


def test_rotary_writes_only_its_slots(layers: Any) -> None:
    """Slots 7, 0 and 19 hold the keys and values; all others, that of the padding too, keep their NaN."""
    step = Step()
    rotated, key_cache, value_cache = step.run(layers)
    assert rotated.is_contiguous()
    for cache in (key_cache, value_cache):
        written = cache.flatten(0, 1).flatten(1).isfinite()
        assert torch.equal(written.any(1), written.all(1))
        assert written.any(1).nonzero().flatten().tolist() == [0, 7, 19]
    assert torch.equal(value_cache[1, 2], step.value[0])


def test_rotation_by_no_angle_changes_nothing(layers: Any) -> None:
    """cos 1 and sin 0 give back queries and keys, bit for bit."""
    step = Step()
    step.cos, step.sin = torch.ones_like(step.cos), torch.zeros_like(step.sin)
    rotated, key_cache, _ = step.run(layers)
    assert torch.equal(rotated, step.query)
    assert torch.equal(key_cache[1, 2], step.key[0])


def test_rotary_takes_any_strides(layers: Any) -> None:
    """Caches with K and V interleaved or heads before slots, and heads whose elements are not side by side."""
    step = Step()
    step.key_cache, step.value_cache = torch.full((4, 2, 2, 5, 16), torch.nan).transpose(2, 3).unbind(1)
    step.query = step.query.transpose(1, 2).contiguous().transpose(1, 2)
    step.key = step.key.transpose(0, 1).contiguous().transpose(0, 1)
    assert_steps_agree(step, layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_into_a_float8_cache(layers: Any, dtype: torch.dtype) -> None:
    """Keys and values are divided by their scales and clamped to 448; the query is not scaled.

    A quarter turn of values that float8 holds exactly: the interpreter rounds others wrongly.
    """
    step = Step(dtype=dtype, cache_dtype=torch.float8_e4m3fn)
    step.cos, step.sin = torch.zeros_like(step.cos), torch.ones_like(step.sin)
    for x, scale in ((step.key, step.scales["key_scale"]), (step.value, step.scales["value_scale"])):
        x.copy_((x * 20).to(torch.float8_e4m3fn).float() * scale)
        x[0, 0, 0] = 1000.0
    rotated, *caches = step.run(layers)
    assert torch.equal(rotated[..., :8], -step.query[..., 8:])
    for cache, expected in zip(caches, step.run(reference_layers)[1:], strict=True):
        assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))
    assert caches[0][1, 2, 0, 8] == caches[1][1, 2, 0, 0] == 448


def test_rotary_rounds_to_float8_as_torch_does() -> None:
    """Any keys and values: the cpu backend stores bit for bit what the reference stores."""
    step = Step(cache_dtype=torch.float8_e4m3fn)
    for cache, expected in zip(step.run(through_ops("cpu"))[1:], step.run(reference_layers)[1:], strict=True):
        assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("tokens", [0, 1])
def test_rotary_of_few_tokens(layers: Any, tokens: int) -> None:
    """A single token, and none."""
    assert_steps_agree(Step(tokens=tokens), layers)


def test_triton_leaves_out_a_slot_beyond_the_cache() -> None:
    """Memory after the cache belongs to something else; the query is rotated all the same."""
    pytest.importorskip("triton")
    step = Step(tokens=1)
    expected = step.run(reference_layers)[0]
    step.slots[0] = 20
    pool = step.key_cache.new_full((5, *step.key_cache.shape[1:]), -7.0)
    step.key_cache = pool[:4]
    layers = through_ops("triton")
    rotated = layers.rotary_and_cache(
        *(step.query, step.key, step.value, step.cos, step.sin), pool[:4], step.value_cache, step.slots
    )
    assert_close(rotated, expected)
    assert pool.eq(-7).all()


@every_dtype
def test_rotation_is_that_of_transformers(dtype: torch.dtype) -> None:
    """Bit for bit `apply_rotary_pos_emb`, both as reference and as plain torch."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    step = Step(dtype=dtype)
    query, key = (x.transpose(0, 1)[None] for x in (step.query, step.key))
    query, key = apply_rotary_pos_emb(query, key, step.cos[None], step.sin[None])
    for module in (reference_layers, cpu_torch_layers):
        rotated, key_cache, _ = step.run(module)
        assert torch.equal(rotated, query[0].transpose(0, 1)), module.__name__
        assert torch.equal(key_cache[1, 2], key[0, :, 0]), module.__name__


@given(angle=st.floats(-1e3, 1e3), shift=st.floats(-100, 100))
def test_scores_depend_on_the_distance_only(angle: float, shift: float) -> None:
    """Turning a query and a key by the same angle leaves their dot product as it was: the point of the embedding."""
    step = Step(tokens=4, heads=2, dim=2)
    step.query, step.key, step.slots = (
        step.query[:1].expand(4, 2, 2),
        step.key[:1].expand(4, 2, 2),
        torch.arange(4),
    )
    angles = torch.tensor([angle + shift, shift, angle, 0.0], dtype=torch.float64)[:, None].expand(4, 2)
    step.cos, step.sin = angles.cos().float(), angles.sin().float()
    query, key_cache, _ = step.run(cpu_torch_layers)
    shifted, plain = (query[::2] * key_cache.flatten(0, 1)[1:4:2]).sum(-1)
    torch.testing.assert_close(shifted, plain, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- silu_and_mul


@every_dtype
@pytest.mark.parametrize("n", [1, 50, 1400])
def test_silu_and_mul_of_any_width(layers: Any, dtype: torch.dtype, n: int) -> None:
    """Any number of columns, more than one program takes."""
    gate_up = randn(3, 2 * n, dtype=dtype)
    assert_close(layers.silu_and_mul(gate_up), reference_layers.silu_and_mul(gate_up))


def test_silu_and_mul_at_the_extremes(layers: Any) -> None:
    """Gates far beyond the range of exp give 0 on one side and themselves on the other."""
    gate_up = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 2.0, 2.0, 2.0, 2.0, 2.0]])
    torch.testing.assert_close(
        layers.silu_and_mul(gate_up), torch.tensor([[0.0, 0.0, 0.0, 200.0, 2e4]]), rtol=1e-6, atol=1e-30
    )


def test_silu_and_mul_of_views(layers: Any) -> None:
    """Columns of a larger projection, and rows and columns exchanged."""
    for gate_up in (randn(4, 30)[:, 3:23], randn(20, 4).T, randn(0, 20)):
        assert_close(layers.silu_and_mul(gate_up), reference_layers.silu_and_mul(gate_up.contiguous()))


@every_dtype
def test_silu_and_mul_is_that_of_transformers(dtype: torch.dtype) -> None:
    """Bit for bit the activation of LlamaMLP, both as reference and as plain torch."""
    from transformers.activations import ACT2FN

    gate_up = randn(5, 192, dtype=dtype) * 4
    gate, up = gate_up.chunk(2, dim=-1)
    expected = ACT2FN["silu"](gate) * up
    for module in (reference_layers, cpu_torch_layers):
        assert torch.equal(module.silu_and_mul(gate_up), expected), module.__name__


# ---------------------------------------------------------------- offsets beyond 32 bits


def test_rows_beyond_32_bit_offsets(layers: Any) -> None:
    """Rows that start past element 2^31 are read where they are (report 47)."""
    rows = far_apart(2, 64)
    near = rows.clone()
    weight = torch.ones(64, dtype=torch.float16)
    assert_close(layers.silu_and_mul(rows), reference_layers.silu_and_mul(near))
    expected = reference_layers.rms_norm(near, weight, eps=1e-6)
    assert isinstance(expected, Tensor)
    assert_close(layers.rms_norm(rows, weight, eps=1e-6), expected)


def test_tokens_and_slots_beyond_32_bit_offsets(layers: Any) -> None:
    """Queries, keys, values and slots past element 2^31 are found where they are (report 47)."""
    step = Step(tokens=2, heads=2, kv_heads=1, dtype=torch.float16)
    wide = far_apart(2, 64)
    step.query, step.key, step.value = (part.view(2, -1, 16) for part in wide.split([32, 16, 16], dim=1))
    pool = torch.empty(70_000, 2, 32, 1, 512, dtype=torch.float16)[..., :16]
    step.slots = torch.tensor([69_999 * 32 + 31, 66_000 * 32])
    key_cache, value_cache = pool.unbind(1)
    rotated = layers.rotary_and_cache(
        *(step.query, step.key, step.value, step.cos, step.sin), key_cache, value_cache, step.slots
    )
    step.slots = torch.tensor([1, 0])
    expected, near_keys, near_values = step.run(reference_layers)
    assert_close(rotated, expected)
    assert_close(key_cache[69_999, 31], near_keys[0, 1])
    assert_close(value_cache[66_000, 0], near_values[0, 0])


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_keys_are_written_where_there_are_no_queries(backend: ops.Backend) -> None:
    """Zero query heads are none to rotate; the cache write is the same."""
    if backend == "triton":
        pytest.importorskip("triton")
    caches = torch.zeros(5, 4, 2, 16), torch.zeros(5, 4, 2, 16)
    new = torch.ones(2, 2, 16)
    rotated = ops.rotary_and_cache(
        torch.ones(2, 0, 16), new, new, torch.ones(2, 16), torch.zeros(2, 16), *caches, torch.tensor([0, 5]),
        backend=backend,
    )  # fmt: skip
    assert rotated.shape == (2, 0, 16)
    assert [int(cache.sum()) for cache in caches] == [64, 64]
