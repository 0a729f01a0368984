"""One run of a sweep in whatever process it is sent to, and its record as bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from servetwin.sim.leaping_process import OnProgress
from servetwin.sim.planning.one_run import run_one
from servetwin.sim.planning.record import Record
from servetwin.sim.planning.spec import RunSpec
from servetwin.sim.processes import measured

OF_THE_MACHINE = (MemoryError, OSError)
"""Errors that another try may not end with."""


class Task(NamedTuple):
    """A run to be done."""

    spec_hash: str
    spec: RunSpec
    folder: str
    """Where paths begin."""


class _Ended(NamedTuple):
    summary: dict[str, Any] | None
    error: str | None
    final: bool
    notes: tuple[str, ...]


def carry_out(task: Task, on_progress: OnProgress | None = None) -> bytes:
    """Runs it; the record (`Record.from_bytes`) tells an error, too. KeyboardInterrupt goes through."""
    done = measured(lambda: _run(task, on_progress))
    ended: _Ended = done.value
    record = Record(
        spec_hash=task.spec_hash,
        spec=task.spec.to_json(),
        **ended._asdict(),
        wall_time_s=done.wall_time_s,
        host=done.host,
        date=done.date,
    )
    return record.to_bytes()


def lost(task: Task, error: str) -> bytes:
    """The record of a run that took its process along."""
    empty: Callable[[], None] = lambda: None  # noqa: E731
    stamp = measured(empty)
    return Record(
        task.spec_hash, task.spec.to_json(), None, error, False, (), stamp.wall_time_s, stamp.host, stamp.date
    ).to_bytes()


def _run(task: Task, on_progress: OnProgress | None) -> _Ended:
    try:
        os.chdir(task.folder)
        result = run_one(task.spec, on_progress=on_progress)
    except (Exception, SystemExit) as e:
        return _Ended(None, _in_words(e), not isinstance(e, OF_THE_MACHINE), ())
    return _Ended(result.summary, None, True, result.notes)


def _in_words(error: BaseException) -> str:
    """One line: what the command line would say, or the kind of an error that nobody foresaw."""
    from servetwin.sim.commands.errors import InfeasibleError, PolicyFailedError

    text = " ".join(str(error).split())
    foreseen = isinstance(error, ValueError | InfeasibleError | PolicyFailedError)
    return text if foreseen and text else f"{type(error).__name__}: {text}"
