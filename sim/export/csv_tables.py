"""The tables of a run as CSV: the columns of the log with a header, nothing for null, times in seconds."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from servetwin.sim.columns import SCHEMAS, arrow_schema
from servetwin.sim.step_rows import expanded
from servetwin.sim.tables import Tables, replica_of

if TYPE_CHECKING:
    import pyarrow as pa

    from servetwin.sim.runs import Run

ROWS_AT_ONCE = 65_536


def tables_of(run: Run) -> list[str]:
    """The tables that a run has, in the order of the documentation."""
    return [table for table in SCHEMAS if table in run.header["parts"]]


def csv_pieces(log: Tables, table: str) -> Iterator[bytes]:
    """One table, a piece at a time: the header, then rows in the order of `Tables.frame`."""
    from pyarrow.csv import CSVWriter

    sink = io.BytesIO()
    writer = CSVWriter(sink, arrow_schema(SCHEMAS[table]))
    for rows in _batches(log, table):
        writer.write(rows)
        yield sink.getvalue()
        sink.seek(0)
        sink.truncate()
    writer.close()
    yield sink.getvalue()


def _batches(log: Tables, table: str) -> Iterator[pa.Table]:
    import pyarrow as pa

    schema = arrow_schema(SCHEMAS[table])
    if table == "steps" and _has_one_engine(log):
        # The longest table, and in order as it is: it need not be in memory as a whole.
        for part in log.iter_parts(table):
            yield expanded(part).cast(schema)
        return
    frame = log.frame(table)
    for first in range(0, len(frame), ROWS_AT_ONCE):
        yield pa.Table.from_pandas(frame[first : first + ROWS_AT_ONCE], schema=schema, preserve_index=False)


def _has_one_engine(log: Tables) -> bool:
    return len({replica_of(part) for part in log.iter_parts("steps")}) <= 1
