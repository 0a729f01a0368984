"""Our own trace format as a table: the fields of a RequestSpec, its source row excepted, as columns of a Parquet file.

What a value may be is what it may be in our JSONL; a column that is absent, or null, holds the default. Prefix ids
beyond 64 bits stand as texts, so every RequestSpec is read back as it was. The schema's metadata says which requests
have times of arrival of their own, where not all of them have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from servetwin.workloads.columns import RequestColumns
from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.traces.jsonl import FIELDS, REQUIRED, request_of
from servetwin.workloads.traces.trace import ArrivalTimes, Reading, TraceFormat
from servetwin.workloads.traces.values import Damage

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 8192
ROW_GROUP_ROWS = 65_536
MAX_ID_CHARACTERS = 4000
"""Of a prefix id written as a text."""


ARRIVALS = b"servetwin.arrivals"
"""Key of the metadata."""


def write_parquet(
    path: Path, requests: RequestColumns, wrote: Callable[[int], None], arrivals: ArrivalTimes = "recorded"
) -> None:
    """Writes requests in the order given; `wrote` is told how many more are written. The file grows under `path`."""
    import pyarrow.parquet as pq

    table = requests.with_column("request_id", requests.values("request_id")).table
    table = table.select([name for name in table.column_names if name in FIELDS])
    if arrivals != "recorded":
        table = table.replace_schema_metadata({ARRIVALS: arrivals})
    with pq.ParquetWriter(path, table.schema, compression="zstd") as writer:
        for start in range(0, len(table), ROW_GROUP_ROWS):
            part = table.slice(start, ROW_GROUP_ROWS)
            writer.write_table(part)
            wrote(len(part))


def _read(reading: Reading) -> None:
    import pyarrow.parquet as pq

    path, rows = reading.source.path, reading.rows
    first_row_of: dict[str, int] = {}
    with _damage_told(path), pq.ParquetFile(reading.source.file) as file:
        _check_schema(path, file.schema_arrow)
        reading.arrivals = _arrivals(path, file.schema_arrow)
        number = 0
        for batch in file.iter_batches(BATCH_ROWS, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                with rows.row(number):
                    spec = request_of(number, _with_whole_ids(row))
                    before = first_row_of.setdefault(spec.request_id, number)
                    if before != number:
                        raise Damage("request_id", spec.request_id, f"unique; row {before} has it too")
                    if reading.arrivals == "none" and spec.arrival_s:
                        raise Damage(
                            "arrival_s", spec.arrival_s, "0 in a file that says it has no arrival times"
                        )
                    rows.add_request(spec)


@contextmanager
def _damage_told(path: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as e:
        raise WorkloadError(f"{path}: is not a whole Parquet file: {e}") from e


def _check_schema(path: str, schema: pa.Schema) -> None:
    names = schema.names
    for name in names:
        if name not in FIELDS or names.count(name) > 1:
            problem = "there once" if name in FIELDS else f"one of {', '.join(FIELDS)}"
            raise WorkloadError(f"{path}: column {name!r}: must be {problem}")
        if not _is_plain(schema.field(name).type):
            raise WorkloadError(
                f"{path}: column {name!r}: type {schema.field(name).type} must be a number, a text, true or false, "
                "or a list of whole numbers"
            )
    for name in REQUIRED:
        if name not in names:
            raise WorkloadError(f"{path}: column {name!r} is missing: {FIELDS[name].allowed}")


def _arrivals(path: str, schema: pa.Schema) -> ArrivalTimes:
    said = (schema.metadata or {}).get(ARRIVALS, b"recorded").decode()
    for known in get_args(ArrivalTimes):
        if said == known:
            return cast(ArrivalTimes, known)
    raise WorkloadError(
        f"{path}: metadata {ARRIVALS.decode()} {said!r}: must be one of {', '.join(get_args(ArrivalTimes))}"
    )


def _is_plain(type_: pa.DataType) -> bool:
    """Other types would take other Python values, some of which cannot be made of what a damaged file holds."""
    import pyarrow.types as t

    if t.is_list(type_) or t.is_large_list(type_):
        return bool(
            t.is_integer(type_.value_type) or t.is_string(type_.value_type) or t.is_null(type_.value_type)
        )
    kinds = (t.is_integer, t.is_floating, t.is_boolean, t.is_string, t.is_large_string, t.is_null)
    return any(is_kind(type_) for is_kind in kinds)


def _with_whole_ids(row: dict[str, Any]) -> dict[str, Any]:
    """Prefix ids as numbers, which stand as texts where some do not fit into 64 bits. Raises Damage."""
    ids = row.get("prefix_ids")
    if not ids or not isinstance(ids[0], str):
        return row
    return row | {"prefix_ids": [_id(text) for text in ids]}


def _id(text: object) -> int:
    if isinstance(text, str) and len(text) <= MAX_ID_CHARACTERS and text.removeprefix("-").isdecimal():
        return int(text)
    raise Damage("prefix_ids", text, "a list of whole numbers")


FORMAT = TraceFormat(
    name="servetwin parquet",
    looks_like="a Parquet file with the columns of our JSONL",
    matches=lambda head: head.is_parquet,
    read=_read,
)
