"""A run folder says what the log said, whatever ended the run, and is never somebody else's folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from servetwin.sim.columns import SCHEMAS, Columns, arrow_schema
from servetwin.sim.config import CacheConfig, EngineConfig, ModelConfig, RunConfig, SchedulerConfig
from servetwin.sim.events import EventLog, MemorySink, Sink
from servetwin.sim.metrics import summarize
from servetwin.sim.runs import (
    JsonLines,
    RunFolderError,
    RunWriteError,
    RunWriter,
    differences,
    read_json_lines,
    read_run,
    tables_equal,
)
from servetwin.sim.simulation import simulate
from servetwin.sim.steptime.modelled import ConstantStepModel, ModelledStepTimer
from servetwin.sim.token_source import TokenSource
from servetwin.workloads import ListWorkload, RequestSpec

HEADER = {"config": {"seed": 0}}


def log_a_run(sink: Sink, *, source: str = "constant", step_ns: int = 10_000_000) -> None:
    """Logs 40 requests on 3 seats, of which one is given up."""
    engine = EngineConfig(
        model=ModelConfig(max_model_len=64),
        cache=CacheConfig(block_size=4, num_gpu_blocks=18),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16),
    )
    requests = [
        RequestSpec(request_id=f"r{i}", arrival_s=i / 100, prompt_tokens=9, output_tokens=20)
        for i in range(39)
    ]
    requests.append(
        RequestSpec(request_id="gone", arrival_s=0.1, prompt_tokens=9, output_tokens=20, abort_s=2.0)
    )
    tokens = TokenSource(100)
    simulate(
        RunConfig(engine=engine, executor="constant"),
        ListWorkload(requests),
        ModelledStepTimer(ConstantStepModel(step_ns), tokens, source),
        EventLog(sink, save_tokens=True),
        tokens=tokens,
        plan_tokens=False,
        log_blocks=True,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "run"


@pytest.fixture
def finished(folder: Path) -> Path:
    """A complete run folder."""
    writer = RunWriter.create(folder, HEADER, save_tokens=True)
    log_a_run(writer)
    writer.complete()
    return folder


def requests_columns(*names: str) -> dict[str, Columns]:
    columns = Columns("requests")
    for name in names:
        columns.append(name, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, "stop", 0, None, None, 0)
    return {"requests": columns}


def test_what_is_read_is_what_was_logged(finished: Path) -> None:
    """Tables and summary of the folder equal those of the log in memory, exactly."""
    sink = MemorySink()
    log_a_run(sink)
    run = read_run(finished)
    assert run.state == "complete"
    assert run.config == {"seed": 0}
    assert differences(run, sink) == []
    assert run.summary == summarize(sink)
    for table in SCHEMAS:
        assert (run.frame(table).dtypes == sink.frame(table).dtypes).all()
    assert len(run.steps) > 200
    assert len(run.header["parts"]["steps"]) > 1


def test_equality_ignores_where_numbers_come_from() -> None:
    """Logs that differ in `source` only are equal; another duration is not."""
    sinks = {name: MemorySink() for name in ("constant", "recorded", "slower")}
    log_a_run(sinks["constant"])
    log_a_run(sinks["recorded"], source="recorded")
    log_a_run(sinks["slower"], step_ns=11_000_000)
    assert tables_equal(sinks["constant"], sinks["recorded"])
    assert not tables_equal(sinks["constant"], sinks["slower"])


def test_the_summary_file_is_what_summary_says(finished: Path) -> None:
    """`summary.json` wins over computing."""
    RunWriter.create(finished, HEADER, overwrite=True).write_summary({"completed": 1})
    assert read_run(finished).summary == {"completed": 1}


def test_a_run_without_parts_reads_as_empty_tables(folder: Path) -> None:
    """A run that has just begun is running and has frames with the right columns and no rows."""
    RunWriter.create(folder, HEADER)
    run = read_run(folder)
    assert run.state == "running"
    assert list(run.steps.columns) == list(SCHEMAS["steps"])
    assert len(run.requests) == 0
    assert run.requests.arrival_s.dtype == float
    assert not run.has_tokens
    assert run.summary["completed"] == 0


def test_a_complete_run_has_a_part_of_every_table(folder: Path) -> None:
    """Also of a table without rows."""
    RunWriter.create(folder, HEADER).complete()
    for table in ("requests", "steps", "events", "blocks"):
        assert [p.name for p in (folder / table).iterdir()] == ["00000.parquet"]


def test_only_listed_parts_count(folder: Path) -> None:
    """A part on disk that `run.json` does not list yet is not read."""
    writer = RunWriter.create(folder, HEADER)
    writer.write(requests_columns("a", "b"))
    before = (folder / "run.json").read_bytes()
    writer.write(requests_columns("c"))
    (folder / "run.json").write_bytes(before)
    assert read_run(folder).requests.request_id.tolist() == ["a", "b"]


def test_a_failed_run_says_why(folder: Path) -> None:
    """State, reason, and what was written until then."""
    writer = RunWriter.create(folder, HEADER)
    writer.write(requests_columns("a"))
    writer.fail("interrupted")
    run = read_run(folder)
    assert (run.state, run.reason, len(run.requests)) == ("failed", "interrupted", 1)


KILLED = """
import sys, time
from servetwin.sim.runs import RunWriter
writer = RunWriter.create(sys.argv[1], {"config": {}})
stream = writer.workload()
for n in range(1000):
    stream.write({"request_id": f"r{n}"})
writer.write({})
stream.write({"request_id": "lost"})
print("written", flush=True)
time.sleep(600)
"""


def test_a_killed_run_is_partial_and_readable(folder: Path) -> None:
    """After SIGKILL: partial, and the streams hold everything up to the last flush."""
    with subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"written\n"
        assert read_run(folder).state == "running"
        with pytest.raises(RunFolderError, match="is being written"):
            RunWriter.create(folder, HEADER, overwrite=True)
        child.send_signal(signal.SIGKILL)
    assert read_run(folder).state == "partial"
    rows = list(read_json_lines(folder / "workload.jsonl.zst"))
    assert [r["request_id"] for r in rows] == [f"r{n}" for n in range(1000)]


def test_another_process_with_the_same_number_is_not_ours(folder: Path) -> None:
    """A live process counts only if it began when the writer did."""
    RunWriter.create(folder, HEADER)
    header = json.loads((folder / "run.json").read_text())
    header["process"]["started"] = "another boot/1"
    (folder / "run.json").write_text(json.dumps(header))
    assert read_run(folder).state == "partial"


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    """Not empty: the message names --overwrite; a file is no folder; an empty folder is welcome."""
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(RunFolderError, match="--overwrite"):
        RunWriter.create(tmp_path, HEADER)
    with pytest.raises(RunFolderError, match="is a file"):
        RunWriter.create(tmp_path / "notes", HEADER)
    (tmp_path / "empty").mkdir()
    RunWriter.create(tmp_path / "empty", HEADER)


def test_overwrite_takes_runs_only(tmp_path: Path) -> None:
    """A folder that is no run is left alone even with --overwrite, whatever it calls its files."""
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(RunFolderError, match="not a run folder"):
        RunWriter.create(tmp_path, HEADER, overwrite=True)
    (tmp_path / "run.json").write_text('{"script": "start"}')
    with pytest.raises(RunFolderError, match=r"not the run\.json of a run"):
        RunWriter.create(tmp_path, HEADER, overwrite=True)
    assert (tmp_path / "notes").read_text() == "mine"


def test_overwrite_replaces_the_run_and_nothing_else(finished: Path) -> None:
    """The old run is gone; a file that no run writes stays."""
    (finished / "notes.md").write_text("mine")
    RunWriter.create(finished, HEADER, overwrite=True)
    run = read_run(finished)
    assert (run.state, len(run.requests)) == ("running", 0)
    assert not list(finished.glob("*/*.parquet"))
    assert (finished / "notes.md").read_text() == "mine"


def test_the_header_s_own_keys_are_refused(folder: Path) -> None:
    """A caller cannot set the state by accident, and a refusal leaves no folder."""
    with pytest.raises(ValueError, match="header keys state"):
        RunWriter.create(folder, {"state": "complete"})
    assert not folder.exists()


def test_a_run_of_before_a_column_was_added_reads_with_nulls(finished: Path) -> None:
    for part in (finished / "steps").iterdir():
        pq.write_table(pq.read_table(part, partitioning=None).drop_columns(["graph_tokens"]), part)
    steps = read_run(finished).steps
    assert list(steps.columns) == list(SCHEMAS["steps"])
    assert len(steps) > 200
    assert steps.graph_tokens.isna().all()


def test_a_run_of_the_first_schema_reads_the_same(finished: Path) -> None:
    """There every step was a row, and every gap stood in itl/."""
    run, old = read_run(finished), finished.with_name("old")
    shutil.copytree(finished, old)
    header = json.loads((old / "run.json").read_text())
    for table in ("steps", "itl"):
        frame = run.frame(table)
        rows = pa.Table.from_pandas(frame, schema=arrow_schema(SCHEMAS[table]), preserve_index=False)
        pq.write_table(rows, old / table / "00000.parquet")
        header["parts"][table] = [f"{table}/00000.parquet"]
    (old / "run.json").write_text(json.dumps(header | {"schema_version": 1}))
    assert differences(run, read_run(old)) == []
    assert summarize(read_run(old)) == summarize(run)
    assert len(run.itl) > 100


def test_damage_gives_one_error(finished: Path) -> None:
    """A missing part, a cut part, a cut header, another schema: RunFolderError that names the file."""
    part = finished / "steps" / "00000.parquet"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(RunFolderError, match=r"steps/00000\.parquet: damaged part"):
        _ = read_run(finished).steps
    part.unlink()
    with pytest.raises(RunFolderError, match=r"steps/00000\.parquet is listed in run\.json but missing"):
        read_run(finished)
    header = (finished / "run.json").read_text()
    (finished / "run.json").write_text(header.replace('"schema_version": 2', '"schema_version": 99'))
    with pytest.raises(RunFolderError, match="schema_version is 99; this version reads 1 and 2"):
        read_run(finished)
    (finished / "run.json").write_text(header[:50])
    with pytest.raises(RunFolderError, match=r"run\.json: damaged"):
        read_run(finished)
    with pytest.raises(RunFolderError, match=r"is not a run folder: it has no run\.json"):
        read_run(finished / "steps")


def test_a_vanished_folder_is_one_clear_error(finished: Path) -> None:
    """Writing where the folder is gone names the file and the reason."""
    writer = RunWriter.create(finished, HEADER, overwrite=True)
    finished.rename(finished.with_name("moved"))
    with pytest.raises(RunWriteError, match=r"cannot write .*00000\.parquet: No such file") as error:
        writer.write(requests_columns("a"))
    assert error.value.errno == errno.ENOENT


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    """A stream onto a full device says so."""
    target = tmp_path / "workload.jsonl.zst"
    target.symlink_to("/dev/full")
    lines = JsonLines(target)
    with pytest.raises(RunWriteError, match=r"cannot write .*: No space left"):
        for n in range(100_000):
            lines.write({"request_id": os.urandom(50).hex(), "n": n})
        lines.flush()
    with pytest.raises(RunWriteError, match="No space left"):
        lines.close()


def test_a_stream_is_one_frame(tmp_path: Path) -> None:
    """Flushing does not end the frame: readers that stop at the first frame see every line."""
    with JsonLines(tmp_path / "a.jsonl.zst") as lines:
        lines.write({"a": 1})
        lines.flush()
        lines.write({"a": 2})
    content = (tmp_path / "a.jsonl.zst").read_bytes()
    assert zstandard.ZstdDecompressor().stream_reader(content).read() == b'{"a":1}\n{"a":2}\n'
    assert list(read_json_lines(tmp_path / "a.jsonl.zst")) == [{"a": 1}, {"a": 2}]


def test_a_stream_of_something_else_is_refused(tmp_path: Path) -> None:
    """Not compressed, or not JSON: RunFolderError naming the file and the line."""
    (tmp_path / "plain").write_text("{}")
    with pytest.raises(RunFolderError, match="plain: cannot be read"):
        list(read_json_lines(tmp_path / "plain"))
    (tmp_path / "text").write_bytes(zstandard.compress(b"{}\nhello\n"))
    with pytest.raises(RunFolderError, match="text: line 2 is not JSON"):
        list(read_json_lines(tmp_path / "text"))


def test_importing_the_log_stays_light() -> None:
    """Neither the log nor the run folder brings pandas or pyarrow with it."""
    code = (
        "import sys, servetwin.sim.events, servetwin.sim.runs, servetwin.sim.definitions\n"
        "print(sorted({'pandas', 'pyarrow', 'torch'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "damage",
    [
        {"parts": []},
        {"parts": {"steps": ["../secret.parquet"]}},
        {"parts": {"steps": [3]}},
        {"parts": {"nothing": []}},
        {"process": 5},
    ],
)
def test_a_damaged_header_is_one_clear_error(tmp_path: Path, damage: dict[str, object]) -> None:
    """Nothing is followed out of the folder, and nothing fails with a bare exception."""
    RunWriter.create(tmp_path / "run", {"config": {}}).complete()
    header = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(header | damage))
    with pytest.raises(RunFolderError, match=r"run\.json: damaged: process or parts"):
        read_run(tmp_path / "run")


def test_overwriting_stops_at_a_symbolic_link_before_anything_is_removed(tmp_path: Path) -> None:
    """A table folder that is a link leads somewhere else: refused, and the run is whole afterwards."""
    RunWriter.create(tmp_path / "run", {"config": {}}).complete()
    (tmp_path / "run" / "steps").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "steps").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match="steps is a symbolic link"):
        RunWriter.create(tmp_path / "run", {"config": {}}, overwrite=True)
    assert read_run(tmp_path / "run").state == "complete"
