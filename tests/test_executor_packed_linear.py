"""Packed linear layers against torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from servetwin.executor import packed_linear
from servetwin.executor.packed_linear import PackedLinear, pack_linears, packing_dtype
from servetwin.executor.testing import tiny_model, torch_threads

INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "one": lambda: torch.randn(70),
    "none": lambda: torch.randn(0, 70),
    "row": lambda: torch.randn(1, 70),
    "batch": lambda: torch.randn(1, 5, 70),
    "large": lambda: torch.randn(300, 70),
    "transposed": lambda: torch.randn(70, 9).t(),
    "columns": lambda: torch.randn(9, 140)[:, 35:105],
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def packed(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    dtype = packing_dtype(weight.dtype)
    if dtype is None:
        pytest.skip(f"weights of {weight.dtype} cannot be packed on this machine")
    return PackedLinear(weight, bias, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("name", INPUTS)
def test_it_computes_what_a_linear_layer_does(name: str, with_bias: bool, dtype: torch.dtype) -> None:
    """Any number of rows and any strides; bfloat16 within a unit in the last place."""
    x, weight = INPUTS[name]().to(dtype), torch.randn(100, 70).to(dtype)
    bias = torch.randn(100).to(dtype) if with_bias else None
    output = packed(weight, bias)(x)
    assert output.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(output, linear(x, weight, bias), rtol=tolerance, atol=tolerance)


def test_bfloat16_weights_without_bfloat16_units_are_packed_as_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The product is exact but for float32 sums, and rounded once."""
    monkeypatch.setattr(packed_linear, "cpu_has_bfloat16", lambda: False)
    weight, x = torch.randn(40, 30).bfloat16(), torch.randn(6, 30).bfloat16()
    layer = packed(weight, None)
    assert "float32" in repr(layer)
    exact = (x.double() @ weight.double().t()).float()
    # Half a unit in the last place of bfloat16, and what float32 sums leave.
    torch.testing.assert_close(layer(x).float(), exact, rtol=2**-8, atol=1e-5)


def test_only_plain_linear_layers_are_packed_and_their_weights_freed() -> None:
    class Doubled(nn.Linear):
        """Computes in a way of its own."""

    conv: Any = Conv1D
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.ReLU(), Doubled(3, 3), conv(2, 3)))
    x, before = torch.randn(5, 4), sum(p.numel() for p in model.parameters())
    with torch.inference_mode():
        expected = model(x)
        assert pack_linears(model) == 2
        torch.testing.assert_close(model(x), expected)
    assert sum(p.numel() for p in model.parameters()) == before - (4 * 3 + 3) - (3 * 2 + 2)


def test_a_tied_embedding_keeps_its_weight() -> None:
    model: Any = tiny_model("qwen2", tie_word_embeddings=True)
    weight = model.model.embed_tokens.weight
    pack_linears(model)
    assert isinstance(model.lm_head, PackedLinear)
    assert model.model.embed_tokens.weight is weight


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_where_torch_cannot_pack_the_layers_stay(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its operators are internal: they may be missing, or refuse."""

    def refuse(*_: object) -> None:
        raise error("not here")

    monkeypatch.setattr(packed_linear, "_pack", refuse)
    model = nn.Sequential(nn.Linear(4, 3))
    assert packing_dtype(torch.float32) is None
    assert pack_linears(model) == 0
    assert type(model[0]) is nn.Linear
