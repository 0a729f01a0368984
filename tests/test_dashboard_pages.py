"""Numbers on the pages of the dashboard are those of the log, computed another way."""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pandas as pd
import pyarrow.parquet as pq
import pytest

pytest.importorskip("streamlit", reason="needs the extra `dashboard`")

from dashboards import metrics, opened, shown, write_run
from streamlit.testing.v1 import AppTest

from servetwin.dashboard import kv_losses, slo, step_times, step_view
from servetwin.dashboard.block_map import CACHED, FREE, HELD, SHARED, block_map
from servetwin.dashboard.hit_loss import hit_loss
from servetwin.dashboard.library import Library
from servetwin.dashboard.prefix_tree import computed_and_evicted, prefix_tree
from servetwin.dashboard.request_lives import Filter, choose, running_at, segments, story
from servetwin.dashboard.residencies import Residencies, holding
from servetwin.dashboard.run_data import RunData
from servetwin.dashboard.run_list import differences
from servetwin.sim.cli import run
from servetwin.sim.config import EngineConfig
from servetwin.sim.definitions import DEFINITIONS
from servetwin.sim.explain import explain
from servetwin.sim.metrics import summarize
from servetwin.sim.planning.steady import Lives, steady_state
from servetwin.sim.runs import Run, RunWriter, read_run
from servetwin.sim.steptime.errors import Errors
from servetwin.sim.steptime.profiles import load_profile
from servetwin.sim.steptime.steps_profile import StepsProfile

BLOCK, BLOCKS = 16, 60
RUN_FLAGS = [
    *("--executor", "constant", "--step-time-s", "0.01", "--max-num-seqs", "12", "--max-model-len", "800"),
    *("--num-gpu-blocks-override", str(BLOCKS + 1), "--max-num-batched-tokens", "256"),
]


def write_workload(path: Path) -> Path:
    """80 requests that share beginnings of 1 to 12 blocks; some are prompts of whole blocks and asked twice."""
    draw = random.Random(7)
    lines = []
    for n in range(80):
        family, shared = draw.randrange(3), draw.randrange(1, 12)
        row = {
            "request_id": f"r{n}",
            "arrival_s": round(n * 0.03, 3),
            "prompt_tokens": shared * BLOCK + draw.choice([0, 0, 7, 30]),
            "output_tokens": draw.randrange(1, 90),
            "prefix_ids": [100 * family + i for i in range(shared)],
            "prefix_block_tokens": BLOCK,
        }
        lines.append(orjson.dumps(row | ({"abort_s": 1.5} if n == 40 else {})))
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the same requests, synchronous (`a`) and asynchronous (`b`)."""
    home = tmp_path_factory.mktemp("pages")
    workload = write_workload(home / "workload.jsonl")
    assert (
        run(["run", str(workload), *RUN_FLAGS, "--no-async-scheduling", "--out", str(home / "runs" / "a")])
        == 0
    )
    assert run(["run", str(workload), *RUN_FLAGS, "--out", str(home / "runs" / "b")]) == 0
    return home / "runs"


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Path:
    """The same requests at three replicas, each with a pool of its own."""
    out = folder.parent / "fleet"
    flags = [*RUN_FLAGS, "--replicas", "3", "--router", "round_robin", "--out", str(out)]
    assert run(["run", str(folder.parent / "workload.jsonl"), *flags]) == 0
    return out


@pytest.fixture
def log(folder: Path) -> Run:
    return read_run(folder / "a")


@pytest.fixture
def data(folder: Path) -> RunData:
    return Library().open(folder / "a")


@pytest.fixture
def res(data: RunData) -> Residencies:
    assert data.residencies is not None
    return data.residencies


def figure(app: AppTest, number: int = 0) -> dict[str, Any]:
    """A chart of the page as JSON."""
    spec: dict[str, Any] = json.loads(app.get("plotly_chart")[number].proto.spec)
    return spec


def numbers(values: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """An array of a figure, which Plotly may have packed."""
    if isinstance(values, dict):
        flat = np.frombuffer(base64.b64decode(values["bdata"]), dtype=values["dtype"])
        return flat.reshape([int(n) for n in values["shape"].split(",")]) if "shape" in values else flat
    return np.array(values)


def trace(spec: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (t for t in spec["data"] if t.get("name") == name)
    return found


# ---------------------------------------------------------------- overview


def test_overview(folder: Path, log: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Key figures from requests and steps; the series are the columns of steps/, step for step."""
    app = shown(monkeypatch, folder)
    done = log.requests[log.requests.finish_reason == "length"]
    found = metrics(app)
    assert found["Completed requests"] == f"{len(done)} of 80"
    span = done.finish_s.max() - log.requests.arrival_s.min()
    assert found["Request throughput"] == f"{len(done) / span:,.4g}/s"
    assert found["Output throughput"] == f"{done.num_output_tokens.sum() / span:,.4g} tokens/s"
    ttft = 1000 * (done.first_token_s - done.arrival_s)
    assert found["Median TTFT"] == f"{ttft.median():,.4g} ms"
    many = done[done.num_output_tokens > 1]
    tpot = 1000 * (many.last_token_s - many.first_token_s) / (many.num_output_tokens - 1)
    assert found["Median TPOT"] == f"{tpot.median():,.4g} ms"
    assert found["Preemptions"] == str((log.events.kind == "preempted").sum()) != "0"
    steps = log.steps
    hits = steps.prefix_hit_tokens.sum() / steps.prefix_query_tokens.sum()
    assert found["Prefix hits"] == f"{hits:.1%}"
    assert found["Peak KV use"] == f"{steps.used_blocks.max() / BLOCKS:.1%}"
    spec = figure(app)
    series = {
        "running": steps.running, "waiting": steps.waiting, "used": steps.used_blocks,
        "cached, free": steps.cached_free_blocks, "free": steps.free_blocks, "prefill": steps.prefill_tokens,
        "decode": steps.decode_tokens, "step time of the run": 1000 * (steps.device_s + steps.prepare_s),
    }  # fmt: skip
    for name, column in series.items():
        drawn = trace(spec, name)
        np.testing.assert_allclose(numbers(drawn["x"]), steps.start_s)
        np.testing.assert_allclose(numbers(drawn["y"]), column, err_msg=name)
    arrivals = trace(spec, "arrivals")
    width = np.diff(numbers(arrivals["x"]))[0]
    assert numbers(arrivals["y"]).sum() * width == pytest.approx(80)
    ends = figure(app, 1)["data"][0]
    counted = Counter(log.requests.finish_reason) | {"open": 0}
    assert dict(zip(ends["x"], numbers(ends["y"]).tolist(), strict=True)) == counted


def test_definitions_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GuideLLM's TPOT includes the first token: 3 s for 3 tokens."""
    app = shown(monkeypatch, write_run(tmp_path / "a"))
    app.selectbox(key="metric_defs").select("guidellm").run()
    assert metrics(app)["Median TPOT"] == "1,000 ms"
    assert any("which includes TTFT" in caption.value for caption in app.caption)


def test_a_window_shows_its_steps(folder: Path, log: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those between from and to, and the one that holds when the window begins."""
    low, high = 0.5, 1.0
    drawn = numbers(trace(figure(shown(monkeypatch, folder, from_=str(low), to_=str(high))), "running")["x"])
    starts = log.steps.start_s
    expected = starts[(starts <= high) & (starts > starts[starts <= low].max() - 1e-9)]
    np.testing.assert_allclose(drawn, expected)


def test_asynchronous_runs_have_lanes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host and device of the first steps; a synchronous run has no such figure."""
    steps = read_run(folder / "b").steps
    app = shown(monkeypatch, folder, run=str(folder / "b"))
    device = trace(figure(app, 1), "device")
    np.testing.assert_allclose(numbers(device["base"]), steps.device_start_s[: len(numbers(device["x"]))])
    np.testing.assert_allclose(numbers(device["x"]), 0.01)
    assert len(shown(monkeypatch, folder).get("plotly_chart")) == len(app.get("plotly_chart")) - 1
    legend = figure(app, 1)["layout"]["legend"]
    assert legend["y"] > 1 and legend["yanchor"] == "bottom", "it would cover the lane of the device"


def test_what_a_profile_foretells_is_drawn(
    folder: Path, data: RunData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the step times of the run, once a profile was named."""
    name = "epyc-2cpu-llama-44m"
    line = trace(figure(shown(monkeypatch, folder, profile=name)), "foretold by the profile")
    profile = load_profile(name)
    assert isinstance(profile, StepsProfile)
    times = step_times.step_times(data, data.span_s)
    np.testing.assert_allclose(numbers(line["x"]), times.start_s)
    np.testing.assert_allclose(numbers(line["y"]), profile.step_model().durations_ns(times.features) / 1e6)


def test_a_running_run_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written so far is shown, with a word on it, and what comes later is picked up."""
    app = shown(monkeypatch, write_run(tmp_path / "a", "running"))
    assert "still going on" in app.warning[0].value
    assert any(c.value == "This page follows the run." for c in app.caption)
    assert metrics(app)["Completed requests"] == "1 of 1"


@pytest.mark.parametrize("name", ["runs/a", "fleet"])
def test_unfinished_runs_have_the_figures_of_what_there_is(fleet: Path, tmp_path: Path, name: str) -> None:
    """The same as the summary of the whole frames says."""
    path = tmp_path / "cut"
    shutil.copytree(fleet.parent / name, path)
    (path / "summary.json").unlink()
    header = orjson.loads((path / "run.json").read_bytes())
    (path / "run.json").write_bytes(orjson.dumps(header | {"state": "failed", "reason": "interrupted"}))
    assert Library().open(path).summary == summarize(read_run(path))


def test_many_steps_are_read_by_rows(data: RunData, log: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps are too many to be made one by one, extremes and sums of their rows stay."""
    names = ("used_blocks", "running", "waiting", "free_blocks", "device_s")
    exact = data.steps(None, names)
    assert exact.exact and len(exact.frame) == len(log.steps) == exact.num_steps
    monkeypatch.setattr(step_view, "EXACT_STEPS", 10)
    coarse = data.steps(None, names)
    assert not coarse.exact and coarse.num_steps == len(log.steps)
    assert len(coarse.frame) < len(log.steps)
    for name in names:
        extremes = coarse.frame[name].min(), coarse.frame[name].max()
        assert extremes == (log.steps[name].min(), log.steps[name].max()), name
    assert coarse.frame.start_s.is_monotonic_increasing


# ---------------------------------------------------------------- several replicas


def test_replicas_are_added_up(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each schedule call the sum over all replicas of what their latest step said."""
    steps = read_run(fleet).steps
    spec = figure(shown(monkeypatch, fleet))
    drawn = trace(spec, "running")
    assert len(numbers(drawn["x"])) == len(steps)
    for name, column in {"running": "running", "used": "used_blocks", "waiting": "waiting"}.items():
        expected = sum(
            steps[column].where(steps.replica == k).ffill().fillna(0) for k in steps.replica.unique()
        )
        np.testing.assert_allclose(numbers(trace(spec, name)["y"]), expected)


def test_one_replica_can_be_chosen(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sidebar or the link; its series are its own steps, its requests those that ended there."""
    log = read_run(fleet)
    app = shown(monkeypatch, fleet, replica="1")
    assert app.selectbox(key="replica").options == ["all", "0", "1", "2"]
    steps = log.steps[log.steps.replica == 1]
    np.testing.assert_allclose(numbers(trace(figure(app), "running")["y"]), steps.running)
    table = opened(app, "requests").dataframe[0].value
    mine = log.requests[log.requests.replica == 1]
    assert {*table["request"]} == {*mine.request_id}
    assert app.query_params["replica"] == "1"


def test_pages_for_one_pool_take_the_first_replica(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And say so."""
    app = opened(shown(monkeypatch, fleet, view="Block map"), "kv_cache")
    assert any("Replica 0 of 3" in caption.value for caption in app.caption)
    data = Library().open(fleet).of_replica(0)
    blocks = read_run(fleet).blocks
    assert data.residencies is not None and len(data.residencies) == (blocks.replica == 0).sum()
    assert data.usable_blocks == BLOCKS


def test_stories_of_a_fleet(fleet: Path) -> None:
    """The part of the log that a life needs has its steps and events of every replica."""
    data, log = Library().open(fleet), read_run(fleet)
    config = EngineConfig.model_validate(log.config["engine"])
    for request_id in log.requests.request_id[::16]:
        assert story(data, request_id) == explain(log, config, request_id)


# ---------------------------------------------------------------- runs


def test_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is what each summary says; the difference of two runs is the flag that differs."""
    app = opened(shown(monkeypatch, folder), "runs")
    table = app.dataframe[0].value
    for n, name in enumerate(("a", "b")):
        summary = read_run(folder / name).summary
        row = table.iloc[n]
        assert (row["run"], row["state"], row["requests"]) == (name, "complete", 80)
        assert row["requests/s"] == summary["request_throughput"]
        judged = steady_state(Lives.of(read_run(folder / name).requests))
        assert row["verdict"] == judged.verdict.value
        assert row["TTFT p99 (ms)"] == summary["p99_ttft_ms"]
        assert row["preemptions"] == read_run(folder / name).requests.preemptions.sum()
    differing = app.dataframe[1].value
    assert differing.loc["config.engine.scheduler.async_scheduling"].to_list() == ["False", "True"]
    assert len(differing) == 1


def test_a_run_that_served_nobody_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request is refused: there is no queue that could have been stable."""
    lines = [
        {"request_id": f"r{n}", "arrival_s": n, "prompt_tokens": 900, "output_tokens": 5} for n in range(4)
    ]
    workload = tmp_path / "workload.jsonl"
    workload.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    assert run(["run", str(workload), *RUN_FLAGS, "--out", str(tmp_path / "runs" / "refused")]) == 0
    row = opened(shown(monkeypatch, tmp_path / "runs"), "runs").dataframe[0].value.iloc[0]
    assert (row["state"], row["requests"], row["verdict"]) == ("complete", 4, None)


def test_runs_that_cannot_be_read_are_rows_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign folder says what it lacks, beside the others."""
    app = opened(shown(monkeypatch, folder, tmp_path), "runs")
    states = app.dataframe[0].value["state"].to_list()
    assert states[:2] == ["complete", "complete"]
    assert "has no run.json" in states[2]


def test_differences_name_fields_that_one_has_alone() -> None:
    """Nested fields get dotted names; equal ones are left out."""
    table = differences({"a": {"x": {"y": 1, "z": [1, 2]}}, "b": {"x": {"y": 2, "z": [1, 2]}, "w": None}})
    assert table.to_dict("index") == {"x.y": {"a": "1", "b": "2"}, "w": {"a": "-", "b": "none"}}


# ---------------------------------------------------------------- requests


def test_requests(folder: Path, log: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the table are those of requests/; the chart's bars fill the life of each; the story is `explain`'s."""
    victim = log.requests.request_id[log.requests.preemptions.idxmax()]
    app = opened(shown(monkeypatch, folder, request=victim, order="most preemptions"), "requests")
    table = app.dataframe[0].value.set_index("request")
    assert len(table) == 40
    rows = log.requests.set_index("request_id").loc[table.index]
    assert table["preemptions"].to_list() == sorted(log.requests.preemptions, reverse=True)[:40]
    np.testing.assert_allclose(table["TTFT (ms)"], 1000 * (rows.first_token_s - rows.arrival_s))
    np.testing.assert_allclose(table["queue (ms)"], 1000 * (rows.first_scheduled_s - rows.queued_s))
    told = explain(log, EngineConfig.model_validate(log.config["engine"]), victim)
    assert f"request {victim}:" in app.code[0].value
    assert app.code[0].value.count(" s  waited ") == sum(m.kind == "wait" for m in told.moments) > 0
    (bars,) = figure(app, 1)["data"]
    np.testing.assert_allclose(numbers(bars["x"]), [p.duration_ns / 1e6 for p in told.phases])


def test_bars_fill_the_life_of_a_request(data: RunData, log: Run) -> None:
    """Without gap or overlap from queued to end; preempted time is that between the events."""
    chosen = choose(data, Filter(data.span_s, limit=200))
    assert chosen.total == len(chosen.rows) == 80
    bars = segments(data, chosen.rows)
    requests = log.requests.set_index("request_id")
    for request_id, mine in bars.groupby("request_id"):
        row = requests.loc[request_id]
        assert mine.from_s.iloc[0] == row.queued_s and mine.to_s.iloc[-1] == row.finish_s
        assert (mine.from_s.to_numpy()[1:] == mine.to_s.to_numpy()[:-1]).all()
    away = bars[bars.phase == "preempted"]
    events = log.events[log.events.kind.isin(("preempted", "resumed"))].sort_values(
        ["request_id", "time_s"], kind="stable"
    )
    gone = events[events.kind == "preempted"].groupby("request_id").time_s.sum()
    back = events[events.kind == "resumed"].groupby("request_id").time_s.sum()
    # Nobody was aborted while preempted here, so every preemption has its resumption.
    expected = (back - gone).loc[lambda s: s > 0]
    found = (away.to_s - away.from_s).groupby(away.request_id).sum()
    pd.testing.assert_series_equal(found[found > 0].sort_index(), expected, check_names=False)


def test_filters(data: RunData, log: Run) -> None:
    """By window, end and preemption."""
    early = choose(data, Filter((0.0, 0.3), limit=200))
    expected = log.requests[log.requests.arrival_s <= 0.3].request_id
    assert data.request_ids(early.rows) == expected.to_list()
    aborted = choose(data, Filter(data.span_s, reasons=("abort",)))
    assert data.request_ids(aborted.rows) == ["r40"]
    preempted = choose(data, Filter(data.span_s, only_preempted=True, limit=200))
    assert {*data.request_ids(preempted.rows)} == {*log.requests.request_id[log.requests.preemptions > 0]}


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_life_needs_only_its_part_of_the_log(folder: Path, name: str) -> None:
    """A request's story is the one that the whole log tells."""
    data, log = Library().open(folder / name), read_run(folder / name)
    config = EngineConfig.model_validate(log.config["engine"])
    for request_id in log.requests.request_id[::9]:
        assert story(data, request_id) == explain(log, config, request_id)


def test_an_unknown_request_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With those that are close; the page lives on."""
    app = opened(shown(monkeypatch, folder, request="r4o"), "requests")
    assert "'r4o' is none of the" in app.error[0].value


# ---------------------------------------------------------------- KV cache


@pytest.mark.parametrize("name", ["a", "b"])
def test_block_map_and_pool_agree_with_the_steps(folder: Path, name: str) -> None:
    """At every instant of the map as many blocks are held, cached and free as steps/ counts after its schedule."""
    data = Library().open(folder / name)
    res, steps = data.residencies, read_run(folder / name).steps
    assert res is not None
    cells = block_map(res, data.span_s, (1, BLOCKS))
    assert cells.state.shape == (BLOCKS, 240)
    checked = 0
    for n, time_s in enumerate(cells.times_s):
        before = np.flatnonzero(steps.start_s <= time_s)
        if not len(before) or (steps.end_s == time_s).any():
            continue
        step = steps.iloc[before[-1]]
        # What a request gives back when it ends is free before the next schedule call counts.
        ended = steps.end_s[(steps.end_s > step.start_s) & (steps.end_s <= time_s)]
        if len(ended):
            continue
        counts = Counter(cells.state[:, n].tolist())
        assert counts[HELD] + counts[SHARED] == step.used_blocks
        assert counts[CACHED] == step.cached_free_blocks
        assert counts[FREE] == step.free_blocks
        checked += 1
        held = holding(res, time_s, BLOCKS, running_at(data, res, time_s))
        assert held.total == BLOCKS
        assert sum(held.of_requests.values()) + held.left_behind == step.used_blocks
        assert (held.cached_free, held.free) == (step.cached_free_blocks, step.free_blocks)
        assert len(held.of_requests) <= step.running
    assert checked > 100


def test_the_map_shows_who_was_preempted(data: RunData, res: Residencies, log: Run) -> None:
    """Just before the preemption the victim owns blocks on the map; just after it none."""
    lost = log.events[log.events.kind == "preempted"].iloc[0]
    number = int(res.numbers_of([lost.request_id])[0])
    cells = block_map(res, (lost.time_s - 0.005, lost.time_s + 0.005), (1, BLOCKS), times=2)
    held = (cells.request == number) & ((cells.state == HELD) | (cells.state == SHARED))
    assert held[:, 0].sum() > 0
    assert held[:, 1].sum() == 0


def test_what_preemptions_lost(folder: Path, log: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost tokens and blocks are those of the events; usage is that of the steps around them."""
    app = opened(shown(monkeypatch, folder, view="What preemptions lost"), "kv_cache")
    events = log.events[log.events.kind == "preempted"]
    assert metrics(app)["Computed tokens lost"] == f"{events.computed_tokens.sum():,}"
    resumed = log.events[log.events.kind == "resumed"]
    assert metrics(app)["Of these found again"] == f"{resumed.computed_tokens.sum():,}"
    table = app.dataframe[0].value
    assert table["request"].to_list() == events.request_id.to_list()
    steps = log.steps
    for row in table.itertuples():
        place = int(steps.start_s.searchsorted(row[1]))
        assert row[7] == pytest.approx(100 * steps.used_blocks[place - 1] / BLOCKS)
        assert row[8] == pytest.approx(100 * steps.used_blocks[place] / BLOCKS)


def test_reuse(data: RunData, res: Residencies, log: Run) -> None:
    """Hits, evictions and lifetimes of contents, counted block by block."""
    steps = log.steps
    hit_tokens = log.events.computed_tokens[log.events.kind.isin(("scheduled", "resumed"))].sum()
    assert res.spans.hits.sum() * BLOCK == hit_tokens > 0
    assert len(res.spans.idle_before_eviction) == steps.evictions.sum() > 0
    lifetimes = []
    for _, rows in log.blocks.groupby("block_id"):
        begun = None
        for row in rows.itertuples():
            begun = row.from_s if begun is None else begun
            if row.ended in ("freed", "evicted"):
                lifetimes.append(row.to_s - begun)
            if row.ended != "reused":
                begun = None
    np.testing.assert_allclose(np.sort(res.spans.lifetime), np.sort(lifetimes))
    begins, counts = kv_losses.evictions_over_time(data, data.span_s, 50)
    assert counts.sum() == steps.evictions.sum() and len(begins) == 50


def test_last_blocks(data: RunData, log: Run) -> None:
    """Slots of the last block that nobody used when a request ended or was preempted."""
    events = log.events[log.events.kind.isin(("finished", "aborted", "preempted")) & (log.events.blocks > 0)]
    left = (events.blocks * BLOCK - events.computed_tokens).clip(0, BLOCK - 1)
    waste = kv_losses.last_blocks(data)
    assert waste.mean == pytest.approx(left.mean())
    assert waste.share == pytest.approx(left.sum() / (events.blocks.sum() * BLOCK))


def test_hit_loss(data: RunData, res: Residencies, log: Run) -> None:
    """The parts add up to the prompts; evicted and unreachable blocks are found again by walking the residencies."""
    found = hit_loss(data, res, BLOCK)
    admitted = log.requests[log.requests.first_scheduled_s.notna()]
    assert found.prompt == sum(found[1:]) == admitted.num_prompt_tokens.sum()
    assert found.hit == admitted.cached_tokens.sum() > 0
    assert found.short == (admitted.num_prompt_tokens % BLOCK).sum()
    first_preempted = log.events[log.events.kind == "preempted"].groupby("request_id").time_s.min()
    limits = admitted.set_index("request_id").first_token_s
    gone: list[str] = []
    there: list[str] = []
    taken_back = {(r.block_id, r.to_s) for r in log.blocks.itertuples() if r.ended == "reused"}
    for row in log.blocks[log.blocks.prefix_id.notna()].itertuples():
        until = min(limits.get(row.request_id, np.inf), first_preempted.get(row.request_id, np.inf))
        if (row.block_id, row.from_s) in taken_back or not row.from_s < until:
            continue
        before = log.blocks[(log.blocks.prefix_id == row.prefix_id) & (log.blocks.index < row.Index)]
        if len(before):
            alive = before.to_s.isna() | (before.to_s > row.from_s)
            (there if alive.any() else gone).append(row.request_id)
    assert found.evicted == len(gone) * BLOCK > 0
    assert found.unreachable + found.last_block == len(there) * BLOCK > 0
    rule = admitted[
        (admitted.num_prompt_tokens % BLOCK == 0)
        & (admitted.cached_tokens == admitted.num_prompt_tokens - BLOCK)
        & admitted.request_id.isin(there)
    ]
    assert found.last_block == len(rule) * BLOCK > 0


def test_prefix_tree(data: RunData, res: Residencies, folder: Path) -> None:
    """Three families; each root is what all requests of one share, and its blocks are in blocks/ under those ids."""
    rows = [orjson.loads(line) for line in (folder.parent / "workload.jsonl").read_bytes().splitlines()]
    families = Counter(row["prefix_ids"][0] for row in rows)
    tree = prefix_tree(data)
    assert tree.requests_read == 80
    assert sorted(node.requests for node in tree.roots) == sorted(families.values())
    shortest = {f: min(len(r["prefix_ids"]) for r in rows if r["prefix_ids"][0] == f) for f in families}
    assert sorted(len(n.contents) for n in tree.roots) == sorted(shortest.values())
    root = tree.roots[0]
    computed, evicted = computed_and_evicted(data, res, root.contents)
    assert computed >= len(root.contents)
    assert evicted == len(data.run.blocks.query("prefix_id in @root.contents and ended == 'evicted'"))


@pytest.mark.parametrize("view", ["Occupancy", "Block map", "What fills the pool", "Reuse", "Prefix tree"])
def test_views_of_the_kv_cache_open(folder: Path, view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its link, with a chart."""
    app = opened(shown(monkeypatch, folder, view=view), "kv_cache")
    assert app.get("plotly_chart")
    assert app.query_params["view"] == view
    assert not app.error


def test_evictions_share_their_axis_with_the_occupancy(
    folder: Path, log: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window is the axis, whenever the first and the last content are evicted; all of its evictions are drawn."""
    low, high = 0.5, 1.5
    app = opened(shown(monkeypatch, folder, **{"from": str(low), "to": str(high)}), "kv_cache")
    spec = figure(app, 1)
    assert spec["layout"]["xaxis"]["range"] == [low, high]
    inside = log.steps[(log.steps.start_s >= low) & (log.steps.start_s <= high)]
    assert 0 < numbers(spec["data"][0]["y"]).sum() == inside.evictions.sum()


def test_the_least_bar_of_hits_can_be_seen(
    folder: Path, res: Residencies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts stand on an axis of powers of ten that begins below 1."""
    app = opened(shown(monkeypatch, folder, view="Reuse"), "kv_cache")
    spec = figure(app, 1)
    drawn = numbers(spec["data"][0]["y"])
    assert drawn.sum() == len(res.spans.hits)
    assert spec["layout"]["yaxis"]["type"] == "log"
    low, high = spec["layout"]["yaxis"]["range"]
    assert 10**low < 1 and drawn.max() < 10**high


def test_without_blocks_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that did not log them has its occupancy, and a word on the rest."""
    app = opened(shown(monkeypatch, write_run(tmp_path / "a"), view="Block map"), "kv_cache")
    assert "did not log blocks/" in app.info[0].value


# ---------------------------------------------------------------- latency and SLO


@pytest.mark.parametrize("metric_defs", [*DEFINITIONS])
def test_latencies(folder: Path, log: Run, metric_defs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every statistic in the table is that of the run's summary by the same definitions."""
    app = opened(shown(monkeypatch, folder, defs=metric_defs), "latency")
    table = app.dataframe[0].value
    expected = summarize(log, metric_defs)["servetwin"]["latency"]
    for label, name in {
        "TTFT": "ttft",
        "TPOT": "tpot",
        "ITL": "itl",
        "E2E": "e2el",
        "queue": "queue",
    }.items():
        for statistic, value in expected[f"{name}_ms"].items():
            assert float(table.loc[label, statistic].replace(",", "")) == pytest.approx(value, rel=1e-5), (
                label
            )


def test_distributions_are_those_of_the_requests(
    folder: Path, log: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share that is drawn at any latency is that of the requests up to it, also between two of them."""
    spec = figure(opened(shown(monkeypatch, folder), "latency"))
    done = log.requests[log.requests.finish_reason == "length"]
    for label, end_s in (("TTFT", done.first_token_s), ("E2E", done.last_token_s)):
        samples = np.sort(1e3 * (end_s - done.arrival_s).to_numpy())
        drawn = trace(spec, label)
        assert drawn["line"]["shape"] == "hv", "a slope between two samples would be a share that nobody has"
        x, y = numbers(drawn["x"]), numbers(drawn["y"])
        assert (x[0], y[0]) == (pytest.approx(samples[0]), 0)
        between = np.concatenate([samples + 1e-6, (samples[1:] + samples[:-1]) / 2 + 1e-6])
        expected = 100 * np.searchsorted(samples, between, side="right") / len(samples)
        np.testing.assert_allclose(y[np.searchsorted(x, between, side="right") - 1], expected)


def test_limits(folder: Path, log: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attainment and goodput as counted request by request; the curve passes through them."""
    limits = {"ttft": 250.0, "tpot": 12.0}
    app = opened(shown(monkeypatch, folder, ttft="250", tpot="12"), "latency")
    goodput = summarize(log, goodput_ms=limits)["request_goodput"]
    assert metrics(app)["Goodput"] == f"{goodput:,.4g} requests/s"
    done = log.requests[log.requests.finish_reason == "length"]
    gaps = (done.num_output_tokens - 1).clip(lower=1)
    ttft = 1e3 * (done.first_token_s - done.arrival_s)
    tpot = 1e3 * (done.last_token_s - done.first_token_s) / gaps
    good = ((ttft.round(6) <= 250) & (tpot.round(6) <= 12)).sum()
    assert 0 < good < len(done)
    assert metrics(app)["Within all limits"] == f"{good / 80:.1%}"
    curve = figure(app, 1)["data"][0]
    at_one = np.interp(1, numbers(curve["x"]), numbers(curve["y"]))
    assert at_one == pytest.approx(100 * good / 80, abs=2)


def test_a_limit_that_is_just_kept_is_kept(data: RunData) -> None:
    """The largest latency as limit: all requests are good, whatever a division rounds to."""
    times = data.completed_times
    worst_ms = float((times.first_token - times.sent).max()) / 1e6
    found = slo.attainment(times, slo.Limits(ttft_ms=worst_ms), "vllm-bench", 80, 1.0)
    assert found.good == len(times.arrival)
    assert found.share == pytest.approx(len(times.arrival) / 80)
    worse = slo.attainment(times, slo.Limits(ttft_ms=worst_ms * (1 - 1e-9)), "vllm-bench", 80, 1.0)
    assert worse.good < found.good


# ---------------------------------------------------------------- step times


def test_step_times(folder: Path, log: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps by regime as steps/ has them; errors of a profile as computed one step after another."""
    name = "epyc-2cpu-llama-44m"
    app = opened(shown(monkeypatch, folder, profile=name), "step_time")
    steps = log.steps[log.steps["rows"] > 0]
    by_regime = app.dataframe[0].value
    assert by_regime.loc["all", "steps"] == len(steps)
    assert by_regime.loc["decode", "steps"] == (steps.prefill_rows == 0).sum()
    mixed = (steps.prefill_rows > 0) & (steps.decode_rows > 0)
    assert by_regime.loc["mixed", "steps"] == mixed.sum() > 0
    profile = load_profile(name)
    assert isinstance(profile, StepsProfile)
    data = Library().open(folder / "a")
    times = step_times.step_times(data, data.span_s)
    model = profile.step_model()
    alone = np.array(
        [int(model.durations_ns(times.features.where(np.arange(len(times)) == n))[0]) for n in range(50)]
    )
    whole = step_times.foretell(model, times)
    np.testing.assert_allclose(whole.device_ms[:50], alone / 1e6)
    expected = Errors.of(whole.device_ms, np.full(len(times), 10.0))
    assert expected is not None
    assert app.dataframe[1].value.loc["all", "mean error (%)"] == pytest.approx(expected.mape)
    assert metrics(app)["Outside"] == f"{whole.outside.sum()} of {len(steps):,}"


def test_a_wrong_profile_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the shipped ones; the page lives on."""
    app = opened(shown(monkeypatch, folder, profile="nobody"), "step_time")
    assert "epyc-2cpu-llama-44m" in app.error[0].value
    assert app.get("plotly_chart")


# ---------------------------------------------------------------- windows without anything in them


@pytest.mark.parametrize("page", ["overview", "requests", "kv_cache", "latency", "step_time"])
def test_a_window_behind_the_run_is_empty(folder: Path, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is there, and no page breaks on it."""
    app = opened(shown(monkeypatch, folder, from_="900", to_="1000", ttft="100"), page)
    assert not app.error
    if page == "requests":
        assert "No request of this window" in app.info[0].value


def test_a_window_the_wrong_way_round_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole run is shown, with a word on it."""
    app = shown(monkeypatch, folder, from_="3", to_="1")
    assert "From is not before To" in app.sidebar.warning[0].value


# ---------------------------------------------------------------- older folders


@pytest.mark.parametrize("page", ["overview", "requests", "kv_cache", "latency", "step_time"])
def test_older_folders_have_their_pages(
    folder: Path, tmp_path: Path, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the columns that were added later: what they would say is left out, and said to be."""
    old = tmp_path / "old"
    shutil.copytree(folder / "a", old)
    later = {"released_s", "shared", "replica", "sent_s", "predicted_outside", "logits_rows", "new_requests"}
    for file in old.glob("*/*.parquet"):
        part = pq.read_table(file, partitioning=None)
        pq.write_table(part.drop_columns([name for name in part.column_names if name in later]), file)
    app = opened(shown(monkeypatch, old, view="Block map"), page)
    assert not app.error
    if page == "kv_cache":
        assert any("An older run" in caption.value for caption in app.caption)
    if page == "step_time":
        assert "noted shape" in app.info[0].value


# ---------------------------------------------------------------- without requests or steps


@pytest.mark.parametrize("page", ["overview", "requests", "kv_cache", "latency", "step_time", "runs"])
def test_an_empty_run_has_pages(tmp_path: Path, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has happened yet: no exception, and "no data" in the place of figures."""
    RunWriter.create(tmp_path / "a", {"config": {}})
    app = opened(shown(monkeypatch, tmp_path), page)
    assert not app.error
