"""Rotary embeddings whose angles are the same in every forward pass.

transformers chooses the angles of two rope types, `dynamic` and `longrope`, by the longest position of the forward
pass. In a packed batch a long request would so change the angles of its neighbours, and K/V already in the cache
would not fit the angles of later queries. Here they are chosen once per engine, by its `max_model_len`:

longrope  the long factors where max_model_len is above original_max_position_embeddings, else the short ones (vLLM)
dynamic   the base of a text of max_model_len tokens; at the default max_model_len that is vLLM's base
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from servetwin.sim import context_limit

FloatArray = npt.NDArray[np.float32]

SUPPORTED_ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")
LENGTH_DEPENDENT = ("dynamic", "longrope")


def why_unsupported_rope(config: PretrainedConfig) -> str | None:
    """Names a rope type that is not supported; None when there is none."""
    for parameters in context_limit.rope_sets(_parameters(config)):
        rope_type = parameters.get("rope_type", "default")
        if rope_type not in SUPPORTED_ROPE_TYPES:
            return (
                f"rope_type {rope_type!r} is not supported; supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
            )
    return None


def max_positions(config: PretrainedConfig) -> int:
    """Longest context in tokens that the positions allow, by vLLM's rule."""
    return context_limit.max_positions(int(config.max_position_embeddings), _parameters(config))


def default_max_model_len(config: PretrainedConfig) -> int:
    """Context of an engine that was not told one, in tokens, by vLLM's rule."""
    return context_limit.default_max_model_len(int(config.max_position_embeddings), _parameters(config))


def _parameters(config: PretrainedConfig) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def fix_rope(model: PreTrainedModel, max_model_len: int) -> None:
    """Gives every rotary embedding of `model` the angles for `max_model_len` tokens, for good."""
    # Any: torch's type information takes every attribute of a module for a tensor or a module.
    module: Any
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict):
            for layer_type, name in rope_type.items():
                if name in LENGTH_DEPENDENT:
                    _fix(module, name, max_model_len, layer_type)
                    rope_type[layer_type] = "default"
        elif rope_type in LENGTH_DEPENDENT:
            _fix(module, rope_type, max_model_len)
            module.rope_type = "default"


def _fix(module: Any, rope_type: str, max_model_len: int, layer_type: str | None = None) -> None:
    """Replaces inverse frequencies and scaling; under the type `default` transformers leaves them alone."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    inv_freq: torch.Tensor = getattr(module, f"{prefix}inv_freq")
    fixed, scaling = ROPE_INIT_FUNCTIONS[rope_type](
        module.config, inv_freq.device, seq_len=max_model_len, layer_type=layer_type
    )
    module.register_buffer(f"{prefix}inv_freq", fixed, persistent=False)
    setattr(module, f"{prefix}attention_scaling", scaling)


def halves_from_neighbours(weight: FloatArray, num_heads: int) -> FloatArray:
    """Query or key weights `[out, in]` whose rotary pairs are neighbours, in Llama's order, which pairs halves.

    The rows of each head 0 1 2 3 4 5 become 0 2 4 1 3 5; scores q . k do not change.
    """
    out_features, in_features = weight.shape
    pairs = weight.reshape(num_heads, out_features // num_heads // 2, 2, in_features)
    return pairs.swapaxes(1, 2).reshape(out_features, in_features)
