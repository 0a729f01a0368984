"""Flags from a file and from the environment: their order, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from servetwin.sim.cli import run
from servetwin.sim.runs import read_run

COMMON = {"executor": "constant", "step_time_s": 0.02, "num_prompts": 4, "async_scheduling": False}


def served(tmp_path: Path, config: Path, *arguments: str) -> dict[str, int]:
    """The scheduler's part of the configuration of a run with a file of flags."""
    out = tmp_path / "out"
    assert run(["run", "chat", "--config", str(config), "--out", str(out), *arguments]) == 0
    scheduler: dict[str, int] = read_run(out).config["engine"]["scheduler"]
    return scheduler


def written(tmp_path: Path, text: str, name: str = "flags.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a.yaml",
            "executor: constant\nstep_time_s: 0.02\nnum-prompts: 4\nmax_num_seqs: 5\nasync_scheduling: false",
        ),
        (
            "a.toml",
            'executor = "constant"\nstep-time-s = 0.02\nnum_prompts = 4\nmax_num_seqs = 5\nasync-scheduling = false',
        ),
        ("a.json", json.dumps(COMMON | {"max_num_seqs": 5})),
    ],
)
def test_every_kind_of_file_gives_flags(tmp_path: Path, name: str, text: str) -> None:
    scheduler = served(tmp_path, written(tmp_path, text, name))
    assert scheduler["max_num_seqs"] == 5
    assert not scheduler["async_scheduling"]


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = written(
        tmp_path, json.dumps(COMMON | {"max_num_seqs": 5, "block_size": 32, "seed": 7}), "flags.json"
    )
    monkeypatch.setenv("SERVETWIN_RUN_MAX_NUM_SEQS", "6")
    monkeypatch.setenv("SERVETWIN_RUN_BLOCK_SIZE", "64")
    served(tmp_path, config, "--max-num-seqs", "8")
    found = read_run(tmp_path / "out").config
    assert found["engine"]["scheduler"]["max_num_seqs"] == 8
    assert found["engine"]["cache"]["block_size"] == 64
    assert found["seed"] == 7


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.yaml", "max_num_seq: 4", "max-num-seq"),
        ("a.yaml", "max_num_seqs: four", "'four' is not a whole number"),
        ("a.yaml", "max_num_seqs: {a: 1}", "max-num-seqs: must be a value or a list of values"),
        ("a.yaml", "max_num_seqs:", "max-num-seqs: must be a value or a list of values, got None"),
        ("a.yaml", "- 1", "must hold keys with values"),
        ("a.yaml", "a: [", "a.yaml"),
        ("a.toml", "a =", "a.toml"),
        ("a.ini", "a = 1", "must be .yaml, .yml, .toml or .json"),
        ("a.yaml", "config: b.yaml", "names a file of flags itself"),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused(
    tmp_path: Path, name: str, text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path, text, name)
    assert run(["run", "chat", "--executor", "constant", "--step-time-s", "1", f"--config={config}"]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_a_file_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "chat", "--config", "nowhere.yaml"]) == 2
    assert "nowhere.yaml: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["sweep", "plan"])
def test_sweep_and_plan_take_one_too(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path, "executor: constant\nstep_time_s: soon")
    arguments = ["--param", "block_size=16", "--out", str(tmp_path / "s")] if command == "sweep" else []
    assert run([command, "chat", "--config", str(config), *arguments]) == 2
    assert "[step-time-s]" in capsys.readouterr().err
