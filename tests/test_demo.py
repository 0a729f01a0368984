"""The demo: the main job on the embedded default, what it prints, and how its run looks on the page."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra `executor`")
pytest.importorskip("glassllm", reason="needs the extra `models`")
pytest.importorskip("streamlit", reason="needs the extra `dashboard`")

from streamlit.testing.v1 import AppTest

from servetwin.dashboard.launch import APP
from servetwin.executor.testing import torch_threads
from servetwin.sim.cli import run
from servetwin.sim.runs import Run, read_run

OPENINGS = (
    "the old house at the end of the lane",
    "the ship came into the harbour",
    "the night of the great storm",
)
"""One of these stands in every prompt; which request is shown depends on who was preempted most."""

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def demo(folder: Path) -> tuple[Run, str]:
    """The demo's run and what it printed on stdout."""
    command = [sys.executable, "-c", "from servetwin.sim.cli import main; main()", "demo"]
    arguments = ["--out", str(folder / "run"), "--models", str(folder / "models")]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "96/96 requests" in done.stderr
    return read_run(folder / "run"), done.stdout


def test_the_demo_shows_figures_a_text_and_the_way_on(demo: tuple[Run, str]) -> None:
    """A results table, one generated text, the run folder and the command for the dashboard."""
    run, printed = demo
    for word in ("TTFT", "TPOT", "ITL", "E2E", "throughput", "KV peak", "preemptions", "prefix hits"):
        assert word in printed
    panel = " ".join(printed.replace("│", " ").split())
    assert any(opening in panel for opening in OPENINGS)
    assert f"run folder   {run.path}" in printed
    assert f"dash {run.path}" in printed


def test_the_demo_exercises_the_whole_loop(demo: tuple[Run, str]) -> None:
    """Real steps, preemptions and prefix hits; nothing is lost."""
    run, _ = demo
    assert len(run.requests) == run.summary["completed"] == 96
    assert run.summary["servetwin"]["preemptions"] > 0
    assert run.requests.cached_tokens.sum() > 0
    assert set(run.steps.source) == {"measured"}


def test_a_second_demo_replaces_the_first_with_the_same_texts(demo: tuple[Run, str], folder: Path) -> None:
    """Measured times differ from run to run, so schedules do; the texts do not, but for a rare tie in rounding."""
    first = tokens_by_request(demo[0])
    with torch_threads(1):
        assert run(["demo", "--out", str(folder / "run"), "--models", str(folder / "models")]) == 0
    again = tokens_by_request(read_run(folder / "run"))
    assert first.keys() == again.keys()
    assert sum(first[name] == again[name] for name in first) >= 92


def tokens_by_request(run: Run) -> dict[str, list[int]]:
    frame = run.tokens.sort_values(["request_id", "index"])
    return {str(name): rows.token_id.tolist() for name, rows in frame.groupby("request_id")}


def test_the_page_shows_the_demo(demo: tuple[Run, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures on the page are those of the summary; three charts; no exception."""
    path = demo[0].path
    summary = json.loads((path / "summary.json").read_text())
    monkeypatch.setattr(sys, "argv", [str(APP), str(path)])
    page = AppTest.from_file(str(APP), default_timeout=60).run()
    assert not page.exception
    found = {m.label: m.value for m in page.metric}
    assert found["Completed requests"] == "96 of 96"
    assert found["Preemptions"] == str(summary["servetwin"]["preemptions"])
    assert found["Output throughput"] == f"{summary['output_throughput']:,.4g} tokens/s"
    assert len(page.get("plotly_chart")) == 3


@contextmanager
def served(path: Path) -> Iterator[str]:
    """The dashboard's address while it runs."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-c", "from servetwin.sim.cli import main; main()", "dash", str(path)]
    process = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("dashboard: http://127.0.0.1:")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.serial
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser on the PATH")
def test_a_browser_draws_the_charts(demo: tuple[Run, str]) -> None:
    """A real browser shows three charts with lines in them, and asks nobody but us for anything."""
    from playwright.sync_api import expect, sync_playwright

    asked: list[str] = []
    with served(demo[0].path) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.on("request", lambda request: asked.append(_host_of(request)))
        page.goto(address, wait_until="commit")
        expect(page.locator(".stPlotlyChart .plot-container")).to_have_count(3, timeout=90_000)
        expect(page.get_by_text("96 of 96")).to_be_visible()
        assert page.locator(".stPlotlyChart path.js-line, .stPlotlyChart canvas").count() >= 2
        browser.close()
    assert set(asked) <= {"127.0.0.1", ""}


def _host_of(request: object) -> str:
    from urllib.parse import urlparse

    return urlparse(str(getattr(request, "url", ""))).hostname or ""
