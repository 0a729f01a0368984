"""Steps of a run in a window of time: one by one where they are few, by their rows on disk where they are many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from servetwin.dashboard.charts.thinning import min_max
from servetwin.dashboard.run_columns import Numbers, RunColumns
from servetwin.sim.step_rows import expanded

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

EXACT_STEPS = 200_000
"""Steps of a window that are made one by one."""
COUNTED = ("running", "waiting", "used_blocks", "cached_free_blocks", "free_blocks")
"""Columns that hold until the next schedule call."""
EXTREMES = 4_000
"""Rows that are kept for each column where there are more steps."""


class StepView(NamedTuple):
    """Steps in order, with the columns that were asked for; `start_s` among them."""

    frame: pd.DataFrame
    exact: bool
    """Whether each row is a step. Else there are those that hold the extremes of the columns; one of a leap of like
    steps stands for all of them, and one more at its end says what has grown until then (blocks, step time)."""
    num_steps: int


def steps_between(columns: RunColumns, from_s: float, to_s: float, names: Sequence[str]) -> StepView:
    """Steps whose time, from their schedule call to the next one, touches [from_s, to_s].

    `names`: integer and time columns of steps/.
    """
    starts, repeats = columns.numbers("steps", "start_s"), step_repeats(columns)
    first, last = _rows(starts, from_s, to_s)
    num_steps = int(repeats[first:last].sum())
    names = list(dict.fromkeys(("start_s", *names)))
    if num_steps <= EXACT_STEPS:
        return StepView(_one_by_one(columns, first, last, names), True, num_steps)
    return StepView(_by_rows(columns, first, last, names), False, num_steps)


def merged(views: Sequence[StepView]) -> StepView:
    """Steps of several replicas in order of time: what is counted after each schedule call is added up over all.

    A replica counts with what its latest step said; before its first one in the window with nothing.
    """
    import pandas as pd

    if len(views) == 1:
        return views[0]
    frame = pd.concat([view.frame for view in views], ignore_index=True)
    order = np.argsort(frame.start_s.to_numpy(), kind="stable")
    frame = frame.iloc[order].reset_index(drop=True)
    whose = np.repeat(np.arange(len(views)), [len(view.frame) for view in views])[order]
    for name in (name for name in COUNTED if name in frame):
        total = np.zeros(len(frame))
        for place in range(len(views)):
            total += frame[name].where(whose == place).ffill().fillna(0).to_numpy()
        frame[name] = total.astype(np.int64)
    return StepView(frame, all(v.exact for v in views), sum(v.num_steps for v in views))


def first_steps(
    columns: RunColumns, from_s: float, to_s: float, names: Sequence[str], limit: int = EXACT_STEPS
) -> tuple[pd.DataFrame, int]:
    """The first steps of a window one by one, about `limit` of them, and how many more there are."""
    starts, repeats = columns.numbers("steps", "start_s"), step_repeats(columns)
    first, last = _rows(starts, from_s, to_s)
    total = np.cumsum(repeats[first:last])
    kept = first + int(total.searchsorted(limit, side="right"))
    # One row alone may be more than that.
    kept = min(max(kept, first + 1), last)
    return _one_by_one(columns, first, kept, names), int(repeats[kept:last].sum())


def _rows(starts: Numbers, from_s: float, to_s: float) -> tuple[int, int]:
    """First and last + 1 of those that begin up to `to_s` and are the latest, or later, at `from_s`."""
    at = int(starts.searchsorted(from_s, side="right"))
    # Steps in flight may begin in one instant.
    first = int(starts.searchsorted(starts[at - 1], side="left")) if at else 0
    return first, int(starts.searchsorted(to_s, side="right"))


def step_repeats(columns: RunColumns) -> Numbers:
    """How many steps each row of the table is, [rows]."""
    repeats = columns.numbers("steps", "repeats")
    # Parts of the first schema version have no such column.
    return np.nan_to_num(repeats, nan=1).astype(np.int64) if repeats.dtype.kind == "f" else repeats


def step_rows_between(columns: RunColumns, first: int, last: int) -> list[pa.Table]:
    """Rows [first, last) of the table as its parts have them, with all that makes single steps of them."""
    found, begin = [], 0
    for part, rows in zip(columns.part_names("steps"), columns.part_rows("steps"), strict=True):
        low, high = max(first - begin, 0), min(last - begin, rows)
        if low < high:
            found.append(columns.whole_part("steps", part).slice(low, high - low))
        begin += rows
    return found


def _one_by_one(columns: RunColumns, first: int, last: int, names: Sequence[str]) -> pd.DataFrame:
    import pyarrow as pa

    from servetwin.sim.columns import SCHEMAS, arrow_schema

    empty = arrow_schema({name: SCHEMAS["steps"][name] for name in names}).empty_table()
    parts = [expanded(part, names) for part in step_rows_between(columns, first, last)]
    frame: pd.DataFrame = pa.concat_tables([empty, *parts]).to_pandas()
    return frame


def _by_rows(columns: RunColumns, first: int, last: int, names: Sequence[str]) -> pd.DataFrame:
    """Rows that hold the extremes of each column, and one more after each of them that is a leap of several steps."""
    import pandas as pd

    columns.load("steps", names)
    repeats = step_repeats(columns)[first:last]
    values = {name: columns.numbers("steps", name)[first:last] for name in names}
    changes = {name: _change(columns, name, slice(first, last), repeats) for name in names}
    kept: Numbers = np.unique(
        np.concatenate([_extremes(values[name], changes[name]) for name in names if name != "start_s"])
    )
    place = np.repeat(kept, np.where(repeats[kept] > 1, 2, 1))
    at_end = np.concatenate([[False], place[1:] == place[:-1]])
    frame = {}
    for name in names:
        change = changes[name]
        shown = values[name][place]
        frame[name] = shown if change is None else shown + np.where(at_end, change[place], 0)
    return pd.DataFrame(frame, copy=False)


def _extremes(values: Numbers, change: Numbers | None) -> Numbers:
    kept = min_max(np.nan_to_num(values), EXTREMES)
    return kept if change is None else np.concatenate([kept, min_max(values + change, EXTREMES)])


def _change(columns: RunColumns, name: str, rows: slice, repeats: Numbers) -> Numbers | None:
    """By how much the last step of each row differs from its first; None where it does not."""

    def listed(list_name: str) -> Numbers:
        return columns.list_lengths("steps", list_name)[rows]

    known: dict[str, Callable[[], Numbers]] = {
        "start_s": lambda: _durations(columns, rows, repeats),
        "used_blocks": lambda: listed("blocks_begun_at"),
        "cached_free_blocks": lambda: -listed("evictions_at"),
        "free_blocks": lambda: listed("evictions_at") - listed("blocks_begun_at"),
        "device_s": lambda: columns.numbers("steps", "device_growth_ns")[rows] * (repeats - 1) / 1e9,
        "decode_context_tokens": lambda: columns.numbers("steps", "decode_rows")[rows] * (repeats - 1),
    }
    return known[name]() if name in known else None


def _durations(columns: RunColumns, rows: slice, repeats: Numbers) -> Numbers:
    """From the first step of a row to its last: its share of the time until the next row begins."""
    starts = columns.numbers("steps", "start_s")
    until = np.append(starts[rows.start + 1 : rows.stop + 1], starts[-1:])[: rows.stop - rows.start]
    until_last: Numbers = (until - starts[rows]) * (repeats - 1) / np.maximum(repeats, 1)
    return until_last
