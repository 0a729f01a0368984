"""Model folders: what loads, and what is refused in one clear line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file
from transformers import AutoConfig

from servetwin.executor.model_loader import (
    SUPPORTED_MODEL_TYPES,
    ModelLoadError,
    describe_model,
    kv_cache_spec,
    load_model,
    read_config,
    resolve_dtype,
)
from servetwin.executor.packed_model import PackedModel
from servetwin.executor.rope import max_positions
from servetwin.executor.testing import (
    TINY_CONFIGS,
    TINY_VARIANTS,
    TeacherForced,
    reference_logits,
    tiny_model,
    torch_threads,
)

CPU = torch.device("cpu")
SEQUENCES = [[(13 * i + 29 * row) % 150 + 3 for i in range(20 - 4 * row)] for row in range(3)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny llama as transformers saves it."""
    tiny_model("llama", attention="eager").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def assert_weights(model: torch.nn.Module, expected: Mapping[str, torch.Tensor]) -> None:
    actual = model.state_dict()
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(actual[name], weight), name


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_saved_folder_loads_with_equal_weights(folder: Path) -> None:
    loaded = load_model(folder, device=CPU)
    assert_weights(loaded.model, tiny_model("llama").state_dict())
    assert (loaded.name, loaded.vocab_size, loaded.max_positions) == ("tiny", 160, 256)
    assert loaded.eos_token_ids == (2,)
    assert loaded.num_parameters == sum(p.numel() for p in loaded.model.parameters())
    assert not loaded.model.training


@pytest.mark.parametrize("name", [*SUPPORTED_MODEL_TYPES, *TINY_VARIANTS])
def test_a_loaded_model_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    """Several sequences in one packed batch, in chunks, against each alone in transformers' own forward pass."""
    tiny_model(name, attention="eager").save_pretrained(tmp_path)
    loaded = load_model(tmp_path, device=CPU)
    driver, model = TeacherForced(loaded, SEQUENCES), PackedModel(loaded.model)
    chunks = [driver.step(model, step) for step in ({0: 9, 2: 4}, {0: 1, 1: 16, 2: 8}, {0: 10})]
    for row, sequence in enumerate(SEQUENCES):
        logits = torch.cat([chunk[row] for chunk in chunks if row in chunk])
        expected = reference_logits(tiny_model(name, attention="eager"), sequence)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_there_is_a_tiny_configuration_of_every_supported_type() -> None:
    assert set(TINY_CONFIGS) == set(SUPPORTED_MODEL_TYPES)


@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"])
def test_bin_files_load_too(folder: Path, max_shard_size: str) -> None:
    """Some older folders hold pytorch_model.bin only, or its shards."""
    weights = tiny_model("llama").state_dict()
    (folder / "model.safetensors").unlink()
    split = split_torch_state_dict_into_shards(
        weights, filename_pattern="pytorch_model{suffix}.bin", max_shard_size=max_shard_size
    )
    for filename, names in split.filename_to_tensors.items():
        torch.save({name: weights[name] for name in names}, folder / filename)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert split.is_sharded == (max_shard_size == "100KB")
    assert_weights(load_model(folder, device=CPU).model, weights)


def test_sharded_safetensors_load(tmp_path: Path) -> None:
    model = tiny_model("llama", attention="eager")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_weights(load_model(tmp_path, device=CPU).model, model.state_dict())


def test_a_missing_shard_is_told(tmp_path: Path) -> None:
    tiny_model("llama", attention="eager").save_pretrained(tmp_path, max_shard_size="100KB")
    next(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(ModelLoadError, match=r"cannot load the model.*model-0000"):
        load_model(tmp_path, device=CPU)


def test_experts_stored_one_by_one_are_put_together(tmp_path: Path) -> None:
    """As published Qwen3-MoE folders have them."""
    model = tiny_model("qwen3_moe", attention="eager")
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.5.down_proj.weight" in names
    assert_weights(load_model(tmp_path, device=CPU).model, model.state_dict())


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    tiny_model("qwen2", attention="eager", tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load_model(tmp_path, device=CPU).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_dummy_needs_the_configuration_only_and_follows_the_seed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    state = torch.random.get_rng_state()
    first, again, other = (
        load_model(folder, load_format="dummy", device=CPU, seed=seed).model.model.embed_tokens.weight
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state), "the global random stream is left alone"


def test_further_end_tokens_come_from_the_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert load_model(folder, device=CPU).eos_token_ids == (2, 7, 9)
    edit_config(folder, eos_token_id=[5, 6])
    assert load_model(folder, device=CPU).eos_token_ids == (5, 6, 7, 2, 9)


def test_wanted_types_are_taken(folder: Path) -> None:
    assert load_model(folder, dtype="bfloat16", device=CPU).model.dtype == torch.bfloat16
    assert load_model(folder, dtype="float32", device=CPU).model.dtype == torch.float32


@pytest.mark.parametrize(
    ("of_config", "capabilities", "device", "expected"),
    [
        (torch.float32, {"avx512_bf16": True}, "cpu", torch.float32),
        (None, {"avx512_bf16": True}, "cpu", torch.float32),
        (torch.bfloat16, {"avx512_bf16": True}, "cpu", torch.bfloat16),
        (torch.bfloat16, {"avx512_bf16": False, "amx_bf16": True}, "cpu", torch.bfloat16),
        (torch.bfloat16, {"avx512_bf16": False}, "cpu", torch.float32),
        (torch.float16, {"avx512_bf16": True}, "cpu", torch.bfloat16),
        (torch.float16, {}, "cpu", torch.float32),
        (torch.bfloat16, {}, "cuda", torch.bfloat16),
    ],
)
def test_auto_type(
    of_config: torch.dtype | None,
    capabilities: dict[str, bool],
    device: str,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """bfloat16 where the configuration says so and the processor has it; float16 never."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert resolve_dtype("auto", of_config, torch.device(device)) == expected


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere' is not a folder"):
        load_model(tmp_path / "nowhere", device=CPU)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        load_model(tmp_path, device=CPU)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ("[1]", "must hold a JSON object, not list"), ("\udcff", "not valid JSON")],
)
def test_a_damaged_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path, device=CPU)


def test_a_config_that_makes_no_model(folder: Path) -> None:
    edit_config(folder, num_attention_heads=7)
    with pytest.raises(ModelLoadError, match="llama configuration"):
        load_model(folder, load_format="dummy", device=CPU)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_config_with_an_unknown_activation(folder: Path, load_format: Literal["auto", "dummy"]) -> None:
    edit_config(folder, hidden_act="wobble")
    with pytest.raises(ModelLoadError, match="wobble"):
        load_model(folder, load_format=load_format, device=CPU)


def test_old_rope_keys_at_the_top_level_are_understood(folder: Path) -> None:
    """Before transformers 5: rope_theta and rope_scaling instead of rope_parameters."""
    raw = json.loads((folder / "config.json").read_text())
    del raw["rope_parameters"], raw["dtype"]
    raw |= {
        "rope_theta": 5e5,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(raw))
    config = read_config(folder)
    assert config.rope_parameters["rope_theta"] == 5e5
    assert config.dtype == torch.bfloat16
    assert max_positions(config) == 512


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("mamba", "it has recurrent or state-space layers, which keep a state instead of K and V; "),
        ("jamba", "it has recurrent or state-space layers, which keep a state instead of K and V; "),
        ("deepseek_v3", r"it caches latent vectors instead of K and V \(multi-head latent attention\); "),
        ("t5", "it is an encoder-decoder model; "),
        ("qwen2_vl", "it takes images or sound too; "),
        ("gemma3", r"it takes images too \(its text part alone is supported as gemma3_text\); "),
        ("wobble", "transformers does not know it; "),
        ("bert", ""),
        (None, ""),
        (["llama"], ""),
    ],
)
def test_other_model_types_are_refused_by_name_with_kind_and_list(
    folder: Path, model_type: object, kind: str
) -> None:
    edit_config(folder, model_type=model_type)
    with pytest.raises(ModelLoadError) as raised:
        load_model(folder, device=CPU)
    pattern = rf"model_type {re.escape(repr(model_type))} is not supported; {kind}supported are gemma2, .* qwen3_moe$"
    assert re.search(pattern, str(raised.value))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "wobble"}}, "rope_type 'wobble' is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "do not generate text"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types chunked_attention are not"),
    ],
)
def test_options_of_a_supported_type_that_are_not_supported(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load_model(folder, device=CPU)


def test_max_model_len_is_that_of_the_model_unless_it_was_given(folder: Path) -> None:
    assert load_model(folder, device=CPU).max_model_len == 256
    assert load_model(folder, device=CPU, max_model_len=64).max_model_len == 64
    with pytest.raises(ModelLoadError, match="max_model_len 257 is above the 256 positions of model 'tiny'"):
        load_model(folder, device=CPU, max_model_len=257)


def test_windows_are_told_only_where_a_layer_has_one() -> None:
    """Qwen 2 and 3 name a window that is off, or on from some layer on."""
    assert describe_model(tiny_model("qwen2"), "off").sliding_window is None
    on = {"use_sliding_window": True, "sliding_window": 5}
    assert describe_model(tiny_model("qwen2", **on, max_window_layers=1), "on").sliding_window == 5
    assert describe_model(tiny_model("qwen2", **on, max_window_layers=2), "too high").sliding_window is None
    assert describe_model(tiny_model("qwen3_moe", **on), "everywhere").sliding_window == 5


def test_quantized_weights_are_refused(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ModelLoadError, match="quantization_config, method 'gptq'"):
        load_model(folder, device=CPU)


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="cannot load the model"):
        load_model(folder, device=CPU)


def test_truncated_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ModelLoadError, match="cannot load the model"):
        load_model(folder, device=CPU)


def test_weights_of_another_shape_never_run_as_random_ones(folder: Path) -> None:
    """transformers would fill what is missing with random numbers."""
    edit_config(folder, num_hidden_layers=3)
    with pytest.raises(ModelLoadError, match=r"do not belong to its config\.json: 9 missing keys"):
        load_model(folder, device=CPU)


def test_positions_grow_with_linear_and_yarn_rope() -> None:
    def positions(**rope: Any) -> int:
        parameters = {"rope_theta": 1e4, **rope}
        return max_positions(
            AutoConfig.for_model("llama", max_position_embeddings=4096, rope_parameters=parameters)
        )

    assert positions(rope_type="default") == 4096
    assert positions(rope_type="linear", factor=2.0) == 8192
    assert positions(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024) == 4096


def test_kv_bytes_per_token() -> None:
    """Case 71: 32 layers, 8 K/V heads, dim 128, 2-byte values are 131,072 bytes."""
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096
    )
    assert kv_cache_spec(config, torch.bfloat16).bytes_per_token == 131_072


def test_the_example_configuration_is_a_llama_of_ten_million_parameters() -> None:
    folder = Path(__file__).resolve().parent.parent / "examples" / "llama-10m"
    config = read_config(folder)
    loaded = load_model(folder, load_format="dummy", device=CPU)
    assert 9e6 < loaded.num_parameters < 11e6
    assert loaded.max_positions == 32_768
    assert config.num_key_value_heads < config.num_attention_heads
