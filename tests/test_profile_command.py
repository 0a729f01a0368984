"""`servetwin profile` and what follows from it, with a tiny model on this machine: measure, fit, simulate, go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from servetwin.executor.profile import TorchProfiler
from servetwin.executor.testing import tiny_model, torch_threads
from servetwin.sim.cli import run
from servetwin.sim.commands.profile_loads import load_shapes
from servetwin.sim.runs import read_run
from servetwin.sim.steptime.calibration import Calibration
from servetwin.sim.steptime.profile_folder import PROFILE_HEADER, read_profile_folder
from servetwin.sim.steptime.profiles import load_profile, write_profile
from servetwin.sim.steptime.steps_profile import StepsProfile

ENGINE = ["--dtype", "float32", "--max-num-seqs", "4", "--block-size", "4", "--max-model-len", "64"]
ENGINE += ["--num-gpu-blocks-override", "60", "--max-num-batched-tokens", "32", "--threads", "1"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", attention="sdpa").save_pretrained(folder)
    return folder


def profile(
    model: Path, out: Path, *flags: str, points: int = 15, passes: int = 2, live_seconds: int = 0
) -> int:
    sizes = ["--points", str(points), "--passes", str(passes), "--repetitions", "2"]
    live = ["--live-seconds", str(live_seconds)]
    return run(["profile", "--model", str(model), *ENGINE, *sizes, *live, "--out", str(out), *flags])


@pytest.fixture(scope="module")
def profiled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("profiled") / "p"
    assert profile(model, out) == 0
    return out


@pytest.fixture(scope="module")
def fitted(profiled: Path) -> Path:
    out = profiled.parent / "p.json"
    assert run(["fit", str(profiled), "-o", str(out)]) == 0
    return out


def test_a_profile_holds_every_point_of_every_pass(profiled: Path) -> None:
    found = read_profile_folder(profiled)
    assert len(found.rows) == 30
    assert found.header["complete"] and found.header["measured"] == 30
    first, second = found.rows[:15], found.rows[15:]
    assert [r["query_lens"] for r in first] == [r["query_lens"] for r in second]
    assert {r["kind"] for r in first} == {"prefill", "decode", "mixed"}
    assert min(r["device_us"] for r in found.rows) > 0
    about = found.header["about"]
    assert {"device", "versions", "model", "date", "dtype", "threads"} <= about.keys()
    assert found.header["engine"] == {
        "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "num_gpu_blocks": 60, "block_size": 4,
        "vocab_size": about_vocab(profiled),
    }  # fmt: skip
    assert found.header["coverage"]["rows"] == [1, 4]


def about_vocab(profiled: Path) -> Any:
    return read_profile_folder(profiled).header["engine"]["vocab_size"]


def test_a_broken_off_profile_goes_on_with_the_point_it_had_come_to(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C after nine points: they are written, and no point is measured twice."""
    measured: list[Any] = []
    original = TorchProfiler.measure

    def measure(self: TorchProfiler, point: Any, repetitions: int, budget_s: float) -> dict[str, Any]:
        if len(measured) == 9:
            measured.append(None)
            raise KeyboardInterrupt
        measured.append(point)
        return original(self, point, repetitions, budget_s)

    monkeypatch.setattr(TorchProfiler, "measure", measure)
    assert profile(model, tmp_path / "p") == 130
    assert len(read_profile_folder(tmp_path / "p").rows) == 9
    assert not read_profile_folder(tmp_path / "p").header["complete"]
    assert profile(model, tmp_path / "p", "--resume") == 0
    assert "9 of 30 measurements are there already" in capsys.readouterr().err
    rows = read_profile_folder(tmp_path / "p").rows
    assert [tuple(r["query_lens"]) for r in rows] == [p.query_lens for p in measured if p is not None]


def test_when_its_minutes_are_over_the_design_is_left_where_it_is(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A time too short for two points: one is measured, the folder is whole, and it can be gone on with."""
    assert profile(model, tmp_path / "p", "--minutes", "0.0001", "--point-seconds", "0.1") == 0
    found = read_profile_folder(tmp_path / "p")
    assert 1 <= len(found.rows) < 30
    assert found.header["complete"]
    assert "--resume goes on" in capsys.readouterr().err
    assert run(["fit", str(tmp_path / "p")]) == 0
    assert profile(model, tmp_path / "p", "--resume") == 0
    assert len(read_profile_folder(tmp_path / "p").rows) == 30
    capsys.readouterr()
    assert profile(model, tmp_path / "p", "--resume") == 0
    said = capsys.readouterr().err
    assert "all steps of the design are measured already" in said and "loading" not in said


def test_a_profile_in_the_way_is_left_as_it_is(
    profiled: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (profiled / PROFILE_HEADER).read_bytes()
    assert profile(model, profiled) == 2
    assert "--resume goes on with it" in capsys.readouterr().err
    assert profile(model, profiled, "--resume", points=16) == 2
    assert "its points is 15, here it is 16" in capsys.readouterr().err
    assert (profiled / PROFILE_HEADER).read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--points", "0"], "--points 0: must be 1 or more"),
        (["--passes", "0"], "--passes 0"),
        (["--point-seconds", "0"], "--point-seconds 0"),
        (["--minutes", "0"], "--minutes 0"),
        (["--live-seconds", "-1"], "--live-seconds -1"),
        (["--live-seconds", "nan"], "--live-seconds nan"),
        (["--gpu", "H100"], "--gpu"),
        (["--scheduling-policy", "nonsense"], "nonsense"),
        (["--vllm-compat", "nonsense"], "nonsense"),
        (["--draft-acceptance-rate", "0.5"], "--draft-acceptance-rate"),
        (["--live-seconds", "0", "--no-async-scheduling"], "--async-scheduling has no effect"),
        (["--speculative-config", '{"method":"ngram","num_speculative_tokens":2}'], "--speculative-config"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert run(["profile", "--model", str(model), *ENGINE, "--out", str(tmp_path / "p"), *flags]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


def test_points_alone_are_a_profile_that_does_not_call_itself_calibrated(
    profiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", str(profiled), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["calibrated"] is False
    assert found["untested"] == ["prefill", "decode", "mixed"]
    assert found["errors"] == [] and found["host"] is None
    assert run(["fit", str(profiled)]) == 0
    assert "not calibrated" in capsys.readouterr().out


def workload(path: Path, count: int = 12, gap_s: float = 0.002) -> Path:
    rows = [
        {"request_id": f"r{i}", "arrival_s": gap_s * i, "prompt_tokens": 5 + i, "output_tokens": 6 + i % 3}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_takes_its_limits_and_its_times_from_the_profile(
    fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No model is named; seats, budget, window and pool are those that were measured, and that is said."""
    assert (
        run(["run", str(workload(tmp_path / "w.jsonl")), "--executor", str(fitted), "--block-size", "4"]
            + ["--out", str(tmp_path / "r")])
        == 0
    )  # fmt: skip
    said = capsys.readouterr()
    assert "as in the profile: max_num_seqs 4, max_num_batched_tokens 32, max_model_len 64" in said.err
    assert "not calibrated" in " ".join(said.out.split())
    found = read_run(tmp_path / "r")
    profile = load_profile(fitted)
    assert isinstance(profile, StepsProfile)
    assert set(found.steps["source"]) == {"profile"}
    assert found.config["engine"]["cache"]["num_gpu_blocks"] == 60
    decode = found.steps[(found.steps["prefill_tokens"] == 0) & (found.steps["rows"] > 0)].iloc[0]
    assert decode["prepare_s"] > 0
    # Points alone say nothing of the host, which then takes no time; that is said.
    assert profile.host is None and found.steps["host_s"].max() == 0
    assert "the host takes no time between steps" in said.err


def test_a_step_beyond_what_was_measured_is_marked_in_log_and_summary(
    fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight seats instead of four: steps of five rows and more are extrapolated, and no others."""
    flags = ["--executor", str(fitted), "--block-size", "4", "--max-num-seqs", "8", "--json"]
    # All at once: more than four run, however fast the machine is.
    requests = workload(tmp_path / "w.jsonl", 30, gap_s=0)
    assert run(["run", str(requests), *flags, "--out", str(tmp_path / "r")]) == 0
    summary = json.loads(capsys.readouterr().out)
    steps = read_run(tmp_path / "r").steps
    outside = steps["predicted_outside"] == 1
    assert outside[steps["rows"] > 4].all()
    assert not outside[steps["rows"] == 1].any()
    assert summary["servetwin"]["predicted_outside_steps"] == int(outside.sum()) > 0


def test_a_recorded_replay_of_such_a_run_is_the_same_run(fitted: Path, tmp_path: Path) -> None:
    flags = ["--block-size", "4"]
    first, second = tmp_path / "a", tmp_path / "b"
    load = str(workload(tmp_path / "w.jsonl"))
    assert run(["run", load, "--executor", str(fitted), *flags, "--out", str(first)]) == 0
    assert run(["run", load, "--executor", f"recorded:{first}", *flags, "--out", str(second)]) == 0
    ours, theirs = read_run(first), read_run(second)
    assert ours.requests.equals(theirs.requests)
    left_out = ["source", "predicted_s", "predicted_outside"]
    assert ours.steps.drop(columns=left_out).equals(theirs.steps.drop(columns=left_out))


@pytest.mark.parametrize(
    "flags", [["--gpu", "H100"], ["--tensor-parallel-size", "2"], ["--cudagraph-capture-sizes", "8"]]
)
def test_flags_that_times_of_whole_steps_cannot_heed_are_refused(
    fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert run(["run", str(workload(tmp_path / "w.jsonl")), "--executor", str(fitted), *flags]) == 2
    assert flags[0] in capsys.readouterr().err


def test_a_simulated_run_is_no_measurement(
    fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = str(workload(tmp_path / "w.jsonl"))
    assert (
        run(["run", load, "--executor", str(fitted), "--block-size", "4", "--out", str(tmp_path / "r")]) == 0
    )
    assert run(["fit", str(tmp_path / "r")]) == 2
    assert "its step times are 'profile', nothing was measured there" in capsys.readouterr().err


def test_a_complete_profile_goes_on_with_its_own_engine_only(
    profiled: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is loaded any more that would show the difference."""
    others = {
        "its max_model_len is 64, here it is 32": [("64", "32")],
        "its dtype is 'float32', here it is 'bfloat16'": [("float32", "bfloat16")],
        "its threads is 1, here it is 2": [("1", "2")],
    }
    for said, changes in others.items():
        engine = [dict(changes).get(word, word) for word in ENGINE]
        flags = ["--points", "15", "--passes", "2", "--repetitions", "2", "--live-seconds", "0", "--resume"]
        assert run(["profile", "--model", str(model), *engine, *flags, "--out", str(profiled)]) == 2
        assert said in capsys.readouterr().err


def changed(fitted: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    data = json.loads(fitted.read_text())
    change(data)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("kind"), "kind"),
        (lambda d: d.pop("regression"), "regression"),
        (
            lambda d: d["regression"]["device_weights"].__setitem__(0, -1.0),
            "device_weights must be 15 numbers",
        ),
        (lambda d: d["regression"]["device_weights"].pop(), "device_weights must be 15 numbers"),
        (lambda d: d["regression"]["highest"].pop(), "highest must be 9 numbers"),
        (lambda d: d["regression"]["correction"]["weights"].pop(), "must fit together"),
    ],
)
def test_a_damaged_profile_is_refused_in_one_short_line(
    fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, said: str
) -> None:
    path = changed(fitted, tmp_path, change)
    assert run(["run", str(workload(tmp_path / "w.jsonl")), "--executor", str(path)]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err) < 1000


def test_what_is_no_folder_of_measurements_is_said_to_be_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", str(tmp_path / "nothing")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert run(["fit", str(tmp_path)]) == 2
    assert (
        "holds no profile (profile.json), no run (run.json) and no kernel tables" in capsys.readouterr().err
    )


def test_a_run_that_was_simulated_is_said_to_be_no_measurement(
    fitted: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load, out = str(workload(tmp_path / "w.jsonl")), tmp_path / "r"
    assert run(["run", load, "--executor", str(fitted), "--block-size", "4", "--out", str(out)]) == 0
    flags = ["--profile", str(fitted), "--model", str(model), "--noise-runs", "0"]
    assert run(["validate", str(out), *flags]) == 0
    assert "the run was no measurement: its step times are 'profile'" in capsys.readouterr().out


def test_tables_and_measured_steps_are_not_fitted_together(
    profiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", str(profiled), str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_a_run_that_was_measured_is_fitted_and_tests_the_points(
    model: Path, profiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of the real executor in simulated time: it is foretold from the points alone, regime by regime."""
    load = str(workload(tmp_path / "w.jsonl", 40))
    engine = ["--model", str(model), *ENGINE]
    assert run(["run", load, "--executor", "torch", *engine, "--out", str(tmp_path / "r")]) == 0
    capsys.readouterr()
    assert run(["fit", str(profiled), str(tmp_path / "r"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    everything = next(e for e in found["errors"] if e["of"] == "all")
    steps = read_run(tmp_path / "r").steps
    assert everything["n"] == int((steps["rows"] > 0).sum())
    # Loose, since machines wander: it tells units apart.
    assert everything["median_percent"] < 400
    assert [s["kind"] for s in found["sources"]] == ["points", "run"]


def test_the_speed_of_a_machine_is_calibrated_on_one_half_and_kept(
    fitted: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that took 1.25 times as long on the device: the factor is found, and a profile with it foretells that."""
    slow, run_folder, kept = tmp_path / "slow.json", tmp_path / "r", tmp_path / "kept.json"
    profile = load_profile(fitted)
    write_profile(profile.model_copy(update={"factor": Calibration(value=1.25, on="whim of a test")}), slow)
    load = str(workload(tmp_path / "w.jsonl", 40))
    assert run(["run", load, "--executor", str(slow), "--block-size", "4", "--out", str(run_folder)]) == 0
    assert (
        "device times x 1.25, fitted to the whim of a test" in read_run(run_folder).header["executor"]["note"]
    )
    capsys.readouterr()
    flags = ["--model", str(model), "--noise-runs", "0", "--json"]
    calibrating = ["--calibrate", "first-half", "--save-profile", str(kept)]
    assert run(["validate", str(run_folder), "--profile", str(fitted), *flags, *calibrating]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["calibrated"]["what"] == "factor of all times on the device"
    assert found["calibrated"]["value"] == pytest.approx(1.25, rel=0.01)
    assert run(["validate", str(run_folder), "--profile", str(kept), *flags]) == 0
    again = json.loads(capsys.readouterr().out)
    assert abs(again["metrics"]["tpot"]["error_percent"]["mean"]) < 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seconds", "5"], "--seconds goes with --live only"),
        (["--load-format", "dummy"], "--load-format goes with --live only"),
        (["--live", "--again", "x"], "--again goes with a run that was measured already"),
        (["--live", "--loads", "0"], "--loads 0.0: percentages above 0"),
        (["--live", "--live-runs", "3"], "--live-runs 3: allowed are 1 and 2"),
        (["--live", "--seconds", "0"], "--seconds 0"),
        (["--live", "--max-ttft-error", "0"], "--max-ttft-error 0"),
        (["--live", "--gpu", "H100"], "--gpu: goes with a profile of kernels"),
        (["--live", "--noise-runs", "1"], "--noise-runs 1"),
        (["--live"], "needs at least two requests at different times"),
    ],
)
def test_what_cannot_be_validated_live_is_refused_before_anything_is_loaded(
    fitted: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    load = str(workload(tmp_path / "w.jsonl", 1))
    assert run(["validate", load, "--profile", str(fitted), "--model", str(model), *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("longest", [16, 40, 64, 500, 4096, 131_072])
def test_the_live_loads_fit_any_engine(longest: int) -> None:
    """The longest draws (1.8 times the means) fit the window, the shortest (0.2 times) have a token."""
    for shape in load_shapes(longest):
        assert 1.8 * (shape.input_tokens + shape.output_tokens) <= longest
        assert 0.2 * shape.input_tokens >= 1


@pytest.mark.full
@pytest.mark.serial
def test_live_runs_measure_the_host_and_test_the_fit(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three short live runs: host times, errors of each run left out, and a validation of one of them."""
    out, file = tmp_path / "p", tmp_path / "p.json"
    assert profile(model, out, live_seconds=4) == 0
    assert read_profile_folder(out).header["live"] == ["live/balanced", "live/prompts", "live/answers"]
    capsys.readouterr()
    assert run(["fit", str(out), "-o", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["host"]["schedule_base_ns"] > 0 and found["host"]["update_base_ns"] > 0
    assert not found["host"]["overlaps_preparation"]
    assert {Path(e["run"]).name for e in found["errors"]} == {"balanced", "prompts", "answers"}
    live = str(out / "live" / "balanced")
    code = run(
        ["validate", live, "--profile", str(file), "--model", str(model), "--noise-runs", "0", "--json"]
    )
    assert code in (0, 4)
    compared = json.loads(capsys.readouterr().out)
    assert compared["steps_by_regime"]["all"]["prepare"] is not None
    assert compared["plans"] is not None
    load, kept = str(workload(tmp_path / "w.jsonl", 40)), tmp_path / "loads"
    flags = ["--profile", str(file), "--model", str(model), "--loads", "20", "50", "--seconds", "2"]
    assert run(["validate", load, "--live", *flags, "--out", str(kept), "--noise-runs", "0", "--json"]) in (
        0,
        4,
    )
    found = json.loads(capsys.readouterr().out)
    assert [load["percent"] for load in found["loads"]] == [20, 50]
    assert found["loads"][0]["rate_per_s"] == pytest.approx(0.2 * found["capacity_per_s"])
    assert all(load["again"]["difference_percent"]["e2e"]["mean"] is not None for load in found["loads"])
    assert read_run(kept / "load-50" / "live-2").state == "complete"
