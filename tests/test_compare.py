"""`servetwin compare`: requests paired by id, deltas as the tables give them, intervals that cover, limits kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servetwin.sim.cli import run
from servetwin.sim.comparison import compare_runs
from servetwin.sim.metric_names import default_names, metric_name
from servetwin.sim.pairing import pair
from servetwin.sim.planning.bootstrap import BlockBootstrap, interval
from servetwin.sim.planning.thresholds import threshold
from servetwin.sim.runs import Run, read_run

SMALL = ["--max-num-seqs", "4", "--num-gpu-blocks-override", "60", "--max-model-len", "256"]


def served(folder: Path, rows: list[dict[str, Any]], *arguments: str, step_s: float = 0.01) -> Run:
    """A run of rows of our JSONL with a constant step time, in that folder."""
    workload = folder.with_suffix(".jsonl")
    workload.write_text("".join(json.dumps(row) + "\n" for row in rows))
    constant = ["--executor", "constant", "--step-time-s", str(step_s)]
    assert run(["run", str(workload), *constant, *SMALL, "--out", str(folder), *arguments]) == 0
    return read_run(folder)


def rows(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Requests of different lengths, ten a second."""
    return [
        {
            "request_id": f"q{i}",
            "arrival_s": i / 10,
            "prompt_tokens": 20 + 13 * (i % 7),
            "output_tokens": 1 + 7 * (i % 5),
        }
        | fields
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The same requests with steps of 10 and of 12 ms."""
    folder = tmp_path_factory.mktemp("compare")
    return served(folder / "a", rows(60)), served(folder / "b", rows(60), step_s=0.012)


def answer(capsys: pytest.CaptureFixture[str], a: Run, b: Run, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and the JSON object of `compare`."""
    capsys.readouterr()
    code = run(["compare", str(a.path), str(b.path), *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


# ---------------------------------------------------------------- the bootstrap


@given(
    st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=60),
    st.integers(1, 9),
    st.sampled_from([0.0, 12.5, 50.0, 99.0, 100.0]),
)
def test_a_resample_is_that_of_its_blocks_written_out(
    values: list[float | None], length: int, p: float
) -> None:
    array = np.array([np.nan if value is None else value for value in values])
    bootstrap = BlockBootstrap(len(array), resamples=20, seed=3, block_length=length)
    means, stds, percentiles = bootstrap.means(array), bootstrap.stds(array), bootstrap.percentiles(array, p)
    assert (bootstrap.weights.sum(axis=1) == bootstrap.num_blocks).all()
    for row, weights in enumerate(bootstrap.weights):
        drawn = np.concatenate(
            [np.tile(array[k * length : (k + 1) * length], times) for k, times in enumerate(weights)]
        )
        drawn = drawn[~np.isnan(drawn)]
        if not len(drawn):
            assert np.isnan([means[row], stds[row], percentiles[row]]).all()
            continue
        assert means[row] == pytest.approx(drawn.mean(), abs=1e-6)
        # Sums of squares know half the digits.
        assert stds[row] == pytest.approx(drawn.std(), abs=1e-6 + 1e-7 * np.nanmax(np.abs(array)))
        assert percentiles[row] == pytest.approx(np.percentile(drawn, p), abs=1e-6)


def test_percentiles_of_many_values_are_found_in_a_window_of_ranks() -> None:
    """Values that grow with time: the blocks differ as much as can be, so that the first window is too narrow."""
    n = 40_000
    rng = np.random.default_rng(0)
    for values in (np.arange(n, dtype=np.float64), rng.lognormal(size=n)):
        bootstrap = BlockBootstrap(n, resamples=8, seed=1)
        found = bootstrap.percentiles(values, 90)
        blocks = np.arange(n) // bootstrap.block_length
        for weights, value in zip(bootstrap.weights, found, strict=True):
            assert value == pytest.approx(np.percentile(np.repeat(values, weights[blocks]), 90))


def test_intervals_cover_the_mean_of_values_that_follow_each_other() -> None:
    """95 % intervals of an AR(1) series hold its mean about as often; single draws would do so far less often."""
    rng = np.random.default_rng(5)
    covered = {1: 0, 20: 0}
    for seed in range(200):
        series = np.zeros(2000)
        noise = rng.normal(size=2000)
        for i in range(1, 2000):
            series[i] = 0.7 * series[i - 1] + noise[i]
        for length in covered:
            means = BlockBootstrap(2000, resamples=300, seed=seed, block_length=length).means(series)
            found = interval(means)
            assert found is not None
            covered[length] += found.low <= 0 <= found.high
    assert covered[20] >= 176
    assert covered[1] <= 150


def test_the_same_seed_gives_the_same_intervals_and_wrong_sizes_are_refused() -> None:
    values = np.arange(50.0)
    first, again, other = (BlockBootstrap(50, seed=seed).means(values) for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()
    assert interval(np.full(3, np.nan)) is None
    with pytest.raises(ValueError, match="49 values for a bootstrap of 50"):
        BlockBootstrap(50).means(np.zeros(49))
    with pytest.raises(ValueError, match="must be 1 or more"):
        BlockBootstrap(0)


# ---------------------------------------------------------------- the comparison


def test_deltas_are_those_of_the_tables(
    two_runs: tuple[Run, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = two_runs
    code, found = answer(capsys, a, b)
    assert code == 0
    assert found["pairs"] == {
        "paired": 60,
        "only_in_a": 0,
        "only_in_b": 0,
        "not_completed_in_both": {},
        "different_lengths": 0,
        "different_arrivals": 0,
    }
    sides = [log.requests.set_index("request_id").sort_index() for log in (a, b)]
    ttfts = [1000 * (side.first_token_s - side.arrival_s) for side in sides]
    metric = found["metrics"]["p99_ttft"]
    assert [metric["a"], metric["b"]] == pytest.approx([np.percentile(t, 99) for t in ttfts])
    assert metric["delta"] == pytest.approx(np.percentile(ttfts[1], 99) - np.percentile(ttfts[0], 99))
    assert metric["interval"][0] <= metric["delta"] <= metric["interval"][1]
    assert metric["pairs"] == 60
    longer = [side[side.num_output_tokens > 1] for side in sides]
    tpots = [1000 * (s.last_token_s - s.first_token_s) / (s.num_output_tokens - 1) for s in longer]
    metric = found["metrics"]["mean_tpot"]
    assert metric["delta"] == pytest.approx((tpots[1] - tpots[0]).mean())
    assert metric["pairs"] == len(longer[0]) == 48
    for name in ("request_throughput", "duration", "total_output_tokens"):
        assert found["metrics"][name]["delta"] == pytest.approx(b.summary[name] - a.summary[name])
        assert found["metrics"][name]["interval"] is None
    assert found["metrics"]["p99_itl"]["a"] == pytest.approx(a.summary["p99_itl_ms"])
    assert found["configuration"]["step_time_s"] == {"a": 0.01, "b": 0.012}
    assert "seed" not in found["configuration"]
    assert set(found["metrics"]) == {str(name) for name in default_names()}


def test_pairing_makes_intervals_narrow(two_runs: tuple[Run, Run]) -> None:
    """What both runs share cancels: the interval of the difference is narrower than that of independent draws."""
    a, b = two_runs
    paired = compare_runs(a, b).differences["mean_ttft"].interval
    samples = [1e3 * (r.requests.first_token_s - r.requests.arrival_s).to_numpy() for r in (a, b)]
    means = [BlockBootstrap(60, seed=seed).means(side) for seed, side in enumerate(samples)]
    apart = interval(means[1] - means[0])
    assert paired is not None and apart is not None
    assert paired.high - paired.low < 0.7 * (apart.high - apart.low)


def test_a_run_does_not_differ_from_itself(
    two_runs: tuple[Run, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = answer(capsys, two_runs[0], two_runs[0], "--fail-on", "p99_ttft:+0%")
    assert code == 0 and found["configuration"] == {}
    deltas = {metric["delta"] for metric in found["metrics"].values()}
    assert deltas <= {0.0, None}
    assert {tuple(m["interval"]) for m in found["metrics"].values() if m["interval"]} == {(0.0, 0.0)}


def test_what_cannot_be_paired_is_counted_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = rows(20), rows(22)[1:]
    first[3]["abort_s"] = first[3]["arrival_s"] + 0.02
    first[5]["prompt_tokens"], second[7]["output_tokens"] = 300, 3
    second[9]["arrival_s"] += 0.001
    a, b = served(tmp_path / "a", first), served(tmp_path / "b", second)
    code, found = answer(capsys, a, b)
    assert code == 0
    assert found["pairs"] == {
        "paired": 17,
        "only_in_a": 1,
        "only_in_b": 2,
        "not_completed_in_both": {"A abort, B length": 1, "A refused, B length": 1},
        "different_lengths": 1,
        "different_arrivals": 1,
    }
    assert sum(1 for note in found["notes"] if "no pair" in note) == 3
    assert found["metrics"]["mean_ttft"]["pairs"] == 17
    assert found["a"]["requests"] == {"abort": 1, "length": 18, "refused": 1}


def test_runs_of_different_workloads_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = served(tmp_path / "a", rows(3))
    b = served(tmp_path / "b", [row | {"request_id": f"x{i}"} for i, row in enumerate(rows(3))])
    capsys.readouterr()
    assert run(["compare", str(a.path), str(b.path)]) == 2
    assert "no request of A (3) is in B (3)" in capsys.readouterr().err


def test_an_id_that_stands_twice_is_refused(two_runs: tuple[Run, Run]) -> None:
    import pandas as pd

    table = two_runs[0].requests
    with pytest.raises(ValueError, match="B has request 'q0' twice"):
        pair(table, pd.concat([table, table[:1]]))


# ---------------------------------------------------------------- limits


def test_limits_that_are_exceeded_end_with_exit_code_4(
    two_runs: tuple[Run, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps are 20 % longer: TPOT rises by 20 %, or 2 ms, to the letter."""
    a, b = two_runs
    rules = ["median_tpot:+19%", "median_tpot:+20%", "median_tpot:+0.0019s", "completed:-0", "p99.9_ttft:-1%"]
    flags = [text for rule in rules for text in ("--fail-on", rule)]
    code, found = answer(capsys, a, b, *flags)
    assert code == 4
    verdicts = [(v["exceeded"], v["interval_beyond"]) for v in found["fail_on"]]
    assert verdicts == [(True, True), (False, False), (True, True), (False, None), (False, False)]
    assert found["fail_on"][0]["delta_percent"] == pytest.approx(20)
    assert answer(capsys, a, b, "--fail-on", "median_tpot:+20%")[0] == 0
    assert answer(capsys, b, a, "--fail-on", "request_throughput:-0.1%")[0] == 0
    assert answer(capsys, a, b, "--fail-on", "request_throughput:-0.1%")[0] == 4


def test_a_limit_within_the_interval_is_told_from_one_beyond(two_runs: tuple[Run, Run]) -> None:
    difference = compare_runs(*two_runs).differences["mean_ttft"]
    assert difference.delta is not None and difference.interval is not None
    low, high = difference.interval
    middle = (difference.delta + low) / 2
    words = [
        threshold(f"mean_ttft:+{limit}ms").judge(difference).words for limit in (low / 2, middle, 2 * high)
    ]
    assert "FAILED" in words[0] and "whole interval lies beyond" in words[0]
    assert "FAILED" in words[1] and "the limit lies within the interval" in words[1]
    assert "kept" in words[2] and "whole interval lies within" in words[2]


def test_a_figure_without_a_value_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One output token each: there is no TPOT, and nothing says that it is good."""
    a = served(tmp_path / "a", rows(3, output_tokens=1))
    code, found = answer(capsys, a, a, "--fail-on", "p99_tpot:+5%")
    assert code == 4
    assert found["metrics"]["p99_tpot"]["pairs"] == 0
    assert found["fail_on"][0]["exceeded"] and found["fail_on"][0]["delta"] is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--fail-on", "p99_tfft:+5%"], "metric 'p99_tfft' is not known; allowed: (mean"),
        (["--fail-on", "p101_ttft:+5%"], "a percentile lies between 0 and 100"),
        (["--fail-on", "p99_ttft"], "must be NAME:+N or NAME:-N"),
        (["--fail-on", "p99_ttft:5%"], "'5%' is no limit"),
        (["--fail-on", "preemptions:+5ms"], "preemptions is in preemptions, not a time"),
        (["--metric-defs", "mine"], "--metric-defs 'mine': must be one of vllm-server"),
        (["--confidence", "100"], "--confidence 100: must be above 0 and below 100"),
        (["--resamples", "9"], "--resamples 9: must be 100 or more"),
        (["--seed", "-1"], "--seed -1: must be 0 or more"),
    ],
)
def test_bad_input_is_one_line(
    two_runs: tuple[Run, Run], capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    capsys.readouterr()
    assert run(["compare", *(str(log.path) for log in two_runs), *flags]) == 2
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and not out


def test_a_run_that_broke_off_is_told_and_never_judged(
    two_runs: tuple[Run, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(two_runs[1].path, broken)
    header = json.loads((broken / "run.json").read_text())
    (broken / "run.json").write_text(json.dumps(header | {"state": "failed", "reason": "interrupted"}))
    code, found = answer(capsys, two_runs[0], read_run(broken))
    assert code == 0 and f"{broken}: the run is failed (interrupted)" in found["notes"]
    assert run(["compare", str(two_runs[0].path), str(broken), "--fail-on", "p99_ttft:+900%"]) == 2
    assert "--fail-on judges complete runs only" in capsys.readouterr().err


def test_names_are_read_in_every_spelling() -> None:
    spellings = {"p99_ttft_ms": "p99_ttft", "mean_e2e": "mean_e2el", "p99.9_itl": "p99.9_itl"}
    assert {text: str(metric_name(text)) for text in spellings} == spellings
    assert metric_name("median_tpot").percentile == 50 and metric_name("p99.9_itl").percentile == 99.9
    assert metric_name("steps").unit == "steps" and metric_name("max_ttft").unit == "ms"


def test_the_tables_for_people_say_the_intervals_and_the_verdicts(
    two_runs: tuple[Run, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(["compare", *(str(log.path) for log in two_runs), "--fail-on", "p99_ttft:+1%"]) == 4
    shown = capsys.readouterr().out
    for words in (
        "60 pairs",
        "95 % interval",
        "p99_ttft",
        "step_time_s",
        "p99_ttft:+1%: FAILED",
        "blocks of 4",
    ):
        assert words in shown
