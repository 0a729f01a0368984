"""`servetwin run --executor torch` with the n-gram drafter: the same tokens in fewer steps, and plans to run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra `executor`")

from servetwin.executor.testing import tiny_model, torch_threads
from servetwin.sim.cli import run
from servetwin.sim.runs import Run, read_run

LIMITS = {
    "--max-num-seqs": 3,
    "--max-num-batched-tokens": 32,
    "--block-size": 4,
    "--max-model-len": 64,
    "--num-gpu-blocks-override": 32,
}
DRAFTING = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", attention="sdpa").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight prompts that repeat themselves, in a pool too small for three at full length."""
    rows: list[dict[str, Any]] = [
        {
            "request_id": f"r{i}",
            "arrival_s": 0.001 * i,
            "prompt_token_ids": [(7 * i + k % 4) % 100 for k in range(12 + i)],
            "output_tokens": 40,
        }
        for i in range(8)
    ]
    path = tmp_path_factory.mktemp("workload") / "w.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def served(workload: Path, model: Path, out: Path, *more: str) -> Run:
    flags = [str(part) for flag in LIMITS.items() for part in flag]
    arguments = ["run", str(workload), "--executor", "torch", "--model", str(model), *flags, *more]
    with torch_threads(1):
        assert run([*arguments, "--out", str(out), "--save-tokens", "--save-plans"]) == 0
    return read_run(out)


@pytest.fixture(scope="module")
def plain(workload: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return served(workload, model, tmp_path_factory.mktemp("plain") / "run")


@pytest.fixture(scope="module")
def drafted(workload: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("drafted") / "run"
    return served(workload, model, out, "--speculative-config", json.dumps(DRAFTING))


def tokens_of(run: Run) -> dict[str, list[int]]:
    frame = run.tokens.sort_values(["request_id", "index"])
    return {name: rows.token_id.tolist() for name, rows in frame.groupby("request_id")}


def test_drafts_change_no_token(plain: Run, drafted: Run) -> None:
    assert tokens_of(drafted) == tokens_of(plain)
    assert set(map(len, tokens_of(drafted).values())) == {40}


def test_accepted_drafts_save_steps(plain: Run, drafted: Run) -> None:
    """Some drafts were right and some wrong, over preemptions too; every accepted one saved a row of a step."""
    steps = drafted.steps
    assert 0 < steps.accepted_draft_tokens.sum() < steps.draft_tokens.sum()
    assert drafted.requests.preemptions.sum() > 0
    assert steps.decode_rows.sum() < plain.steps.decode_rows.sum()


def test_recorded_plans_with_drafts_give_the_same_tokens(drafted: Run, model: Path, tmp_path: Path) -> None:
    """`execute` verifies the drafts that the plans name; nobody drafts."""
    out = tmp_path / "again"
    plans = str(drafted.path / "plans.jsonl.zst")
    with torch_threads(1):
        assert run(["execute", plans, "--model", str(model), "--out", str(out), "--save-tokens"]) == 0
    assert tokens_of(read_run(out)) == tokens_of(drafted)
