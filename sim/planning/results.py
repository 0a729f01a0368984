"""The table of a sweep: one row a run, in the order of the plan. Reading it needs nothing of the simulator.

What differs between equal runs stands only in columns whose name contains `wall`, `path`, `host` or `date`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from servetwin.sim.run_files import RunFolderError, write_whole

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

RESULTS = "results.parquet"
ABOUT = b"servetwin"
"""Key of the file's metadata."""
FIRST = ("run", "point", "seed")
"""Number of the run, number of its point (a choice of parameters), and its seed."""
STATE, ERROR, HASH = "state", "error", "spec_hash"
LAST = (HASH, "wall_time_s", "host", "date")
DONE, FAILED = "done", "failed"


@dataclass(frozen=True)
class Results:
    """A sweep's table, and what its columns are."""

    frame: pd.DataFrame
    parameters: tuple[str, ...]
    """Columns with what was varied."""
    figures: tuple[str, ...]
    """Columns with what came of it; names and units are those of `summary.json` (`p99_ttft_ms`: milliseconds)."""
    about: Mapping[str, Any]
    """method, seeds, objective, direction, workload, num_runs (of the whole sweep)."""

    @property
    def complete(self) -> bool:
        """All runs of the sweep have ended."""
        return len(self.frame) == int(self.about["num_runs"])


def read_results(path: str | Path) -> Results:
    """From the folder of a sweep, or its results.parquet. Raises RunFolderError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = Path(path) / RESULTS if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise RunFolderError(f"{path}: there is no {RESULTS} of a sweep")
    try:
        table = pq.read_table(file, partitioning=None)
        about = orjson.loads((table.schema.metadata or {})[ABOUT])
        return results_of(table.to_pandas(), about)
    except (pa.ArrowException, KeyError, orjson.JSONDecodeError) as e:
        raise RunFolderError(f"{file}: is no table of a sweep: {e}") from e


def results_of(frame: pd.DataFrame, about: Mapping[str, Any]) -> Results:
    """A frame with columns as in results.parquet."""
    parameters = tuple(about["parameters"])
    other = {*FIRST, STATE, ERROR, *LAST, *parameters}
    return Results(frame, parameters, tuple(c for c in frame.columns if c not in other), about)


def write_results(file: Path, table: pa.Table) -> None:
    """Writes it whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd")
    write_whole(file, buffer.getvalue())


def results_table(rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> pa.Table:
    """Rows with columns named as above, `parameters` of `about` and figures; a column is null where a row has none."""
    import pyarrow as pa

    names = list(dict.fromkeys(name for row in rows for name in row))
    first = [*FIRST, *(name for name in about["parameters"] if name not in FIRST), STATE, ERROR]
    names = [*first, *(name for name in names if name not in (*first, *LAST)), *LAST]
    columns = {name: _array([row.get(name) for row in rows], name) for name in names}
    return pa.table(columns).replace_schema_metadata(
        {ABOUT: orjson.dumps(about, option=orjson.OPT_SORT_KEYS)}
    )


_TYPES = {"run": "int64", "point": "int64", "seed": "int64", "wall_time_s": "float64"} | dict.fromkeys(
    (STATE, ERROR, HASH, "host", "date"), "string"
)


def _array(values: list[Any], name: str) -> pa.Array:
    import pyarrow as pa

    if name in _TYPES:
        return pa.array(values, pa.type_for_alias(_TYPES[name]))
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {bool} and kinds:
        return pa.array(values, pa.bool_())
    if kinds <= {int} and kinds:
        return pa.array(values, pa.int64())
    if kinds <= {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array([None if value is None else _text(value) for value in values], pa.string())


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def by_point(results: Results) -> pd.DataFrame:
    """One row a point: its parameters, `runs`, `failed_runs`, and the mean of every figure over runs that were done."""
    points = results.frame.groupby("point", sort=True)
    counts = points.agg(
        runs=("run", "count"), failed_runs=(STATE, lambda states: int((states == FAILED).sum()))
    )
    done = results.frame[results.frame[STATE] == DONE]
    means = done.groupby("point")[[*results.figures]].mean()
    # Not `first()`, which passes over missing values.
    parameters = points.nth(0).set_index("point")[[*results.parameters]]
    return parameters.join(counts).join(means).reset_index()


def half_widths(results: Results) -> pd.DataFrame:
    """One row a point: of the mean of every figure half the width of its 95 % t interval; NaN with fewer than two runs.

    Seeds are independent of each other, so this is the interval of one point. Points share their seeds: a difference
    between two of them is surer than two intervals side by side look.
    """
    import numpy as np
    from scipy.stats import t

    done = results.frame[results.frame[STATE] == DONE].groupby("point")[[*results.figures]]
    counts = done.count()
    factor = t.ppf(0.975, np.maximum(counts - 1, 1)) / np.sqrt(np.maximum(counts, 1))
    widths: pd.DataFrame = (done.std() * factor).reindex(sorted(results.frame.point.unique()))
    # A copy in one piece; pandas would warn of the many.
    return widths.copy().reset_index()


def lead(results: Results, points: Sequence[int], figure: str) -> tuple[float, float] | None:
    """By how much a figure differs between two points, seed by seed, and half the width of that mean's 95 % t interval.

    `points`: numbers of two of them; the second minus the first. None with fewer than two seeds that both have.
    """
    import numpy as np
    from scipy.stats import t

    done = results.frame[results.frame[STATE] == DONE]
    first, second = (done[done.point == point].set_index("seed")[figure] for point in points)
    differences = (second - first).dropna().to_numpy(dtype=np.float64)
    n = len(differences)
    if n < 2:
        return None
    width = t.ppf(0.975, n - 1) * differences.std(ddof=1) / np.sqrt(n)
    return float(differences.mean()), float(width)
