"""`servetwin fit`, `servetwin validate`, and the executors that take step times from measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from kernel_folders import write_csv, write_model, write_skew, write_tables

from servetwin.sim.cli import run
from servetwin.sim.runs import read_run
from servetwin.sim.steptime.fit import fit_tables
from servetwin.sim.steptime.host_times import HostTimes
from servetwin.sim.steptime.profiles import load_profile, write_profile
from servetwin.sim.steptime.step_regression import StepRegression
from servetwin.sim.steptime.steps_profile import StepsProfile
from servetwin.sim.tables import differences
from servetwin.sim.validation.comparison import compare_curves
from servetwin.sim.validation.read_measured import read_measured
from servetwin.sim.validation.step_errors import measured_steps

ENGINE = ["--num-gpu-blocks-override", "400", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs one command line; gives its exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    return write_tables(tmp_path / "tables")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """Forty requests, some of which begin alike, in an engine that is busy but not overrun."""
    random = np.random.default_rng(3)
    path, time_s = tmp_path / "workload.jsonl", 0.0
    with path.open("w", encoding="utf-8") as file:
        for i in range(40):
            time_s += float(random.exponential(0.02))
            prompt = int(random.integers(30, 300))
            row = {
                "request_id": f"r{i}",
                "arrival_s": round(time_s, 6),
                "prompt_tokens": prompt,
                "output_tokens": int(random.integers(2, 40)),
                "prefix_ids": [i % 4, *range(1000 * i + 10, 1000 * i + 9 + -(-prompt // 16))],
                "prefix_block_tokens": 16,
            }
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture
def measured(tmp_path: Path, command: Command, workload: Path, tables: Path, model: Path) -> Path:
    """A run folder, "measured" with these tables."""
    out = tmp_path / "measured"
    arguments = ["--executor", tables, "--model", model, *ENGINE, "--out", out]
    assert command("run", workload, *arguments)[0] == 0
    return out


def compared(
    command: Command, path: Path, tables: Path, model: Path, *more: object
) -> tuple[int, dict[str, Any]]:
    code, out, err = command(
        "validate", path, "--profile", tables, "--model", model, "--noise-runs", 0, "--json", *more
    )
    assert out, err
    return code, json.loads(out)


def as_request_lines(folder: Path, run_folder: Path, *, delay_s: float = 0.0) -> Path:
    """The requests of a run as LLMServingSim writes measured ones: two clocks, and columns of its own."""
    folder.mkdir()
    rows = []
    for r in read_run(run_folder).requests.itertuples():
        engine_clock = 5_000.0 + delay_s
        rows.append(
            {
                "request_id": r.request_id,
                "input_toks": r.num_prompt_tokens,
                "output_toks": r.num_output_tokens,
                "arrival_time": 1.7e9 + r.arrival_s,
                "queued_ts": engine_clock + r.queued_s,
                "scheduled_ts": engine_clock + r.first_scheduled_s,
                "first_token_ts": engine_clock + r.first_token_s,
                "last_token_ts": engine_clock + r.last_token_s,
            }
        )
    (folder / "requests.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)) + b"\n")
    meta = {
        "engine_kwargs": {"max_num_seqs": 8, "max_num_batched_tokens": 256},
        "kv_cache": {"num_gpu_blocks": 400},
    }
    (folder / "meta.json").write_bytes(orjson.dumps(meta))
    return folder


# ---------------------------------------------------------------- validate


def test_a_run_is_its_own_twin(command: Command, measured: Path, tables: Path, model: Path) -> None:
    """The same requests, engine and step times: not a nanosecond off."""
    code, found = compared(command, measured, tables, model)
    assert code == 0
    assert found["missed"] == []
    for name in ("ttft", "tpot", "e2e", "queue"):
        assert found["metrics"][name]["measured"] == pytest.approx(
            found["metrics"][name]["simulated"], abs=1e-9
        )
    assert found["calibrated"] is None
    assert found["curves"]["running"]["mean_absolute_error"] == 0
    assert found["engine"]["scheduler"]["max_num_seqs"] == 8
    assert found["totals"]["makespan_s"]["measured"] == pytest.approx(
        found["totals"]["makespan_s"]["simulated"]
    )


def test_slower_kernels_miss_the_threshold(
    command: Command, measured: Path, tmp_path: Path, model: Path
) -> None:
    """Exit code 4, and the metrics that miss it by name."""
    slow = scaled_tables(tmp_path, 1.3)
    code, found = compared(command, measured, slow, model, "--max-tpot-error", 10)
    assert code == 4
    assert "tpot" in found["missed"]
    assert found["metrics"]["tpot"]["error_percent"]["mean"] > 10


def test_the_factor_that_the_first_half_needs_is_found(
    command: Command, measured: Path, tmp_path: Path, model: Path
) -> None:
    """Dense operators 1.25 times as slow as those of the run: the factor is 0.8, and the second half agrees."""
    slow = scaled_tables(tmp_path, 1.25)
    saved = tmp_path / "calibrated.json"
    code, found = compared(
        command, measured, slow, model, "--calibrate", "first-half", "--save-profile", saved
    )
    assert code == 0
    assert found["calibrated"]["value"] == pytest.approx(0.8, abs=0.005)
    assert set(found["parts"]) == {"all requests", "first half (fitted to)", "second half (tested)"}
    second = found["parts"]["second half (tested)"]
    assert abs(second["tpot"]["error_percent"]["mean"]) < 0.5
    _, again = compared(command, measured, saved, model)
    assert again["metrics"] == found["metrics"]


def test_measured_lines_of_two_clocks(
    command: Command, measured: Path, tmp_path: Path, tables: Path, model: Path, workload: Path
) -> None:
    """Arrivals are of the client's clock; what is queued soonest says how the two lie."""
    lines = as_request_lines(tmp_path / "lines", measured)
    code, found = compared(command, lines, tables, model, "--workload", workload)
    assert code == 0
    assert found["source"] == "requests.jsonl"
    assert found["metrics"]["ttft"]["error_percent"]["mean"] == pytest.approx(0, abs=0.2)
    assert found["metrics"]["e2e"]["median_request_error_percent"] == pytest.approx(0, abs=0.2)


def test_without_its_workload_prompts_share_nothing(
    command: Command, measured: Path, tmp_path: Path, tables: Path, model: Path
) -> None:
    _, found = compared(command, as_request_lines(tmp_path / "lines", measured), tables, model)
    assert found["metrics"]["ttft"]["error_percent"]["mean"] > 0.2


def test_a_benchmark_result_says_no_queueing(
    command: Command, measured: Path, tmp_path: Path, tables: Path, model: Path
) -> None:
    requests = read_run(measured).requests.sort_values("arrival_s")
    result = {
        "input_lens": requests.num_prompt_tokens.tolist(),
        "output_lens": requests.num_output_tokens.tolist(),
        "start_times": (77.0 + requests.arrival_s).tolist(),
        "ttfts": (requests.first_token_s - requests.arrival_s).tolist(),
        "itls": [
            [last - first] for first, last in zip(requests.first_token_s, requests.last_token_s, strict=True)
        ],
    }
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(result))
    engine = ["--num-gpu-blocks-override", 400, "--max-num-seqs", 8, "--max-num-batched-tokens", 256]
    _, found = compared(command, path, tables, model, *engine)
    assert found["metrics"]["queue"]["measured"] is None
    assert found["metrics"]["tpot"]["measured"]["mean_s"] > 0
    assert found["curves"] == {}


def test_how_much_is_chance_is_told(command: Command, measured: Path, tables: Path, model: Path) -> None:
    """Two runs that differ in 3 % of noise on every step differ by far less in their means."""
    code, out, _ = command(
        "validate", measured, "--profile", tables, "--model", model, "--noise-runs", 2, "--json"
    )
    assert code == 0
    noise = json.loads(out)["noise_percent"]
    assert 0 < noise["tpot"] < 3


def test_the_report_for_people_has_units_and_formulas(
    command: Command, measured: Path, tables: Path, model: Path
) -> None:
    code, out, _ = command("validate", measured, "--profile", tables, "--model", model, "--noise-runs", 0)
    assert code == 0
    assert "TTFT = first token - queued" in out
    assert "passed" in out
    assert "load: " in out
    assert " ms" in out


def test_curves_are_compared_where_they_were_sampled(measured: Path) -> None:
    """At the measured instants, whatever steps lie between."""
    run_ = read_measured(measured)
    assert run_.curves is not None
    simulated = type("Simulated", (), {"curves": run_.curves})()
    shift_s, found = compare_curves(run_, simulated)
    assert shift_s == 0
    # Of steps that begin at one instant the last one counts.
    assert {name: curve.mean_absolute_error for name, curve in found.items()} == pytest.approx(
        {"running": 0, "waiting": 0, "kv_percent": 0}, abs=0.01
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrival_time": None}, "row 1: arrival_time None must be a number of seconds"),
        ({"input_toks": 0}, "row 1: input_toks 0 must be a whole number of tokens, 1 or more"),
        ({"output_toks": 2.5}, "row 1: output_toks 2.5 must be a whole number of tokens"),
        ({"first_token_ts": 1.0}, "request 'r0' has "),
        ({"queued_ts": "soon"}, "row 1: queued_ts 'soon' must be a number of seconds"),
    ],
)
def test_damaged_measurements_are_refused(
    command: Command,
    measured: Path,
    tmp_path: Path,
    tables: Path,
    model: Path,
    change: dict[str, Any],
    message: str,
) -> None:
    folder = as_request_lines(tmp_path / "lines", measured)
    lines = (folder / "requests.jsonl").read_bytes().splitlines()
    lines[0] = orjson.dumps(orjson.loads(lines[0]) | change)
    (folder / "requests.jsonl").write_bytes(b"\n".join(lines))
    code, _, err = command("validate", folder, "--profile", tables, "--model", model)
    assert code == 2
    assert message in err


def test_what_cannot_be_compared_is_refused_in_one_line(
    command: Command, measured: Path, tmp_path: Path, tables: Path, model: Path, workload: Path
) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text("".join(workload.read_text().splitlines(keepends=True)[:-1]))
    lines = as_request_lines(tmp_path / "lines", measured)
    for arguments, message in (
        ([tmp_path / "nothing"], "no such file or folder"),
        ([tables], "is neither a run folder"),
        ([lines, "--workload", short], "has 39 requests, the run 40; they are joined row by row"),
        ([measured, "--max-ttft-error", "0"], "--max-ttft-error 0.0: must be above 0"),
        ([measured, "--save-profile", "x.json"], "--save-profile goes with --calibrate first-half"),
        ([measured, "--noise-runs", "-1"], "--noise-runs -1: must be 0, or 2 and more"),
        ([measured, "--tensor-parallel-size", "2"], "--tensor-parallel-size 2: "),
        ([measured, "--num-gpu-blocks-override", "3"], "num_gpu_blocks 3"),
    ):
        code, _, err = command("validate", *arguments, "--profile", tables, "--model", model)
        assert code == 2, err
        assert message in err
        assert err.count("\n") == 1


# ---------------------------------------------------------------- step by step


def test_a_twin_agrees_in_every_step(command: Command, measured: Path, tables: Path, model: Path) -> None:
    _, found = compared(command, measured, tables, model)
    steps = read_run(measured).steps
    plans, regimes = found["plans"], found["steps_by_regime"]
    assert plans["parting"] is None
    assert plans["steps"] == [plans["agreeing_steps"]] * 2 == [int((steps.rows > 0).sum())] * 2
    assert plans["drift"]["largest_ms"] == 0
    inside = regimes["all"]["n"]
    assert inside + regimes.get("outside", {"n": 0})["n"] == plans["agreeing_steps"]
    assert all(errors["mape_percent"] == pytest.approx(0, abs=1e-6) for errors in regimes.values())
    # Like steps differ by what their contexts differ.
    assert 0 <= found["step_noise_percent"] < 3
    assert found["metrics"]["itl"]["measured"] == found["metrics"]["itl"]["simulated"]


def test_a_batch_is_foretold_as_it_was_measured(
    command: Command, measured: Path, tmp_path: Path, model: Path
) -> None:
    """Slower tables make other plans; the errors of the measured steps know nothing of that."""
    _, found = compared(command, measured, scaled_tables(tmp_path, 1.3), model, "--max-e2e-error", 99)
    assert found["plans"]["parting"]["kind"] == "arrival"
    assert found["plans"]["drift"]["last_ms"] > 0
    assert 10 < found["steps_by_regime"]["all"]["bias_percent"] < 30
    assert found["again"] is None


def test_the_report_for_people_goes_step_by_step(
    command: Command, measured: Path, tmp_path: Path, model: Path
) -> None:
    slow = scaled_tables(tmp_path, 1.3)
    _, out, _ = command("validate", measured, "--profile", slow, "--model", model, "--noise-runs", 0)
    said = " ".join(out.split())
    assert "Steps, one by one (the measured batch, foretold)" in said
    assert "plans agree for the first " in said
    assert " came " in said
    assert "ITL = gaps between successive outputs" in said
    assert "second run" not in said


def test_a_second_measured_run_stands_beside_each_error(
    command: Command, measured: Path, tmp_path: Path, tables: Path, model: Path, workload: Path
) -> None:
    """The same load on an engine a little slower; its requests stand in another order in its tables."""
    second = tmp_path / "second"
    arguments = ["--executor", scaled_tables(tmp_path, 1.1), "--model", model, *ENGINE, "--out", second]
    assert command("run", workload, *arguments)[0] == 0
    _, found = compared(command, measured, tables, model, "--again", second)
    again, first = found["again"], read_run(measured).requests.set_index("request_id")
    theirs = read_run(second).requests.set_index("request_id").loc[first.index]
    ratio = (theirs.last_token_s - theirs.queued_s).mean() / (first.last_token_s - first.queued_s).mean()
    assert again["difference_percent"]["e2e"]["mean"] == pytest.approx(100 * (ratio - 1))
    assert again["difference_percent"]["itl"]["mean"] > 2
    assert again["plans"]["parting"]["words"].count("the second run") == 1
    assert 2 < found["steps_by_regime"]["decode"]["again"]["bias_percent"] < 10
    assert found["metrics"]["e2e"]["error_percent"]["mean"] == 0
    command_line = ["validate", measured, "--profile", tables, "--model", model, "--noise-runs", 0]
    _, out, _ = command(*command_line, "--again", second)
    assert "put in the place of a model" in " ".join(out.split())
    assert "the two measured runs: plans agree for the first" in " ".join(out.split())


def test_a_second_run_of_another_load_is_refused(
    command: Command, measured: Path, tmp_path: Path, tables: Path, model: Path, workload: Path
) -> None:
    rows = [json.loads(line) for line in workload.read_text().splitlines()]
    rows[3]["prompt_tokens"] += 1
    for name, kept, message in (
        ("fewer", rows[:-1], "completed 39 requests, "),
        ("other", rows, "request 'r3' has a prompt of "),
    ):
        path, out = tmp_path / f"{name}.jsonl", tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        assert command("run", path, "--executor", tables, "--model", model, *ENGINE, "--out", out)[0] == 0
        code, _, err = command("validate", measured, "--profile", tables, "--model", model, "--again", out)
        assert code == 2
        assert message in err
        assert err.count("\n") == 1


def test_without_a_run_folder_there_are_no_steps(
    command: Command, measured: Path, tmp_path: Path, tables: Path, model: Path
) -> None:
    lines = as_request_lines(tmp_path / "lines", measured)
    _, found = compared(command, lines, tables, model, "--again", measured)
    assert found["plans"] is found["steps_by_regime"] is found["step_noise_percent"] is None
    assert "itl" not in found["metrics"]
    assert found["again"]["plans"] is None
    assert set(found["again"]["difference_percent"]) >= {"ttft", "tpot", "e2e"}


def test_an_engine_is_what_the_run_says_it_was(
    command: Command, tmp_path: Path, tables: Path, model: Path, workload: Path
) -> None:
    """Also its policy and its limit of long prompts, which no flag of `validate` names."""
    rows = [json.loads(line) for line in workload.read_text().splitlines()]
    path, out = tmp_path / "priorities.jsonl", tmp_path / "out"
    path.write_text("".join(json.dumps(row | {"priority": -place}) + "\n" for place, row in enumerate(rows)))
    engine = [*ENGINE, "--scheduling-policy", "priority", "--long-prefill-token-threshold", 64]
    assert command("run", path, "--executor", tables, "--model", model, *engine, "--out", out)[0] == 0
    _, found = compared(command, out, tables, model)
    assert found["plans"]["parting"] is None
    assert found["engine"]["scheduler"]["policy"] == "priority"


def test_answers_that_a_token_ended_end_so_again(
    command: Command, tmp_path: Path, tables: Path, model: Path, workload: Path
) -> None:
    """Asynchronous scheduling learns of a stop a step late, so the row is in flight once more."""
    rows = [json.loads(line) for line in workload.read_text().splitlines()]
    for row in rows[::2]:
        answer = [5] * (row["output_tokens"] - 1) + [9]
        row |= {"output_token_ids": answer, "stop_token_ids": [9], "output_tokens": len(answer) + 20}
    path, out = tmp_path / "stops.jsonl", tmp_path / "out"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--executor", tables, "--model", model, *ENGINE, "--async-scheduling", "--out", out]
    assert command("run", path, *arguments)[0] == 0
    assert set(read_run(out).requests.finish_reason) == {"length", "stop"}
    _, found = compared(command, out, tables, model)
    assert found["plans"]["parting"] is None


def test_a_profile_of_whole_steps_knows_the_host(
    command: Command, measured: Path, model: Path, tmp_path: Path
) -> None:
    """Its time around each step is in the simulation, that of preparing a batch among the errors, and apart from it the
    worker's time between two steps."""
    steps = measured_steps(read_run(measured))
    assert steps is not None
    regression = StepRegression.fit([replace(steps, prepare_us=0 * steps.device_us + 40)])
    host = HostTimes(
        schedule_base_ns=50_000, schedule_per_row_ns=0, schedule_per_new_ns=0, update_base_ns=30_000,
        update_per_row_ns=0, turnaround_ns=20_000, overlaps_preparation=False,
    )  # fmt: skip
    profile = StepsProfile(
        about={"device": "a machine"}, engine={}, sources=[], coverage={}, regression=regression, host=host, errors=[],
        untested=["prefill", "decode", "mixed"],
    )  # fmt: skip
    write_profile(profile, tmp_path / "whole.json")
    arguments = [
        "validate",
        measured,
        "--profile",
        tmp_path / "whole.json",
        "--model",
        model,
        "--noise-runs",
        0,
    ]
    _, out, _ = command(*arguments, "--json")
    found = json.loads(out)
    assert found["steps_by_regime"]["decode"]["mape_percent"] < 5
    # The simulated run that was measured took no time to prepare a batch.
    assert found["steps_by_regime"]["decode"]["prepare"] is None
    assert any("not calibrated" in line for line in found["assumed"])
    assert profile.step_model().prepare_ns(steps.features)[0] == pytest.approx(40_000, rel=0.01)


def test_requests_arrive_when_they_can_have_reached_the_engine(
    command: Command, measured: Path, tables: Path, model: Path
) -> None:
    """On the wall clock each was sent some time before: what all of them need is no wait."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    first = read_measured(measured).requests.arrival_s
    for part in (measured / "requests").iterdir():
        rows = pq.read_table(part, partitioning=None)
        place = rows.column_names.index("arrival_s")
        earlier = pc.subtract(rows["arrival_s"], 0.002)
        pq.write_table(rows.set_column(place, rows.schema.field(place), earlier), part)
    assert read_measured(measured).requests.arrival_s.tolist() == pytest.approx(first.tolist(), abs=1e-12)
    _, found = compared(command, measured, tables, model)
    assert found["plans"]["parting"] is None


def test_itl_of_a_benchmark_result(
    command: Command, measured: Path, tmp_path: Path, tables: Path, model: Path
) -> None:
    """Its arrays of gaps, pooled."""
    requests = read_run(measured).requests.sort_values("arrival_s")
    spans = (requests.last_token_s - requests.first_token_s) / (requests.num_output_tokens - 1)
    gaps = [[s] * (n - 1) for s, n in zip(spans, requests.num_output_tokens, strict=True)]
    result = {
        "input_lens": requests.num_prompt_tokens.tolist(),
        "output_lens": requests.num_output_tokens.tolist(),
        "start_times": requests.arrival_s.tolist(),
        "ttfts": (requests.first_token_s - requests.arrival_s).tolist(),
        "itls": gaps,
    }
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(result))
    engine = ["--num-gpu-blocks-override", 400, "--max-num-seqs", 8, "--max-num-batched-tokens", 256]
    _, found = compared(command, path, tables, model, *engine)
    pooled = np.concatenate(gaps)
    itl = found["metrics"]["itl"]["measured"]
    assert itl["mean_s"] == pytest.approx(pooled.mean(), rel=1e-6)
    assert itl["p99_s"] == pytest.approx(np.percentile(pooled, 99), rel=1e-6)
    assert found["plans"] is None


# ---------------------------------------------------------------- fit and profiles


def scaled_tables(tmp_path: Path, factor: float) -> Path:
    """The tables with dense operators and head slower by `factor`."""
    import pandas as pd

    folder = write_tables(tmp_path / "slow")
    rows = pd.read_csv(folder / "dense.csv")
    rows["time_us"] *= factor
    write_csv(folder / "dense.csv", "layer,tokens,time_us", rows.itertuples(index=False))
    return folder


def test_fit_writes_a_profile_that_serves_as_the_tables_do(
    command: Command, tmp_path: Path, tables: Path, model: Path, workload: Path
) -> None:
    profile = tmp_path / "profile.json"
    write_skew(tables)
    code, out, _ = command("fit", tables, "-o", profile, "--json")
    assert code == 0
    report = json.loads(out)
    assert {e["of"] for e in report["errors"]} >= {"attention", "decode attention", "dense, each"}
    assert report["about"]["gpu"] == "made up"
    loaded, direct = load_profile(profile).times(), fit_tables(tables)
    assert loaded.attention_us(100, 30, 5, 400) == direct.attention_us(100, 30, 5, 400)
    assert loaded.dense_us("o_proj", 77) == direct.dense_us("o_proj", 77)
    runs = []
    for name, source in (("a", profile), ("b", tables)):
        arguments = ["--executor", source, "--model", model, *ENGINE, "--out", tmp_path / name]
        assert command("run", workload, *arguments)[0] == 0
        runs.append(read_run(tmp_path / name))
    assert differences(*runs) == []


def test_fit_keeps_what_is_there(command: Command, tmp_path: Path, tables: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text("mine")
    code, _, err = command("fit", tables, "-o", profile)
    assert (code, profile.read_text()) == (2, "mine")
    assert "exists; --overwrite replaces it" in err
    assert command("fit", tables, "-o", profile, "--overwrite")[0] == 0
    assert command("fit", tables, "-o", tmp_path / "no" / "p.json")[0] == 2


def test_fit_shows_the_errors_of_what_it_left_out(command: Command, tables: Path) -> None:
    code, out, _ = command("fit", tables)
    assert code == 0
    for word in (
        "every 4th row",
        "decode attention",
        "chunks of 64 tokens",
        "dense, each",
        "physics",
        "P99",
    ):
        assert word in out


@pytest.mark.parametrize("text", ["", "{}", '{"kind": "kernels"}', "[1]", "not JSON"])
def test_a_file_that_is_no_profile_is_refused(
    command: Command, tmp_path: Path, model: Path, workload: Path, text: str
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    code, _, err = command("run", workload, "--executor", path, "--model", model)
    assert code == 2
    assert "is no profile of `servetwin fit`" in err
    assert err.count("\n") <= 2


def test_a_run_with_a_profile_says_where_its_times_are_from(
    command: Command, tmp_path: Path, tables: Path, model: Path, workload: Path
) -> None:
    """In the summary and in run.json; steps outside the measured region are marked in the log and counted."""
    out = tmp_path / "out"
    long = tmp_path / "long.jsonl"
    row = {"request_id": "long", "arrival_s": 0, "prompt_tokens": 2000, "output_tokens": 3}
    long.write_text(json.dumps(row) + "\n")
    arguments = [
        "--executor",
        tables,
        "--model",
        model,
        "--num-gpu-blocks-override",
        "400",
        "--out",
        out,
        "--json",
    ]
    code, text, _ = command("run", long, *arguments)
    assert code == 0
    summary = json.loads(text)["servetwin"]
    assert "kernels measured on made up" in summary["notes"][0]
    assert summary["predicted_outside_steps"] > 0
    steps = read_run(out).steps
    assert steps.predicted_outside.sum() == summary["predicted_outside_steps"]


def test_flags_that_a_profile_cannot_heed_are_refused(
    command: Command, tables: Path, model: Path, workload: Path
) -> None:
    for more, message in (
        (["--dtype", "float32"], "--dtype has no effect with --executor"),
        (["--step-time-s", "1"], "--step-time-s has no effect with --executor"),
        (["--gpu", "H100"], "--gpu H100 has no effect with a profile on one card"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype goes with --executor roofline only"),
    ):
        code, _, err = command("run", workload, "--executor", tables, "--model", model, *more)
        assert code == 2
        assert message in err
    code, _, err = command("run", workload, "--executor", tables)
    assert code == 2
    assert "needs --model FOLDER" in err


# ---------------------------------------------------------------- recorded


@pytest.mark.parametrize("scheduling", ["--async-scheduling", "--no-async-scheduling"])
def test_a_run_with_recorded_times_is_the_same_run(
    command: Command, tmp_path: Path, tables: Path, model: Path, workload: Path, scheduling: str
) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    arguments = ["--model", model, *ENGINE, scheduling]
    assert command("run", workload, "--executor", tables, *arguments, "--out", first)[0] == 0
    assert command("run", first, "--executor", f"recorded:{first}", *arguments, "--out", again)[0] == 0
    assert differences(read_run(first), read_run(again)) == []
    assert set(read_run(again).steps.source) == {"recorded"}


def test_recorded_times_know_their_engine(
    command: Command, tmp_path: Path, measured: Path, model: Path
) -> None:
    """What is not given is as in the recorded run; what is, may not fit, and then the step is named."""
    out = tmp_path / "again"
    code, _, err = command(
        "run", measured, "--executor", f"recorded:{measured}", "--model", model, "--out", out
    )
    assert code == 0
    assert "max_num_seqs 8" in err
    assert differences(read_run(measured), read_run(out)) == []
    code, _, err = command(
        "run", measured, "--executor", f"recorded:{measured}", "--model", model, "--max-num-seqs", 2
    )
    assert code == 2
    assert "in the recorded run: its times fit the same requests on the same engine only" in err
    code, _, err = command("run", measured, "--executor", "recorded:nowhere")
    assert code == 2
    assert "nowhere is no folder" in err
