"""The dashboard shows what the tables say, draws no more than a browser can, and ends when told to."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("streamlit", reason="needs the extra `dashboard`")

from dashboards import opened, shown, write_run
from stories import Story

from servetwin.dashboard.charts import overview, thinning
from servetwin.dashboard.folders import labels, runs_of
from servetwin.dashboard.launch import PortError, serve
from servetwin.dashboard.library import Library
from servetwin.sim.runs import RunFolderError, RunWriter
from servetwin.sim.step_rows import StepRows


def test_a_failed_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State and reason stand above the figures."""
    page = shown(monkeypatch, write_run(tmp_path / "a", "failed"))
    (warning,) = page.warning
    assert "interrupted" in warning.value


def test_several_runs_have_a_selector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run is shown when it is chosen."""
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", "failed")]
    page = shown(monkeypatch, *runs)
    assert not page.warning
    page.selectbox(key="run").select(runs[1]).run()
    assert page.warning


def test_a_damaged_run_is_an_error_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error names the file; the page does not fail."""
    run = write_run(tmp_path / "a")
    (run / "steps" / "00000.parquet").unlink()
    (error,) = shown(monkeypatch, run).error
    assert "steps/00000.parquet is listed in run.json but missing" in error.value


def test_a_damaged_run_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run is one choice away; the damaged one stays an error when it is chosen again."""
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b")]
    (runs[0] / "run.json").write_text("{")
    app = shown(monkeypatch, *runs)
    assert "run.json: damaged" in app.error[0].value
    app.selectbox(key="run").select(runs[1]).run()
    assert not app.error
    assert app.get("plotly_chart")


def test_a_link_restores_the_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run, window and definitions come from the address, and stand there on the next page, too."""
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b")]
    query = {"run": str(runs[1]), "from_": "0.5", "to_": "2", "defs": "guidellm"}
    app = shown(monkeypatch, tmp_path, **query)
    assert app.selectbox(key="run").value == runs[1]
    assert (app.number_input(key="from_s").value, app.number_input(key="to_s").value) == (0.5, 2)
    assert app.selectbox(key="metric_defs").value == "guidellm"
    app.query_params.clear()  # as Streamlit does when another page is opened
    opened(app, "runs")
    assert app.query_params == {"run": str(runs[1]), "from": "0.5", "to": "2", "defs": "guidellm"}
    app.button(key="whole_run").click().run()
    assert "from" not in app.query_params


def test_a_link_to_what_is_not_there_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown run is told; nonsense in the other places is left out."""
    run = write_run(tmp_path / "a")
    app = shown(monkeypatch, run, run="/gone", from_="x", to_="nan", defs="nobody")
    assert "/gone" in app.warning[0].value
    assert app.query_params == {"run": str(run), "defs": "vllm-bench"}


def test_runs_are_found_below_a_folder(tmp_path: Path) -> None:
    """Run folders are taken as they are, others are searched; tables of a run are not."""
    a, b = write_run(tmp_path / "x" / "a"), write_run(tmp_path / "x" / "deep" / "b")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    assert runs_of([b, tmp_path / "x", foreign]) == [b, a, foreign]
    assert labels([a, b]) == {a: "a", b: "deep/b"}
    assert labels([a]) == {a: "a"}


def test_an_open_run_is_read_anew_when_it_has_changed(tmp_path: Path) -> None:
    """The same object until then; afterwards old columns are kept and new parts are added to them."""
    path = tmp_path / "a"
    writer = RunWriter.create(path, {"config": {}})
    library, written = Library(), Story()
    written.step(0, 1)
    writer.write({"steps": written.log._step_rows})
    first = library.open(path)
    assert first.columns.numbers("steps", "start_s").tolist() == [0]
    assert library.open(path) is first
    assert first.span_s == (0, 1)
    written.log._step_rows = StepRows()
    written.step(1, 3)
    writer.write({"steps": written.log._step_rows})
    second = library.open(path)
    (path / "steps" / "00000.parquet").write_bytes(b"not read again")
    assert second.columns.numbers("steps", "start_s").tolist() == [0, 1]
    assert second.span_s == (0, 3)


def steps(n: int) -> pd.DataFrame:
    """A long table of steps with one spike."""
    running = np.zeros(n)
    running[n // 3] = 50
    return pd.DataFrame(
        {
            "start_s": np.arange(n) / 100,
            "running": running,
            "waiting": np.arange(n) % 7,
            "used_blocks": running,
            "cached_free_blocks": 10.0,
            "free_blocks": 90 - running,
        }
    )


@pytest.mark.parametrize("figure", [overview.requests_over_time, overview.kv_blocks_over_time])
def test_charts_are_thinned_without_losing_the_peak(figure: Any) -> None:
    """About MAX_POINTS a trace, all traces over the same instants, the spike still there, lines as steps."""
    traces = figure(steps(100_000)).data
    assert all(len(t.x) <= thinning.MAX_POINTS + 2 for t in traces)
    assert all(np.array_equal(t.x, traces[0].x) for t in traces)
    assert traces[0].y.max() == 50
    assert (traces[0].x[0], traces[0].x[-1]) == (0, 999.99)
    assert {t.line.shape for t in traces} == {"hv"}


def test_a_short_run_is_drawn_whole() -> None:
    """Few points are not touched, and axes have units."""
    figure = overview.requests_over_time(steps(50))
    assert len(figure.data[0].x) == 50
    assert figure.layout.xaxis.title.text == "time of the run (s)"
    assert figure.layout.yaxis.title.text == "requests"


def test_thinning_without_tsdownsample_keeps_extremes() -> None:
    """The fallback holds the minimum and the maximum of every piece."""
    y = np.random.default_rng(0).normal(size=10_000)
    kept = thinning.min_max(y, 100)
    assert len(kept) <= 100
    assert {y.argmin(), y.argmax()} <= set(kept)
    assert (np.diff(kept) > 0).all()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    """No run folder, a port in use, no port at all: one error, before anything is started."""
    run = write_run(tmp_path / "a")
    with pytest.raises(RunFolderError, match="is not a run folder"):
        serve([tmp_path / "a" / "steps"], 8501)
    with pytest.raises(PortError, match="port 0 is not between"):
        serve([run], 0)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        with pytest.raises(PortError, match="cannot be had: Address already in use"):
            serve([run], s.getsockname()[1])


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.serial
def test_serve_answers_and_ends_with_its_child(tmp_path: Path) -> None:
    """The server answers on the loopback; SIGTERM to the parent ends both, with exit code 0."""
    run, port = write_run(tmp_path / "a"), free_port()
    code = (
        f"import sys; from servetwin.dashboard.launch import serve; sys.exit(serve([{str(run)!r}], {port}))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stderr is not None
        said = any(f"http://127.0.0.1:{port}" in line for line in parent.stderr)
        assert said, "the server ended without saying its address"
        for _ in range(300):
            if healthy(port) or parent.poll() is not None:
                break
            time.sleep(0.2)
        assert healthy(port)
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(30) == 0
    assert not healthy(port)
