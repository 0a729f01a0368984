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
from engines import NO_SHAPE

pytest.importorskip("streamlit", reason="needs the extra `dashboard`")

from streamlit.testing.v1 import AppTest

from servetwin.dashboard import charts
from servetwin.dashboard.launch import APP, PortError, serve
from servetwin.sim.contract import CachedRequestData, ModelRunnerOutput, SchedulerOutput, StepResult
from servetwin.sim.events import EventLog
from servetwin.sim.records import Admission, EngineCoreOutputs, Finish, Frame, ScheduleRecord
from servetwin.sim.runs import RunFolderError, RunWriter
from servetwin.sim.timeline import StepTimes
from servetwin.workloads import RequestSpec

S = 1_000_000_000


def write_run(path: Path, state: str = "complete") -> Path:
    """A run of one request that gets three tokens, one a second."""
    writer = RunWriter.create(path, {"config": {}})
    log = EventLog(writer)
    log.arrived(RequestSpec(request_id="a", arrival_s=0.0, prompt_tokens=4, output_tokens=3), 0)
    for n in range(3):
        record = ScheduleRecord(running=1, used_blocks=1 + n, free_blocks=9 - n)
        if n == 0:
            record.admitted = [Admission("a", False, 0, 1)]
        cached = CachedRequestData(["a"], new_block_ids=[None], num_computed_tokens=[n])
        frame = Frame(n, n * S, SchedulerOutput([], cached, {"a": 1}, 1, {}, [0], set()), record)
        log.scheduled(frame)
        ended = n == 2
        outputs = EngineCoreOutputs({"a": [7]}, {"a": Finish("length", None)} if ended else {})
        result = StepResult(0, S, ModelRunnerOutput([], {}, []), "constant", shape=NO_SHAPE)
        log.stepped(frame, result, StepTimes(0, n * S, n * S, (n + 1) * S), (n + 1) * S, outputs)
    log.close(3 * S)
    if state == "complete":
        writer.complete()
    else:
        writer.fail("interrupted")
    return path


def shown(monkeypatch: pytest.MonkeyPatch, *runs: Path) -> AppTest:
    """The page for these runs, after its first run; fails when the page raised."""
    monkeypatch.setattr(sys, "argv", [str(APP), *map(str, runs)])
    page = AppTest.from_file(str(APP), default_timeout=60).run()
    assert not page.exception
    return page


def metrics(page: AppTest) -> dict[str, str]:
    return {m.label: m.value for m in page.metric}


def test_the_page_shows_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Key figures, three charts, no warning for a complete run."""
    page = shown(monkeypatch, write_run(tmp_path / "a"))
    found = metrics(page)
    assert found["Completed requests"] == "1 of 1"
    assert found["Median TTFT"] == "1,000 ms"
    assert found["Peak KV use"] == "30.0%"
    assert found["Prefix hits"] == "no data"
    assert len(page.get("plotly_chart")) == 3
    assert not page.warning


def test_definitions_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GuideLLM's TPOT includes the first token: 3 s for 3 tokens."""
    page = shown(monkeypatch, write_run(tmp_path / "a"))
    page.selectbox(key="metric_defs").select("guidellm").run()
    assert metrics(page)["Median TPOT"] == "1,000 ms"
    assert any("which includes TTFT" in caption.value for caption in page.caption)


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


@pytest.mark.parametrize("figure", [charts.requests_over_time, charts.kv_blocks_over_time])
def test_charts_are_thinned_without_losing_the_peak(figure: Any) -> None:
    """About MAX_POINTS a trace, all traces over the same instants, the spike still there, lines as steps."""
    traces = figure(steps(100_000)).data
    assert all(len(t.x) <= charts.MAX_POINTS + 2 for t in traces)
    assert all(np.array_equal(t.x, traces[0].x) for t in traces)
    assert traces[0].y.max() == 50
    assert (traces[0].x[0], traces[0].x[-1]) == (0, 999.99)
    assert {t.line.shape for t in traces} == {"hv"}


def test_a_short_run_is_drawn_whole() -> None:
    """Few points are not touched, and axes have units."""
    figure = charts.requests_over_time(steps(50))
    assert len(figure.data[0].x) == 50
    assert figure.layout.xaxis.title.text == "time of the run (s)"
    assert figure.layout.yaxis.title.text == "requests"


def test_thinning_without_tsdownsample_keeps_extremes() -> None:
    """The fallback holds the minimum and the maximum of every piece."""
    y = np.random.default_rng(0).normal(size=10_000)
    kept = charts.min_max(y, 100)
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
        serve([tmp_path], 8501)
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
