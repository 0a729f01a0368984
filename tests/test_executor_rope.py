"""Rotary embeddings: the angles of transformers, and never those of a neighbour in the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from servetwin.executor import model_loader
from servetwin.executor.model_loader import describe_model
from servetwin.executor.packed_model import PackedModel
from servetwin.executor.rope import default_max_model_len, fix_rope, max_positions
from servetwin.executor.testing import TeacherForced, reference_logits, tiny_model, torch_threads

ORIGINAL = 16
"""Length in tokens that the tiny longrope model was made for; it takes four times as many."""
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}
LONG = [(7 * i) % 150 + 3 for i in range(40)]
SHORT = [(11 * i) % 150 + 3 for i in range(9)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def longrope_phi(attention: str | None = None) -> PreTrainedModel:
    chosen = {} if attention is None else {"attention": attention}
    return tiny_model(
        "phi3",
        max_position_embeddings=4 * ORIGINAL,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=dict(LONGROPE),
        **chosen,
    )


def rope_llama(rope_type: str, attention: str | None = None) -> PreTrainedModel:
    chosen = {} if attention is None else {"attention": attention}
    rope = {"rope_theta": 1e4, **SETTINGS[rope_type]}
    return tiny_model("llama", max_position_embeddings=ORIGINAL, rope_parameters=rope, **chosen)


def packed(model: PreTrainedModel, max_model_len: int, *sequences: list[int]) -> list[torch.Tensor]:
    """Logits of sequences that share every batch, computed in two chunks."""
    loaded = describe_model(model, "tiny", max_model_len)
    driver, runner = TeacherForced(loaded, sequences), PackedModel(model)
    halves = [driver.step(runner, {i: len(s) // 2 for i, s in enumerate(sequences)})]
    halves.append(driver.step(runner, {i: len(s) - len(s) // 2 for i, s in enumerate(sequences)}))
    return [torch.cat([half[i] for half in halves]) for i in range(len(sequences))]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def check_that_neighbours_do_not_matter() -> None:
    """A short request beside a long one gives what it gives alone, and so does the long one."""
    together = packed(longrope_phi(), 4 * ORIGINAL, LONG, SHORT)
    for sequence, logits in zip((LONG, SHORT), together, strict=True):
        assert_close(logits, packed(longrope_phi(), 4 * ORIGINAL, sequence)[0])


@pytest.mark.parametrize("rope_type", ["linear", "yarn", "llama3"])
def test_types_that_look_at_no_length_are_those_of_transformers(rope_type: str) -> None:
    sequences = LONG[:16], SHORT
    expected = [reference_logits(rope_llama(rope_type, "eager"), sequence) for sequence in sequences]
    for actual, wanted in zip(packed(rope_llama(rope_type), ORIGINAL, *sequences), expected, strict=True):
        assert_close(actual, wanted)


def test_the_two_rope_sets_of_gemma3_are_those_of_transformers() -> None:
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    expected = reference_logits(tiny_model("gemma3_text", attention="eager", rope_parameters=rope), LONG)
    assert_close(packed(tiny_model("gemma3_text", rope_parameters=rope), 64, LONG, SHORT)[0], expected)


def test_longrope_does_not_leak_between_requests() -> None:
    check_that_neighbours_do_not_matter()


def test_longrope_would_leak_without_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees it."""
    monkeypatch.setattr(model_loader, "fix_rope", lambda model, max_model_len: None)
    with pytest.raises(AssertionError):
        check_that_neighbours_do_not_matter()


def test_a_text_beyond_the_original_length_is_that_of_transformers() -> None:
    """transformers takes the long factors for it, and so does an engine of such a max_model_len."""
    expected = reference_logits(longrope_phi("eager"), LONG)
    assert_close(packed(longrope_phi(), 4 * ORIGINAL, LONG, SHORT)[0], expected)


def test_an_engine_of_the_original_length_takes_the_short_factors() -> None:
    expected = reference_logits(longrope_phi("eager"), SHORT)
    assert_close(packed(longrope_phi(), ORIGINAL, SHORT)[0], expected)
    with pytest.raises(AssertionError):
        assert_close(packed(longrope_phi(), ORIGINAL + 1, SHORT)[0], expected)


def test_dynamic_takes_the_base_of_max_model_len_whatever_the_batch() -> None:
    """Equal to transformers where the text is as long as the engine allows."""
    expected = reference_logits(rope_llama("dynamic", "eager"), LONG)
    together = packed(rope_llama("dynamic"), len(LONG), LONG, SHORT)
    assert_close(together[0], expected)
    assert_close(together[1], packed(rope_llama("dynamic"), len(LONG), SHORT)[0])


def test_dynamic_within_the_trained_length_is_the_plain_one() -> None:
    expected = reference_logits(tiny_model("llama", attention="eager"), SHORT)
    assert_close(packed(rope_llama("dynamic"), ORIGINAL, SHORT)[0], expected)


def test_single_layer_types_are_fixed_too() -> None:
    """Gemma 3 with dynamic angles in its full layers."""
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e6},
    }
    model = tiny_model("gemma3_text", max_position_embeddings=ORIGINAL, rope_parameters=rope)
    before = model.model.rotary_emb.full_attention_inv_freq.clone()
    fix_rope(model, 4 * ORIGINAL)
    rotary = model.model.rotary_emb
    assert set(rotary.rope_type.values()) == {"default"}
    assert rotary.full_attention_inv_freq[0] == before[0]
    assert bool((rotary.full_attention_inv_freq[1:] < before[1:]).all())


def test_the_longest_context_follows_the_rope_type() -> None:
    """vLLM's rule: a factor multiplies; longrope starts with its original length unless told otherwise."""
    lengths = {
        name: (max_positions(model.config), default_max_model_len(model.config))
        for name, model in {**{t: rope_llama(t) for t in SETTINGS}, "longrope": longrope_phi()}.items()
    }
    assert lengths == {
        "linear": (64, 64),
        "yarn": (64, 64),
        "llama3": (16, 16),
        "dynamic": (64, 64),
        "longrope": (64, 16),
    }
