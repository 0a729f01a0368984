"""The race of CPU engines, at toy size: it runs, the tokens are equal, its figures add up."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from servetwin.executor.testing import torch_threads

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "executor_cpu.py"


@pytest.fixture(scope="module")
def race() -> Iterator[Any]:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("executor_cpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch, torch_threads(1):
        patch.setitem(sys.modules, spec.name, module)
        patch.setenv("SERVETWIN_ENABLE_MULTIPROCESSING", "0")
        spec.loader.exec_module(module)
        yield module


def test_all_engines_give_the_tokens_of_generate(race: Any, tmp_path: Path) -> None:
    """In float32, in one process; and a run of ours taken apart adds up to the run."""
    torch.manual_seed(0)
    LlamaForCausalLM(race.TOY.config()).save_pretrained(tmp_path)
    runs = {name: build(tmp_path, "float32", race.TOY) for name, build in race.BUILDERS.items()}
    tokens = {name: run() for name, run in runs.items()}
    assert len(tokens["generate"]) == race.TOY.batch
    assert {len(row) for row in tokens["generate"]} == {race.TOY.output_tokens}
    assert tokens["servetwin"] == tokens["generate"] == tokens["generate_batch"]
    spent = race.profile(runs["servetwin"])
    assert {"linear", "attention", "norms", "rotary and KV write", "SiLU", "sample"} <= spent.keys()
    assert min(spent.values()) > 0


@pytest.mark.full
def test_the_script_writes_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--toy", "--rounds", "1", "--threads", "1", "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    figures = json.loads(out.read_text())
    assert figures["threads"] == 1
    assert figures["float32"]["sequences_equal_to_generate"]["servetwin"] == figures["shape"]["batch"]
    assert figures["bfloat16"]["output_tokens_per_s"].keys() == {"generate", "generate_batch", "servetwin"}
