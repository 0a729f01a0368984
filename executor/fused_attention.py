"""Self-attention with one projection for query, key and value, and rotary embedding and KV write as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from servetwin.executor.attention import rotate_and_attend
from servetwin.executor.module_tools import join_linears, transformers_class

Reader = Callable[[Any], Any]


def _nothing(_: Any) -> None:
    return None


_OF_LAYER, _OF_CONFIG = attrgetter("sliding_window"), attrgetter("config.sliding_window")

KNOWN: dict[str, tuple[Reader, Reader]] = {
    "Gemma2Attention": (_OF_LAYER, attrgetter("attn_logit_softcapping")),
    "Gemma3Attention": (_OF_LAYER, _nothing),
    "LlamaAttention": (_nothing, _nothing),
    "MistralAttention": (_OF_CONFIG, _nothing),
    "Phi3Attention": (_OF_CONFIG, _nothing),
    "Qwen2Attention": (_OF_LAYER, _nothing),
    "Qwen3Attention": (_OF_LAYER, _nothing),
    "Qwen3MoeAttention": (_OF_LAYER, _nothing),
}
"""Classes of transformers: (sliding window, softcap) that their forward passes to the attention interface."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What one layer attends with."""

    layer_index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    softcap: float | None


class FusedAttention(nn.Module):
    """Takes and gives what the attention modules of transformers do, for a packed batch without masks."""

    def __init__(
        self,
        qkv_proj: nn.Module,
        o_proj: nn.Module,
        q_norm: nn.Module | None,
        k_norm: nn.Module | None,
        options: AttentionOptions,
    ) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj, self.q_norm, self.k_norm = qkv_proj, o_proj, q_norm, k_norm
        self.options = options
        self._sizes = (options.num_heads, options.num_kv_heads, options.num_kv_heads)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_unused: Any
    ) -> tuple[Tensor, None]:
        """hidden_states `[1, tokens, hidden]`, cos and sin `[1, tokens, rotary_dim]`; gives the like, no weights."""
        options = self.options
        qkv = self.qkv_proj(hidden_states).view(-1, sum(self._sizes), options.head_dim)
        query, key, value = qkv.split(self._sizes, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = position_embeddings
        attended = rotate_and_attend(
            query,
            key,
            value,
            cos.squeeze(0),
            sin.squeeze(0),
            options.layer_index,
            options.scale,
            options.sliding_window,
            options.softcap,
        )
        return self.o_proj(attended.view(*hidden_states.shape[:-1], -1)), None


def fused_attention(module: nn.Module) -> FusedAttention | None:
    """What computes the same as `module`, on the paged cache; None when it is no attention that is known here."""
    attention: Any = module
    name = transformers_class(module)
    if name not in KNOWN:
        return None
    qkv_proj = (
        attention.qkv_proj
        if name == "Phi3Attention"
        else join_linears([attention.q_proj, attention.k_proj, attention.v_proj])
    )
    if qkv_proj is None:
        return None
    norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
    return FusedAttention(qkv_proj, attention.o_proj, *norms, _options(attention, *KNOWN[name]))


def _options(attention: Any, sliding_window: Reader, softcap: Reader) -> AttentionOptions:
    config = attention.config
    return AttentionOptions(
        layer_index=attention.layer_idx,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        sliding_window=sliding_window(attention),
        softcap=softcap(attention),
    )
