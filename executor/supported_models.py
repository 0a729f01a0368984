"""Which models the executor runs, and what it says of the others.

A model is on the list when its forward pass was compared with transformers' own, packed and paged (in the tests).
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING

SUPPORTED_MODEL_TYPES = (
    "gemma2",
    "gemma3_text",
    "gpt2",
    "llama",
    "mistral",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
SUPPORTED_LAYER_TYPES = ("full_attention", "sliding_attention")
GENERATING_ARCHITECTURES = ("CausalLM", "LMHead")
"""A part of the names of transformers' classes that predict the next token."""

_STATE_KEYS = (
    "state_size",
    "ssm_state_size",
    "mamba_d_state",
    "linear_num_value_heads",
    "lru_width",
    "conv_L_cache",
)
"""Settings that only models with recurrent layers have."""


def why_unsupported(raw: dict[str, Any]) -> str | None:
    """What in a `config.json` is not supported, in words that name it; None when everything is."""
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        kind = _kind(model_type, raw)
        return (
            f"model_type {model_type!r} is not supported; {f'{kind}; ' if kind else ''}"
            f"supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    for key in ("quantization_config", "compression_config"):
        if isinstance(raw.get(key), dict):
            return f"quantized weights ({key}, method {raw[key].get('quant_method')!r}) are not supported"
    if raw.get("use_bidirectional_attention"):
        return "use_bidirectional_attention is not supported: only causal models generate token by token"
    return _why_unsupported_lists(raw)


def _why_unsupported_lists(raw: dict[str, Any]) -> str | None:
    architectures = raw.get("architectures") or []
    if architectures and not any(part in str(a) for a in architectures for part in GENERATING_ARCHITECTURES):
        return f"architectures {architectures} do not generate text (expected a name like ...ForCausalLM)"
    others = sorted(set(map(str, raw.get("layer_types") or [])).difference(SUPPORTED_LAYER_TYPES))
    if others:
        return f"layer_types {', '.join(others)} are not supported; supported are {', '.join(SUPPORTED_LAYER_TYPES)}"
    return None


def _kind(model_type: object, raw: dict[str, Any]) -> str:
    """What sort of model it is, as far as its configuration, or else transformers' defaults for it, tell."""
    defaults = _defaults(model_type) if isinstance(model_type, str) else None

    def has(*names: str) -> bool:
        return any(raw.get(name) is not None or hasattr(defaults, name) for name in names)

    if f"{model_type}_text" in SUPPORTED_MODEL_TYPES:
        return f"it takes images too (its text part alone is supported as {model_type}_text)"
    if has("vision_config", "audio_config"):
        return "it takes images or sound too"
    if raw.get("is_encoder_decoder", getattr(defaults, "is_encoder_decoder", False)):
        return "it is an encoder-decoder model"
    if has("kv_lora_rank"):
        return "it caches latent vectors instead of K and V (multi-head latent attention)"
    if has(*_STATE_KEYS):
        return "it has recurrent or state-space layers, which keep a state instead of K and V"
    if defaults is None and isinstance(model_type, str):
        return "transformers does not know it"
    return ""


def _defaults(model_type: str) -> Any:
    """transformers' configuration class, whose attributes are the defaults; None for a type that it does not know."""
    try:
        return CONFIG_MAPPING[model_type]
    except KeyError:
        return None
