"""`servetwin sweep`: its table, what it refuses, what it never does twice, and that a kill loses nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from sweeping import CONSTANT, assert_same_table, lasting, started, write_workload

from servetwin.sim.cli import run
from servetwin.sim.commands.flag_names import spelled
from servetwin.sim.commands.flags import RunFlags, SimulationFlags
from servetwin.sim.planning import Study, read_results
from servetwin.sim.planning.backends import Processes
from servetwin.sim.planning.record import Record
from servetwin.sim.planning.results import by_point, half_widths
from servetwin.sim.planning.spec import RunSpec
from servetwin.sim.planning.worker import Task
from servetwin.sim.run_files import RunFolderError

PATIENCE_S = 60
GRID = ["--param", "max_num_seqs=2,8", "--param", "step_time_s=0.01,0.02"]


@pytest.fixture
def workload(tmp_path: Path) -> str:
    return str(write_workload(tmp_path / "workload.jsonl"))


def swept(out: Path, *arguments: str, code: int = 0) -> Path:
    assert run(["sweep", *arguments, "--out", str(out)]) == code
    return out


# ---------------------------------------------------------------- the table


def test_one_row_a_run_in_the_order_of_the_plan(tmp_path: Path, workload: str) -> None:
    """The last parameter changes fastest, then the seed; figures are those of `run` with the same flags."""
    out = swept(tmp_path / "out", workload, *CONSTANT, *GRID, "--seeds", "2", "--seed", "7", "--jobs", "1")
    results = read_results(out)
    frame = results.frame
    assert results.parameters == ("max_num_seqs", "step_time_s")
    assert results.complete
    assert frame.run.tolist() == [*range(8)]
    assert frame.point.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert frame.seed.tolist() == [7, 8] * 4
    assert frame.max_num_seqs.tolist() == [2] * 4 + [8] * 4
    assert frame.step_time_s.tolist() == [0.01, 0.01, 0.02, 0.02] * 2
    assert set(frame.state) == {"done"}
    assert frame.error.isna().all()
    one = tmp_path / "one"
    flags = ["--executor", "constant", "--step-time-s", "0.02", "--max-num-seqs", "8", "--seed", "8"]
    assert run(["run", workload, *flags, "--out", str(one)]) == 0
    summary = json.loads((one / "summary.json").read_text())
    last = frame.iloc[-1]
    assert last.p99_ttft_ms == summary["p99_ttft_ms"]
    assert last.p90_queue_ms == summary["servetwin"]["latency"]["queue_ms"]["p90"]
    assert last.requests_length == summary["servetwin"]["requests"]["length"] == 20
    assert last.kv_peak_used_fraction == summary["servetwin"]["kv_peak_used_fraction"]


def test_the_number_of_jobs_changes_nothing(tmp_path: Path, workload: str) -> None:
    """In this process, and in two others: identical tables."""
    arguments = [workload, *CONSTANT, *GRID, "--seeds", "2"]
    one = swept(tmp_path / "one", *arguments, "--jobs", "1")
    assert_same_table(one, swept(tmp_path / "two", *arguments, "--jobs", "2"))


def test_seeds_are_common_to_all_points(tmp_path: Path) -> None:
    """Two seeds draw two workloads; every point is given the same ones."""
    chat = ["chat", "--num-prompts", "20", "--request-rate", "20"]
    out = swept(
        tmp_path / "out", *chat, *CONSTANT, "--param", "max_num_seqs=64,128", "--seeds", "2", "--jobs", "1"
    )
    frame = read_results(out).frame
    tokens = frame.total_input_tokens.tolist()
    assert tokens[:2] == tokens[2:]
    assert tokens[0] != tokens[1]
    widths = half_widths(read_results(out))
    # Of two numbers a and b: t(0.975, 1 degree of freedom) x |a - b| / 2.
    assert widths.total_input_tokens.tolist() == pytest.approx(
        [12.7062 * abs(tokens[0] - tokens[1]) / 2] * 2, 1e-4
    )
    means = by_point(read_results(out))
    assert means.total_input_tokens.tolist() == [sum(tokens[:2]) / 2] * 2
    assert means.runs.tolist() == [2, 2]


def test_any_field_may_vary_also_the_workload_and_its_rate(tmp_path: Path, workload: str) -> None:
    """Values of every kind stand in the table as they are; none is no value."""
    other = str(write_workload(tmp_path / "other.jsonl", 10))
    parameters = [
        f"workload={workload},{other}",
        "rate_scale=1,2",
        "max_num_seqs=none,4",
        "enable_prefix_caching=true,false",
        "reset_prefix_cache_at=0.1 0.2",
    ]
    flags = [word for text in parameters[:4] for word in ("--param", text)]
    frame = read_results(swept(tmp_path / "out", *CONSTANT, *flags, "--jobs", "1")).frame
    assert frame.workload.tolist() == [workload] * 8 + [other] * 8
    assert frame.completed.tolist() == [20] * 8 + [10] * 8
    assert frame.rate_scale.tolist()[:8] == [1.0] * 4 + [2.0] * 4
    assert frame.max_num_seqs.isna().tolist()[:4] == [True, True, False, False]
    assert frame.enable_prefix_caching.tolist()[:2] == [True, False]
    assert frame.duration[0] > frame.duration[4]
    listed = swept(tmp_path / "lists", workload, *CONSTANT, "--param", parameters[4], "--jobs", "1")
    assert read_results(listed).frame.reset_prefix_cache_at.tolist() == ["0.1 0.2"]


def test_a_run_that_fails_is_a_row(tmp_path: Path, workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The others go on; exit code 1; a resumed sweep says the same at once."""
    arguments = [workload, *CONSTANT, "--max-num-batched-tokens", "64", "--param", "max_num_seqs=8,128,16"]
    out = swept(tmp_path / "out", *arguments, "--jobs", "1", code=1)
    frame = read_results(out).frame
    assert frame.state.tolist() == ["done", "failed", "done"]
    assert "max_num_batched_tokens 64 is below max_num_seqs 128" in frame.error[1]
    assert frame.completed.isna().tolist() == [False, True, False]
    assert "failed: 1 of 3 runs; run 1:" in capsys.readouterr().out
    swept(out, *arguments, "--jobs", "1", "--resume", code=1)


def test_the_table_on_the_screen_cuts_nothing(
    tmp_path: Path, workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """However long the names of parameters are: a terminal breaks lines, and a pipe has room."""
    wide = ["--param", "max_num_scheduled_tokens=64,128", "--param", "long_prefill_token_threshold=16,32"]
    swept(tmp_path / "out", workload, *CONSTANT, *wide, "--seeds", "2", "--jobs", "1")
    shown = capsys.readouterr().out
    assert "max_num_scheduled_tokens" in shown
    assert "long_prefill_token_threshold" in shown
    assert "…" not in shown
    mean = read_results(tmp_path / "out").frame.request_throughput[:2].mean()
    assert f"{mean:.4g}" in shown


def test_json_is_one_object(tmp_path: Path, workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On stdout and nothing else: the points with their means, the best, and the counts."""
    arguments = [*GRID, "--objective", "p99_ttft_ms", "--json", "--jobs", "1"]
    swept(tmp_path / "out", workload, *CONSTANT, *arguments)
    told = json.loads(capsys.readouterr().out)
    assert (told["num_runs"], told["done"], told["failed"], told["reused"]) == (4, 4, 0, 0)
    assert [point["max_num_seqs"] for point in told["points"]] == [2, 2, 8, 8]
    assert told["best"] == min(told["points"], key=lambda point: point["p99_ttft_ms"]) | {"lead": None}
    assert told["best"]["max_num_seqs"] == 8


def test_the_best_point_is_told_with_its_lead_seed_by_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Points share their seeds, so that their difference is surer than each of them."""
    chat = ["chat", "--num-prompts", "30", "--request-rate", "20", "--executor", "constant"]
    more = [
        "--param",
        "step_time_s=0.02,0.01",
        "--seeds",
        "3",
        "--objective",
        "mean_e2el_ms",
        "--jobs",
        "1",
        "--json",
    ]
    out = swept(tmp_path / "out", *chat, *more)
    best = json.loads(capsys.readouterr().out)["best"]
    frame = read_results(out).frame
    values = frame.mean_e2el_ms.to_numpy().reshape(2, 3)
    differences = values[0] - values[1]
    assert best["step_time_s"] == 0.01
    # Two degrees of freedom.
    width = 4.30265 / 3**0.5
    assert best["lead"] == pytest.approx([differences.mean(), width * differences.std(ddof=1)], rel=1e-4)
    assert best["half_width_95"]["mean_e2el_ms"] == pytest.approx(width * values[1].std(ddof=1), rel=1e-4)


# ---------------------------------------------------------------- points


def test_draws_stay_in_their_ranges_and_go_with_the_seed(tmp_path: Path, workload: str) -> None:
    """Whole numbers stay whole; the same seed draws the same points, another one others."""
    flags = [
        "--param",
        "max_num_seqs=4..12:log",
        "--param",
        "step_time_s=0.01..0.02",
        "--param",
        "block_size=16,32",
    ]
    tables = {}
    for name, method, seed in (
        ("a", "random", "0"),
        ("b", "random", "0"),
        ("c", "random", "1"),
        ("d", "sobol", "0"),
    ):
        arguments = [*flags, "--method", method, "--runs", "6", "--seed", seed, "--jobs", "1"]
        tables[name] = lasting(swept(tmp_path / name, workload, *CONSTANT, *arguments))
    for frame in tables.values():
        assert len(frame) == 6
        assert frame.max_num_seqs.dtype == "int64"
        assert frame.max_num_seqs.between(4, 12).all()
        assert frame.step_time_s.between(0.01, 0.02).all()
        assert frame.step_time_s.nunique() == 6
        assert set(frame.block_size) <= {16, 32}
    assert tables["a"].equals(tables["b"])
    assert not tables["a"].equals(tables["c"])
    assert not tables["a"].equals(tables["d"])


def test_optuna_asks_for_the_same_points_however_many_run_at_once(tmp_path: Path, workload: str) -> None:
    """Also when it goes on after half of the runs are lost; it finds the short step."""
    flags = ["--param", "step_time_s=0.001..0.1:log", "--param", "max_num_seqs=4,64", "--method", "optuna"]
    search = [workload, "--executor", "constant", *flags, "--runs", "10", "--objective", "mean_e2el_ms"]
    one = swept(tmp_path / "one", *search, "--jobs", "1")
    two = swept(tmp_path / "two", *search, "--jobs", "2")
    assert_same_table(one, two)
    for record in sorted((two / "runs").iterdir())[::2]:
        record.unlink()
    swept(two, *search, "--jobs", "1", "--resume")
    assert_same_table(one, two)
    frame = read_results(one).frame
    assert len(frame) == 10
    assert frame.mean_e2el_ms[4:].min() < frame.mean_e2el_ms[:4].min()


# ---------------------------------------------------------------- reuse


def test_what_has_ended_is_not_done_again(tmp_path: Path, workload: str) -> None:
    """A resumed sweep does the missing runs only: the others' records stay as they were, to the instant."""
    arguments = [workload, *CONSTANT, *GRID, "--jobs", "1"]
    out = swept(tmp_path / "out", *arguments, "--resume")
    before = read_results(out).frame
    assert len([*(out / "runs").iterdir()]) == 4
    (out / "runs" / f"{before.spec_hash[0]}.json").unlink()
    swept(out, *arguments, "--resume")
    after = read_results(out).frame
    assert after.spec_hash.tolist() == before.spec_hash.tolist()
    assert (after.date != before.date).tolist() == [True, False, False, False]
    swept(out, *arguments, "--resume")
    assert read_results(out).frame.equals(after)


def test_a_sweep_that_is_shown_again_says_what_its_figures_rest_on(
    tmp_path: Path, workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [workload, *CONSTANT, "--param", "max_num_seqs=4", "--jobs", "1", "--resume"]
    for _ in range(2):
        swept(tmp_path / "out", *arguments)
        assert "assumed: num_gpu_blocks 40000" in capsys.readouterr().err


def test_what_replicas_cost_is_in_the_table(tmp_path: Path, workload: str) -> None:
    arguments = [*CONSTANT, "--param", "replicas=2,3", "--jobs", "1", "--objective", "replica_hours"]
    frame = read_results(swept(tmp_path / "out", workload, *arguments)).frame
    # All replicas are there from the first arrival, at 0, to the last answer.
    assert frame.replica_hours.tolist() == pytest.approx((frame.replicas * frame.duration / 3600).tolist())
    assert ((frame.utilization > 0) & (frame.utilization <= 1)).all()


def test_sweeps_share_a_store(tmp_path: Path, workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A run is taken from it where flags and files are the same, and done anew where the workload has changed."""
    store = ["--store", str(tmp_path / "store"), "--jobs", "1", "--json"]

    def reused(out: str, parameter: str) -> int:
        swept(tmp_path / out, workload, *CONSTANT, "--param", parameter, *store)
        return int(json.loads(capsys.readouterr().out)["reused"])

    assert reused("one", "max_num_seqs=2,4,8") == 0
    assert reused("two", "max_num_seqs=4,8,16") == 2
    assert len([*(tmp_path / "store").iterdir()]) == 4
    write_workload(Path(workload), 19)
    assert reused("three", "max_num_seqs=4,8,16") == 0


def test_two_sweeps_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """The same sweep twice into one folder, and another into its store: three whole tables."""
    workload = str(write_workload(tmp_path / "workload.jsonl", 100))
    seeds = [
        workload,
        *CONSTANT,
        "--param",
        "max_num_seqs=2,4,8,16",
        "--seeds",
        "3",
        "--jobs",
        "1",
        "--resume",
    ]
    alone = swept(tmp_path / "alone", *seeds)
    store = ["--store", str(tmp_path / "store")]
    processes = [
        started(*seeds, *store, "--out", str(tmp_path / name)) for name in ("shared", "shared", "other")
    ]
    for process in processes:
        _, said = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, said
    for name in ("shared", "other"):
        assert_same_table(alone, tmp_path / name)
    assert len([*(tmp_path / "store").glob("*.json")]) == 12
    assert not [*tmp_path.rglob("*.tmp")]


def test_a_dry_run_does_and_writes_nothing(
    tmp_path: Path, workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It tells the points, and how many runs are there already."""
    out = tmp_path / "out"
    arguments = [workload, *CONSTANT, *GRID, "--seeds", "3", "--dry-run"]
    assert run(["sweep", *arguments, "--out", str(out)]) == 0
    assert "4 points x 3 seeds = 12 runs, 0 of them done already" in capsys.readouterr().out
    assert not out.exists()
    assert run(["sweep", *arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["points"][1] == {"max_num_seqs": 2, "step_time_s": 0.02}
    assert [*tmp_path.iterdir()] == [Path(workload)]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--param", "max_num_sequences=3"],
            "'max_num_sequences' is no field of a run; near are: max_num_seqs",
        ),
        (["--param", "max_num_seqs=3,many"], "--max-num-seqs: 'many' is not a whole number"),
        (["--param", "max_num_seqs=3,3"], "3 stands there 2 times"),
        (["--param", "max_num_seqs=3", "--param", "max_num_seqs=4"], "--param max_num_seqs is given 2 times"),
        (["--param", "max_num_seqs=3..9"], "a grid needs values"),
        (["--param", "max_num_seqs=9..3", "--method", "random", "--runs", "3"], "LOW must be below HIGH"),
        (["--param", "loop=1..2", "--method", "random", "--runs", "3"], 'Invalid value "1..2" for --loop'),
        (["--param", "max_num_seqs=1..x", "--method", "random", "--runs", "3"], "'x' is not a whole number"),
        (["--param", "max_num_seqs"], "must be NAME=V1,V2 or NAME=LOW..HIGH"),
        (["--param", "seed=1,2", "--seeds", "2"], "--param seed cannot stand beside --seeds"),
        (["--runs", "3"], "--runs goes with --method random"),
        (["--method", "sobol", "--param", "max_num_seqs=3..9"], "--method sobol needs --runs"),
        (["--method", "optuna", "--param", "max_num_seqs=3..9", "--runs", "3"], "needs --objective"),
        (["--objective", "p99_tftt_ms"], "--objective 'p99_tftt_ms' is no column; near are: p99_ttft_ms"),
        (["--seeds", "0"], "--seeds 0: must be 1 or more"),
        (["--jobs", "0"], "--jobs 0: must be 1 or more"),
        (["--ray-address", "1.2.3.4:5"], "--ray-address goes with --backend ray"),
        (["--direction", "maximize"], "--direction maximize goes with --objective"),
        (["--executor", "torch"], "measures its steps"),
        (["--max-num-seqs", "0"], "max_num_seqs 0"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    arguments: list[str], words: str, tmp_path: Path, workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names flag, value and what is allowed; exit code 2."""
    out = tmp_path / "out"
    constant = CONSTANT if "--executor" not in arguments else []
    assert run(["sweep", workload, *constant, *arguments, "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not out.exists()


def test_a_folder_of_something_else_is_refused(
    tmp_path: Path, workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another sweep is told by what differs; a sweep that is there is not overwritten."""
    arguments = [workload, *CONSTANT, *GRID, "--jobs", "1"]
    out = swept(tmp_path / "out", *arguments)
    table = (out / "results.parquet").read_bytes()
    capsys.readouterr()

    def refusal(*more: str, folder: Path = out) -> str:
        assert run(["sweep", *arguments, *more, "--out", str(folder)]) == 2
        return capsys.readouterr().err

    assert "holds a sweep; --resume goes on with it" in refusal()
    assert "holds another sweep: --seeds: 1 there, 3 here" in refusal("--resume", "--seeds", "3")
    assert "block_size: 16 there, 32 here" in refusal("--resume", "--block-size", "32")
    assert "is not empty and holds no sweep" in refusal("--resume", folder=tmp_path)
    assert "is a file" in refusal(folder=Path(workload))
    write_workload(Path(workload), 7)
    assert "holds another sweep: bytes of workload: " in refusal("--resume")
    assert (out / "results.parquet").read_bytes() == table


def test_a_damaged_record_is_named(tmp_path: Path, workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It cannot come from a kill; whoever made it learns which file it is."""
    arguments = [workload, *CONSTANT, *GRID, "--jobs", "1"]
    out = swept(tmp_path / "out", *arguments)
    record = next((out / "runs").iterdir())
    record.write_text(record.read_text()[:-40])
    assert run(["sweep", *arguments, "--resume", "--out", str(out)]) == 2
    assert f"{record}: damaged" in capsys.readouterr().err


def test_results_of_something_else_are_refused(tmp_path: Path) -> None:
    """Nothing there, and a file that is no table."""
    with pytest.raises(RunFolderError, match=r"there is no results\.parquet"):
        read_results(tmp_path)
    (tmp_path / "results.parquet").write_text("no")
    with pytest.raises(RunFolderError, match="is no table of a sweep"):
        read_results(tmp_path)


# ---------------------------------------------------------------- from Python


def test_a_study_gives_the_table_of_the_command_line(tmp_path: Path, workload: str) -> None:
    """Python values for texts; a frame for a file."""
    out = swept(tmp_path / "out", workload, *CONSTANT, *GRID, "--seeds", "2", "--jobs", "1")
    study = Study(workload, executor="constant", step_time_s=0.01)
    frame = study.sweep({"max_num_seqs": [2, 8], "step_time_s": "0.01,0.02"}, seeds=2)
    mine = frame[lasting(out).columns]
    assert mine.equals(lasting(out))
    study.sweep({"max_num_seqs": [2, 8]}, out=tmp_path / "study")
    assert read_results(tmp_path / "study").parameters == ("max_num_seqs",)


def test_reading_results_loads_no_simulator() -> None:
    """The dashboard reads tables of sweeps; it is to run nothing."""
    code = (
        "import servetwin.sim.planning.results, servetwin.sim.planning, sys, json\n"
        "print(json.dumps([m for m in sys.modules if 'simpy' in m or 'commands' in m or 'ray' in m.split('.')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


# ---------------------------------------------------------------- processes that end


def killed_and_resumed(out: Path, arguments: list[str], moments: list[tuple[int, float]]) -> None:
    """Starts the sweep and kills it a while after so many records were there, again and again; then lets it finish."""
    for num_records, delay_s in moments:
        process = started(*arguments, "--resume", "--out", str(out), start_new_session=True)
        while records_after_kills(out) < num_records:
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        time.sleep(delay_s)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    process = started(*arguments, "--resume", "--out", str(out))
    _, said = process.communicate(timeout=10 * PATIENCE_S)
    assert process.returncode == 0, said


def records_after_kills(out: Path) -> int:
    return len([*(out / "runs").glob("*.json")])


def test_a_killed_sweep_goes_on_to_the_same_table(tmp_path: Path) -> None:
    """SIGKILL while runs are being done, then --resume: the table of an undisturbed sweep, every run once."""
    workload = str(write_workload(tmp_path / "workload.jsonl", 250))
    arguments = [workload, *CONSTANT, "--param", "max_num_seqs=2,4,8,16", "--seeds", "5", "--jobs", "2"]
    out = tmp_path / "out"
    process = started(*arguments, "--resume", "--out", str(out))
    end = time.monotonic() + PATIENCE_S
    while not [*out.glob("runs/*.json")] and time.monotonic() < end:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    killed = records_after_kills(out)
    assert 0 < killed < 20
    before = {file.name: file.read_bytes() for file in (out / "runs").glob("*.json")}
    swept(out, *arguments, "--resume")
    assert records_after_kills(out) == 20
    assert {name: (out / "runs" / name).read_bytes() for name in before} == before
    assert_same_table(swept(tmp_path / "undisturbed", *arguments), out)


@pytest.mark.full
def test_two_hundred_runs_killed_five_times_give_the_undisturbed_table(tmp_path: Path) -> None:
    """At random moments, whatever is being done then: starting, running, writing."""
    workload = str(write_workload(tmp_path / "workload.jsonl", 400))
    seats = ",".join(map(str, range(1, 41)))
    arguments = [workload, *CONSTANT, "--param", f"max_num_seqs={seats}", "--seeds", "5", "--jobs", "2"]
    draw = random.Random()
    # Once while it starts, then while runs are being done.
    moments = [(0, draw.uniform(0, 1.5))]
    moments += [(n, draw.uniform(0, 0.1)) for n in sorted(draw.sample(range(1, 180), 4))]
    out = tmp_path / "out"
    killed_and_resumed(out, arguments, moments)
    assert records_after_kills(out) == 200
    assert_same_table(swept(tmp_path / "undisturbed", *arguments), out)


@contextmanager
def two_of_four_done(tmp_path: Path, jobs: str) -> Iterator[subprocess.Popen[str]]:
    """A sweep into `out` whose two short runs have ended and whose two long ones take minutes; nothing of it stays."""
    long = write_workload(tmp_path / "long.jsonl", 60_000)
    short = write_workload(tmp_path / "short.jsonl", 10)
    out = tmp_path / "out"
    arguments = [
        *CONSTANT,
        "--no-leap",
        "--param",
        f"workload={short},{long}",
        "--seeds",
        "2",
        "--jobs",
        jobs,
    ]
    process = started(*arguments, "--out", str(out), start_new_session=True)
    try:
        end = time.monotonic() + PATIENCE_S
        while len([*out.glob("runs/*.json")]) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.02)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for_the_end_of_group(group: int) -> None:
    """No process of the sweep is left."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("a process of the sweep is still there")


@pytest.mark.serial
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_ends_a_sweep_within_seconds(jobs: str, tmp_path: Path) -> None:
    """Exit code 130, what had ended is in the table, no process stays, and --resume goes on."""
    with two_of_four_done(tmp_path, jobs) as process:
        os.killpg(process.pid, signal.SIGINT)
        asked = time.monotonic()
        _, said = process.communicate(timeout=PATIENCE_S)
        assert time.monotonic() - asked < 10
        assert process.returncode == 130, said
        wait_for_the_end_of_group(process.pid)
    assert "Traceback" not in said
    assert "--resume goes on" in said
    results = read_results(tmp_path / "out")
    assert results.frame.workload.tolist() == [str(tmp_path / "short.jsonl")] * 2
    assert not results.complete


@pytest.mark.serial
def test_processes_end_with_a_sweep_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL takes no time to say good-bye; its processes notice by themselves."""
    with two_of_four_done(tmp_path, "2") as process:
        process.kill()
        process.wait()
        wait_for_the_end_of_group(process.pid)


def test_a_run_that_kills_its_process_is_told_and_the_others_go_on(
    tmp_path: Path, workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel does for want of memory. It is not kept, so that --resume tries it again."""
    (tmp_path / "deadly.py").write_text(
        "import os, signal\n"
        "from servetwin.sim.policy import FCFS\n"
        "class Deadly(FCFS):\n"
        "    def may_admit(self, request, state):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = [
        workload,
        *CONSTANT,
        "--param",
        "scheduling_policy=fcfs,deadly:Deadly,priority,sjf",
        "--jobs",
        "2",
    ]
    out = swept(tmp_path / "out", *arguments, code=1)
    frame = read_results(out).frame
    assert frame.state.tolist() == ["done", "failed", "done", "done"]
    assert frame.error[1] == "its process was killed, twice (for want of memory?)"
    assert len([*(out / "runs").iterdir()]) == 3


def test_a_pool_gives_every_record_once(workload: str) -> None:
    """Also when there are far more tasks than processes."""
    spec = RunSpec.from_fields(workload, executor="constant", step_time_s=0.01)
    tasks = [Task(f"run {i}", spec.with_(seed=i), str(Path.cwd())) for i in range(30)]
    asked: list[Any] = []
    pool = Processes(2, lambda: asked.append(None))
    try:
        hashes = sorted(Record.from_bytes(content).spec_hash for content in pool.run(tasks))
    finally:
        pool.close()
    assert hashes == sorted(task.spec_hash for task in tasks)
    assert asked


def test_a_plugin_that_exits_fails_its_run_alone(
    tmp_path: Path, workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sys.exit in somebody's policy is an error of that run, in this process and in another."""
    (tmp_path / "exiting.py").write_text(
        "import sys\n"
        "from servetwin.sim.policy import FCFS\n"
        "class Exiting(FCFS):\n"
        "    def may_admit(self, request, state):\n"
        "        sys.exit('enough')\n"
    )
    monkeypatch.chdir(tmp_path)
    for jobs in ("1", "2"):
        policies = ["--param", "scheduling_policy=exiting:Exiting,fcfs", "--jobs", jobs]
        frame = read_results(swept(tmp_path / jobs, workload, *CONSTANT, *policies, code=1)).frame
        assert frame.state.tolist() == ["failed", "done"]
        assert "enough" in frame.error[0]


def test_ray_that_is_not_there_is_told_in_one_line(
    tmp_path: Path, workload: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package is missing: the extra that has it; nothing is written."""
    monkeypatch.setitem(sys.modules, "ray", None)
    out = tmp_path / "out"
    assert run(["sweep", workload, *CONSTANT, *GRID, "--backend", "ray", "--out", str(out)]) == 2
    assert "--backend ray needs the package ray: pip install 'servetwin[ray]'" in capsys.readouterr().err
    assert not out.exists()


def test_the_help_shows_every_flag_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Load, engine, sampling and trace flags by their full names, but for those of a single run."""
    assert run(["run", "--help"]) == 0
    flags = {word for word in capsys.readouterr().out.split() if word.startswith("--")}
    assert run(["sweep", "--help"]) == 0
    text = capsys.readouterr().out
    assert "NAME=LOW..HIGH:log" in " ".join(text.split())
    of_one_run = {spelled(f.name) for f in fields(RunFlags)} - {
        spelled(f.name) for f in fields(SimulationFlags)
    }
    of_one_run.add("--no-log-blocks")
    shown = set(text.split())
    assert {flag for flag in flags if flag.rstrip(".,;:)(") == flag} - shown <= of_one_run
    assert "--max-num-batched-tokens" in shown


def test_seeds_that_change_nothing_are_told(
    tmp_path: Path, workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace with constant steps draws nothing; a preset draws its requests."""
    note = "all seeds gave the same figures"
    swept(tmp_path / "trace", workload, *CONSTANT, "--seeds", "2", "--jobs", "1")
    assert note in capsys.readouterr().err
    swept(tmp_path / "one", workload, *CONSTANT, "--jobs", "1")
    swept(tmp_path / "preset", "chat", "--num-prompts", "5", *CONSTANT, "--seeds", "2", "--jobs", "1")
    assert note not in capsys.readouterr().err
