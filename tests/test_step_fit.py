"""The fit of whole steps: held out by run, trusted as far as it helps; the host apart; what a profile says of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from engines import engine_config, serve, spec
from numpy.typing import NDArray
from test_step_regression import some_steps, step, true_us

from servetwin.sim.contract import StepShape
from servetwin.sim.events import MemorySink
from servetwin.sim.host_model import LinearHostModel
from servetwin.sim.steptime.features import Ints, StepFeatures
from servetwin.sim.steptime.host_times import HostTimes, overlaps_preparation
from servetwin.sim.steptime.measured_steps import MeasuredSteps
from servetwin.sim.steptime.modelled import ModelledStepTimer
from servetwin.sim.steptime.profile_folder import (
    PROFILE_HEADER,
    ProfileFolderError,
    ProfileWriter,
    read_profile_folder,
)
from servetwin.sim.steptime.profiles import ProfileError, load_profile, write_profile
from servetwin.sim.steptime.step_fit import StepFit, fit_sources
from servetwin.sim.steptime.step_sources import StepSourceError, StepsSource, read_sources
from servetwin.sim.steptime.steps_profile import StepsProfile
from servetwin.sim.token_source import TokenSource

ABOUT = {"model": "made-up", "dtype": "float32", "device": "a machine", "threads": 1, "num_parameters": 7}
ENGINE = {
    "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, "num_gpu_blocks": 50, "block_size": 4,
}  # fmt: skip


def source(
    name: str, shapes: list[StepShape], us: NDArray[np.float64], kind: str = "run", **about: Any
) -> StepsSource:
    steps = MeasuredSteps(StepFeatures.of(shapes), us, np.full(len(shapes), 20.0))
    return StepsSource("run" if kind == "run" else "points", name, steps, None, ABOUT | about, ENGINE)


def run_of(name: str, seed: int, *, spread: float = 0.0, factor: float = 1.0) -> StepsSource:
    shapes = some_steps(240, seed)
    noise = np.exp(spread * np.random.default_rng(seed).standard_normal(len(shapes)))
    return source(name, shapes, factor * true_us(StepFeatures.of(shapes)) * noise)


def fitted(*sources: StepsSource) -> StepFit:
    return fit_sources(sources)


# ---------------------------------------------------------------- held out by run


def test_each_run_is_foretold_by_a_fit_that_has_not_seen_it() -> None:
    """A run that is slower throughout shows as a bias of its own, and not at all in a fit to itself."""
    fit = fitted(run_of("a", 1), run_of("b", 2), run_of("slow", 3, factor=1.5))
    bias = {h.run: h.errors.bias for h in fit.held_out if h.regime == "all"}
    assert bias["slow"] == pytest.approx(100 * (1 / 1.5 - 1), abs=4)
    assert {h.regime for h in fit.held_out} == {"all", "prefill", "decode", "mixed"}
    assert fit.untested == ()


def test_on_a_steady_machine_the_correction_is_trusted_and_helps() -> None:
    fit = fitted(run_of("a", 1), run_of("b", 2), run_of("c", 3))
    everything = [h for h in fit.held_out if h.regime == "all"]
    assert fit.regression.trust == 1.0
    assert all(h.errors.mape < 0.5 * h.physical.mape for h in everything)


def test_where_only_noise_is_left_the_physical_model_stands_alone() -> None:
    """Times that are the model's own terms and noise of 30 %: what was learned of one run hurts in another."""

    def run(name: str, seed: int) -> StepsSource:
        shapes = some_steps(150, seed)
        f = StepFeatures.of(shapes)
        noise = np.exp(0.3 * np.random.default_rng(seed).standard_normal(len(f)))
        return source(name, shapes, (500 + 3.0 * f.new_tokens + 0.05 * f.decode_context_tokens) * noise)

    fit = fitted(run("a", 1), run("b", 2), run("c", 3))
    everything = [h for h in fit.held_out if h.regime == "all"]
    assert fit.regression.trust <= 0.5
    assert all(h.errors.mape < 1.05 * h.physical.mape for h in everything)
    assert all(abs(h.errors.bias) < 10 for h in everything)


def test_one_run_alone_is_no_test_and_points_alone_are_none_either() -> None:
    alone = fitted(run_of("a", 1))
    assert alone.held_out == ()
    assert alone.untested == ("prefill", "decode", "mixed")
    points = fitted(source("p", some_steps(90), true_us(StepFeatures.of(some_steps(90))), kind="points"))
    assert points.untested == ("prefill", "decode", "mixed")


def test_a_regime_that_no_run_has_is_named() -> None:
    decode = [step([50] * n, []) for n in range(1, 41)]
    us = 100.0 + 10.0 * np.arange(1, 41)
    fit = fitted(source("a", decode, us), source("b", decode, us))
    assert fit.untested == ("prefill", "mixed")
    profile = StepsProfile.of([source("a", decode, us)], fit)
    assert not profile.calibrated
    assert "not calibrated for prefill and mixed steps" in profile.describe_error()


def test_points_are_foretold_for_a_run_and_extrapolation_is_counted() -> None:
    small = [step([40] * n, [(16, 0)]) for n in range(1, 17)]
    points = source("points", small, true_us(StepFeatures.of(small)), kind="points")
    fit = fitted(points, run_of("a", 1))
    everything = next(h for h in fit.held_out if h.regime == "all")
    assert everything.outside > 0.5 * everything.errors.n


# ---------------------------------------------------------------- the host


class Doubling:
    """10 us and 1 us a row on the device, half as much to prepare."""

    overlaps_preparation = False

    def durations_ns(self, features: StepFeatures) -> Ints:
        return np.where(features.new_tokens > 0, 10_000 + 1_000 * features.rows, 0)

    def prepare_ns(self, features: StepFeatures) -> Ints:
        return np.where(features.new_tokens > 0, 5_000 + 500 * features.rows, 0)


class Overlapping(Doubling):
    overlaps_preparation = True


def log_of(model: Doubling, host: LinearHostModel | None = None) -> MemorySink:
    config = engine_config(usable_blocks=400, async_scheduling=True)
    requests = [spec(f"r{i}", 9, 12 + i % 5, i * 7e-5) for i in range(40)]
    timer = ModelledStepTimer(model, TokenSource(config.model.vocab_size), "modelled")
    return serve(requests, config, timer=timer, host=host)


HOST = LinearHostModel(2_000, 300, 900, 4_000, 200)


def test_host_times_are_found_again() -> None:
    """Schedule and update of a run with known ones, to a few ns: nothing else is in them."""
    found = HostTimes.of([log_of(Doubling(), HOST).steps])
    assert found is not None
    model = found.model()
    for name in HOST.__slots__:
        assert getattr(model, name) == pytest.approx(getattr(HOST, name), rel=0.02)


def test_a_run_without_host_times_has_none() -> None:
    assert HostTimes.of([log_of(Doubling()).steps]) is None
    assert HostTimes.of([]) is None


def test_a_simulated_run_among_live_ones_says_nothing_of_the_host() -> None:
    """Its host times are 0, its preparing overlaps: both would ruin what the live run says."""
    live = log_of(Doubling(), HOST).steps
    assert HostTimes.of([live, log_of(Overlapping()).steps]) == HostTimes.of([live])


def test_the_turnaround_of_a_model_is_in_its_run_and_found_again() -> None:
    """A worker that takes 3 us between two steps: only steps that were waiting for it show that."""

    class Slow(Doubling):
        turnaround_ns = 3_000

    slow, plain = log_of(Slow(), HOST).steps, log_of(Doubling(), HOST).steps
    found, without = HostTimes.of([slow]), HostTimes.of([plain])
    assert found is not None and without is not None
    assert (found.turnaround_ns, without.turnaround_ns) == (3_000, 0)
    assert slow["end_s"].max() > plain["end_s"].max()


def test_the_worker_waits_for_its_device_where_the_model_says_so() -> None:
    waiting, overlapping = log_of(Doubling(), HOST).steps, log_of(Overlapping(), HOST).steps
    assert not overlaps_preparation(waiting)
    assert overlaps_preparation(overlapping)
    assert waiting["prepare_s"].max() > 0
    assert waiting["end_s"].max() > overlapping["end_s"].max()


def test_the_turnaround_is_the_gap_of_steps_that_were_handed_over_in_time() -> None:
    """Three steps of 10 ms, 1 ms apart; the last one was handed over late and says nothing."""
    steps = pd.DataFrame(
        {
            "rows": [1, 1, 1],
            "new_requests": [1, 0, 0],
            "start_s": [0.0, 0.001, 0.030],
            "schedule_s": [0.001, 0.001, 0.001],
            "host_s": [0.002, 0.002, 0.002],
            "end_s": [0.012, 0.023, 0.042],
            "prepare_start_s": [0.001, 0.012, 0.031],
            "device_start_s": [0.001, 0.012, 0.031],
            "device_s": [0.010, 0.010, 0.010],
        }
    )
    found = HostTimes.of([steps])
    assert found is not None
    assert found.turnaround_ns == pytest.approx(1_000_000, abs=2)
    assert not found.overlaps_preparation


# ---------------------------------------------------------------- the profile


def profile() -> StepsProfile:
    sources = [run_of("a", 1), run_of("b", 2)]
    fit = fit_sources(sources)
    host = HostTimes.of([log_of(Doubling(), HOST).steps])
    return StepsProfile.of(sources, replace(fit, host=host), "2026-01-02")


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, written = tmp_path / "p.json", profile()
    write_profile(written, path)
    assert load_profile(path) == written
    assert not list(tmp_path.glob("*.partial"))
    data = json.loads(path.read_text())
    assert data["about"]["device"] == "a machine"
    assert data["coverage"]["new_tokens"][0] >= 1
    assert {e["of"] for e in data["errors"]} == {"all", "prefill", "decode", "mixed"}
    assert data["untested"] == []


def test_the_turnaround_is_the_worker_s_and_no_preparation() -> None:
    made = profile()
    assert made.host is not None
    features = StepFeatures.of([step([10], [])])
    model = made.step_model()
    assert (model.prepare_ns(features) == made.regression.prepare_ns(features)).all()
    assert model.turnaround_ns == made.host.turnaround_ns
    assert model.overlaps_preparation == made.host.overlaps_preparation


def test_a_folder_of_measured_steps_is_no_profile_yet(tmp_path: Path) -> None:
    ProfileWriter.begin(tmp_path / "p", about=ABOUT, engine=ENGINE, design={"points": 1})
    with pytest.raises(ProfileError, match="servetwin fit"):
        load_profile(tmp_path / "p")


# ---------------------------------------------------------------- folders

ROW = {
    "kind": "mixed", "num_tokens": 5, "num_reqs": 3, "query_lens": [1, 1, 3], "context_lens": [7, 9, 4],
    "graph_tokens": None, "device_us": 80.0, "device_us_p10": 79.0, "device_us_p90": 99.0, "forward_us": 70.0,
    "prepare_us": 9.0,
}  # fmt: skip


def test_the_shape_of_a_measured_point() -> None:
    """Two decode rows that read 8 and 10 tokens, and a chunk of 3 behind 4."""
    steps = MeasuredSteps.of_points([ROW, ROW | {"kind": "prefill", "query_lens": [1], "context_lens": [0]}])
    mixed, prefill = (
        {name: int(getattr(steps.features, name)[i]) for name in StepShape._fields} for i in (0, 1)
    )
    assert mixed == {
        "new_tokens": 5, "rows": 3, "logits_rows": 3, "decode_rows": 2, "decode_context_tokens": 18,
        "decode_context_max_tokens": 10, "prefill_tokens": 3, "prefill_rows": 1, "prefill_pairs": 21,
        "prefill_context_tokens": 7, "largest_chunk_tokens": 3, "largest_chunk_context_tokens": 7, "new_requests": 0,
    }  # fmt: skip
    assert (prefill["prefill_rows"], prefill["decode_rows"]) == (1, 0)
    assert steps.device_us.tolist() == [80.0, 80.0]


def begun(path: Path, **changes: Any) -> ProfileWriter:
    return ProfileWriter.begin(path, about=ABOUT | changes, engine=ENGINE, design={"points": 4, "seed": 0})


def test_a_profile_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "p"
    begun(path, date="2026-01-01").add([ROW, ROW])
    writer = ProfileWriter.resume(
        path, about=ABOUT | {"date": "2026-01-02"}, engine=ENGINE, design={"points": 4, "seed": 0}
    )
    assert writer.measured == 2
    writer.add([ROW])
    writer.end({"rows": [3, 3]})
    found = read_profile_folder(path)
    assert len(found.rows) == 3
    assert found.rows[2]["query_lens"] == [1, 1, 3]
    assert found.header["complete"] and found.header["coverage"] == {"rows": [3, 3]}


def test_a_pool_that_memory_has_sized_anew_does_not_stop_a_profile(tmp_path: Path) -> None:
    begun(tmp_path / "p")
    other = ENGINE | {"num_gpu_blocks": 49}
    ProfileWriter.resume(tmp_path / "p", about=ABOUT, engine=other, design={"points": 4, "seed": 0})


def test_a_run_given_twice_is_no_test_of_itself(tmp_path: Path) -> None:
    begun(tmp_path / "a").add([ROW])
    with pytest.raises(StepSourceError, match="is there twice"):
        read_sources([tmp_path / "a", tmp_path / "a" / ".." / "a"])


def test_another_machine_or_design_does_not_go_on_with_it(tmp_path: Path) -> None:
    path = tmp_path / "p"
    begun(path)
    with pytest.raises(ProfileFolderError, match=r"its threads is 1, here it is 2"):
        ProfileWriter.resume(
            path, about=ABOUT | {"threads": 2}, engine=ENGINE, design={"points": 4, "seed": 0}
        )
    with pytest.raises(ProfileFolderError, match=r"its seed is 0, here it is 5"):
        ProfileWriter.resume(path, about=ABOUT, engine=ENGINE, design={"points": 4, "seed": 5})


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ProfileFolderError, match="is not empty"):
        begun(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 9}', "\x00"])
def test_a_damaged_header_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / PROFILE_HEADER).write_text(text)
    with pytest.raises(ProfileFolderError, match=PROFILE_HEADER):
        read_profile_folder(tmp_path)


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    begun(tmp_path / "p").add([ROW])
    (tmp_path / "p" / "points" / "00000.parquet").unlink()
    with pytest.raises(ProfileFolderError, match="a part"):
        read_profile_folder(tmp_path / "p")
    (tmp_path / "p" / "points" / "00000.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ProfileFolderError, match="a part"):
        read_profile_folder(tmp_path / "p")


def test_sources_of_two_machines_do_not_go_together(tmp_path: Path) -> None:
    begun(tmp_path / "a").add([ROW])
    begun(tmp_path / "b", device="another").add([ROW])
    with pytest.raises(StepSourceError, match="device is 'another'"):
        read_sources([tmp_path / "a", tmp_path / "b"])


def test_a_profile_without_a_measurement_is_refused(tmp_path: Path) -> None:
    begun(tmp_path / "a")
    with pytest.raises(StepSourceError, match="no step was measured"):
        read_sources([tmp_path / "a"])
