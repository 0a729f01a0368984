"""A model as memory and time see it: its dimensions, and what follows from them (parameters, bytes of weights)."""

from __future__ import annotations

from dataclasses import dataclass

from servetwin.sim.quantization import Quantization

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes a value of the data types that models run in."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2 and its relatives): one latent a token instead of K and V of heads."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    @property
    def width(self) -> int:
        """Values cached per token and layer: the latent and the rotary part, shared by all heads."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts of some layers."""

    count: int
    per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    """Of all shared experts of a layer together."""
    num_layers: int = 0
    """Layers that have experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a decoder. Biases and norms (below 0.2 % of the parameters) are left out of all counts."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Of the dense layers."""
    vocab_size: int
    embedding_size: int | None = None
    """Width of the embeddings where it is not the hidden size (they are projected then)."""
    gated_mlp: bool = True
    """Three matrices (gate, up, down) instead of two."""
    tied_embeddings: bool = False
    learned_positions: int = 0
    """Rows of a learned position embedding."""
    latent: LatentAttention | None = None
    experts: Experts | None = None
    num_windowed_layers: int = 0
    window_tokens: int | None = None
    dtype: str = "bfloat16"
    """Of the checkpoint: a key of DTYPE_BYTES."""
    quantization: Quantization | None = None

    @property
    def attention_parameters(self) -> int:
        """Of one layer."""
        h, heads = self.hidden_size, self.num_heads
        if (m := self.latent) is None:
            return h * self.head_dim * (2 * heads + 2 * self.num_kv_heads)
        q_in, q_down = (h, 0) if m.q_lora_rank is None else (m.q_lora_rank, h * m.q_lora_rank)
        queries = q_down + q_in * heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)
        keys_values = h * m.width + m.kv_lora_rank * heads * (m.qk_nope_head_dim + m.v_head_dim)
        return queries + keys_values + heads * m.v_head_dim * h

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - (self.experts.num_layers if self.experts else 0)

    @property
    def dense_parameters(self) -> int:
        """Linear layers that every token uses: attention, dense MLPs, shared experts, routers."""
        shared = 0
        if (e := self.experts) is not None:
            shared = e.num_layers * (self._mlp(e.shared_intermediate_size) + self.hidden_size * e.count)
        return (
            self.num_layers * self.attention_parameters
            + self.num_dense_layers * self._mlp(self.intermediate_size)
            + shared
        )

    @property
    def expert_parameters(self) -> int:
        """All routed experts of all layers."""
        return 0 if (e := self.experts) is None else e.num_layers * e.count * self._mlp(e.intermediate_size)

    @property
    def active_expert_parameters(self) -> int:
        """Those of the routed experts that one token uses."""
        return (
            0 if (e := self.experts) is None else e.num_layers * e.per_token * self._mlp(e.intermediate_size)
        )

    @property
    def head_parameters(self) -> int:
        """The matrix from hidden state to logits."""
        return self.vocab_size * (self.embedding_size or self.hidden_size)

    @property
    def embedding_parameters(self) -> int:
        """Everything outside the layers: token and position embeddings, the head unless it is tied to them."""
        size = self.embedding_size or self.hidden_size
        projections = 2 * size * self.hidden_size if self.embedding_size else 0
        copies = 1 if self.tied_embeddings else 2
        return copies * self.head_parameters + projections + self.learned_positions * self.hidden_size

    @property
    def num_parameters(self) -> int:
        return self.dense_parameters + self.expert_parameters + self.embedding_parameters

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token goes through; all of the embeddings counted."""
        return self.dense_parameters + self.active_expert_parameters + self.embedding_parameters

    def bytes_per_dense_parameter(self, dtype: str) -> float:
        """Of the linear layers that are no routed experts, run in `dtype`."""
        quantized = self.quantization is not None and not self.quantization.experts_only
        return self._bytes_per_parameter(dtype, quantized)

    def bytes_per_expert_parameter(self, dtype: str) -> float:
        return self._bytes_per_parameter(dtype, self.quantization is not None)

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights on all cards; quantized layers as they are stored, the others in `dtype`."""
        return round(
            self.dense_parameters * self.bytes_per_dense_parameter(dtype)
            + self.expert_parameters * self.bytes_per_expert_parameter(dtype)
            + self.embedding_parameters * DTYPE_BYTES[dtype]
        )

    def _bytes_per_parameter(self, dtype: str, quantized: bool) -> float:
        if quantized and self.quantization is not None:
            return self.quantization.bits / 8
        return DTYPE_BYTES[dtype]

    def _mlp(self, intermediate_size: int) -> int:
        return (3 if self.gated_mlp else 2) * self.hidden_size * intermediate_size
