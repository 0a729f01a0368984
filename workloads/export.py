"""Requests to files: our JSONL or Parquet, told by the name, or Mooncake's JSON lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from servetwin.workloads.columns import RequestColumns
from servetwin.workloads.spec import RequestSpec, WorkloadError
from servetwin.workloads.to_mooncake import BLOCK_TOKENS, mooncake_rows, not_said
from servetwin.workloads.traces.jsonl import jsonl_rows
from servetwin.workloads.traces.parquet import write_parquet
from servetwin.workloads.traces.source import naming
from servetwin.workloads.traces.trace import ArrivalTimes
from servetwin.workloads.traces.writing import whole_file, write_json_lines
from servetwin.workloads.transform import as_columns

T = TypeVar("T")
JSON_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PARQUET_ENDING = ".parquet"
NO_TIMESTAMPS = (
    "no timestamps in the file, for the requests have no times: tools that need some must be given a rate"
)
TOLD_EVERY = 4096
"""Requests."""
Wrote = Callable[[int], None]
"""Told now and then how many more requests are written."""


def write_trace(
    path: str | Path,
    requests: Sequence[RequestSpec],
    *,
    arrivals: ArrivalTimes = "recorded",
    overwrite: bool = False,
    wrote: Wrote | None = None,
) -> None:
    """Writes our JSONL (.jsonl, .jsonl.gz, .jsonl.zst) or Parquet (.parquet), in order of arrival.

    `read_trace` gives back the same requests but for their source rows, and `arrivals`, which says what of their times
    is known (`Trace.arrivals`). The file is there whole or not at all. Raises
    WorkloadError for another ending, for a file that exists (unless `overwrite`), for ids used twice, and for
    times of requests that have none.
    """
    target = _target(path, (*JSON_ENDINGS, PARQUET_ENDING), overwrite)
    columns = as_columns(requests)
    _check_arrivals(columns, arrivals)
    _check_ids(columns)
    wrote = wrote or _tell_nobody
    if target.name.endswith(PARQUET_ENDING):
        with whole_file(target) as unfinished:
            write_parquet(unfinished, columns, wrote, arrivals)
    else:
        write_json_lines(target, jsonl_rows(_counted(columns, wrote), arrivals))


def write_mooncake(
    path: str | Path,
    requests: Sequence[RequestSpec],
    *,
    arrivals: ArrivalTimes = "recorded",
    block_tokens: int = BLOCK_TOKENS,
    overwrite: bool = False,
    wrote: Wrote | None = None,
) -> list[str]:
    """Writes Mooncake's JSON lines in order of arrival; returns what they cannot say, a sentence each.

    `arrivals`: as in `write_trace`; without times there are no timestamps. `block_tokens`: tokens per hash id.
    Raises WorkloadError as `write_trace` does.
    """
    target = _target(path, JSON_ENDINGS, overwrite)
    columns = as_columns(requests)
    _check_arrivals(columns, arrivals)
    rows = mooncake_rows(columns, block_tokens, timed=arrivals != "none")
    write_json_lines(target, _counted(rows, wrote or _tell_nobody))
    return ([NO_TIMESTAMPS] if arrivals == "none" else []) + not_said(columns, block_tokens)


def _target(path: str | Path, endings: Sequence[str], overwrite: bool) -> Path:
    target = Path(path)
    if not target.name.endswith(tuple(endings)):
        raise WorkloadError(f"{path}: the name must end in {', '.join(endings)}")
    with naming(path, "written"):
        _check_free(target, overwrite)
    return target


def _check_free(target: Path, overwrite: bool) -> None:
    if target.is_dir() or (target.exists() and not overwrite):
        raise WorkloadError(
            f"{target}: is a folder"
            if target.is_dir()
            else f"{target}: exists; overwrite it with --overwrite (overwrite=True)"
        )
    if not target.parent.is_dir():
        raise WorkloadError(f"{target}: there is no folder {target.parent}")


def _check_arrivals(columns: RequestColumns, arrivals: ArrivalTimes) -> None:
    if arrivals == "none" and columns.arrival_s.any():
        raise WorkloadError(
            "arrivals 'none': must be 'recorded' or 'first turns' for requests that have times"
        )


def _check_ids(columns: RequestColumns) -> None:
    ids = columns.values("request_id")
    if len(set(ids)) < len(ids):
        [(twice, _)] = Counter(ids).most_common(1)
        raise WorkloadError(f"request_id {twice!r}: must be unique")


def _counted(things: Iterable[T], wrote: Wrote) -> Iterator[T]:
    for number, thing in enumerate(things, start=1):
        yield thing
        if number % TOLD_EVERY == 0:
            wrote(TOLD_EVERY)


def _tell_nobody(count: int) -> None:
    """For callers who do not want to know."""
