"""The converted glassllm model computes, reads and writes what the package itself does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import glassllm
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from servetwin.executor.glassllm import FILES, convert, main
from servetwin.executor.model_loader import load_model
from servetwin.executor.model_runner import ModelRunner
from servetwin.executor.testing import LogitsRecorder, PlanWriter, torch_threads
from servetwin.executor.tokenizer import load_tokenizer

TEXTS = [
    "It was a dark and stormy night, and the captain said:\n\n  'Who is there?'",
    "",
    " ",
    "two  spaces,   three; a\ttab and\r\na return",
    "aaaaaaa bbbb thethethe",
    "café naïve cafe\u0301 \uff46\uff55\uff4c\uff4c \ufb01 🙂",
    "<eos> <bos> <pad> <unk> are no special tokens here",
    "a mark ▁ of its own ▁▁",
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tmp_path_factory.mktemp("models") / "glassllm-en")


@pytest.mark.parametrize("language", ["en", "pt"])
def test_logits_equal_those_of_the_package(language: str, tmp_path: Path) -> None:
    """Within 1e-4 over all 128 positions."""
    original, _ = glassllm.load_pretrained(language)
    ids = np.random.default_rng(0).integers(0, original.cfg.vocab_size, original.cfg.max_len)
    model = AutoModelForCausalLM.from_pretrained(convert(tmp_path / language, language))
    with torch.inference_mode():
        logits = model(torch.tensor(ids).unsqueeze(0)).logits[0].numpy()
    np.testing.assert_allclose(logits, original(ids).data[0], atol=1e-4, rtol=0)


def test_the_executor_continues_a_text_as_the_package_does(folder: Path) -> None:
    """Same greedy tokens and text, logits within 1e-4."""
    original, vocab = glassllm.load_pretrained("en")
    prompt = vocab.encode("The old man looked at the sea and")
    expected = [step.token for step in original.generate(prompt, 40, greedy=True)]
    runner = ModelRunner(
        load_model(folder, device=torch.device("cpu")),
        num_blocks=10,
        block_size=16,
        max_num_seqs=1,
        max_model_len=128,
    )
    runner.observe_logits = recorder = LogitsRecorder()
    plans = PlanWriter(16, 10)
    plans.add("a", prompt)
    plans.take(runner.execute_model(plans.plan({"a": len(prompt)})))
    for _ in range(39):
        plans.take(runner.execute_model(plans.plan({"a": 1})))
    assert plans.output_of("a") == expected
    reference = original([*prompt, *expected[:-1]]).data[0, len(prompt) - 1 :]
    np.testing.assert_allclose(recorder.of("a").numpy(), reference, atol=1e-4, rtol=0)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert tokenizer.decode(expected) == vocab.decode(expected)


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_encodes_and_decodes_as_the_package_does(folder: Path, text: str) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    _, vocab = glassllm.load_pretrained("en")
    ids = vocab.encode(text)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == vocab.decode(ids)


def test_every_token_decodes_alike(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    _, vocab = glassllm.load_pretrained("en")
    for token_id in range(vocab.vocab_size):
        assert tokenizer.decode([token_id]) == vocab.decode([token_id])


def test_a_complete_folder_is_reused_and_nothing_is_left_beside_it(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert(folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert all((folder / name).is_file() for name in FILES)


def test_something_else_at_the_place_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="exists and is not a converted model"):
        convert(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_an_unknown_language_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="language must be one of en, pt, got 'de'"):
        convert(tmp_path / "x", "de")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder on stdout; errors on stderr with exit 1; wrong usage exits 2."""
    out = tmp_path / "new" / "model"
    assert main([str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2
    assert "usage: python -m servetwin.executor.glassllm" in capsys.readouterr().err
