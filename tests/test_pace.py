"""`servetwin run --pace`: the same run, held back and written while it goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from servetwin.sim.cli import run
from servetwin.sim.commands.pace import Pace
from servetwin.sim.runs import differences, read_run

S = 1_000_000_000
CHAT = ["run", "chat", "--num-prompts", "12", "--executor", "constant", "--step-time-s", "0.02"]


def test_simulated_time_is_held_back_and_lost_time_is_not_caught_up() -> None:
    """At 10 simulated seconds a second, 3 of them last 0.3 s; those after a pause of 0.4 s do, too."""
    flushes: list[float] = []
    pace = Pace(10, lambda: flushes.append(time.monotonic()), lambda: None)
    begun = time.monotonic()
    for n in range(1, 4):
        pace.at(n * S)
    assert time.monotonic() - begun >= 0.29
    assert flushes
    time.sleep(0.4)
    begun = time.monotonic()
    for n in range(4, 7):
        pace.at(n * S)
    assert time.monotonic() - begun >= 0.2


def test_a_long_wait_can_be_ended() -> None:
    """What `on_nap` raises ends an hour's wait at once."""
    asked = iter([None, None, KeyboardInterrupt()])

    def nap() -> None:
        if (error := next(asked)) is not None:
            raise error

    with pytest.raises(KeyboardInterrupt):
        Pace(1, lambda: None, nap).at(3600 * S)


def test_without_a_pace_the_log_is_written_now_and_then() -> None:
    """Slow steps: nothing waits, but what has happened can be read."""
    flushes: list[int] = []
    pace = Pace(None, lambda: flushes.append(1), lambda: pytest.fail("nobody naps here"))
    pace.at(3600 * S)
    assert flushes == []
    time.sleep(0.3)
    pace.at(3601 * S)
    assert flushes == [1]


def test_a_paced_run_is_the_same_run(tmp_path: Path) -> None:
    """Its log equals that of a run as fast as can be, in more parts; its summary does, too."""
    assert run([*CHAT, "--out", str(tmp_path / "fast")]) == 0
    assert run([*CHAT, "--pace", "5", "--out", str(tmp_path / "paced")]) == 0
    fast, paced = read_run(tmp_path / "fast"), read_run(tmp_path / "paced")
    assert differences(fast, paced) == []
    assert fast.summary == paced.summary
    assert len(paced.header["parts"]["steps"]) > len(fast.header["parts"]["steps"])


@pytest.mark.parametrize("pace", ["0", "-1", "inf", "nan"])
def test_what_is_no_pace_is_refused(pace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*CHAT, "--pace", pace]) == 2
    assert "must be simulated seconds per second, above 0" in capsys.readouterr().err


def test_the_wall_clock_has_its_own_pace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "one.jsonl"
    rows.write_text(json.dumps({"request_id": "a", "arrival_s": 0, "prompt_tokens": 4, "output_tokens": 2}))
    assert run(["run", str(rows), "--live", "--model", "examples/llama-10m", "--pace", "2"]) == 2
    assert "--pace goes with simulated time only" in capsys.readouterr().err
