"""ModelShape from a Hugging Face `config.json`: the names that architectures give to one thing, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from servetwin.sim.hf_config import HFConfig, ModelFolderError, read_hf_config
from servetwin.sim.layer_kinds import expert_layers, windowed_layers
from servetwin.sim.model_shape import DTYPE_BYTES, Experts, LatentAttention, ModelShape
from servetwin.sim.quantization import read_quantization

NAMES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
}
"""Field -> its names, the usual one first."""
INTERMEDIATE = ("intermediate_size_mlp", "intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv")
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "top_k_experts")
UNGATED = (
    "gpt2", "opt", "gpt_neox", "gpt_neo", "gptj", "gpt_bigcode", "falcon", "bloom", "mpt", "phi", "starcoder2",
    "nemotron", "codegen", "stablelm_epoch",
)  # fmt: skip
"""Architectures whose MLP has two matrices."""
TIED = (
    "gpt2",
    "opt",
    "gpt_bigcode",
    "bloom",
    "mpt",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "cohere",
    "cohere2",
)
"""Architectures that tie head and embeddings where the file does not say; the others do not."""
NOT_COUNTED = {
    "ssm_state_size": "a state-space layer keeps a state beside K and V",
    "mamba_d_state": "a Mamba layer keeps a state beside K and V",
    "mamba_d_conv": "a Mamba layer keeps a state beside K and V",
    "layers_block_type": "not every layer is attention",
    "block_types": "not every layer is attention",
    "hybrid_override_pattern": "not every layer is attention",
    "attn_layer_period": "not every layer is attention",
    "linear_num_value_heads": "linear attention keeps a state instead of K and V",
    "linear_attn_config": "linear attention keeps a state instead of K and V",
    "cross_attention_layers": "cross attention keeps K and V of images",
    "index_head_dim": "sparse attention keeps the keys of its indexer beside the latent",
    "compress_ratios": "compressed attention keeps fewer K and V than tokens",
    "block_configs": "every layer has heads of its own",
    "num_kv_shared_layers": "some layers use the K and V of others",
    "use_cla": "some layers use the K and V of others",
    "num_global_key_value_heads": "layers differ in their KV heads",
    "swa_num_key_value_heads": "layers differ in their KV heads",
    "is_encoder_decoder": "an encoder-decoder keeps K and V of its encoder",
}
"""Keys of architectures whose KV cache is not layers x heads x tokens, and why."""


def read_model_shape(path: Path) -> ModelShape:
    """The shape of the model in a folder (or of a `config.json` itself), without its weights.

    Raises ModelFolderError, naming file and key, for what is missing and for an architecture whose KV cache cannot be
    told.
    """
    return shape_of(read_hf_config(path))


def shape_of(config: HFConfig) -> ModelShape:
    """The shape in a configuration that has been read. Raises ModelFolderError as above."""
    reader = _Reader(config)
    reader.refuse_other_caches()
    try:
        return reader.shape()
    except ValueError as e:
        raise e if isinstance(e, ModelFolderError) else ModelFolderError(f"{config.path}: {e}") from e


class _Reader:
    def __init__(self, config: HFConfig) -> None:
        self._config = config
        self._text = config.text
        self._model_type = str(self._text.get("model_type", ""))

    def refuse_other_caches(self) -> None:
        for key, why in NOT_COUNTED.items():
            if self._text.get(key):
                raise ModelFolderError(
                    f"{self._config.path}: {key} {self._text[key]!r}: {why}, so the KV cache of this architecture "
                    f"({self._model_type or 'no model_type'}) is not told by layers, heads and tokens; not supported"
                )

    def shape(self) -> ModelShape:
        text, model_type = self._text, self._model_type
        sizes = {field: self._number(field, *names) for field, names in NAMES.items()}
        layers, hidden, heads = sizes["num_layers"], sizes["hidden_size"], sizes["num_heads"]
        experts = self._experts(layers)
        windowed, window = windowed_layers(text, layers)
        embedding = text.get("word_embed_proj_dim")
        tied = model_type in TIED
        return ModelShape(
            name=self._config.name,
            **sizes,
            num_kv_heads=self._kv_heads(heads),
            head_dim=self._head_dim(hidden, heads),
            intermediate_size=self._optional(*INTERMEDIATE) or 4 * hidden,
            embedding_size=embedding if embedding and embedding != hidden else None,
            gated_mlp=model_type not in UNGATED,
            tied_embeddings=bool(
                text.get("tie_word_embeddings", self._config.data.get("tie_word_embeddings", tied))
            ),
            learned_positions=self._learned_positions(),
            latent=self._latent(),
            experts=experts,
            num_windowed_layers=windowed,
            window_tokens=window,
            dtype=self._dtype(),
            quantization=read_quantization(
                text.get("quantization_config") or self._config.data.get("quantization_config")
            ),
        )

    def _number(self, field: str, *names: str) -> int:
        value = self._optional(*names)
        if value is None:
            raise ModelFolderError(f"{self._config.path}: {names[0]} is missing ({field.replace('_', ' ')})")
        return value

    def _optional(self, *names: str) -> int | None:
        """The first of these keys that is set, a positive whole number."""
        for name in names:
            value = self._text.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelFolderError(
                    f"{self._config.path}: {name} {value!r} must be a whole number, 1 or more"
                )
            return value
        return None

    def _kv_heads(self, heads: int) -> int:
        attention = self._text.get("attn_config")
        if isinstance(attention, dict) and attention.get("kv_n_heads"):
            return int(attention["kv_n_heads"])
        if self._model_type == "falcon" and not self._text.get("new_decoder_architecture"):
            return 1 if self._text.get("multi_query", True) else heads
        if self._model_type == "gpt_bigcode":
            return 1 if self._text.get("multi_query", True) else heads
        return self._optional(*KV_HEADS) or heads

    def _head_dim(self, hidden: int, heads: int) -> int:
        given = self._optional("head_dim", "kv_channels", "attention_head_dim")
        if given is None and self._text.get("kv_lora_rank") is None and hidden % heads:
            raise ModelFolderError(
                f"{self._config.path}: hidden_size {hidden} is no multiple of num_attention_heads {heads}, and there "
                "is no head_dim"
            )
        return given or hidden // heads

    def _latent(self) -> LatentAttention | None:
        if self._text.get("kv_lora_rank") is None:
            if self._text.get("v_head_dim") not in (None, self._text.get("head_dim")):
                raise ModelFolderError(
                    f"{self._config.path}: v_head_dim {self._text['v_head_dim']!r} without kv_lora_rank: K and V of "
                    "different widths are not supported"
                )
            return None
        return LatentAttention(
            kv_lora_rank=self._number("latent width", "kv_lora_rank"),
            qk_rope_head_dim=self._number("rotary part of the latent cache", "qk_rope_head_dim"),
            qk_nope_head_dim=self._number("query width", "qk_nope_head_dim"),
            v_head_dim=self._number("value width", "v_head_dim"),
            q_lora_rank=self._optional("q_lora_rank"),
        )

    def _experts(self, layers: int) -> Experts | None:
        count = self._optional(*EXPERTS)
        if count is None or count == 1:
            return None
        size = self._optional("moe_intermediate_size", "intermediate_size") or 0
        shared = self._text.get("shared_expert_intermediate_size") or size * (
            self._text.get("n_shared_experts") or (1 if self._model_type == "llama4_text" else 0)
        )
        return Experts(
            count=count,
            per_token=self._number("experts of a token", *PER_TOKEN),
            intermediate_size=size,
            shared_intermediate_size=shared,
            num_layers=expert_layers(self._text, layers),
        )

    def _learned_positions(self) -> int:
        match self._model_type:
            case "gpt2" | "gpt_bigcode":
                return self._optional("n_positions") or 0
            case "opt":
                # OPT's table begins two rows late.
                return (self._optional("max_position_embeddings") or 0) + 2
        return 0

    def _dtype(self) -> str:
        for data in (self._text, self._config.data):
            value: Any = data.get("torch_dtype") or data.get("dtype")
            if value is not None:
                name = str(value).removeprefix("torch.")
                if name not in DTYPE_BYTES:
                    raise ModelFolderError(
                        f"{self._config.path}: torch_dtype {value!r}; allowed: {', '.join(DTYPE_BYTES)}"
                    )
                return name
        return "float32"
