"""A model's dimensions from its config.json: parameters, bytes of weights, and KV bytes per token, worked by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servetwin.sim.hf_config import ModelFolderError
from servetwin.sim.kv_bytes import kv_bytes
from servetwin.sim.model_shape import ModelShape
from servetwin.sim.model_shape_reader import read_model_shape

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "torch_dtype": "bfloat16",
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "torch_dtype": "bfloat16", "sliding_window": None,
}  # fmt: skip
GEMMA3_27B = {
    "model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 262208,
        "sliding_window": 1024, "sliding_window_pattern": 6,
    }, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "vocab_size": 50257,
    "n_positions": 1024,
}
OPT_350M = {
    "model_type": "opt", "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "vocab_size": 50272, "word_embed_proj_dim": 512, "max_position_embeddings": 2048, "torch_dtype": "float16",
}  # fmt: skip


def shape(tmp_path: Path, config: dict[str, Any], **change: Any) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    return read_model_shape(tmp_path)


@pytest.mark.parametrize(
    ("config", "per_token", "billions", "active_billions"),
    [
        (LLAMA_8B, 2 * 32 * 8 * 128 * 2, 8.03, 8.03),
        (LLAMA_70B, 2 * 80 * 8 * 128 * 2, 70.6, 70.6),
        (DEEPSEEK_V3, 61 * (512 + 64) * 2, 671, 37.6),
        (QWEN3_30B, 2 * 48 * 4 * 128 * 2, 30.5, 3.35),
        (GEMMA3_27B, 2 * 62 * 16 * 128 * 2, 27.0, 27.0),
        (GPT2, 2 * 12 * 12 * 64 * 4, 0.124, 0.124),
        (OPT_350M, 2 * 24 * 16 * 64 * 2, 0.331, 0.331),
    ],
)
def test_hand_worked_models(
    tmp_path: Path, config: dict[str, Any], per_token: int, billions: float, active_billions: float
) -> None:
    """KV bytes exactly; parameters as the models' makers count them, within a percent."""
    found = shape(tmp_path, config)
    kv = kv_bytes(found, found.dtype)
    assert kv.per_token == per_token
    assert kv.formula.endswith(f"= {per_token:,} bytes")
    assert found.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert found.num_active_parameters / 1e9 == pytest.approx(active_billions, rel=0.01)


def test_case_71_bytes_per_token(tmp_path: Path) -> None:
    """32 layers, 8 KV heads of 128, 2 bytes: 131,072 bytes a token, 2 MiB a block of 16."""
    kv = kv_bytes(shape(tmp_path, LLAMA_8B), "bfloat16")
    assert kv.per_token == 131_072
    assert 16 * kv.per_token == 2 * 2**20
    assert kv.formula == "2 (K and V) x 32 layers x 8 KV heads x 128 x 2 bytes = 131,072 bytes"


def test_fp8_halves_the_cache_and_not_the_weights(tmp_path: Path) -> None:
    found = shape(tmp_path, LLAMA_8B)
    assert kv_bytes(found, "bfloat16", "fp8").per_token == 65_536
    assert found.weight_bytes("bfloat16") == 2 * found.num_parameters
    assert found.weight_bytes("float32") == 4 * found.num_parameters


def test_heads_are_divided_among_cards_and_a_latent_is_not(tmp_path: Path) -> None:
    """Eight KV heads on 16 cards are repeated; a latent belongs to all heads, so every card has all of it."""
    llama, deepseek = shape(tmp_path, LLAMA_8B), shape(tmp_path, DEEPSEEK_V3)
    whole = kv_bytes(llama, "bfloat16").per_token
    assert [kv_bytes(llama, "bfloat16", tensor_parallel_size=n).per_token for n in (2, 8, 16)] == [
        whole // 2,
        whole // 8,
        whole // 8,
    ]
    assert kv_bytes(deepseek, "bfloat16", tensor_parallel_size=8).per_token == 70_272
    with pytest.raises(ValueError, match="3 does not divide the 32 attention heads"):
        kv_bytes(llama, "bfloat16", tensor_parallel_size=3)
    with pytest.raises(ValueError, match="must be 1 or more"):
        kv_bytes(llama, "bfloat16", tensor_parallel_size=0)
    odd = shape(tmp_path, LLAMA_8B, num_attention_heads=48, num_key_value_heads=6, head_dim=128)
    with pytest.raises(ValueError, match="4 neither divides the 6 KV heads"):
        kv_bytes(odd, "bfloat16", tensor_parallel_size=4)


@pytest.mark.parametrize(
    ("quantization", "bytes_per_weight"),
    [
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, (4 + 20 / 128) / 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, (4 + 20 / 128) / 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5 / 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5 / 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            1.0,
        ),
    ],
)
def test_quantized_checkpoints(tmp_path: Path, quantization: dict[str, Any], bytes_per_weight: float) -> None:
    """Linear layers as they are stored, scales included; embeddings and head keep the model's type."""
    found = shape(tmp_path, LLAMA_8B, quantization_config=quantization)
    linear = found.num_parameters - found.embedding_parameters
    assert found.weight_bytes("bfloat16") == round(linear * bytes_per_weight + 2 * found.embedding_parameters)


def test_mxfp4_is_for_experts_only(tmp_path: Path) -> None:
    """gpt-oss: 4.25 bits for experts, 16 for everything else."""
    found = shape(tmp_path, QWEN3_30B, quantization_config={"quant_method": "mxfp4"})
    others = found.num_parameters - found.expert_parameters
    assert found.weight_bytes("bfloat16") == round(found.expert_parameters * 4.25 / 8 + 2 * others)


@pytest.mark.parametrize(
    ("change", "windowed", "window"),
    [
        ({"sliding_window": 4096}, 32, 4096),
        ({"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"] * 16}, 16, 4096),
        ({"sliding_window": 4096, "model_type": "gemma2"}, 16, 4096),
        ({"sliding_window": 4096, "model_type": "qwen2"}, 0, None),
        (
            {
                "sliding_window": 4096,
                "model_type": "qwen2",
                "use_sliding_window": True,
                "max_window_layers": 28,
            },
            4,
            4096,
        ),
        ({"sliding_window": 4096, "use_sliding_window": False}, 0, None),
        (
            {
                "attention_chunk_size": 8192,
                "layer_types": ["chunked_attention"] * 24 + ["full_attention"] * 8,
            },
            24,
            8192,
        ),
        ({}, 0, None),
    ],
)
def test_windowed_layers(tmp_path: Path, change: dict[str, Any], windowed: int, window: int | None) -> None:
    found = shape(tmp_path, LLAMA_8B, **change)
    assert (found.num_windowed_layers, found.window_tokens) == (windowed, window)


def test_gemma3_has_five_windowed_layers_for_a_full_one(tmp_path: Path) -> None:
    """62 layers, every sixth full: 52 windowed; the text model sits under text_config."""
    found = shape(tmp_path, GEMMA3_27B)
    assert (found.num_windowed_layers, found.window_tokens) == (52, 1024)
    assert found.tied_embeddings


def test_experts_are_read_with_their_dense_layers(tmp_path: Path) -> None:
    deepseek = shape(tmp_path, DEEPSEEK_V3)
    assert deepseek.experts is not None
    assert (deepseek.num_dense_layers, deepseek.experts.num_layers) == (3, 58)
    assert deepseek.experts.shared_intermediate_size == 2048
    every_second = shape(tmp_path, QWEN3_30B, decoder_sparse_step=2, mlp_only_layers=[1])
    assert every_second.num_dense_layers == 25


def test_the_file_itself_will_do(tmp_path: Path) -> None:
    shape(tmp_path, LLAMA_8B)
    assert read_model_shape(tmp_path / "config.json").num_layers == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "wide"}, "hidden_size 'wide' must be a whole number"),
        ({"hidden_size": 4100}, "hidden_size 4100 is no multiple of num_attention_heads 32"),
        ({"mamba_d_state": 128}, "mamba_d_state 128: a Mamba layer keeps a state beside K and V"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types has 'linear_attention'"),
        ({"index_head_dim": 128}, "index_head_dim 128: sparse attention keeps the keys of its indexer"),
        ({"is_encoder_decoder": True}, "an encoder-decoder keeps K and V of its encoder"),
        ({"v_head_dim": 192}, "v_head_dim 192 without kv_lora_rank"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({"torch_dtype": "int8"}, "torch_dtype 'int8'; allowed: bfloat16, float16, float32"),
        ({"quantization_config": {"quant_method": "magic"}}, "quant_method 'magic' is not known"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq with bits None"),
        ({"num_experts": 8}, "num_experts_per_tok is missing"),
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """One line, with the file and the key; never a guess about a cache that is no K and V of tokens."""
    with pytest.raises(ModelFolderError, match=message) as caught:
        shape(tmp_path, LLAMA_8B, **change)
    assert "config.json" in str(caught.value)
