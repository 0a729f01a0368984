"""Puts fused operations into a model of transformers, part by part.

A part is replaced when its class is known here by name, and computes the same afterwards (the tests compare with
transformers, for every model type). Everything else stays as transformers wrote it: embeddings, rotary angles, experts,
heads, whole layers of other structure. The parts call kernels that no compiler can look into, so a model that is to be
compiled is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from servetwin.executor.fused_attention import fused_attention
from servetwin.executor.fused_mlp import fused_mlp
from servetwin.executor.fused_norm import FusedRMSNorm, fused_norm
from servetwin.executor.module_tools import transformers_class

PRE_NORM_LAYERS = (
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Phi3DecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "Qwen3MoeDecoderLayer",
)
"""Classes of transformers that compute h + mlp(norm(h)) of h = x + attention(norm(x))."""


class FusedDecoderLayer(nn.Module):
    """A layer of such a class, in which h and its norm are one operation."""

    def __init__(self, layer: Any, norm: FusedRMSNorm) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = norm, layer.mlp
        # Some releases of transformers choose the layer's mask by it.
        self.attention_type: str | None = getattr(layer, "attention_type", None)

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """hidden_states `[1, tokens, hidden]`; the options are those of transformers' layers."""
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)
        normed, residual = self.post_attention_layernorm.of_sum(attended, hidden_states)
        output: Tensor = residual + self.mlp(normed)
        return output


def fuse_layers(model: nn.Module) -> None:
    """Replaces all parts of `model` (in evaluation mode) that are known. Its weights are joined, not copied."""
    builders: tuple[Callable[[nn.Module], nn.Module | None], ...]
    # Attention and layers take over norms that are fused already.
    builders = (fused_norm, fused_mlp, fused_attention, _fused_layer)
    for build in builders:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                fused = build(child)
                if fused is not None:
                    setattr(parent, name, fused.train(False))


def _fused_layer(module: nn.Module) -> FusedDecoderLayer | None:
    norm = getattr(module, "post_attention_layernorm", None)
    if transformers_class(module) in PRE_NORM_LAYERS and isinstance(norm, FusedRMSNorm):
        return FusedDecoderLayer(module, norm)
    return None
