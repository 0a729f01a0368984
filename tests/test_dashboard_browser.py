"""The dashboard in a real browser: pages without complaints, a run that is started, watched and stopped."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from browsers import Watched, browser, needs_browser, served

pytest.importorskip("streamlit", reason="needs the extra `dashboard`")

from playwright.sync_api import Browser, Page, expect

from servetwin.sim.cli import run
from servetwin.sim.runs import read_run

pytestmark = [pytest.mark.full, pytest.mark.serial, needs_browser]
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the same requests: one with a tight pool, the other with plenty of blocks."""
    runs = tmp_path_factory.mktemp("runs")
    load = ["--dataset-name", "random", "--random-input-len", "200", "--random-output-len", "40"]
    load += ["--random-range-ratio", "0.5", "--request-rate", "30", "--num-prompts", "200"]
    engine = [
        "--executor",
        "constant",
        "--step-time-s",
        "0.01",
        "--max-num-seqs",
        "16",
        "--max-model-len",
        "1024",
    ]
    for name, blocks in (("tight", "160"), ("wide", "1000")):
        out = runs / name
        assert run(["run", *load, *engine, "--num-gpu-blocks-override", blocks, "--out", str(out)]) == 0
    return runs


def number(page: Page, label: str) -> float:
    """A key figure of the page."""
    text = (
        page.locator("[data-testid=stMetric]", has_text=label)
        .locator("[data-testid=stMetricValue]")
        .inner_text()
    )
    return float(re.sub(r"[,%\s]", "", text))


def live_processes(folder: Path) -> list[psutil.Process]:
    return [
        p for p in psutil.process_iter(["cmdline"]) if any(str(folder) in w for w in p.info["cmdline"] or [])
    ]


def test_live_shows_a_run_that_moves(chromium: Browser, folder: Path, tmp_path: Path) -> None:
    """Started with chosen flags: time and requests grow, a pause holds them, a stop ends it; nobody is left."""
    runs = tmp_path / "runs"
    shutil.copytree(folder / "wide", runs / "wide")
    with served(runs) as address:
        watched = Watched(chromium)
        page = watched.page
        page.goto(f"{address}/live")
        page.get_by_label("Requests", exact=True).fill("2000", timeout=PATIENCE_MS)
        page.get_by_label("Seats (max_num_seqs)").fill("4")
        page.get_by_label("Pace (simulated s per s)").fill("4")
        page.keyboard.press("Tab")
        expect(page.get_by_text("--max-num-seqs 4 --pace 4")).to_be_visible(timeout=PATIENCE_MS)
        page.get_by_role("button", name="Start").click()
        page.locator("[data-testid=stMetric]").first.wait_for(timeout=PATIENCE_MS)
        seen = _watch(page, 6)
        assert seen == sorted(seen) and seen[-1] - seen[0] > 4, seen
        assert number(page, "Waiting") > 0 and number(page, "Running") == 4
        assert page.locator(".stPlotlyChart .js-line").count() >= 2
        watched.screenshot("live", tmp_path / "artifacts")
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_text("paused", exact=True)).to_be_visible(timeout=PATIENCE_MS)
        time.sleep(1.5)
        held = _watch(page, 3)
        assert held[0] == held[-1]
        page.get_by_role("button", name="Go on").click()
        expect(page.get_by_text("going on", exact=True)).to_be_visible(timeout=PATIENCE_MS)
        assert _watch(page, 4)[-1] > held[0]
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_text("ended", exact=True)).to_be_visible(timeout=PATIENCE_MS)
        found = read_run(runs / "live-1")
        assert (found.state, found.reason) == ("failed", "interrupted")
        assert number(page, "Requests ended") == len(found.requests)
        assert watched.complaints == []
        # One more, which the end of the server has to end.
        page.get_by_text("Start a run").click()
        page.get_by_role("button", name="Start").click()
        page.get_by_text("going on", exact=True).wait_for(timeout=PATIENCE_MS)
        assert live_processes(runs / "live-2")
    end = time.monotonic() + 15
    while left := live_processes(runs / "live-2"):
        assert time.monotonic() < end, left
        time.sleep(0.1)


def _watch(page: Page, seconds: int) -> list[float]:
    """The time of the run as shown, once a second."""
    seen = []
    for _ in range(seconds):
        seen.append(number(page, "Time of the run"))
        time.sleep(1)
    return seen
