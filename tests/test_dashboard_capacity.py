"""The Capacity page: what a sweep's table and a plan's answer say, and which points are on the frontier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("streamlit", reason="needs the extra `dashboard`")

from dashboards import metrics, shown

from servetwin.dashboard.capacity import configurations, frontier, read_plan, results_of, with_cost
from servetwin.dashboard.charts import capacity as charts
from servetwin.dashboard.launch import serve
from servetwin.sim.planning.results import RESULTS, by_point, read_results, results_table, write_results
from servetwin.sim.runs import RunFolderError

ABOUT = {"parameters": ["max_num_seqs"], "method": "grid", "seeds": 2, "workload": "chat", "num_runs": 7}


def write_sweep(folder: Path) -> Path:
    """Three points of two seeds; the more seats, the more is served and the longer it takes; one run failed."""
    rows: list[dict[str, Any]] = []
    for point, seats in enumerate((8, 16, 64)):
        for seed in (0, 1):
            served, waited = 100.0 * (point + 1) + seed, 50.0 * (point + 1) + 2 * seed
            rows.append(
                {"run": len(rows), "point": point, "seed": seed, "max_num_seqs": seats, "state": "done"}
                | {"output_throughput": served, "p99_ttft_ms": waited, "spec_hash": f"{point}{seed}"}
            )
    rows.append({"run": 6, "point": 3, "seed": 0, "max_num_seqs": 1, "state": "failed", "error": "too small"})
    folder.mkdir(parents=True)
    write_results(folder / RESULTS, results_table(rows, ABOUT))
    return folder / RESULTS


def write_plan(path: Path, **changes: Any) -> Path:
    """Two configurations: the larger one takes twice the rate at twice the price."""

    def configuration(seats: int, rate: float, usd: float) -> dict[str, Any]:
        point = {"verdict": "stable", "waits_for": None, "ttft_ms_interval": [80.0, 120.0]}
        curve = [
            point | {"rate": rate / 2, "good": True, "ttft_ms": 100.0},
            point | {"rate": 2 * rate, "good": False, "ttft_ms": None},
            point | {"rate": 1.5 * rate, "good": False, "ttft_ms": 900.0, "ttft_ms_interval": None},
        ]
        cost = {"gpus": seats / 8, "usd_per_hour": usd, "usd_per_million_output_tokens": usd / 10}
        return {
            "settings": {"max_num_seqs": seats}, "feasible": True, "max_request_rate": rate, "knee_rate": 1.1 * rate,
            "replicas": 1, "headroom": 0.1, "binding": "seats", "cost": cost, "curve": curve, "notes": ["few requests"],
        }  # fmt: skip

    rows = [configuration(8, 3.0, 2.0), configuration(16, 6.0, 4.0)]
    plan = {"feasible": True, "max_request_rate": 6.0, "target_rate": None, "simulations": 9, "replicas": 1}
    plan |= {"headroom": 0.1, "binding": "seats", "binding_reason": "99 % of the waiting was for seats"}
    plan |= {
        "cost": rows[1]["cost"],
        "slo": {"ttft": 500.0, "percentile": 95.0},
        "vllm_serve": "vllm serve MODEL",
    }
    plan |= {"assumed": ["max_model_len 131072"], "configurations": rows} | changes
    path.write_text(json.dumps(plan, indent=2))
    return path


def test_results_are_found_and_others_are_not(tmp_path: Path) -> None:
    """Tables of sweeps and answers of plans below a folder; no other JSON, nothing inside a run."""
    table, plan = write_sweep(tmp_path / "a" / "sweep"), write_plan(tmp_path / "plan.json")
    (tmp_path / "other.json").write_text('{"requests": 3}')
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    write_plan(run / "plan.json")
    assert results_of([tmp_path]) == [table, plan]
    with pytest.raises(RunFolderError, match="is no answer of"):
        read_plan(tmp_path / "other.json")
    (tmp_path / "cut.json").write_bytes(plan.read_bytes()[:100])
    with pytest.raises(RunFolderError, match="is no answer of"):
        read_plan(tmp_path / "cut.json")


def test_a_folder_with_results_alone_can_be_served(tmp_path: Path) -> None:
    """It is not refused for having no run; the port is looked at next."""
    write_sweep(tmp_path / "sweep")
    with pytest.raises(ValueError, match="port 0 is not between"):
        serve([tmp_path], 0)


def test_the_page_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means over seeds, the cost of tokens by the price, the frontier, the failed run."""
    table = write_sweep(tmp_path / "sweep")
    app = shown(monkeypatch, tmp_path, page="capacity")
    (points,) = (t.value for t in app.dataframe if "failed_runs" in t.value)
    assert points.output_throughput.dropna().tolist() == [100.5, 200.5, 300.5]
    assert points.p99_ttft_ms.dropna().tolist() == [51, 101, 151]
    app.number_input(key="usd_per_gpu_hour").set_value(3.6).run()
    points = with_cost(by_point(read_results(table)), 3.6)
    assert points.usd_per_million_output_tokens[1] == pytest.approx(1e6 * 3.6 / (200.5 * 3600))
    (shown_points,) = (t.value for t in app.dataframe if "failed_runs" in t.value)
    assert shown_points.usd_per_million_output_tokens[1] == pytest.approx(
        points.usd_per_million_output_tokens[1]
    )
    assert any("1 runs failed" in warning.value for warning in app.warning)
    assert any("too small" in t.value.to_string() for t in app.dataframe)
    figure = json.loads(app.get("plotly_chart")[0].proto.spec)
    assert figure["layout"]["xaxis"]["title"]["text"] == "p99_ttft_ms"
    assert figure["layout"]["yaxis"]["title"]["text"] == "output_throughput (tokens/s)"


def test_the_page_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Key figures, configurations with their cost, the curve with its limit; an infeasible one says so."""
    write_plan(tmp_path / "plan.json")
    app = shown(monkeypatch, tmp_path, page="capacity")
    found = metrics(app)
    assert found["Largest rate"] == "6 requests/s"
    assert found["Cost"] == "4 USD/h"
    assert found["Headroom to the knee"] == "10.0%"
    assert len(app.get("plotly_chart")) == 3
    cost = json.loads(app.get("plotly_chart")[1].proto.spec)["layout"]
    assert cost["xaxis"]["title"]["text"] == "usd_per_million_output_tokens (USD)"
    assert cost["yaxis"]["title"]["text"] == "max_request_rate (requests/s)"
    assert any("TTFT 500 ms (p95)" in caption.value for caption in app.caption)
    assert any(code.value == "vllm serve MODEL" for code in app.code)
    write_plan(tmp_path / "plan.json", feasible=False, nearest={"rate": 0.5})
    app.run()
    assert any("Not feasible" in error.value and "0.5" in error.value for error in app.error)


def test_nothing_to_show_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = shown(monkeypatch, tmp_path, page="capacity")
    assert any("servetwin sweep" in info.value for info in app.info)


def test_the_charts_of_a_plan_hold_its_numbers(tmp_path: Path) -> None:
    """Good and bad rates apart, without those that have no latency; lines at the limit, the largest rate, the knee."""
    plan = read_plan(write_plan(tmp_path / "plan.json"))
    figure = charts.load_curve(plan["configurations"][0], "ttft", "p95 TTFT", 500.0)
    good, bad = figure.data
    assert ([*good.x], [*good.y], [*good.error_y.array]) == ([1.5], [100.0], [20.0])
    assert ([*bad.x], [*bad.y], [*bad.error_y.array]) == ([4.5], [900.0], [0.0])
    assert sorted(line.x0 for line in figure.layout.shapes if line.x0 == line.x1) == pytest.approx([3.0, 3.3])
    table = configurations(plan)
    assert table.max_num_seqs.tolist() == [8, 16] and table.usd_per_hour.tolist() == [2.0, 4.0]


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8) | st.just(np.nan)), max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_the_frontier_is_what_nobody_beats(
    points: list[tuple[float, float]], x_lower: bool, y_lower: bool
) -> None:
    """Against the definition: not worse in both and better in one; in order of x; NaN never."""
    x, y = [p[0] for p in points], [p[1] for p in points]
    a, b = [v if x_lower else -v for v in x], [v if y_lower else -v for v in y]
    known = [i for i in range(len(points)) if not np.isnan(b[i])]

    def beaten(i: int) -> bool:
        return any(a[j] <= a[i] and b[j] <= b[i] and (a[j] < a[i] or b[j] < b[i]) for j in known)

    wanted = {(a[i], b[i]) for i in known if not beaten(i)}
    found = frontier(x, y, x_lower=x_lower, y_lower=y_lower)
    assert {(a[i], b[i]) for i in found} == wanted and len(found) == len(wanted)
    assert [x[i] for i in found] == sorted(x[i] for i in found)
