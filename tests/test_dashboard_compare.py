"""The Compare page: what changed between two runs, request by request, as their logs have it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("streamlit", reason="needs the extra `dashboard`")

from dashboards import shown

from servetwin.dashboard.charts import compare as charts
from servetwin.dashboard.compared import Compared, compare
from servetwin.sim.cli import run
from servetwin.sim.runs import RunFolderError, read_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same 40 requests with steps of 10 ms and, twice as slow, of 20 ms; and another workload."""
    runs = tmp_path_factory.mktemp("compared")
    rows = [
        {
            "request_id": f"r{i}",
            "arrival_s": 0.03 * i,
            "prompt_tokens": 30 + 7 * i,
            "output_tokens": 3 + i % 9,
        }
        for i in range(40)
    ]
    (runs / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = ["--executor", "constant", "--max-num-seqs", "2", "--no-async-scheduling"]
    for name, step_s in (("fast", "0.01"), ("slow", "0.02")):
        command = [
            "run",
            str(runs / "rows.jsonl"),
            *engine,
            "--step-time-s",
            step_s,
            "--out",
            str(runs / name),
        ]
        assert run(command) == 0
    assert (
        run(
            [
                "run",
                "chat",
                "--num-prompts",
                "3",
                *engine,
                "--step-time-s",
                "0.01",
                "--out",
                str(runs / "chat"),
            ]
        )
        == 0
    )
    return runs


def joined(folder: Path) -> pd.DataFrame:
    """Both tables of requests by id, as anybody would join them."""
    fast, slow = (read_run(folder / name).requests.set_index("request_id") for name in ("fast", "slow"))
    return fast.join(slow.add_suffix("_b"))


def compared(folder: Path, a: str = "fast", b: str = "slow") -> Compared:
    return compare(read_run(folder / a), read_run(folder / b), "vllm-bench", intervals=True)


def test_the_differences_are_those_of_the_logs(folder: Path) -> None:
    """TTFT, TPOT and throughput by a join of the tables; the intervals hold the change; the step time differs."""
    found, both = compared(folder), joined(folder)
    ttft = [1e3 * (both[f"first_token_s{x}"] - both[f"arrival_s{x}"]) for x in ("", "_b")]
    p99 = found.latencies["p99_ttft"]
    assert (p99.a, p99.b) == pytest.approx([np.percentile(t, 99) for t in ttft])
    tpot = found.latencies["mean_tpot"]
    assert (tpot.a, tpot.b) == pytest.approx((10, 20))
    assert tpot.interval is not None and tpot.interval.low == pytest.approx(10) == pytest.approx(
        tpot.interval.high
    )
    mean = found.latencies["mean_ttft"]
    assert (
        mean.interval is not None
        and mean.delta is not None
        and mean.interval.low < mean.delta < mean.interval.high
    )
    change = found.quantiles["ttft"][2]
    assert change[[0, -1]] == pytest.approx([(ttft[1] - ttft[0]).min(), (ttft[1] - ttft[0]).max()])
    assert found.num_pairs == 40
    assert found.figures["duration"].a == read_run(folder / "fast").summary["duration"]
    assert found.configuration["step_time_s"] == (0.01, 0.02)


def test_the_page_shows_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and charts for the two runs of the link; the definitions that were chosen."""
    runs = (folder / "fast", folder / "slow")
    app = shown(monkeypatch, *runs, page="compare", run=str(runs[0]), other=str(runs[1]))
    table = next(t.value for t in app.dataframe if "p99_ttft" in t.value.get("figure", pd.Series()).tolist())
    table = table.set_index("figure")
    assert table.loc["mean_tpot", ["A", "B", "B - A", "%"]].tolist() == ["10", "20", "+10", "+100"]
    assert len(app.get("plotly_chart")) == 3
    (configuration,) = (t.value for t in app.dataframe if "field" in t.value)
    assert ["step_time_s", "0.01", "0.02"] in configuration.to_numpy().tolist()
    app.selectbox(key="metric_defs").select("guidellm").run()
    assert any("which includes TTFT" in caption.value for caption in app.caption)


def test_runs_that_share_nothing_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message, and the page lives on with another choice."""
    with pytest.raises(RunFolderError, match="is in B"):
        compared(folder, b="chat")
    runs = (folder / "fast", folder / "chat", folder / "slow")
    app = shown(monkeypatch, *runs, page="compare", run=str(runs[0]), other=str(runs[1]))
    assert any("different workloads" in error.value for error in app.error)
    app.selectbox(key="other_run").select(str(runs[2])).run()
    assert not app.error
    alone = shown(monkeypatch, runs[0], page="compare")
    assert any("Two runs are needed" in info.value for info in alone.info)


def test_a_run_against_itself_has_no_change(folder: Path) -> None:
    """Paired intervals of nothing are nothing."""
    found = compared(folder, b="fast")
    assert all(d.delta == 0 for d in found.latencies.values())
    assert all(d.interval == (0, 0) for d in found.latencies.values())
    assert found.configuration == {}


def test_the_charts_hold_the_numbers(folder: Path) -> None:
    """A line per figure with its interval; A and B in each panel; units on the axes."""
    found = compared(folder)
    (dots,) = charts.forest(found.latencies).data
    place = [*dots.y].index("mean_tpot")
    assert dots.x[place] == pytest.approx(100)
    assert dots.error_x.array[place] == pytest.approx(0, abs=1e-9)
    figure = charts.both_cdfs(found.quantiles)
    assert [t.name for t in figure.data] == ["A", "B"] * 4
    assert figure.data[2].x[-1] == pytest.approx(10) and figure.data[3].x[-1] == pytest.approx(20)
    assert figure.layout.xaxis.title.text == "ms"
