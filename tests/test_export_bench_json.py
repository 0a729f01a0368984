"""`servetwin export bench-json`: the keys and units of `vllm bench serve`, the numbers of the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported_runs import mixed_run

from servetwin.sim.cli import run
from servetwin.sim.export import bench_json as module
from servetwin.sim.runs import Run, read_run
from servetwin.sim.validation.read_measured import read_measured
from servetwin.workloads import read_trace

HEADER = [
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
]
TOTALS = [
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "rtfx",
]
STATISTICS = [
    f"{s}_{m}_ms" for m in ("ttft", "tpot", "itl", "e2el") for s in ("mean", "median", "std", "p99")
]
DETAILS = ["input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """With its tokens, so that every time can be checked."""
    return mixed_run(tmp_path_factory.mktemp("bench") / "run", "--save-tokens")


def exported(log: Run, capsysbinary: pytest.CaptureFixture[bytes], *flags: str) -> dict[str, Any]:
    capsysbinary.readouterr()
    assert run(["export", "bench-json", str(log.path), "-o", "-", *flags]) == 0
    result: dict[str, Any] = json.loads(capsysbinary.readouterr().out)
    return result


def test_it_has_exactly_the_keys_of_vllm(log: Run, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert sorted(exported(log, capsysbinary)) == sorted([*HEADER, *TOTALS, *STATISTICS, *DETAILS])
    assert sorted(exported(log, capsysbinary, "--no-detailed")) == sorted([*HEADER, *TOTALS, *STATISTICS])


def test_scalars_are_those_of_the_tokens_in_ms(log: Run, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """Computed from the table of tokens alone, with numpy's own functions."""
    found = exported(log, capsysbinary, "--metric-percentiles", "50,99.9")
    table = log.requests.set_index("request_id")
    done = table[table.finish_reason == "length"]
    tokens = {name: t.time_s.to_numpy() for name, t in log.tokens.groupby("request_id") if name in done.index}
    ttfts = np.array([1000 * (tokens[i][0] - done.arrival_s[i]) for i in done.index])
    e2els = np.array([1000 * (tokens[i][-1] - done.arrival_s[i]) for i in done.index])
    tpots = np.array([1000 * (t[-1] - t[0]) / (len(t) - 1) for t in tokens.values() if len(t) > 1])
    itls = np.concatenate([1000 * np.diff(t) for t in tokens.values()])
    for name, samples in (("ttft", ttfts), ("tpot", tpots), ("itl", itls), ("e2el", e2els)):
        assert found[f"mean_{name}_ms"] == pytest.approx(samples.mean())
        assert found[f"median_{name}_ms"] == found[f"p50_{name}_ms"] == pytest.approx(np.median(samples))
        assert found[f"std_{name}_ms"] == pytest.approx(samples.std(ddof=0))
        assert found[f"p99.9_{name}_ms"] == pytest.approx(np.percentile(samples, 99.9))
        assert f"p99_{name}_ms" not in found
    duration = max(t[-1] for t in tokens.values()) - table.arrival_s.min()
    assert found["duration"] == pytest.approx(duration)
    assert found["completed"] == len(done) and found["failed"] == len(table) - len(done) > 4
    assert found["total_input_tokens"] == done.num_prompt_tokens.sum()
    assert found["total_output_tokens"] == sum(map(len, tokens.values()))
    assert found["request_throughput"] == pytest.approx(len(done) / duration)
    assert found["num_prompts"] == len(table) == 60


def test_arrays_are_those_of_the_tokens_in_seconds(
    log: Run, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    found = exported(log, capsysbinary)
    assert {len(found[name]) for name in DETAILS} == {60}
    assert log.requests.preemptions.sum() > 5, "gaps over several steps are what this is about"
    tokens = {name: t.time_s.to_numpy() for name, t in log.tokens.groupby("request_id")}
    for place, row in enumerate(log.requests.itertuples()):
        entry = {name: found[name][place] for name in DETAILS}
        assert entry["input_lens"] == row.num_prompt_tokens and entry["generated_texts"] == ""
        assert entry["start_times"] == pytest.approx(row.arrival_s, abs=1e-9)
        if row.finish_reason != "length":
            assert (entry["output_lens"], entry["ttfts"], entry["itls"]) == (0, 0, [])
            assert entry["errors"] == row.finish_reason
            continue
        times = tokens[row.request_id]
        assert entry["output_lens"] == len(times) and entry["errors"] == ""
        assert entry["ttfts"] == pytest.approx(times[0] - row.arrival_s)
        assert entry["itls"] == pytest.approx(np.diff(times), abs=1e-9)
        assert sum(entry["itls"]) == pytest.approx(row.last_token_s - row.first_token_s, abs=1e-9)


def test_arrays_of_many_requests_come_in_pieces(
    log: Run, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = exported(log, capsysbinary)
    for rows in (1, 7, 30, 60):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", rows)
        assert exported(log, capsysbinary) == whole


def test_our_readers_read_it_back(log: Run, tmp_path: Path) -> None:
    """As a workload, and as a measured run."""
    out = tmp_path / "result.json"
    assert run(["export", "bench-json", str(log.path), "-o", str(out)]) == 0
    done = log.requests[log.requests.finish_reason == "length"]
    measured = read_measured(out)
    origin = log.requests.arrival_s.min()
    for name in ("arrival_s", "first_token_s", "last_token_s"):
        assert measured.requests[name].to_numpy() == pytest.approx(done[name].to_numpy() - origin, abs=1e-9)
    assert measured.requests.output_tokens.tolist() == done.num_output_tokens.tolist()
    assert measured.gaps is not None
    lengths, counts = log.gap_lengths
    assert measured.gaps.values.tolist() == lengths.tolist()
    assert np.diff(measured.gaps.cumulative, prepend=0).tolist() == counts.tolist()
    trace = read_trace(out)
    assert "bench" in trace.format
    assert [r.prompt_tokens for r in trace.requests] == done.num_prompt_tokens.tolist()
    assert [r.arrival_s for r in trace.requests] == pytest.approx(
        (done.arrival_s - done.arrival_s.min()).tolist()
    )


def test_what_was_asked_for_stands_in_the_header(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    load = [
        "--dataset-name",
        "random",
        "--random-input-len",
        "20",
        "--random-output-len",
        "4",
        "--num-prompts",
        "20",
    ]
    engine = ["--executor", "constant", "--step-time-s", "0.01", "--max-concurrency", "3"]
    rate = ["--request-rate", "7.5", "--burstiness", "0.5"]
    assert run(["run", *load, *engine, *rate, "--out", str(tmp_path / "a")]) == 0
    flags = [
        "--label",
        "mine",
        "--metadata",
        "gpu=none",
        "--goodput",
        "ttft:100000",
        "--goodput",
        "e2el:100000",
    ]
    found = exported(read_run(tmp_path / "a"), capsysbinary, *flags)
    assert (found["request_rate"], found["burstiness"], found["max_concurrency"]) == (7.5, 0.5, 3)
    assert (found["label"], found["gpu"]) == ("mine", "none")
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert run(["run", *load, *engine, "--out", str(tmp_path / "b")]) == 0
    assert exported(read_run(tmp_path / "b"), capsysbinary)["request_rate"] == "inf"


def test_a_request_that_was_held_back_counts_from_its_sending(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    log = mixed_run(tmp_path / "run", "--max-concurrency", "2")
    found, table = exported(log, capsysbinary), log.requests
    assert found["start_times"] == pytest.approx(table.sent_s.tolist())
    assert (table.sent_s > table.arrival_s + 0.1).any()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--metric-percentiles", "50,x"], "--metric-percentiles '50,x': must be numbers"),
        (["--metric-percentiles", "101"], "must be numbers from 0 to 100"),
        (["--goodput", "itl:5"], "--goodput 'itl:5': must be NAME:MS"),
        (["--metadata", "gpu"], "--metadata 'gpu': must be KEY=VALUE"),
        (["--metadata", "duration=3"], "metadata 'duration' is a key of the result itself"),
        (["--metadata", "mean_ttft_ms=3"], "metadata 'mean_ttft_ms' is a key of the result itself"),
        (["--metadata", "ttfts=3"], "metadata 'ttfts' is a key of the result itself"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    log: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    out = tmp_path / "result.json"
    assert run(["export", "bench-json", str(log.path), "-o", str(out), *flags]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not [*tmp_path.iterdir()]


def test_outputs_are_refused_where_they_cannot_go(
    log: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").write_text("mine")
    for target, said in (
        (tmp_path / "there", "exists; --overwrite replaces it"),
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "file", "its folder does not exist"),
        ("--overwrite", "must be the name of a file"),
    ):
        assert run(["export", "bench-json", str(log.path), "-o", str(target)]) == 2
        assert said in capsys.readouterr().err
    assert (tmp_path / "there").read_text() == "mine"
    assert run(["export", "bench-json", str(log.path), "-o", str(tmp_path / "there"), "--overwrite"]) == 0
    assert json.loads((tmp_path / "there").read_text())["num_prompts"] == 60


def test_damaged_folders_are_told_in_one_line(
    log: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(log.path, folder)
    (folder / "steps" / "00000.parquet").write_bytes(b"no parquet")
    out = tmp_path / "result.json"
    for path, said in ((folder, "damaged part"), (tmp_path / "none", "is not a run folder")):
        assert run(["export", "bench-json", str(path), "-o", str(out)]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1 and not out.exists()
