"""The dashboard in a real browser: pages without complaints, a run that is started, watched and stopped."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote, urlencode

import psutil
import pytest
from browsers import Watched, browser, needs_browser, served

pytest.importorskip("streamlit", reason="needs the extra `dashboard`")

from playwright.sync_api import Browser, Page, expect

from servetwin.dashboard.pages import FIRST_PAGE, PAGES
from servetwin.sim.cli import run
from servetwin.sim.runs import read_run

pytestmark = [pytest.mark.full, pytest.mark.serial, needs_browser]
PATIENCE_MS = 60_000
AT_REST = (
    "document.querySelector('[data-testid=stApp][data-test-script-state=notRunning] h1') !== null"
    " && [...document.querySelectorAll('.stPlotlyChart')].every(c => c.querySelector('.main-svg'))"
)
AXES = (
    "Object.entries(document.querySelector('.js-plotly-plot')._fullLayout)"
    ".filter(([k]) => /^xaxis\\d*$/.test(k)).map(([, axis]) => axis.range)"
)
"""Ranges of the time axes of the first chart."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the same requests, one with a tight pool, the other with plenty of blocks; and a small sweep."""
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
    for name, blocks in (("tight", "120"), ("wide", "1000")):
        out = runs / name
        assert run(["run", *load, *engine, "--num-gpu-blocks-override", blocks, "--out", str(out)]) == 0
    sweep = ["sweep", "chat", "--num-prompts", "20", "--executor", "constant", "--step-time-s", "0.02"]
    assert run([*sweep, "--param", "max_num_seqs=4,8", "--seeds", "2", "--out", str(runs / "sweep")]) == 0
    return runs


def settled(page: Page) -> None:
    """Until Streamlit has done all it wants to do, and every chart is drawn, for a while."""
    end, calm = time.monotonic() + PATIENCE_MS / 1e3, 0
    while calm < 5:
        assert time.monotonic() < end, "the page does not come to rest"
        calm = calm + 1 if page.evaluate(AT_REST) else 0
        time.sleep(0.15)


def path_of(name: str) -> str:
    """The first page is at the root."""
    return "" if name == FIRST_PAGE else name


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


@pytest.mark.parametrize("name", [*PAGES])
def test_every_page_opens(chromium: Browser, folder: Path, tmp_path: Path, name: str) -> None:
    """From its link, in dark and in light: no exception, no complaint, charts drawn, nobody else asked for anything."""
    with served(folder) as address:
        for scheme in ("light", "dark"):
            watched = Watched(chromium, scheme)
            watched.page.goto(f"{address}/{path_of(name)}?run={folder / 'tight'}&other={folder / 'wide'}")
            settled(watched.page)
            expect(watched.page.get_by_role("heading", name=PAGES[name], level=1)).to_be_visible()
            assert (
                watched.page.locator("[data-testid=stException], [data-testid=stAlertContentError]").count()
                == 0
            )
            charts = watched.page.locator(".stPlotlyChart")
            assert watched.page.locator(".stPlotlyChart .main-svg").count() >= charts.count()
            assert watched.complaints == []
            assert watched.hosts <= {"127.0.0.1", ""}
            watched.screenshot(f"{name}-{scheme}", tmp_path / "artifacts")
            watched.page.close()


def test_the_menu_leads_to_every_page_and_keeps_the_run(chromium: Browser, folder: Path) -> None:
    """Page after page in one session; the run of the link stays chosen, and the link says so."""
    with served(folder) as address:
        watched = Watched(chromium)
        page = watched.page
        page.goto(f"{address}/?run={folder / 'wide'}")
        settled(page)
        for title in PAGES.values():
            page.locator("[data-testid=stSidebarNav]").get_by_role("link", name=title, exact=True).click()
            expect(page.get_by_role("heading", name=title, level=1)).to_be_visible(timeout=PATIENCE_MS)
            settled(page)
            assert page.locator("[data-testid=stException]").count() == 0
            assert quote(str(folder / "wide")) in page.url or str(folder / "wide") in unquote(page.url)
        assert watched.complaints == []


def test_a_zoom_moves_all_series(chromium: Browser, folder: Path) -> None:
    """A box over one panel of the overview is the window of all of them, of the link, and of the other pages."""
    with served(folder) as address:
        watched = Watched(chromium)
        page = watched.page
        page.goto(f"{address}/?run={folder / 'tight'}")
        settled(page)
        whole = page.evaluate(AXES)
        drag = page.locator(".stPlotlyChart .nsewdrag").nth(1)
        drag.scroll_into_view_if_needed()
        box = drag.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + box["height"] / 2)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + box["height"] / 2, steps=8)
        page.mouse.up()
        watched.wait_until(f"{AXES}.every(r => r[1] < {0.7 * whole[0][1]})")
        settled(page)
        ranges = page.evaluate(AXES)
        assert len(ranges) >= 4
        assert all(r == pytest.approx(ranges[0], rel=1e-3) for r in ranges)
        assert "from=" in page.url and "to=" in page.url
        page.reload()
        settled(page)
        assert page.evaluate(AXES)[0] == pytest.approx(ranges[0], rel=1e-3)
        assert watched.complaints == []


def test_the_block_map_shows_a_preemption_of_the_log(chromium: Browser, folder: Path) -> None:
    """Around the first one: its victim holds as many blocks as the log says just before, and none just after."""
    log = read_run(folder / "tight")
    preempted = log.events[log.events.kind == "preempted"].iloc[0]
    time_s = preempted.time_s
    choice = urlencode(
        {"view": "Block map", "coloring": "owner", "from": time_s - 0.005, "to": time_s + 0.005}
    )
    with served(folder) as address:
        watched = Watched(chromium)
        watched.page.goto(f"{address}/kv_cache?run={folder / 'tight'}&{choice}")
        settled(watched.page)
        chart = "document.querySelector('.js-plotly-plot')"
        times, owners, colors = (
            watched.page.evaluate(f"[...{chart}.calcdata[0][0].{what}].map(x => x.map ? [...x] : x)")
            for what in ("xCenter", "text", "z")
        )
        marks = watched.page.evaluate(f"{chart}.layout.shapes.map(s => s.x0)")
    assert time_s in [pytest.approx(mark, abs=1e-6) for mark in marks]
    before = max(n for n, t in enumerate(times) if t < time_s)

    def held(column: int) -> int:
        """Blocks that the victim holds: colours from 2 on are those of owners."""
        cells = zip(owners, colors, strict=True)
        return sum(row[column] == preempted.request_id and z[column] >= 2 for row, z in cells)

    assert held(before) == preempted.blocks > 0
    assert held(before + 1) == 0
    assert watched.complaints == []


def test_compare_shows_known_deltas(chromium: Browser, folder: Path) -> None:
    """The change of the mean TTFT, computed from both logs, is a dot of the chart."""
    with served(folder) as address:
        watched = Watched(chromium)
        page = watched.page
        page.goto(f"{address}/compare?run={folder / 'tight'}&other={folder / 'wide'}")
        settled(page)
        means = [
            (log.requests.first_token_s - log.requests.arrival_s).mean()
            for log in (read_run(folder / "tight"), read_run(folder / "wide"))
        ]
        found = page.evaluate(
            "(() => { const t = document.querySelector('.js-plotly-plot').data[0];"
            " return [...t.x][[...t.y].indexOf('mean_ttft')] })()"
        )
        assert found == pytest.approx(100 * (means[1] - means[0]) / means[0], rel=1e-6)
        assert abs(found) > 1
        assert watched.complaints == []


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
