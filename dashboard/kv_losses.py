"""What the pool cost: computed tokens that preemptions threw away, and slots of last blocks that nobody used."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from servetwin.dashboard.run_columns import Numbers
from servetwin.dashboard.run_data import RunData, Window

if TYPE_CHECKING:
    import pandas as pd

LOSSES_AT_MOST = 500


def preemptions(data: RunData, window: Window) -> pd.DataFrame:
    """Each preemption of the window, in order: what it lost, and how full the pool was before and after.

    Columns: time_s, request_id, lost_tokens, lost_blocks, found_tokens (found again in the prefix cache when it
    resumed; NaN: it did not), times (how often this request had been preempted with this one), used_before_percent
    and used_after_percent (the schedule calls before this one, and this one).
    """
    events = data.events("preempted", "resumed")
    mine = events[events.kind == "preempted"].copy()
    resumed = events[events.kind == "resumed"]
    # The n-th time that a request resumes follows the n-th time that it was preempted.
    mine["times"] = mine.groupby("request_id").cumcount() + 1
    found = resumed.assign(times=resumed.groupby("request_id").cumcount() + 1)
    found = found.rename(columns={"computed_tokens": "found_tokens"})[["request_id", "times", "found_tokens"]]
    table = mine.merge(found, on=["request_id", "times"], how="left")
    table = table[(table.time_s >= window[0]) & (table.time_s <= window[1])].head(LOSSES_AT_MOST)
    before, after = _used_percent(data, table.time_s.to_numpy())
    table = table.assign(used_before_percent=before, used_after_percent=after)
    table = table.rename(columns={"computed_tokens": "lost_tokens", "blocks": "lost_blocks"})
    names = ["time_s", "request_id", "times", "lost_tokens", "lost_blocks", "found_tokens"]
    return table[[*names, "used_before_percent", "used_after_percent"]].reset_index(drop=True)


def _used_percent(data: RunData, times_s: Numbers) -> tuple[Numbers, Numbers]:
    """Share of usable blocks in use at the end of the schedule call before each instant, and of the one at it."""
    view = data.steps(_around(data, times_s), ("used_blocks", "cached_free_blocks", "free_blocks"))
    steps = view.frame
    usable = steps.used_blocks + steps.cached_free_blocks + steps.free_blocks
    percent = (100 * steps.used_blocks / usable.where(usable > 0)).to_numpy()
    starts = steps.start_s.to_numpy()
    if not len(starts):
        nothing = np.full(len(times_s), np.nan)
        return nothing, nothing
    first = np.clip(np.searchsorted(starts, times_s, side="left"), 0, len(starts) - 1)
    last = np.clip(np.searchsorted(starts, times_s, side="right") - 1, 0, len(starts) - 1)
    return np.where(first > 0, percent[np.maximum(first - 1, 0)], np.nan), percent[last]


def _around(data: RunData, times_s: Numbers) -> Window:
    """From the row of steps before the first instant on: one step must be known before it."""
    starts = data.columns.numbers("steps", "start_s")
    if not len(times_s) or not len(starts):
        return 0.0, 0.0
    place = max(int(np.searchsorted(starts, times_s[0], side="left")) - 1, 0)
    return float(starts[place]), float(times_s[-1])


class LastBlocks(NamedTuple):
    """Slots of last blocks when requests ended or were preempted."""

    unused: Numbers
    """How many blocks had so many slots left, [block size]: 0, 1, ..."""
    slots: int
    """Of all blocks that they held."""

    @property
    def mean(self) -> float | None:
        total = int(self.unused.sum())
        return float(self.unused @ np.arange(len(self.unused))) / total if total else None

    @property
    def share(self) -> float | None:
        """Unused slots among all."""
        return float(self.unused @ np.arange(len(self.unused))) / self.slots if self.slots else None


def last_blocks(data: RunData) -> LastBlocks:
    """From events/ `finished`, `aborted`, `preempted`: blocks held and tokens computed at that time."""
    import pyarrow as pa
    import pyarrow.compute as pc

    ends = pa.array(["finished", "aborted", "preempted"])
    block_size = data.block_size
    unused, slots = np.zeros(block_size), 0
    # Part by part: events are many, and nothing else needs all of them.
    for part in data.columns.parts("events", ["kind", "blocks", "computed_tokens"]):
        mine = part.filter(pc.is_in(part["kind"], ends))
        blocks, computed = (mine[name].to_numpy().astype(np.int64) for name in ("blocks", "computed_tokens"))
        # Slots taken for the next tokens (drafts, a step in flight) may reach beyond the last computed one's block.
        left = np.clip(blocks * block_size - computed, 0, block_size - 1)[blocks > 0]
        unused += np.bincount(left, minlength=block_size)
        slots += int(blocks.sum()) * block_size
    return LastBlocks(unused, slots)


def evictions_over_time(data: RunData, window: Window, bins: int) -> tuple[Numbers, Numbers]:
    """Beginnings of bins [bins] and evicted contents in each; those of a leap count where it begins."""
    starts = data.columns.numbers("steps", "start_s")
    evicted = data.columns.numbers("steps", "evictions") + data.columns.list_lengths("steps", "evictions_at")
    span = window if window[1] > window[0] else (window[0], window[0] + 1)
    counts, edges = np.histogram(starts, bins=bins, range=span, weights=evicted)
    return edges[:-1], counts
