"""`servetwin export csv`: the tables of a run, read back without a loss."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from exported_runs import mixed_run

from servetwin.sim.cli import run
from servetwin.sim.columns import SCHEMAS
from servetwin.sim.export import csv_tables
from servetwin.sim.runs import Run


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return mixed_run(tmp_path_factory.mktemp("csv") / "run", "--save-tokens")


def check(path: Path, frame: pd.DataFrame) -> None:
    """The file has exactly the rows of the frame."""
    read = pd.read_csv(path)
    assert list(read.columns) == list(frame.columns) and len(read) == len(frame) > 0
    for name in frame.columns:
        if frame[name].isna().all():
            assert read[name].isna().all()
            continue
        expected = frame[name].astype(read[name].dtype)
        assert ((read[name] == expected) | (read[name].isna() & expected.isna())).all(), name


def test_all_tables_go_into_a_folder(log: Run, tmp_path: Path) -> None:
    out = tmp_path / "tables"
    assert run(["export", "csv", str(log.path), "-o", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {f"{table}.csv" for table in SCHEMAS}
    assert [path.name for path in tmp_path.iterdir()] == ["tables"]
    for table in SCHEMAS:
        check(out / f"{table}.csv", log.frame(table))


def test_many_rows_come_in_pieces_and_leaps_as_single_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_tables, "ROWS_AT_ONCE", 7)
    leapt = mixed_run(tmp_path / "run")
    assert leapt.summary["servetwin"]["leapt_steps"] > 0
    out = tmp_path / "tables"
    assert run(["export", "csv", str(leapt.path), "-o", str(out)]) == 0
    assert not (out / "tokens.csv").exists()
    for table in ("requests", "steps", "events", "blocks", "itl"):
        check(out / f"{table}.csv", leapt.frame(table))


def test_one_table_goes_into_a_file_or_to_stdout(
    log: Run, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    out = tmp_path / "r.csv"
    assert run(["export", "csv", str(log.path), "--table", "requests", "-o", str(out)]) == 0
    check(out, log.requests)
    capsysbinary.readouterr()
    for flags in (["--table", "requests"], []):
        assert run(["export", "csv", str(log.path), *flags, "-o", "-"]) == 0
        assert capsysbinary.readouterr().out == out.read_bytes()
    assert run(["export", "csv", str(log.path), "-o", str(tmp_path / "plain.csv")]) == 0
    assert (tmp_path / "plain.csv").read_bytes() == out.read_bytes()
    assert run(["export", "csv", str(log.path), "--table", "steps", "-o", str(tmp_path / "s.csv")]) == 0
    check(tmp_path / "s.csv", log.steps)


def test_files_that_are_there_stay_unless_they_may_be_replaced(
    log: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tables"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    (out / "steps.csv").write_text("old")
    command = ["export", "csv", str(log.path), "-o", str(out)]
    assert run(command) == 2
    assert "steps.csv is there already; --overwrite replaces it" in capsys.readouterr().err
    assert (out / "steps.csv").read_text() == "old" and not (out / "requests.csv").exists()
    assert run([*command, "--overwrite"]) == 0
    check(out / "steps.csv", log.steps)
    assert (out / "mine.txt").read_text() == "mine"


def test_a_damaged_run_leaves_no_folder(log: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(log.path, folder)
    (folder / "events" / "00000.parquet").write_bytes(b"no parquet")
    assert run(["export", "csv", str(folder), "-o", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert "damaged part" in err and err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-o", "--overwrite"], "--out --overwrite: must be the name of a folder or a file"),
        (["-o", "x", "--table", "token"], "--table 'token': must be one of requests, steps"),
        (["-o", "no/such/folder"], "its folder does not exist"),
    ],
)
def test_bad_input_is_one_line(
    log: Run, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert run(["export", "csv", str(log.path), *flags]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_table_that_a_run_has_not_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = mixed_run(tmp_path / "run")
    assert run(["export", "csv", str(log.path), "--table", "tokens", "-o", "-"]) == 2
    assert "has none; it has requests, steps, events, blocks, itl" in capsys.readouterr().err
