"""Which layers of a model attend through a sliding window, and which have experts; read off its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Text = Mapping[str, Any]
"""The language model's part of a `config.json`."""
FULL, WINDOWED = "full_attention", ("sliding_attention", "chunked_attention")
PATTERN_DEFAULTS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}
"""Every n-th layer is full, where the file does not say (transformers' defaults)."""
OPT_IN = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
"""Architectures whose window counts only with `use_sliding_window`."""


def windowed_layers(text: Text, num_layers: int) -> tuple[int, int | None]:
    """(layers that see a window only, tokens of the window); (0, None) when all see everything.

    A layer with chunked attention counts as one with a window of that size. ValueError for a kind of layer whose state
    is no K and V of tokens.
    """
    window = text.get("sliding_window") or text.get("attention_chunk_size")
    types = text.get("layer_types")
    if types:
        for kind in types:
            if kind != FULL and kind not in WINDOWED:
                raise ValueError(
                    f"layer_types has {kind!r}: its state does not grow with tokens as K and V do"
                )
        count = sum(kind in WINDOWED for kind in types)
    else:
        count = _by_rule(text, num_layers)
    return (count, int(window)) if window and count else (0, None)


def _by_rule(text: Text, num_layers: int) -> int:
    if text.get("use_sliding_window") is False or (
        text.get("model_type") in OPT_IN and not text.get("use_sliding_window")
    ):
        return 0
    if "max_window_layers" in text:
        # The first ones are full.
        return max(num_layers - int(text["max_window_layers"]), 0)
    pattern = text.get("sliding_window_pattern") or PATTERN_DEFAULTS.get(str(text.get("model_type")))
    return num_layers - num_layers // int(pattern) if pattern else num_layers


def expert_layers(text: Text, num_layers: int) -> int:
    """Layers with experts, of a model that has some; the others are dense."""
    if text.get("moe_layers"):
        return len(text["moe_layers"])
    first_dense = int(text.get("first_k_dense_replace") or 0)
    step = int(text.get("decoder_sparse_step") or text.get("interleave_moe_layer_step") or 1)
    dense = set(text.get("mlp_only_layers") or ())
    return sum((i + 1) % step == 0 and i not in dense for i in range(first_dense, num_layers))
