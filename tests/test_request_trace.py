"""The README's table of hops: a request goes through every one of them, in that order."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from servetwin.executor import LLM, SamplingParams
from servetwin.executor.testing import TINY_VOCAB_SIZE, tiny_model

ROOT = Path(__file__).resolve().parent.parent
HOP = re.compile(
    r"^\| `(?P<name>[\w.]+)` \| .* \| \[`(?P<path>[\w/]+)\.py`\]\((?P=path)\.py\) \|$", re.MULTILINE
)
OF_THE_CHILD = "MPClient.add_request"
"""Not called in one process, where the boundary is a call."""


@dataclass(frozen=True)
class Hop:
    name: str
    module: str

    def owner(self) -> tuple[Any, str]:
        """(object that has it, its name there)"""
        module = importlib.import_module(f"servetwin.{self.module}")
        *outer, attribute = self.name.split(".")
        return (getattr(module, outer[0]) if outer else module), attribute


def hops() -> list[Hop]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## One request, from `generate()` to its freed blocks and its text")
    table, _, _ = section.partition("\n## ")
    return [Hop(m["name"], m["path"].replace("/", ".")) for m in HOP.finditer(table)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", attention="sdpa").save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(TINY_VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def test_the_table_names_what_is_there() -> None:
    found = hops()
    assert len(found) >= 20
    for hop in found:
        owner, attribute = hop.owner()
        assert callable(getattr(owner, attribute)), hop


def home_of(hop: Hop) -> list[tuple[Any, str]]:
    """Where a call is looked up: in its class, or in every module of ours that imported the function."""
    owner, attribute = hop.owner()
    if "." in hop.name:
        return [(owner, attribute)]
    users = {
        "build_input_batch": ["servetwin.executor.model_runner"],
        "rotary_and_cache": ["servetwin.kernels.ops"],
        "paged_attention": ["servetwin.kernels.ops"],
    }
    return [(importlib.import_module(name), attribute) for name in users[hop.name]]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of hops, in the order in which each was called first."""
    order: list[str] = []
    monkeypatch.setenv("SERVETWIN_ENABLE_MULTIPROCESSING", "0")

    def noting(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def noted(*arguments: Any, **keywords: Any) -> Any:
            if name not in order:
                order.append(name)
            return function(*arguments, **keywords)

        return noted

    with ExitStack() as stack:
        for hop in hops():
            for owner, attribute in home_of(hop):
                stack.enter_context(
                    patch.object(owner, attribute, noting(hop.name, getattr(owner, attribute)))
                )
        yield order


def test_a_request_takes_the_hops_in_the_order_of_the_table(called: list[str], model: Path) -> None:
    size = {"num_gpu_blocks_override": 20, "max_model_len": 32, "block_size": 4, "async_scheduling": False}
    with LLM(model=model, dtype="float32", **size) as llm:
        called.clear()  # the warm-up has run the model
        output = llm.generate("w5 w6 w7 w8 w9", SamplingParams(temperature=0, max_tokens=1))
    assert len(output[0].outputs[0].token_ids) == 1
    assert called == [hop.name for hop in hops() if hop.name != OF_THE_CHILD]
