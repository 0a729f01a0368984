"""The command line: what it prints where, what it refuses how, and what a run leaves behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servetwin.sim.cli import run
from servetwin.sim.rules import CORRECTIONS
from servetwin.sim.runs import read_run, tables_equal

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
SMALL = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--block-size", "16"]
POOL = ["--num-gpu-blocks-override", "60", "--max-model-len", "256"]
CONSTANT = ["--executor", "constant", "--step-time-s", "0.01"]
TORCH = ["--executor", "torch", "--model", "examples/llama-10m"]
NGRAM = [
    "--speculative-config",
    '{"method": "ngram", "num_speculative_tokens": 2}',
    "--draft-acceptance-rate",
    "0.5",
]

Row = dict[str, Any]


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows as our JSONL and returns the path."""

    def write(*rows: Row, name: str = "workload.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        return str(path)

    return write


def rows(count: int = 6, **fields: Any) -> list[Row]:
    return [
        {"request_id": f"q{i}", "arrival_s": 0.5 + 0.05 * i, "prompt_tokens": 40, "output_tokens": 12}
        | fields
        for i in range(count)
    ]


def served(tmp_path: Path, workload: str, *arguments: str, name: str = "out") -> Path:
    """A run with the constant executor, written to a folder."""
    out = tmp_path / name
    assert run(["run", workload, *CONSTANT, *SMALL, *POOL, "--out", str(out), *arguments]) == 0
    return out


# ---------------------------------------------------------------- good runs


def test_json_puts_one_object_on_stdout(
    jsonl: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--json: stdout is the summary and nothing else, and the same as summary.json."""
    out = served(tmp_path, jsonl(*rows()), "--json")
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "summary.json").read_text())
    assert printed["completed"] == 6


def test_the_same_seed_gives_the_same_log_and_another_one_does_not(tmp_path: Path) -> None:
    """A preset's run is determined by its seed, in every table."""

    def log(name: str, seed: str) -> Path:
        out = tmp_path / name
        arguments = ["--num-prompts", "30", "--seed", seed, "--out", str(out)]
        assert run(["run", "chat", *CONSTANT, *arguments]) == 0
        return out

    first, again, other = log("a", "1"), log("b", "1"), log("c", "2")
    assert tables_equal(read_run(first), read_run(again))
    assert not tables_equal(read_run(first), read_run(other))


def test_a_run_is_replayed_from_the_workload_it_wrote(jsonl: Callable[..., str], tmp_path: Path) -> None:
    """workload.jsonl.zst alone gives an equal log (aborts, priorities and prefixes included)."""
    mixed = rows(8, priority=0)
    mixed[1] |= {"abort_s": 0.62}
    mixed[2] |= {"priority": -1, "session_id": "s"}
    for row in mixed[3:]:
        row |= {"prefix_ids": [7, 8], "prefix_block_tokens": 16}
    flags = ["--scheduling-policy", "priority"]
    first = served(tmp_path, jsonl(*mixed), *flags)
    again = served(tmp_path, str(first / "workload.jsonl.zst"), *flags, name="again")
    assert tables_equal(read_run(first), read_run(again))
    assert read_run(first).requests.cached_tokens.sum() > 0


def test_every_request_is_accounted_for(jsonl: Callable[..., str], tmp_path: Path) -> None:
    """Refused and aborted requests stand in requests/ beside the finished ones, with the reason in events/."""
    workload = jsonl(
        *rows(3),
        {"request_id": "long", "arrival_s": 0.1, "prompt_tokens": 300, "output_tokens": 2},
        {"request_id": "gone", "arrival_s": 0.2, "prompt_tokens": 30, "output_tokens": 200, "abort_s": 0.3},
    )
    log = read_run(served(tmp_path, workload))
    reasons = dict(zip(log.requests.request_id, log.requests.finish_reason, strict=True))
    assert reasons == {"q0": "length", "q1": "length", "q2": "length", "long": "refused", "gone": "abort"}
    refused = log.events[log.events.kind == "refused"].iloc[0]
    assert refused.request_id == "long"
    assert "max_model_len is 256" in refused.reason


def test_whole_numbers_take_vllm_suffixes(jsonl: Callable[..., str], tmp_path: Path) -> None:
    """k is 1,000 and K is 1,024; underscores and dashes mean the same in flags."""
    out = tmp_path / "out"
    arguments = [
        "--max_model_len",
        "1k",
        "--max-num-batched-tokens",
        "2K",
        "--num_gpu_blocks_override",
        "1.5k",
    ]
    assert run(["run", jsonl(*rows(1)), *CONSTANT, *arguments, "--out", str(out)]) == 0
    engine = read_run(out).config["engine"]
    assert engine["model"]["max_model_len"] == 1000
    assert engine["scheduler"]["max_num_batched_tokens"] == 2048
    assert engine["cache"]["num_gpu_blocks"] == 1500


def test_what_was_assumed_is_said(
    jsonl: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a model: on stderr and in run.json."""
    out = tmp_path / "out"
    assert run(["run", jsonl(*rows(1)), *CONSTANT, "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assumed = read_run(out).header["assumed"]
    assert assumed[:2] == ["num_gpu_blocks 40000", "max_model_len 131072"]
    assert [a.partition(" (")[0] for a in assumed[2:]] == ["max_num_seqs 256, max_num_batched_tokens 2048"]
    assert all(text in said for text in assumed)


def test_what_is_left_out_is_said(
    jsonl: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of no use, refused requests, and think times that an open loop does not act on: on stderr, with reasons."""
    trace = tmp_path / "trace.csv"
    useless = "2023-11-16 18:15:46.6805900,0,44\r\n2023-11-16 18:15:47.6805900,10,0\r\n"
    good = "2023-11-16 18:15:48.6805900,10,4\r\n2023-11-16 18:15:49.6805900,9000,4"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + useless + good)
    assert run(["run", str(trace), *CONSTANT, *SMALL, *POOL]) == 0
    said = capsys.readouterr().err
    assert "dropped: 2 of 4 rows of no use (1 " in said
    assert "refused: 1 of 2 requests; row-000004: prompt of 9000 tokens leaves no room" in said
    assert run(["run", jsonl(*rows(1, think_time_s=1.0)), *CONSTANT, *SMALL, *POOL]) == 0
    assert "its think_time_s is not acted on" in capsys.readouterr().err


def test_the_engine_is_shown_before_it_serves(
    jsonl: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr: pool, limits, policy, how steps overlap, and what is switched off."""
    flags = ["--no-enable-prefix-caching", "--scheduling-policy", "priority"]
    expected = "engine: 60 blocks of 16 tokens, max_model_len 256, 4 seats, 64 tokens per step, priority"
    for more, how in ([], "asynchronous"), (["--no-async-scheduling"], "synchronous"):
        assert run(["run", jsonl(*rows(1)), *CONSTANT, *SMALL, *POOL, *flags, *more]) == 0
        assert f"{expected}, {how} scheduling, no prefix caching" in capsys.readouterr().err


def test_scheduling_is_asynchronous_unless_told_otherwise(jsonl: Callable[..., str], tmp_path: Path) -> None:
    """As in vLLM; where the drafter forbids it, it is off, and asking for it is refused."""
    for number, (flags, expected) in enumerate(
        [([], True), (["--async-scheduling"], True), (["--no-async-scheduling"], False), (NGRAM, False)]
    ):
        out = served(tmp_path, jsonl(*rows(1)), *flags, name=f"out{number}")
        assert read_run(out).config["engine"]["scheduler"]["async_scheduling"] is expected


def test_switches_of_fidelity_are_in_the_configuration_of_the_run(
    jsonl: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--vllm-compat sets all corrections, a switch of its own name wins; the engine line names those that are on."""
    flags = ["--vllm-compat", "safe", "--no-keep-cursor"]
    rules = read_run(served(tmp_path, jsonl(*rows(1)), *flags)).config["engine"]["rules"]
    assert [rules[name] for name in CORRECTIONS] == [name != "keep_cursor" for name in CORRECTIONS]
    said = capsys.readouterr().err
    assert "corrected: forget_uncomputed_blocks" in said
    assert "corrected: keep_cursor" not in said


def test_a_module_beside_the_data_is_found(
    jsonl: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--executor module:attribute looks into the current folder too, and leaves the module path as it was."""
    import sys

    (tmp_path / "beside.py").write_text("not_callable = 3\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert run(["run", jsonl(*rows(1)), "--executor", "beside:not_callable"]) == 2
    assert "int cannot be called with ExecutorOptions" in capsys.readouterr().err
    assert sys.path == before
    del sys.modules["beside"]


@pytest.mark.parametrize("command", ["run", "execute", "decide", "dash", "demo"])
def test_help_breaks_no_flag(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 80 columns every flag stands whole, so that it can be copied."""
    import re

    def flags(columns: str) -> set[str]:
        monkeypatch.setenv("COLUMNS", columns)
        assert run([command, "--help"]) == 0
        return set(re.findall(r"--[a-z][a-z-]+[a-z](?![\w-])", capsys.readouterr().out))

    assert flags("80") == flags("200")


def test_without_chunked_prefill_the_budget_holds_the_longest_prompt(
    jsonl: Callable[..., str], tmp_path: Path
) -> None:
    """vLLM raises max_num_batched_tokens to max_model_len when it was not given."""
    out = tmp_path / "out"
    flags = ["--no-enable-chunked-prefill", "--max-model-len", "4096"]
    assert run(["run", jsonl(*rows(1)), *CONSTANT, *flags, "--out", str(out)]) == 0
    assert read_run(out).config["engine"]["scheduler"]["max_num_batched_tokens"] == 4096


def test_a_model_folder_gives_its_limits(jsonl: Callable[..., str], tmp_path: Path) -> None:
    """With --model the constant executor takes max_model_len from config.json."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512, "vocab_size": 1000}))
    out = tmp_path / "out"
    assert run(["run", jsonl(*rows(1)), *CONSTANT, "--model", str(tmp_path), "--out", str(out)]) == 0
    assert read_run(out).config["engine"]["model"]["max_model_len"] == 512


def test_an_executor_of_ones_own(
    jsonl: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example: --executor module:attribute is called with ExecutorOptions and then runs the steps."""
    monkeypatch.chdir(ROOT / "examples")
    out = tmp_path / "out"
    flags = ["--executor", "my_executor:PerToken", "--max-num-batched-tokens", "32", "--max-num-seqs", "4"]
    assert run(["run", jsonl(*rows(1)), *flags, "--save-tokens", "--out", str(out)]) == 0
    log = read_run(out)
    assert log.steps.source.unique().tolist() == ["per token"]
    assert log.tokens.token_id.tolist() == [7] * 12
    # Two chunks of the 40 prompt tokens, then 11 tokens one by one.
    assert log.summary["busy_time_s"] == pytest.approx(13 * 0.005 + 51 * 0.00004)


class TooEager:
    """An executor that samples for every row, also for a prompt that is not finished."""

    def __init__(self, options: Any) -> None:
        pass

    def run(self, plan: Any) -> Any:
        from servetwin.sim.contract import ModelRunnerOutput, StepResult

        ids = list(plan.num_scheduled_tokens)
        output = ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, [[3] for _ in ids])
        return StepResult(0, 1_000_000, output, "too eager")


def test_an_executor_must_not_sample_for_an_unfinished_prompt(
    jsonl: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a token would be taken for an answer: refused, with the request named."""
    import sys
    import types

    module = types.ModuleType("my_executors")
    module.TooEager = TooEager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_executors", module)
    flags = ["--executor", "my_executors:TooEager", "--max-num-batched-tokens", "32", "--max-num-seqs", "4"]
    assert run(["run", jsonl(*rows(1)), *flags, "--no-async-scheduling"]) == 2
    assert "sampled for request 'q0', which has 8 known tokens left to compute" in capsys.readouterr().err


# ---------------------------------------------------------------- decide


def test_decide_writes_the_recorded_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same lines in the file of -o and on stdout."""
    scenario = str(GOLDEN / "s05_prefix_shared.scenario.json")
    assert run(["decide", scenario, "-o", str(tmp_path / "d.jsonl")]) == 0
    assert run(["decide", scenario]) == 0
    assert capsys.readouterr().out == (tmp_path / "d.jsonl").read_text()


def scenario_file(tmp_path: Path, request: Row, **config: Any) -> str:
    path = tmp_path / "scenario.json"
    model = {"seed": 1, "vocab_size": 100, "eos_token_id": 7}
    path.write_text(json.dumps({"config": config, "model": model, "requests": [request]}))
    return str(path)


def test_decide_takes_the_corrected_rules(capsys: pytest.CaptureFixture[str]) -> None:
    """In s17 A is resumed with 88 hit tokens to the letter, and with the 64 that were computed when corrected."""
    resumed = {}
    for compat in ("exact", "safe"):
        assert (
            run(
                ["decide", str(GOLDEN / "s17_priority_uncomputed_hit.scenario.json"), "--vllm-compat", compat]
            )
            == 0
        )
        rows = [row for line in capsys.readouterr().out.splitlines() for row in json.loads(line)["sched"]]
        resumed[compat] = [row[3] for row in rows if row[:2] == ["A", "R"]]
    assert resumed == {"exact": [88], "safe": [64]}


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({}, {"num_gpu_blocks": 5}, "below max_model_len 512"),
        ({"max_tokens": 0}, {}, "requests.0.max_tokens 0"),
        ({"max_tokens": "many"}, {}, "requests.0.max_tokens 'many'"),
        ({"arrival_step": None}, {}, "request 'a': arrival_step is missing"),
        ({"prompt_segments": [["p", "x", 0, 512]]}, {}, "request 'a': prompt of 512 tokens leaves no room"),
        ({"min_tokens": 90, "max_tokens": 90}, {"max_model_len": 64}, "min_tokens 90 cannot be reached"),
        ({"unknown": 1}, {}, "requests.0.unknown"),
        ({}, {"enable_chunked_prefill": False}, "without chunked prefill"),
        ({}, {"max_num_batched_tokens": 8}, "below max_num_seqs 16"),
        ({"prompt_segments": [["p", "x", 0, 0]]}, {}, "requests.0: the prompt is empty"),
        ({"prompt_segments": [["p", "x", 0, 10**12]]}, {}, "prompt of 1000000000000 tokens leaves no room"),
        ({"id": "\u00c4"}, {}, "requests.0.id"),
        (
            {},
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "max_num_scheduled_tokens": 8},
            "max_num_scheduled_tokens 8 is below max_model_len 512",
        ),
        (
            {},
            {"max_num_scheduled_tokens": 300},
            "max_num_scheduled_tokens 300 is above max_num_batched_tokens 256",
        ),
        (
            {},
            {"async_scheduling": True, "spec": {"method": "ngram", "num_speculative_tokens": 2}},
            "async_scheduling does not go with speculative method 'ngram'",
        ),
        ({}, {"spec": {"method": "medusa", "num_speculative_tokens": 2}}, "config.spec.method 'medusa'"),
        ({}, {"policy": "lifo"}, "config.policy 'lifo'"),
    ],
)
def test_decide_refuses_what_can_never_run(
    change: Row, config: Row, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the field and the value, exit code 2, nothing written."""
    request = {"id": "a", "prompt_segments": [["p", "x", 0, 20]], "max_tokens": 5, "arrival_step": 0} | change
    out = tmp_path / "d.jsonl"
    assert run(["decide", scenario_file(tmp_path, request, **config), "-o", str(out)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not out.exists()


# ---------------------------------------------------------------- refusals of run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--executor", "constant"], "--step-time-s"),
        ([*CONSTANT[:3], "0"], "--step-time-s 0.0"),
        ([*CONSTANT[:3], "1e-10"], "must be between 1e-09 and 86400 seconds"),
        ([*CONSTANT[:3], "inf"], "--step-time-s inf must be between"),
        ([*CONSTANT[:3], "nan"], "--step-time-s nan must be between"),
        (["--executor", "os:getcwd"], "cannot be called with ExecutorOptions"),
        ([*CONSTANT[:3], "soon"], "soon"),
        ([*CONSTANT, "--max-num-sekvs", "3"], "--max-num-sekvs"),
        ([*CONSTANT, "--max-num-seqs", "many"], "'many' is not a whole number"),
        ([*CONSTANT, "--max-num-seqs", "0"], "max_num_seqs 0"),
        ([*CONSTANT, "--block-size", "-1"], "block_size -1"),
        ([*CONSTANT, "--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "below max_num_seqs 64"),
        ([*CONSTANT, "--num-gpu-blocks-override", "4", "--max-model-len", "256"], "below max_model_len 256"),
        ([*CONSTANT, "--async-scheduling", *NGRAM], "--async-scheduling: the ngram drafter needs the tokens"),
        (
            [*CONSTANT, *NGRAM[:2], "--no-async-scheduling"],
            "--speculative-config needs --draft-acceptance-rate, from 0 to 1 (no model verifies drafts); it is missing",
        ),
        ([*CONSTANT, *NGRAM[2:]], "--draft-acceptance-rate has no effect without --speculative-config"),
        ([*CONSTANT, "--speculative-config", "ngram"], "--speculative-config is no JSON"),
        (
            [*CONSTANT, "--vllm-compat", "0.23"],
            "--vllm-compat '0.23' is not known; allowed: exact, safe, 0.22",
        ),
        (
            [*CONSTANT, "--reset-prefix-cache-at", "-1"],
            "--reset-prefix-cache-at -1.0 must be seconds, 0 or more",
        ),
        ([*CONSTANT, "--dtype", "bfloat16"], "--dtype has no effect"),
        ([*CONSTANT, "--temperature", "1"], "have no effect with --executor constant"),
        ([*CONSTANT, "--save-plans"], "need --out"),
        ([*CONSTANT, "--num-prompts", "7"], "--num-prompts 7: must be at most 6"),
        ([*CONSTANT, "--request-rate", "3"], "--request-rate 3.0: cannot change the times that"),
        ([*CONSTANT, "--request-rate", "0"], "--request-rate 0.0: must be a number above 0, or infinite"),
        ([*CONSTANT, "--burstiness", "2"], "--burstiness goes with --request-rate or --ramp-up-strategy"),
        (
            [*CONSTANT, "--ramp-up-end-rps", "2"],
            "--ramp-up-end-rps needs --ramp-up-strategy, --ramp-up-start-rps",
        ),
        ([*CONSTANT, "--dataset-name", "random"], "stands in the place of WORKLOAD"),
        ([*CONSTANT, "--random-input-len", "5"], "--random-input-len goes with --dataset-name random"),
        ([*CONSTANT, "--loop", "closed"], "--loop 'closed': no request has a session_id"),
        ([*CONSTANT, "--columns", "prompt_tokens"], "--columns 'prompt_tokens' must be field=name"),
        ([*CONSTANT, "--window", "1"], "--window '1' must be START:END in seconds"),
        ([*CONSTANT, "--window", "1:2"], "window_s (--window) has no use for the format servetwin jsonl"),
        ([*CONSTANT, "--tokenizer", "/nowhere"], "--tokenizer /nowhere: there is no tokenizer.json"),
        ([*CONSTANT, "--trace-format", "nope"], "--trace-format 'nope': must be one of azure, mooncake"),
        ([*CONSTANT, "--num-prompts", "0"], "--num-prompts 0: must be a whole number, 1 or more"),
        ([], "--executor is missing: torch"),
        ([*CONSTANT, "--metric-defs", "mine"], "mine"),
        ([*CONSTANT, "--scheduling-policy", "lifo"], "lifo"),
        (
            ["--executor", "nonsense"],
            "--executor 'nonsense' is not known; allowed: constant (with --step-time-s), roofline (with --gpu), "
            "the file or folder of a profile, a shipped profile (epyc-2cpu-llama-10m, epyc-2cpu-llama-44m), "
            "recorded:RUN, torch",
        ),
        (["--executor", "json:nothing"], "has no attribute 'nothing'"),
        (["--executor", "no.such.module:x"], "needs the module 'no'"),
        ([*CONSTANT, "--model", "/nowhere"], "/nowhere/config.json: No such file"),
        ([*CONSTANT, "--gpu-memory-utilization", "0.5"], "--gpu-memory-utilization has no effect"),
        ([*CONSTANT, "--zero-fresh-blocks"], "--zero-fresh-blocks has no effect"),
        ([*CONSTANT, "--compile"], "--compile has no effect"),
        ([*CONSTANT, "--max-concurrency", "0"], "--max-concurrency 0: must be a whole number, 1 or more"),
        (["--live"], "needs --model"),
        ([*CONSTANT, "--live"], "--live goes with --executor torch only, got constant"),
        (["--live", "--max-concurrency", "0"], "--max-concurrency 0: must be a whole number, 1 or more"),
        (["--live", "--reset-prefix-cache-at", "1"], "goes with simulated time only"),
        (["--live", "--step-time-s", "1"], "--step-time-s has no effect with --live"),
        (
            [*TORCH, "--speculative-config", '{"method": "eagle", "num_speculative_tokens": 2}'],
            "--executor torch cannot draft with method eagle; allowed: torch with method ngram",
        ),
        ([*TORCH, *NGRAM[:2], "--draft-acceptance-rate", "1"], "--draft-acceptance-rate goes with modelled"),
        (
            [
                *CONSTANT,
                "--speculative-config",
                '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 6, "prompt_lookup_max": 4}',
            ],
            "prompt_lookup_min 6 is above prompt_lookup_max 4",
        ),
    ],
)
def test_run_refuses_with_one_line(
    arguments: list[str],
    message: str,
    jsonl: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, one line on stderr that names flag and value, and no folder."""
    out = tmp_path / "out"
    extra = [] if "--save-plans" in arguments else ["--out", str(out)]
    assert run(["run", jsonl(*rows()), *arguments, *extra]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out
    assert not out.exists()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt_tokens": -3}, "row 3.*prompt_tokens.*-3"),
        ({"output_tokens": "x"}, "row 3.*output_tokens.*'x'"),
        ({"arrival_s": None}, "row 3.*arrival_s"),
        ({"arrival_s": 1e300}, "row 3.*arrival_s 1e\\+300"),
        ({"abort_s": 1e10}, "row 3.*abort_s 1e\\+10|row 3.*abort_s 10000000000"),
        ({"priority": 2**63}, "row 3.*priority 9223372036854775808"),
        ({"prompt_tokens": 2**64 - 1}, "row 3.*prompt_tokens 18446744073709551615"),
        ({"stop_token_ids": [2**40]}, "row 3.*stop_token_ids"),
        ({"speed": 1}, "row 3.*speed"),
        ({"request_id": "q0"}, "row 3.*request_id.*q0"),
    ],
)
def test_a_damaged_row_is_named(
    row: Row, message: str, jsonl: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row number, field and value; exit code 2; no folder."""
    damaged = rows(4)
    damaged[2] |= row
    assert run(["run", jsonl(*damaged), *CONSTANT, "--out", str(tmp_path / "out")]) == 2
    assert_matches(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def assert_matches(pattern: str, text: str) -> None:
    import re

    assert re.search(pattern, text), text


def test_a_folder_with_something_in_it_is_left_alone(jsonl: Callable[..., str], tmp_path: Path) -> None:
    """--overwrite replaces a run, and nothing but a run."""
    out = served(tmp_path, jsonl(*rows(2)))
    flags = ["run", jsonl(*rows(3)), *CONSTANT, "--out"]
    assert run([*flags, str(out)]) == 2
    assert len(read_run(out).requests) == 2
    assert run([*flags, str(out), "--overwrite"]) == 0
    assert len(read_run(out).requests) == 3
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter1.txt").write_text("...")
    assert run([*flags, str(precious), "--overwrite"]) == 2
    assert [p.name for p in precious.iterdir()] == ["chapter1.txt"]


BAD_POLICY = """
from servetwin.sim.policy import FCFS

class Bad(FCFS):
    def order_key(self, request, now):
        return (request.arrival_s,)
"""


def test_an_error_in_a_policy_is_one_line_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The person who wrote it wants file and line, and exit code 1: the command line was right."""
    (tmp_path / "bad_policy.py").write_text(BAD_POLICY)
    monkeypatch.chdir(tmp_path)
    assert run(["run", "chat", "--num-prompts", "3", *CONSTANT, "--scheduling-policy", "bad_policy:Bad"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("servetwin: the scheduling policy bad_policy:Bad raised AttributeError")
    assert "bad_policy.py, line 6, in order_key" in said


@pytest.mark.parametrize(
    ("policy", "note"),
    [
        ("fair", "no request has a client_id"),
        ("priority", "all priorities are equal"),
        ("sjf", "no request has predicted_output_tokens"),
    ],
)
def test_a_policy_without_anything_to_go_by_is_said(
    policy: str, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", "chat", "--num-prompts", "3", *CONSTANT, "--scheduling-policy", policy]) == 0
    assert f"note: {note}" in capsys.readouterr().err


def test_a_flag_of_vllm_that_is_none_of_ours_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, hint in [
        ("--max-num-partial-prefills", "It would do nothing"),
        ("--host", "inside --vllm-args"),
    ]:
        assert run(["run", "chat", *CONSTANT, flag, "2"]) == 2
        assert hint in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["--async-scheduling", "--no-async-scheduling"])
def test_drafts_that_are_always_right_are_all_accepted(
    mode: str, jsonl: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is dropped behind the last token, and whatever ran in vain for a request that had ended."""
    drafting = ["--speculative-config", '{"method": "eagle", "num_speculative_tokens": 3}']
    row = {"request_id": "r", "arrival_s": 0, "prompt_tokens": 5, "output_tokens": 11}
    arguments = ["run", jsonl(row), *CONSTANT, mode, *drafting, "--draft-acceptance-rate", "1", "--json"]
    assert run(arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["spec_decode_acceptance_rate"] == 100
    assert summary["spec_decode_num_drafts"] * 3 == summary["spec_decode_draft_tokens"]


def test_a_request_whose_drafter_can_never_have_its_slots_is_refused(
    jsonl: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Admitted, it would preempt itself for ever; the other request is served."""
    limits = "--block-size 2 --num-gpu-blocks-override 10 --max-model-len 19 --max-num-seqs 3"
    limits += " --max-num-batched-tokens 4"
    drafting = ["--speculative-config", '{"method": "eagle", "num_speculative_tokens": 6}']
    two = [
        {"request_id": "bad", "arrival_s": 0, "prompt_tokens": 12, "output_tokens": 7},
        {"request_id": "good", "arrival_s": 0, "prompt_tokens": 4, "output_tokens": 3},
    ]
    assert (
        run(
            [
                "run",
                jsonl(*two),
                *CONSTANT,
                *limits.split(),
                *drafting,
                "--draft-acceptance-rate",
                "0.7",
                "--json",
            ]
        )
        == 0
    )
    said = capsys.readouterr()
    assert json.loads(said.out)["servetwin"]["requests"] == {"length": 1, "refused": 1} | {
        k: 0 for k in json.loads(said.out)["servetwin"]["requests"] if k not in ("length", "refused")
    }
    assert "bad: prompt of 12 and output of 7 tokens and 6 slots for the drafter need 10 blocks" in said.err


UNORDERED = """
from servetwin.sim.policy import FCFS

class Unordered(FCFS):
    def order_key(self, request, now):
        return (None if request.request_id.endswith("1") else 1,)

class Number(FCFS):
    def order_key(self, request, now):
        return request.arrival_ns
"""


@pytest.mark.parametrize(
    ("name", "code", "message"), [("Unordered", 1, "cannot be compared"), ("Number", 2, "not a tuple")]
)
def test_keys_that_are_no_keys_are_one_line(
    name: str,
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "odd_policies.py").write_text(UNORDERED)
    monkeypatch.chdir(tmp_path)
    rate = ["--request-rate", "1000", "--max-num-seqs", "1"]
    policy = ["--scheduling-policy", f"odd_policies:{name}"]
    assert run(["run", "chat", "--num-prompts", "9", *rate, *CONSTANT, *policy]) == code
    assert message in capsys.readouterr().err.splitlines()[-1]


# ---------------------------------------------------------------- how requests are sent


def summary_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The --json of a run with the constant executor."""
    pool = ["--num-gpu-blocks-override", "4000", "--max-model-len", "8192"]
    assert run(["run", *arguments, *CONSTANT, *pool, "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def test_a_dataset_stands_in_for_a_workload(capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM's flags and defaults; without a rate all at once, with one the exact duration."""
    random = ["--dataset-name", "random", "--num-prompts", "20"]
    at_once = summary_of(capsys, *random)
    assert (at_once["total_input_tokens"], at_once["total_output_tokens"]) == (20 * 1024, 20 * 128)
    assert at_once["max_concurrent_requests"] == 20
    paced = summary_of(
        capsys, *random, "--random-input-len", "100", "--request-rate", "2", "--burstiness", "inf"
    )
    assert paced["total_input_tokens"] == 2000
    assert paced["duration"] == pytest.approx(10 - 0.5 + 1.28, abs=0.05)
    repeated = summary_of(
        capsys, "--dataset-name", "prefix_repetition", "--num-prompts", "10", "--prefix-repetition-num-prefixes", "1",
        "--request-rate", "1",
    )  # fmt: skip
    assert repeated["servetwin"]["cached_prompt_tokens"] == 9 * 256


def test_a_limit_of_the_client_is_shown_apart(
    jsonl: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What it held back stands beside the latencies, which count from the sending."""
    assert run(["run", jsonl(*rows()), *CONSTANT, *SMALL, *POOL, "--max-concurrency", "1"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "held back",
        "TTFT from arrival",
        "E2E from arrival",
        "= first_token - sent",
        "= sent - arrival",
    ):
        assert words in shown


def test_what_misleads_in_recorded_times_is_said_once_unless_asked_not_to(
    jsonl: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the whole trace, also where its first requests alone are sent; run.json has it in any case."""
    coarse = [row | {"arrival_s": 3.0 * (i // 4) + (1000 if i else 0)} for i, row in enumerate(rows(120))]
    trace = jsonl(*coarse)
    loud = read_run(served(tmp_path, trace, "--num-prompts", "5", name="loud"))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert [line.removeprefix("warning: ") for line in said] == loud.header["workload"]["warnings"]
    for line, words in zip(said, ("31 instants, 3 s apart", "idle head: the first"), strict=True):
        assert words in line
    quiet = read_run(served(tmp_path, trace, "--num-prompts", "5", "--no-trace-warnings", name="quiet"))
    assert "warning" not in capsys.readouterr().err
    assert quiet.header["workload"]["warnings"] == loud.header["workload"]["warnings"]


def test_prefixes_that_some_requests_do_not_tell_are_said(
    jsonl: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = rows(2, prefix_ids=[1, 2, 3], prefix_block_tokens=16)
    served(tmp_path, jsonl(*told, *rows(6)[2:]))
    assert "prefix reuse: known for 2 of 6 requests" in capsys.readouterr().err
    served(tmp_path, jsonl(*told), name="all")
    assert "prefix reuse" not in capsys.readouterr().err


def test_a_rate_of_a_trace_with_sessions_is_of_sessions(
    jsonl: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [
        row | {"session_id": f"s{i // 2}", "turn": i % 2, "think_time_s": 1.0}
        for i, row in enumerate(rows(6))
    ]
    for turn in turns:
        del turn["arrival_s"]
    served(tmp_path, jsonl(*turns), "--request-rate", "2", "--burstiness", "inf")
    err = capsys.readouterr().err
    assert "the rate asked for is in sessions/s, later turns not counted: 3 sessions, 6 requests" in err


def test_sessions_wait_for_their_answers_unless_told_otherwise(
    jsonl: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """run.json says which; a run folder is a workload again, and gives the same log."""
    turns = jsonl(
        {"request_id": "0", "arrival_s": 0, "prompt_tokens": 20, "output_tokens": 9, "session_id": "s", "turn": 0},
        {"request_id": "1", "arrival_s": 9, "prompt_tokens": 40, "output_tokens": 2, "session_id": "s", "turn": 1,
         "think_time_s": 1, "context_tokens": 29},
    )  # fmt: skip
    closed = read_run(served(tmp_path, turns))
    assert closed.header["workload"]["loop"] == "closed"
    assert closed.requests.arrival_s.tolist() == pytest.approx([0, 1.09])
    assert closed.requests.cached_tokens.tolist() == [0, 16]
    assert tables_equal(closed, read_run(served(tmp_path, str(closed.path), name="again")))
    opened = read_run(served(tmp_path, turns, "--loop", "open", name="open"))
    assert opened.header["workload"]["loop"] == "open"
    assert opened.requests.arrival_s.tolist() == [0, 9]
    capsys.readouterr()
