"""Profiles that come with the package: named by hardware, honest about their error, usable by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from servetwin.sim.cli import run
from servetwin.sim.steptime.profiles import ProfileError, load_profile
from servetwin.sim.steptime.shipped import shipped_profiles
from servetwin.sim.steptime.steps_profile import StepsProfile

NAMES = sorted(shipped_profiles())


def test_there_are_some() -> None:
    assert {"epyc-2cpu-llama-10m", "epyc-2cpu-llama-44m"} <= {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_each_says_on_what_it_was_measured_and_how_wrong_it_is(name: str) -> None:
    profile = load_profile(name)
    assert isinstance(profile, StepsProfile)
    assert {"device", "versions", "model", "dtype", "threads", "date"} <= profile.about.keys()
    assert profile.written is not None and profile.host is not None
    assert len({e["run"] for e in profile.errors}) >= 3
    assert profile.untested == []
    assert not any(Path(source["path"]).is_absolute() for source in profile.sources)


@pytest.mark.parametrize("name", NAMES)
def test_each_simulates_by_its_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing else need be given: seats, window and pool are those of the measured engine."""
    load = tmp_path / "w.jsonl"
    rows = [
        {"request_id": f"r{i}", "arrival_s": 0.3 * i, "prompt_tokens": 40 + i, "output_tokens": 8}
        for i in range(20)
    ]
    load.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(["run", str(load), "--executor", name, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["completed"] == 20
    assert 1 < summary["mean_ttft_ms"] < 10_000
    assert summary["servetwin"]["predicted_outside_steps"] == 0
    assert "measured on AMD EPYC" in summary["servetwin"]["notes"][0]


def test_a_name_that_is_none_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ProfileError, match=NAMES[0]):
        load_profile("no-such-profile")
    assert run(["run", "chat", "--executor", "no-such-profile"]) == 2
    assert NAMES[0] in capsys.readouterr().err
