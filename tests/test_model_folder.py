"""What the simulator reads of a model folder without torch, and how its end-of-sequence tokens are used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from servetwin.sim.config import EngineConfig, ModelConfig, RunConfig
from servetwin.sim.model_folder import ModelFolderError, read_model_config
from servetwin.sim.simulation import sampling_of
from servetwin.workloads import RequestSpec

LLAMA = {"max_position_embeddings": 512, "vocab_size": 1000, "eos_token_id": [7, 8, 9]}


def folder(tmp_path: Path, **change: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    return tmp_path


def test_limits_and_tokens_are_read(tmp_path: Path) -> None:
    """The first EOS token is the model's, the others stop requests too."""
    model = read_model_config(folder(tmp_path))
    assert (model.max_model_len, model.vocab_size) == (512, 1000)
    assert (model.eos_token_id, model.extra_eos_token_ids) == (7, (8, 9))
    assert read_model_config(tmp_path, 100).max_model_len == 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"vocab_size": "many"}, "vocab_size is missing"),
    ],
)
def test_a_configuration_without_the_numbers_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelFolderError, match=message):
        read_model_config(folder(tmp_path, **change))


def test_the_limit_can_be_lowered_only(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="max_model_len 513 is above the 512 positions"):
        read_model_config(folder(tmp_path), 513)


@pytest.mark.parametrize(("ignore_eos", "stops"), [(False, [5, 8, 9]), (True, [5])])
def test_further_eos_tokens_stop_whoever_does_not_ignore_eos(ignore_eos: bool, stops: list[int]) -> None:
    """As vLLM adds the ids of a generation configuration to stop_token_ids."""
    model = ModelConfig(eos_token_id=7, extra_eos_token_ids=(8, 9))
    config = RunConfig(engine=EngineConfig(model=model), executor="torch", ignore_eos=ignore_eos)
    spec = RequestSpec(request_id="a", arrival_s=0, prompt_tokens=1, output_tokens=4, stop_token_ids=(5,))
    assert sampling_of(config)(spec).stop_token_ids == stops


@pytest.mark.parametrize(
    ("rope", "default", "most"),
    [
        ({}, 512, 512),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1024, 1024),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, 2048, 2048),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                }
            },
            1024,
            1024,
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 512, 512),
        (
            {"rope_scaling": {"type": "longrope", "factor": 4.0}, "original_max_position_embeddings": 128},
            128,
            512,
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, 512, 512),
    ],
)
def test_the_rope_type_says_how_far_the_positions_reach(
    rope: dict[str, object], default: int, most: int, tmp_path: Path
) -> None:
    """vLLM's rule: linear, dynamic and yarn stretch the context; longrope starts at its original length."""
    data = {"max_position_embeddings": 512, "vocab_size": 100, **rope}
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert read_model_config(tmp_path).max_model_len == default
    assert read_model_config(tmp_path, most).max_model_len == most
    with pytest.raises(ModelFolderError, match=f"above the {most} positions"):
        read_model_config(tmp_path, most + 1)
