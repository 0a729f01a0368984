"""The dashboard and the report of a run of 1,000,000 requests: quick, in bounded memory, few points to the browser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="needs the extra `dashboard`")

from servetwin.dashboard.launch import ENVIRONMENT
from servetwin.dashboard.pages import PAGES
from servetwin.sim.cli import run

pytestmark = [pytest.mark.full, pytest.mark.serial]
ROOT = Path(__file__).resolve().parent.parent
MADE = "SERVETWIN_MILLION_RUN"
"""Environment variable: a folder that benchmarks/million_requests.py has made, instead of making another."""
LIMIT_S, LIMIT_BYTES, LIMIT_POINTS = 3.0, 1_000_000_000, 20_000


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if MADE in os.environ:
        return Path(os.environ[MADE])
    folder = tmp_path_factory.mktemp("million") / "million"
    script = ROOT / "benchmarks" / "million_requests.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)
    return folder


def test_every_page_is_quick_and_small(million: Path, tmp_path: Path) -> None:
    """Each page, opened from the menu for the first time: processor time of the server, its memory, its figures."""
    small, again = tmp_path / "small", tmp_path / "again"
    assert (
        run(
            [
                "run",
                "chat",
                "--num-prompts",
                "5",
                "--executor",
                "constant",
                "--step-time-s",
                "1",
                "--out",
                str(small),
            ]
        )
        == 0
    )
    again.symlink_to(million)
    script = [sys.executable, str(ROOT / "tests" / "page_times.py"), str(small), str(million), str(again)]
    done = subprocess.run(script, check=True, capture_output=True, text=True, env=ENVIRONMENT | os.environ)
    pages = json.loads(done.stdout)
    print(json.dumps(pages, indent=1))
    assert pages.keys() == PAGES.keys()
    assert {name: page["processor_s"] for name, page in pages.items() if page["processor_s"] >= LIMIT_S} == {}
    assert max(page["peak_bytes"] for page in pages.values()) < LIMIT_BYTES
    assert max(page["points"] for page in pages.values()) < LIMIT_POINTS
    assert pages["overview"]["points"] > 1_000 and pages["compare"]["points"] > 1_000


def test_its_report_is_a_small_file(million: Path, tmp_path: Path) -> None:
    """Thinned like the pages."""
    out = tmp_path / "report.html"
    assert run(["report", str(million), "-o", str(out)]) == 0
    assert out.stat().st_size < 5_000_000
    assert "1,000,000 of 1,000,000" in out.read_text()
