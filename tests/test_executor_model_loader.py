"""Model folders: what loads, and what is refused in one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoConfig

from servetwin.executor.model_loader import (
    ModelLoadError,
    kv_cache_spec,
    load_model,
    max_positions,
    read_config,
    resolve_dtype,
)
from servetwin.executor.testing import tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny llama as transformers saves it."""
    tiny_model("llama", attention="eager").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_saved_folder_loads_with_equal_weights(folder: Path) -> None:
    loaded = load_model(folder, device=CPU)
    expected = tiny_model("llama").state_dict()
    for name, weight in loaded.model.state_dict().items():
        assert torch.equal(weight, expected[name])
    assert (loaded.name, loaded.vocab_size, loaded.max_positions) == ("tiny", 160, 256)
    assert loaded.eos_token_ids == (2,)
    assert loaded.num_parameters == sum(p.numel() for p in loaded.model.parameters())
    assert not loaded.model.training


def test_a_bin_file_loads_too(folder: Path) -> None:
    """Some older folders hold pytorch_model.bin only."""
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model("llama").state_dict(), folder / "pytorch_model.bin")
    assert load_model(folder, device=CPU).num_parameters > 0


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
    del raw["rope_parameters"]
    raw |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(raw))
    config = read_config(folder)
    assert config.rope_parameters["rope_theta"] == 5e5
    assert max_positions(config) == 512


@pytest.mark.parametrize("model_type", ["mamba", "bert", None])
def test_other_model_types_are_refused_by_name_with_the_list(folder: Path, model_type: str | None) -> None:
    edit_config(folder, model_type=model_type)
    with pytest.raises(
        ModelLoadError, match=f"model_type {model_type!r} is not supported; .* llama, mistral"
    ):
        load_model(folder, device=CPU)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        {"rope_scaling": {"type": "longrope"}},
        {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
    ],
)
def test_rope_types_that_leak_between_requests_are_refused(folder: Path, rope: dict[str, Any]) -> None:
    edit_config(folder, **rope)
    with pytest.raises(ModelLoadError, match=r"rope_type '(dynamic|longrope)' is not supported"):
        load_model(folder, device=CPU)


def test_quantized_weights_are_refused(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ModelLoadError, match="quantization_config"):
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
