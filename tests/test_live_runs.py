"""Runs started from the dashboard: told to pause and to stop, and gone when who started them is gone."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytest.importorskip("streamlit", reason="needs the extra `dashboard`")

from dashboards import metrics, shown

from servetwin.dashboard.live_command import LiveChoices, arguments, as_typed, free_folder
from servetwin.dashboard.live_runs import AT_ONCE, LiveRun, LiveRuns
from servetwin.dashboard.pages.live import live_runs
from servetwin.sim.runs import RunFolderError, read_run

PATIENCE_S = 60
SLOW = LiveChoices(
    workload="chat", executor="constant", step_time_s=0.02, out=Path(), num_prompts=2000, pace=2
)


def slow(out: Path) -> list[str]:
    """A run of many minutes."""
    return [*arguments(SLOW)[:-1], str(out)]


def until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def num_parts(folder: Path) -> int:
    try:
        return len(read_run(folder).header["parts"]["steps"])
    except RunFolderError:
        return 0


def processes_of(folder: Path) -> list[psutil.Process]:
    """Those whose command line names the folder: leash and run."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or [])]


@pytest.mark.serial
def test_pause_go_on_and_stop(tmp_path: Path) -> None:
    """Nothing is written during a pause; a stop ends a paused run, too, and leaves a folder that can be read."""
    folder = tmp_path / "run"
    with LiveRun(slow(folder), folder) as run:
        until(lambda: num_parts(folder) >= 2, f"it writes: {run.said()}")
        assert run.state == "going on"
        run.pause()
        assert run.state == "paused"
        until(lambda: {p.status() for p in processes_of(folder)} >= {psutil.STATUS_STOPPED}, "it stops")
        before = num_parts(folder)
        time.sleep(0.8)
        assert num_parts(folder) == before
        run.resume()
        until(lambda: num_parts(folder) > before, "it goes on")
        run.pause()
        run.stop()
        assert run.wait(PATIENCE_S) == 130
        assert run.state == "ended"
        assert (read_run(folder).state, read_run(folder).reason) == ("failed", "interrupted")
        assert "interrupted" in run.said()
        run.pause()
        assert run.state == "ended"


@pytest.mark.serial
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_no_run_outlives_who_started_it(tmp_path: Path, end: signal.Signals) -> None:
    """Whoever holds the other end of the leash is killed, even while the run is paused: the run ends as by Ctrl-C."""
    folder = tmp_path / "run"
    code = (
        "import sys, time; from pathlib import Path; from servetwin.dashboard.live_runs import LiveRun\n"
        f"run = LiveRun({slow(folder)!r}, Path({str(folder)!r}))\n"
        "sys.stdin.readline(); run.pause(); print(flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        until(lambda: num_parts(folder) >= 1, "it writes")
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write("\n")
        parent.stdin.flush()
        parent.stdout.readline()
        assert len(processes_of(folder)) == 2
        parent.send_signal(end)
        parent.wait(PATIENCE_S)
        until(lambda: not processes_of(folder), "leash and run end")
    assert read_run(folder).reason == "interrupted"


@pytest.mark.serial
def test_a_run_that_cannot_be_says_why(tmp_path: Path) -> None:
    """Its exit code, and its own words."""
    words = [
        "run",
        "no-such-workload",
        "--executor",
        "constant",
        "--step-time-s",
        "1",
        "--out",
        str(tmp_path),
    ]
    with LiveRun(words, tmp_path) as run:
        assert run.wait(PATIENCE_S) == 2
        assert "no-such-workload" in run.said()


def test_starting_is_refused_in_a_folder_in_use(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(RunFolderError, match="is not empty"):
        LiveRuns().start(["run"], tmp_path)


@pytest.mark.serial
def test_only_so_many_go_on_at_once(tmp_path: Path) -> None:
    runs = LiveRuns()
    try:
        started = [runs.start(slow(tmp_path / str(n)), tmp_path / str(n)) for n in range(AT_ONCE)]
        with pytest.raises(RunFolderError, match="going on already"):
            runs.start(slow(tmp_path / "more"), tmp_path / "more")
        assert runs.all() == started[::-1]
        assert runs.get(tmp_path / "2") is started[2]
    finally:
        runs.close()
    # A run that is stopped before it has begun to listen is broken off.
    assert 0 not in {run.returncode for run in started}


def test_the_command_is_what_one_would_type(tmp_path: Path) -> None:
    """Flags that were left open are left out; the wall clock has neither executor nor pace; more flags come last."""
    chosen = LiveChoices(
        workload="chat", executor="constant", out=Path("live-1"), num_prompts=50, max_num_seqs=8, pace=5.0
    )
    assert as_typed(arguments(chosen)) == (
        "servetwin run chat --executor constant --step-time-s 0.02 --num-prompts 50 --max-num-seqs 8 --pace 5.0 "
        "--seed 0 --out live-1"
    )
    wall = LiveChoices(
        workload="a b.jsonl", executor="live", out=Path("x"), model="m", pace=5.0, more="--dtype 'float32'"
    )
    assert as_typed(arguments(wall)) == (
        "servetwin run 'a b.jsonl' --live --model m --seed 0 --out x --dtype float32"
    )
    with pytest.raises(ValueError, match="more flags"):
        arguments(LiveChoices(workload="chat", executor="constant", out=Path("x"), more="--out 'x"))
    (tmp_path / "live-1").mkdir()
    assert free_folder((tmp_path,)) == tmp_path / "live-2"
    (tmp_path / "live-1" / "run.json").write_text("{}")
    assert free_folder((tmp_path / "live-1",)) == tmp_path / "live-2"


@pytest.mark.serial
def test_the_page_starts_a_run_and_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command stands on the page before it is started; its figures are those of the folder when it has ended."""
    app = shown(monkeypatch, tmp_path, page="live")
    app.selectbox(key="live_workload").select("random").run()
    app.number_input(key="live_num_prompts").set_value(5)
    app.number_input(key="live_pace").set_value(1000.0)
    app.number_input(key="live_max_num_seqs").set_value(1).run()
    folder = tmp_path / "live-1"
    (command,) = app.code
    assert command.value == (
        "servetwin run random --executor constant --step-time-s 0.02 --num-prompts 5 --max-num-seqs 1 "
        f"--pace 1000.0 --seed 0 --out {folder}"
    )
    app.button(key="live_start").click().run()
    try:
        until(lambda: num_parts(folder) > 0 and read_run(folder).state == "complete", "it ends")
        until(lambda: not processes_of(folder), "its process ends")
        app.run()
        assert not app.exception and not app.error
        found = metrics(app)
        assert found["Requests ended"] == "5"
        assert found["Time of the run (s)"] == f"{read_run(folder).steps.end_s.max():,.1f}"
        assert app.button(key="live_stop").disabled
        app.text_input(key="live_more").set_value("--max-num-seqs 0").run()
        app.button(key="live_start").click().run()
        until(lambda: not processes_of(tmp_path / "live-2"), "it is refused")
        app.run()
        assert any("exit code 2" in error.value and "max-num-seqs" in error.value for error in app.error)
    finally:
        live_runs().close()
        live_runs.clear()
