"""`servetwin report`: the page says what the log says, needs nobody else, and is written whole or not at all."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browsers import Watched, browser, needs_browser

pytest.importorskip("plotly", reason="needs the extra `dashboard`")

from servetwin.dashboard.report import report
from servetwin.sim.cli import run
from servetwin.sim.definitions import DEFINITIONS
from servetwin.sim.runs import read_run

LOAD = [
    "--dataset-name",
    "random",
    "--random-input-len",
    "200",
    "--random-output-len",
    "40",
    "--request-rate",
    "40",
]
LOAD += ["--random-range-ratio", "0.5"]
ENGINE = ["--executor", "constant", "--step-time-s", "0.01", "--max-num-seqs", "16"]
ENGINE += ["--num-gpu-blocks-override", "160", "--max-model-len", "1024"]


def served(out: Path, requests: int, *flags: str) -> Path:
    """A run with a queue and preemptions."""
    assert run(["run", *LOAD, *ENGINE, "--num-prompts", str(requests), *flags, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served(tmp_path_factory.mktemp("report") / "small", 300)


class Shown(HTMLParser):
    """The texts of a page: cells of its tables by row, terms with their values, items of its lists; its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.texts: dict[str, list[str]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link"):
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, "tags nest"

    def handle_data(self, text: str) -> None:
        tag = self._open[-1] if self._open else ""
        self.texts.setdefault(tag, []).append(text)
        if tag in ("td", "th"):
            self.rows[-1][-1] += text

    def row(self, name: str) -> list[str]:
        """The first row that begins so."""
        return next(cells[1:] for cells in self.rows if cells[0] == name)


def test_the_figures_are_those_of_the_log(folder: Path) -> None:
    """TTFT, E2E and preemptions computed from the table of requests; formulas of all definitions; the configuration."""
    shown = Shown(report(folder))
    requests = read_run(folder).requests
    assert set(requests.finish_reason) == {"length"} and requests.preemptions.sum() > 0
    ttft_ms = 1e3 * (requests.first_token_s - requests.arrival_s).to_numpy()
    wanted = [
        len(ttft_ms),
        ttft_ms.mean(),
        ttft_ms.std(),
        *np.percentile(ttft_ms, (50, 90, 95, 99)),
        ttft_ms.max(),
    ]
    found = [float(cell.replace(",", "")) for cell in shown.row("TTFT")]
    assert found == pytest.approx(wanted, rel=1e-5)
    figures = dict(zip(shown.texts["dt"], shown.texts["dd"], strict=True))
    assert figures["preemptions"] == f"{requests.preemptions.sum():,}"
    assert figures["completed requests"] == "300 of 300"
    assert shown.row("config.engine.scheduler.max_num_seqs") == ["16"]
    assert shown.row("config.step_time_s") == ["0.01"]
    cells = {cell for row in shown.rows for cell in row}
    assert cells >= {f for d in DEFINITIONS.values() for f in d.formulas(held_back=True).values()} - {None}


def test_caveats_stand_on_top(folder: Path, tmp_path: Path) -> None:
    """A constant step time is no machine; what was assumed is said; a run that failed says so."""
    assumed = json.loads((folder / "run.json").read_text())["assumed"]
    items = Shown(report(folder)).texts["li"]
    assert any("which was chosen" in item for item in items)
    assert assumed and all(any(text in item for item in items) for text in assumed)
    header = json.loads((folder / "run.json").read_text())
    broken = tmp_path / "broken"
    broken.mkdir()
    header |= {"state": "failed", "reason": "interrupted", "parts": {}, "step_time_source": "roofline"}
    (broken / "run.json").write_text(json.dumps(header))
    items = Shown(report(broken)).texts["li"]
    assert items[0] == "This run was interrupted: figures cover what it had written."
    assert "Step times are an estimate from published peaks, not a measurement." in items


def test_the_definitions_can_be_chosen(folder: Path) -> None:
    """GuideLLM's TPOT holds the first token, too."""
    requests = read_run(folder).requests
    per_token_ms = 1e3 * (requests.last_token_s - requests.arrival_s) / requests.num_output_tokens
    shown = Shown(report(folder, "guidellm"))
    assert float(shown.row("TPOT")[1]) == pytest.approx(per_token_ms.mean(), rel=1e-5)


def test_nothing_in_the_page_comes_from_elsewhere(folder: Path) -> None:
    """No tag has an address but of this page or of data; a policy forbids the rest; the same run, the same bytes."""
    page = report(folder)
    assert page == report(folder)
    assert len(page) < 3_000_000
    tags = Shown(page).tags
    addresses = [
        value or "" for _, attributes in tags for name, value in attributes.items() if name in ("src", "href")
    ]
    assert addresses and all(address.startswith(("#", "data:")) for address in addresses)
    policy = next(
        a["content"] for t, a in tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None and policy.startswith("default-src 'none';") and "connect-src" not in policy


def test_what_a_run_brings_along_is_text(folder: Path, tmp_path: Path) -> None:
    """A name with tags in it stays a name."""
    evil = tmp_path / "<img src=x onerror=alert(1)>"
    evil.mkdir()
    header = json.loads((folder / "run.json").read_text())
    header |= {"state": "failed", "reason": "</script><script>alert(1)</script>", "parts": {}}
    header["assumed"] = ["<b>bold</b>"]
    (evil / "run.json").write_text(json.dumps(header))
    page = report(evil)
    assert "<img" not in page and "<b>" not in page and "alert(1)</script>" not in page
    assert "<b>bold</b>" in "".join(Shown(page).texts["li"])


def test_the_command_writes_whole_files_and_refuses_others(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An existing file stays without --overwrite; what cannot be read or written is one line and exit code 2."""
    out = tmp_path / "report.html"
    assert run(["report", str(folder), "-o", str(out)]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    written = out.read_bytes()
    out.write_bytes(b"mine")
    refused = {
        ("report", str(folder), "-o", str(out)): "exists; choose another file, or --overwrite it",
        ("report", str(tmp_path), "-o", str(tmp_path / "new.html")): "is not a run folder",
        ("report", str(out), "-o", str(tmp_path / "new.html")): "is not a run folder",
        ("report", str(folder), "-o", "-"): "--out -: must be the name of an HTML file",
        ("report", str(folder), "-o", str(tmp_path)): "is a folder",
        ("report", str(folder), "-o", str(tmp_path / "no" / "new.html")): "there is no folder",
        (
            "report",
            str(folder),
            "-o",
            str(tmp_path / "new.html"),
            "--metric-defs",
            "mine",
        ): "allowed: vllm-server",
    }
    capsys.readouterr()
    for command, message in refused.items():
        assert run(list(command)) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
    assert out.read_bytes() == b"mine" and not (tmp_path / "new.html").exists()
    assert run(["report", str(folder), "-o", str(out), "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(out), "file_bytes": len(written)}
    assert out.read_bytes() == written


@pytest.mark.full
@pytest.mark.serial
@needs_browser
def test_a_browser_draws_it_from_disk_without_a_network(tmp_path: Path) -> None:
    """20,000 requests: under 5 MB; light and dark, every chart is drawn, zooms of charts over time go together."""
    out = tmp_path / "report.html"
    folder = served(tmp_path / "run", 20_000)
    assert run(["report", str(folder), "-o", str(out)]) == 0
    assert out.stat().st_size < 5_000_000
    num_charts = out.read_text().count('class="chart"')
    with browser() as chromium:
        for scheme, ink in (("light", "#1f2328"), ("dark", "#e6edf3")):
            watched = Watched(chromium, scheme)
            page = watched.page
            page.context.set_offline(True)
            page.goto(out.as_uri())
            page.wait_for_selector("html[data-drawn]", timeout=60_000)
            assert page.locator("html").get_attribute("data-drawn") == str(num_charts)
            assert page.locator(".chart .main-svg").count() >= num_charts
            assert page.evaluate("document.querySelector('.chart').layout.font.color") == ink
            watched.screenshot(f"report-{scheme}", tmp_path / "artifacts")
            _zooms_go_together(watched)
            assert watched.complaints == []
            assert watched.asked == [out.as_uri()]
        page.emulate_media(media="print")
        watched.wait_until("document.querySelector('.chart').layout.width === 680")
        assert page.evaluate("document.querySelector('.chart').layout.font.color") == "#000"
        page.pdf(path=tmp_path / "report.pdf")
    assert re.match(rb"%PDF", (tmp_path / "report.pdf").read_bytes())


def _zooms_go_together(watched: Watched) -> None:
    """A drag over the first chart over time sets the range of all of them."""
    page = watched.page
    charts = page.locator(".chart[data-axis=time]")
    ranges = "[...document.querySelectorAll('.chart[data-axis=time]')].map(c => c._fullLayout.xaxis.range)"
    whole = page.evaluate(ranges)[0][1]
    plot = charts.first.locator(".nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    watched.wait_until(f"{ranges}.every(r => Math.abs(r[1] - {ranges}[0][1]) < 1e-6 && r[1] < {0.8 * whole})")
    assert all(0.1 * whole < first < last for first, last in page.evaluate(ranges))
