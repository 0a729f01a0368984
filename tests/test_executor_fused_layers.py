"""Fused and packed layers against the modules of transformers that they replace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from servetwin.executor.eager_model import eager_model
from servetwin.executor.fused_attention import FusedAttention
from servetwin.executor.fused_layers import FusedDecoderLayer, fuse_layers
from servetwin.executor.fused_mlp import FusedMLP
from servetwin.executor.fused_norm import FusedRMSNorm
from servetwin.executor.model_loader import SUPPORTED_MODEL_TYPES, LoadedModel, describe_model
from servetwin.executor.module_tools import join_linears
from servetwin.executor.packed_model import PackedModel
from servetwin.executor.testing import (
    TINY_VARIANTS,
    TeacherForced,
    reference_logits,
    tiny_model,
    torch_threads,
)

SEQUENCES = [[(13 * i + 29 * row) % 150 + 3 for i in range(20 - 4 * row)] for row in range(3)]
STEPS = ({0: 9, 2: 4}, {0: 1, 1: 16, 2: 8}, {0: 10})
"""Tokens of each sequence per step: chunks of prompts and single tokens, mixed."""
NOT_FUSED = ("gpt2", "opt", "gpt2-layer-scaled", "opt-projected")
"""No part of theirs is known: norms with means, MLPs without gates, learned positions."""
FUSED_LAYERS = {"llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe"}
NUM_LAYERS = 2


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def described(name: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    model: Any = tiny_model(name)
    return describe_model(model.to(dtype), name)


def logits_of(model: PackedModel, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of all tokens of all sequences, one sequence after the other."""
    driver = TeacherForced(described(name, dtype), SEQUENCES)
    chunks = [driver.step(model, step) for step in STEPS]
    return torch.cat([chunk[row] for row in range(3) for chunk in chunks if row in chunk])


def parts(model: nn.Module) -> Counter[str]:
    return Counter(type(module).__name__ for module in model.modules())


@pytest.mark.parametrize("name", [*SUPPORTED_MODEL_TYPES, *TINY_VARIANTS])
def test_a_rebuilt_model_computes_what_transformers_does(name: str) -> None:
    """Several sequences in one packed batch, in chunks, against each alone in transformers' own forward pass."""
    rebuilt = eager_model(described(name))
    reference = tiny_model(name, attention="eager")
    expected = torch.cat([reference_logits(reference, sequence) for sequence in SEQUENCES])
    torch.testing.assert_close(logits_of(rebuilt, name), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sorted({*SUPPORTED_MODEL_TYPES} - {*NOT_FUSED}))
def test_every_part_of_the_models_with_gates_is_fused(name: str) -> None:
    """No norm, attention or dense MLP of transformers is left over."""
    model = tiny_model(name)
    before = parts(model)
    fuse_layers(model)
    after = parts(model)
    assert after[FusedRMSNorm.__name__] == sum(n for part, n in before.items() if part.endswith("RMSNorm"))
    assert after[FusedMLP.__name__] == sum(n for part, n in before.items() if part.endswith("MLP"))
    assert after[FusedAttention.__name__] == NUM_LAYERS
    assert after[FusedDecoderLayer.__name__] == (NUM_LAYERS if name in FUSED_LAYERS else 0)
    assert not [m for m in model.modules() if m.training]


@pytest.mark.parametrize("name", NOT_FUSED)
def test_models_without_known_parts_stay_as_they_are(name: str) -> None:
    model = tiny_model(name)
    before = parts(model)
    fuse_layers(model)
    assert parts(model) == before


def test_a_subclass_may_compute_otherwise_and_is_left_alone() -> None:
    model: Any = tiny_model("llama")
    norm = model.model.norm
    norm.__class__ = type("DoubleNorm", (type(norm),), {"forward": lambda self, x: 2 * x})
    fuse_layers(model)
    assert model.model.norm is norm


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "phi3", "qwen3"])
def test_in_bfloat16_a_rebuilt_model_is_as_near_as_the_original(name: str) -> None:
    """Both round to bfloat16 on the way: neither may be much further from the exact logits than the other."""
    rounded: Any = described(name, torch.bfloat16).model
    exact = logits_of(PackedModel(rounded.float()), name)
    plain = logits_of(PackedModel(described(name, torch.bfloat16).model), name, torch.bfloat16)
    rebuilt = logits_of(eager_model(described(name, torch.bfloat16)), name, torch.bfloat16)
    assert rebuilt.dtype == torch.bfloat16

    def error(logits: torch.Tensor) -> float:
        return float((logits.float() - exact).pow(2).mean().sqrt())

    assert error(rebuilt) < 1.25 * error(plain)


def test_joined_projections_give_the_outputs_of_each() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        linears, x = [nn.Linear(6, out) for out in (4, 2, 3)], torch.randn(5, 6)
    joined = join_linears(linears)
    assert joined is not None
    torch.testing.assert_close(joined(x), torch.cat([linear(x) for linear in linears], dim=-1))


@pytest.mark.parametrize(
    "linears",
    [
        (nn.Linear(4, 2), nn.Linear(4, 2, bias=False)),
        (nn.Linear(4, 2), nn.Linear(3, 2)),
        (nn.Linear(4, 2), nn.Linear(4, 2, dtype=torch.bfloat16)),
        (nn.Linear(4, 2), nn.Identity()),
    ],
    ids=["some-biases", "other-inputs", "other-types", "no-linear"],
)
def test_projections_that_do_not_fit_together_are_not_joined(linears: tuple[nn.Module, ...]) -> None:
    assert join_linears(linears) is None
