"""The coupled loop on a real model: measured times move the clock, and recorded plans can be run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra `executor`")

from servetwin.executor.testing import tiny_model, torch_threads
from servetwin.sim.cli import run
from servetwin.sim.runs import Run, read_run

LIMITS = [
    "--max-num-seqs",
    "3",
    "--max-num-batched-tokens",
    "32",
    "--block-size",
    "8",
    "--max-model-len",
    "64",
]
POOL = ["--num-gpu-blocks-override", "14"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama as a folder, without a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", attention="sdpa").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def coupled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Twelve requests, an hour between the first six and the rest, in a pool that is too small for three at once."""
    folder = tmp_path_factory.mktemp("coupled")
    rows: list[dict[str, Any]] = [
        {
            "request_id": f"t{i}",
            "arrival_s": 0.001 * i + (3600 if i >= 6 else 0),
            "prompt_token_ids": [(7 * i + k) % 100 for k in range(20 + i)],
            "output_tokens": 24,
        }
        for i in range(12)
    ]
    rows[3]["abort_s"] = 0.004
    (folder / "w.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    flags = ["--executor", "torch", "--model", str(model), "--dtype", "float32", *LIMITS, *POOL]
    out = folder / "run"
    with torch_threads(1):
        arguments = ["--out", str(out), "--save-tokens", "--save-plans"]
        assert run(["run", str(folder / "w.jsonl"), *flags, *arguments]) == 0
    return read_run(out)


def tokens_of(run: Run) -> dict[str, list[int]]:
    frame = run.tokens.sort_values(["request_id", "index"])
    return {name: rows.token_id.tolist() for name, rows in frame.groupby("request_id")}


def test_measured_times_add_up_and_vary(coupled: Run) -> None:
    """Every step with tokens has its own measured time, and the sum is the busy time."""
    steps = coupled.steps[coupled.steps.rows > 0]
    took = steps.prepare_s + steps.device_s
    assert (took > 0).all()
    assert took.nunique() > len(steps) / 2
    assert set(coupled.steps.source) == {"measured"}
    assert coupled.summary["busy_time_s"] == pytest.approx(took.sum(), abs=1e-9)


def test_an_hour_of_silence_costs_nothing(coupled: Run) -> None:
    """Simulated time jumps over idle hours; busy time is what was measured."""
    assert coupled.steps.start_s.max() > 3600
    assert coupled.summary["busy_time_s"] < 60


def test_a_step_ends_when_its_measured_time_is_over(coupled: Run) -> None:
    """Tokens are dated by the end of the step that made them: when the device was done with it (no host time here)."""
    steps = coupled.steps
    assert set(coupled.tokens.time_s) <= set(steps.end_s)
    ends = (steps.device_start_s + steps.device_s).round(9)
    assert (ends <= steps.end_s.round(9)).all()
    assert (steps.device_start_s.round(9) >= (steps.prepare_start_s + steps.prepare_s).round(9)).all()


def test_requests_survive_preemption_and_everyone_is_accounted_for(coupled: Run) -> None:
    """The pool forces preemptions, one request is aborted, all others get their 24 tokens."""
    requests = coupled.requests.set_index("request_id")
    assert requests.preemptions.sum() > 0
    assert requests.recomputed_tokens.sum() > 0
    assert requests.finish_reason.to_dict() == {f"t{i}": "abort" if i == 3 else "length" for i in range(12)}
    assert {n for name, n in requests.num_output_tokens.items() if name != "t3"} == {24}


def test_recorded_plans_give_the_same_tokens_without_a_scheduler(
    coupled: Run, model: Path, tmp_path: Path
) -> None:
    """`execute` on plans.jsonl.zst: preemption, resumption and an abort included."""
    out = tmp_path / "again"
    with torch_threads(1):
        plans = str(coupled.path / "plans.jsonl.zst")
        assert run(["execute", plans, "--model", str(model), "--out", str(out), "--save-tokens"]) == 0
    again = read_run(out)
    ran, told = tokens_of(again), tokens_of(coupled)
    # The step in flight when t3 was aborted ran, but its token was dropped.
    cut_short = told.pop("t3", [])
    assert ran.pop("t3", [])[: len(cut_short)] == cut_short
    assert ran == told
    assert len(again.steps) == len(coupled.steps)
    assert again.steps.prefill_tokens.sum() == coupled.steps.prefill_tokens.sum()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--executor torch needs --model"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--model", "MODEL", "--max-model-len", "100000"], "max_model_len 100000"),
        (["--model", "MODEL", "--num-gpu-blocks-override", "2"], "max_model_len"),
        (["--model", "MODEL", "--step-time-s", "1"], "--step-time-s has no effect"),
        (["--model", "MODEL", "--dtype", "float16"], "float16"),
    ],
)
def test_the_torch_executor_refuses_with_one_line(
    arguments: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and no folder."""
    (tmp_path / "w.jsonl").write_text(
        json.dumps({"request_id": "a", "arrival_s": 0, "prompt_tokens": 4, "output_tokens": 2})
    )
    out = tmp_path / "out"
    flags = [str(model) if a == "MODEL" else a for a in arguments]
    assert run(["run", str(tmp_path / "w.jsonl"), "--executor", "torch", *flags, "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert [line.partition(":")[0] for line in said.splitlines() if not line.startswith("loading")] == [
        "servetwin"
    ]
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds no plans"), (b'{"a": 1}\n', "plan"), (b"\x28\xb5\x2f\xfd broken", "plans.jsonl.zst")],
)
def test_execute_refuses_what_is_no_plan(
    content: bytes, message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged file of plans: exit code 2, one line."""
    import zstandard

    plans = tmp_path / "plans.jsonl.zst"
    plans.write_bytes(zstandard.compress(content) if content.startswith(b"{") else content)
    limits = ["--block-size", "8", "--num-gpu-blocks-override", "14", "--max-model-len", "64"]
    arguments = ["execute", str(plans), "--model", str(model), "--out", str(tmp_path / "o"), *limits]
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert message in said, said
    assert said.count("\n") == 1


def test_a_token_outside_the_vocabulary_is_refused_and_the_rest_go_on(model: Path, tmp_path: Path) -> None:
    """At the door, with the id and the vocabulary named; the run is complete."""
    rows = [
        {"request_id": name, "arrival_s": i, "prompt_token_ids": ids, "output_tokens": 2}
        for i, (name, ids) in enumerate({"a": [1, 2], "b": [5, 5_000], "c": [3]}.items())
    ]
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    flags = ["--executor", "torch", "--model", str(model), *LIMITS, *POOL, "--out", str(tmp_path / "out")]
    with torch_threads(1):
        assert run(["run", str(tmp_path / "w.jsonl"), *flags]) == 0
    log = read_run(tmp_path / "out")
    assert log.requests.finish_reason.tolist() == ["length", "refused", "length"]
    assert "prompt token id 5000 is outside" in log.events[log.events.kind == "refused"].reason.item()


def test_every_output_of_a_model_with_sliding_windows_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attention honours the window, the block accounting does not: on stderr, in run.json and in the summary."""
    tiny_model("mistral", attention="sdpa").save_pretrained(tmp_path / "model")
    workload = tmp_path / "w.jsonl"
    workload.write_text('{"request_id": "a", "arrival_s": 0, "prompt_tokens": 5, "output_tokens": 3}\n')
    flags = ["--executor", "torch", "--model", str(tmp_path / "model"), "--num-gpu-blocks-override", "40"]
    flags += ["--max-model-len", "64", "--out", str(tmp_path / "run")]
    assert run(["run", str(workload), *flags]) == 0
    assert "note: sliding window of 7 tokens" in capsys.readouterr().err
    recorded = read_run(tmp_path / "run")
    assert "block accounting differs" in recorded.header["executor"]["note"]
    assert "block accounting differs" in recorded.summary["servetwin"]["notes"][0]
