"""The run folder: written in complete parts while a run goes on, read as frames at any time.

    run.json             state, finished parts, and what made the run what it is
    requests/ steps/ events/ blocks/ itl/ tokens/   Parquet parts 00000.parquet, ... (tables: sim/tables.py)
    summary.json         figures of a complete run
    workload.jsonl.zst   every request as received
    plans.jsonl.zst      every SchedulerOutput, where asked for

A part counts only once `run.json` lists it, and all tables are listed together, so that a reader never sees
half a flush. The clock of this machine appears only in fields whose names begin with `wall_`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson

from servetwin.sim.columns import (
    LATER_COLUMNS,
    PARTS,
    REPLICA,
    SCHEMAS,
    Columns,
    Part,
    arrow_schema,
    replica_array,
)
from servetwin.sim.processes import is_alive, this_process
from servetwin.sim.run_files import (
    JsonLines,
    RunFolderError,
    RunWriteError,
    read_json_lines,
    write_json,
    write_part,
    writing,
)
from servetwin.sim.step_rows import StepRows, part_schema
from servetwin.sim.tables import Tables, differences, tables_equal

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "JsonLines",
    "Run",
    "RunFolderError",
    "RunWriteError",
    "RunWriter",
    "check_room",
    "differences",
    "read_json_lines",
    "read_run",
    "tables_equal",
]

SCHEMA_VERSION, READABLE_VERSIONS = 2, (1, 2)
"""2: one row of steps/ may be many steps."""
HEADER, SUMMARY, WORKLOAD, PLANS = "run.json", "summary.json", "workload.jsonl.zst", "plans.jsonl.zst"
State = Literal["complete", "failed", "running", "partial"]


class RunWriter:
    """Writes one run folder. The sink of an EventLog; ends with `complete` or `fail`."""

    def __init__(self, path: Path, header: Mapping[str, Any], tables: Sequence[str]) -> None:
        self.path = path
        self._tables = tables
        self._started = datetime.now(UTC)
        self._streams: dict[str, JsonLines] = {}
        self._header: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "state": "running",
            "reason": None,
            "wall_started": self._started.isoformat(),
            "wall_ended": None,
            "wall_time_s": None,
            "process": this_process(),
            **header,
            "parts": {table: [] for table in tables},
        }

    @classmethod
    def create(
        cls,
        path: str | Path,
        header: Mapping[str, Any],
        *,
        overwrite: bool = False,
        save_tokens: bool = False,
    ) -> RunWriter:
        """Makes the folder (and those above it) and its `run.json` in state "running".

        `header`: JSON values, among them `config`; keys of our own (`state`, `parts`, ...) are refused.
        Raises RunFolderError when the folder is not empty, unless `overwrite` is given and it holds a run
        that is not being written. Overwriting removes only what a run writes.
        """
        path = Path(path)
        tables = [t for t in SCHEMAS if t != "tokens" or save_tokens]
        writer = cls(path, header, tables)
        if taken := sorted(writer._own_keys() & header.keys()):
            raise ValueError(f"header keys {', '.join(taken)} belong to the writer")
        _make_room(path, overwrite)
        with writing(path):
            for table in tables:
                (path / table).mkdir(parents=True, exist_ok=True)
        writer._write_header()
        return writer

    def write(self, parts: Mapping[str, Part]) -> None:
        """One new part per table given, then the list of parts; streams are flushed first."""
        for stream in self._streams.values():
            stream.flush()
        for table, part in parts.items():
            self._write_part(table, part)
        self._write_header()

    def workload(self) -> JsonLines:
        """The stream of `workload.jsonl.zst`: one object a request, as received."""
        return self._stream(WORKLOAD)

    def plans(self) -> JsonLines:
        """The stream of `plans.jsonl.zst`: one object a plan."""
        return self._stream(PLANS)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / SUMMARY, summary)

    def add_to_header(self, **entries: Any) -> None:
        """Facts known only later, for example the rows that a trace reader dropped."""
        self._header |= entries
        self._write_header()

    def complete(self) -> None:
        """The run is whole: every table has at least one (empty) part."""
        for table in self._tables:
            if not self._header["parts"][table]:
                self._write_part(table, StepRows() if table == "steps" else Columns(table))
        self._end("complete", None)

    def fail(self, reason: str) -> None:
        """The run ended early; what was written stays readable."""
        self._end("failed", reason)

    def _end(self, state: State, reason: str | None) -> None:
        for stream in self._streams.values():
            stream.close()
        now = datetime.now(UTC)
        self._header |= {
            "state": state,
            "reason": reason,
            "wall_ended": now.isoformat(),
            "wall_time_s": (now - self._started).total_seconds(),
        }
        self._write_header()

    def _own_keys(self) -> set[str]:
        return {"schema_version", "state", "reason", "process", "parts"} | {
            key for key in self._header if key.startswith("wall_")
        }

    def _stream(self, name: str) -> JsonLines:
        if name not in self._streams:
            self._streams[name] = JsonLines(self.path / name)
        return self._streams[name]

    def _write_part(self, table: str, part: Part) -> None:
        listed: list[str] = self._header["parts"][table]
        name = f"{table}/{len(listed):05}.parquet"
        write_part(self.path / name, part.to_arrow())
        listed.append(name)

    def _write_header(self) -> None:
        write_json(self.path / HEADER, self._header)


def check_room(path: Path, overwrite: bool) -> None:
    """Raises RunFolderError when a run cannot be written to `path`; changes nothing."""
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"{path} is a file; a run needs a folder of its own")
    if not path.exists() or not any(path.iterdir()):
        return
    if not overwrite:
        raise RunFolderError(f"{path} is not empty; choose another folder, or --overwrite the run in it")
    for link in (path / name for name in SCHEMAS if (path / name).is_symlink()):
        raise RunFolderError(
            f"{link} is a symbolic link, not a table of a run: remove it, or choose another folder"
        )
    if _read_header(path)["state"] == "running" and read_run(path).state == "running":
        raise RunFolderError(f"{path} is being written by another run")


def _make_room(path: Path, overwrite: bool) -> None:
    check_room(path, overwrite)
    if (path / HEADER).exists():
        _remove_run(path)


def _remove_run(path: Path) -> None:
    """Removes what a run writes and nothing else; `run.json` last, so that it can be tried again."""
    with writing(path):
        for name in SCHEMAS:
            if (path / name).is_dir():
                shutil.rmtree(path / name)
        for name in (SUMMARY, WORKLOAD, PLANS, HEADER):
            (path / name).unlink(missing_ok=True)


class Run(Tables):
    """A run folder as it was when it was opened. Frames: requests, steps, events, blocks, itl, tokens."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.header = header

    @property
    def state(self) -> State:
        """complete, failed, running, or partial: its process ended without a word."""
        state: State = self.header["state"]
        return "partial" if state == "running" and not is_alive(self.header["process"]) else state

    @property
    def reason(self) -> str | None:
        """Why it failed."""
        reason: str | None = self.header["reason"]
        return reason

    @property
    def cut_short(self) -> str | None:
        """Why the log is not whole, as half a sentence; None when it is."""
        match self.state:
            case "complete":
                return None
            case "failed":
                return f"the run failed ({self.reason})"
            case "running":
                return "the run goes on"
            case "partial":
                return "the process of the run was killed"

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        config: dict[str, Any] = self.header.get("config", {})
        return config

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What `summary.json` says; computed from the tables so far where a run has not come to write it."""
        file = self.path / SUMMARY
        if file.exists():
            return _read_json(file)
        from servetwin.sim.metrics import summarize

        return summarize(self)

    @property
    def has_tokens(self) -> bool:
        return "tokens" in self.header["parts"]

    def parts(self, table: str) -> Sequence[pa.Table]:
        return list(self.iter_parts(table))

    def iter_parts(self, table: str) -> Iterator[pa.Table]:
        for name in self.header["parts"].get(table, []):
            yield _read_part(self.path / name, table)

    def iter_columns(
        self, table: str, names: Sequence[str] | None, parts: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        """These parts with these columns only, which is all of a part that is read; None stands for all.

        `parts`: names as in the list of parts of `run.json`.
        """
        for name in self.header["parts"].get(table, []) if parts is None else parts:
            yield _read_part(self.path / name, table, names)


def read_run(path: str | Path) -> Run:
    """Opens a run folder: complete, failed, still being written, or left by a killed process.

    Raises RunFolderError when it is no run folder or a listed part is missing; a part that cannot be read
    raises it when its table is first asked for.
    """
    path = Path(path)
    header = _read_header(path)
    for name in (name for names in header["parts"].values() for name in names):
        if not (path / name).is_file():
            raise RunFolderError(f"{path}: damaged run: {name} is listed in {HEADER} but missing")
    return Run(path, header)


def _read_header(path: Path) -> dict[str, Any]:
    file = path / HEADER
    if not file.is_file():
        raise RunFolderError(f"{path} is not a run folder: it has no {HEADER}")
    header = _read_json(file)
    if not {"schema_version", "state", "process", "parts"} <= header.keys():
        raise RunFolderError(f"{file} is not the {HEADER} of a run: state, process or parts are missing")
    if not _is_well_formed(header):
        raise RunFolderError(f"{file}: damaged: process or parts are not what a run writes")
    if header["schema_version"] not in READABLE_VERSIONS:
        found, readable = header["schema_version"], " and ".join(map(str, READABLE_VERSIONS))
        raise RunFolderError(f"{file}: schema_version is {found!r}; this version reads {readable}")
    return header


def _is_well_formed(header: Mapping[str, Any]) -> bool:
    """`process` is an object; `parts` lists files of the table's own folder, and of no other place."""
    parts = header["parts"]
    return (
        isinstance(header["process"], dict)
        and isinstance(parts, dict)
        and all(
            table in SCHEMAS
            and isinstance(names, list)
            and all(isinstance(n, str) and re.fullmatch(rf"{table}/\d+\.parquet", n) for n in names)
            for table, names in parts.items()
        )
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = orjson.loads(file.read_bytes())
    except (orjson.JSONDecodeError, OSError) as e:
        raise RunFolderError(f"{file}: damaged: {e}") from e
    if not isinstance(data, dict):
        raise RunFolderError(f"{file}: damaged: not a JSON object")
    return data


def _read_part(file: Path, table: str, names: Sequence[str] | None = None) -> pa.Table:
    """All columns of a part, or those of `names`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as stored:
            there = stored.schema_arrow.names
            # At least one, which says how many rows there are.
            read = [n for n in names if n in there] or there[:1] if names is not None else None
            # With threads each of them keeps memory for the next part.
            part = stored.read(read, use_threads=False)
        schema = part_schema() if table == "steps" else arrow_schema(PARTS.get(table, SCHEMAS[table]))
        wanted = schema.names if names is None else names
        # Runs written before such a column was added.
        for name in wanted:
            if (name in LATER_COLUMNS or name not in SCHEMAS[table]) and name not in part.column_names:
                unknown = pa.nulls(len(part), schema.field(name).type)
                one_engine = name == REPLICA
                part = part.append_column(name, replica_array(0, len(part)) if one_engine else unknown)
        return part.select(wanted)
    except (pa.ArrowException, OSError, KeyError) as e:
        raise RunFolderError(f"{file}: damaged part: {e}") from e
