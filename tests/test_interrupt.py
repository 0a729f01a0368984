"""A run that is stopped leaves a folder that can be read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from servetwin.sim.runs import Run, read_run

PATIENCE_S = 60


@contextmanager
def long_run(out: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that would take long, once it has written its first parts; killed at the end in any case."""
    command = [
        *(sys.executable, "-c", "from servetwin.sim.cli import main; main()"),
        *("run", "chat", "--num-prompts", "60000", "--executor", "constant", "--step-time-s", "0.02"),
        *("--save-plans", "--out", str(out)),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + PATIENCE_S
        while not written(out):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end, "no part was written"
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.communicate()


def written(out: Path) -> bool:
    header = out / "run.json"
    return header.exists() and len(json.loads(header.read_text())["parts"]["steps"]) >= 2


def assert_readable(run: Run) -> None:
    """The tables hold whole steps, and every request that has ended."""
    assert len(run.steps) > 100
    blocks = run.steps.used_blocks + run.steps.cached_free_blocks + run.steps.free_blocks
    assert set(blocks) == {39_999}
    assert run.summary["completed"] == (run.requests.finish_reason == "length").sum() > 0


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_failed_and_readable(stop: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C (or SIGTERM): exit code 130, state failed with reason interrupted, every request seen so far."""
    out = tmp_path / "run"
    with long_run(out) as process:
        process.send_signal(stop)
        # Impatience changes nothing: the folder is being closed.
        process.send_signal(stop)
        _, said = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130, said
    run = read_run(out)
    assert (run.state, run.reason) == ("failed", "interrupted")
    assert_readable(run)
    assert run.requests.finish_reason.isna().any(), "requests that had not ended are there, without a reason"
    assert said.endswith("servetwin: interrupted\n")
    assert "Traceback" not in said


def test_a_killed_run_is_partial_and_readable(tmp_path: Path) -> None:
    """SIGKILL: run.json still says running; without a process that is partial."""
    out = tmp_path / "run"
    with long_run(out) as process:
        assert read_run(out).state == "running"
        os.kill(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)
    assert json.loads((out / "run.json").read_text())["state"] == "running"
    run = read_run(out)
    assert run.state == "partial"
    assert_readable(run)
    arrived = (run.events.kind == "arrived").sum()
    assert run.summary["servetwin"]["requests"]["open"] == arrived - len(run.requests) > 0
