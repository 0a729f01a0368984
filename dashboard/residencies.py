"""Who had which KV block when: the table blocks/ as arrays, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from servetwin.dashboard.run_columns import Numbers, RunColumns

if TYPE_CHECKING:
    import pyarrow as pa

FREED, EVICTED, REUSED, STAYS = 0, 1, 2, 3
"""How a residency ended; STAYS: it had not when the log ended."""
ENDS = {"freed": FREED, "evicted": EVICTED, "reused": REUSED}


@dataclass(frozen=True)
class Residencies:
    """One content in one block each, as arrays [n] in order of beginning; times in s."""

    block: Numbers
    request: Numbers
    """Who brought the content in or took it back, a number into `request_ids`."""
    content: Numbers
    """Its identity, equal where equal contents can be hit; -1 where it could not be."""
    begin: Numbers
    released: Numbers
    """When nobody held it any more; `until` where that was never."""
    until: Numbers
    """The end of the log where it has no end."""
    ended: Numbers
    peak_references: Numbers
    shared: Numbers
    """How many requests took it beside others that held it."""
    request_ids: pa.StringArray
    request_rows: Numbers
    """The row of each of them in requests/; -1 where it is not written."""
    knows_releases: bool
    """Folders of before the column was added say only when a content was gone."""

    @classmethod
    def of(cls, columns: RunColumns, log_end_s: float) -> Residencies:
        """Reads them; in none of the arrays is a NaN."""

        def read(name: str) -> Numbers:
            return columns.numbers("blocks", name)

        begin = read("from_s")
        order = np.argsort(begin, kind="stable")
        until = np.nan_to_num(read("to_s"), nan=log_end_s)
        released = read("released_s")
        requests = columns.coded("blocks", "request_id")
        ends = columns.coded("blocks", "ended")
        meaning = np.array([ENDS[text] for text in ends.texts.to_pylist()] + [STAYS], dtype=np.int8)
        return cls(
            block=read("block_id")[order],
            request=requests.codes[order],
            content=columns.coded("blocks", "prefix_id").codes[order],
            begin=begin[order],
            released=np.where(np.isnan(released), until, released)[order],
            until=until[order],
            ended=meaning[ends.codes][order],
            peak_references=read("peak_references")[order],
            shared=np.nan_to_num(read("shared"))[order].astype(np.int32),
            request_ids=requests.texts,
            request_rows=_rows_of(columns, requests.texts),
            knows_releases=bool(len(released) == 0 or not np.isnan(released).all()),
        )

    def __len__(self) -> int:
        return len(self.block)

    def numbers_of(self, request_ids: Sequence[str]) -> Numbers:
        """The number of each id; -1 where it has no block."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found = pc.index_in(pa.array(request_ids, pa.string()), self.request_ids)
        numbers: Numbers = found.fill_null(-1).to_numpy()
        return numbers

    def held_at(self, time_s: float) -> Numbers:
        """Indices of those that some request holds at an instant."""
        return np.flatnonzero((self.begin <= time_s) & (time_s < self.released))

    def cached_at(self, time_s: float) -> Numbers:
        """Indices of those that nobody holds and that can still be hit."""
        return np.flatnonzero((self.released <= time_s) & (time_s < self.until) & (self.content >= 0))

    @cached_property
    def taken_back(self) -> Numbers:
        """Which begin with a content that was taken back from the free queue, [n]."""
        order = np.lexsort((self.begin, self.block))
        found = np.zeros(len(order), dtype=bool)
        goes_on = (self.block[order][1:] == self.block[order][:-1]) & (self.ended[order][:-1] == REUSED)
        found[order[1:]] = goes_on
        return found

    @cached_property
    def spans(self) -> Spans:
        """Durations of contents, over all times that they were taken back from the free queue."""
        # In a block, a content that was taken back is the next residency of that block.
        order = np.lexsort((self.begin, self.block))
        ended, begins_new = self.ended[order], ~self.taken_back[order]
        content = np.cumsum(begins_new) - 1
        first = np.flatnonzero(begins_new)
        last = np.append(first[1:], len(order)) - 1
        gone = (ended[last] == EVICTED) | (ended[last] == FREED)
        lifetime = self.until[order][last] - self.begin[order][first]
        hits = np.bincount(content, weights=self.shared[order] + (ended == REUSED), minlength=len(first))
        idle = self.until - self.released
        return Spans(
            lifetime=lifetime[gone],
            idle_before_eviction=idle[self.ended == EVICTED],
            idle_before_reuse=idle[self.ended == REUSED],
            hits=hits.astype(np.int64),
        )


class Spans(NamedTuple):
    """Samples in s, and counts."""

    lifetime: Numbers
    """From being taken to being gone, of contents that are gone."""
    idle_before_eviction: Numbers
    """From the last release to the eviction."""
    idle_before_reuse: Numbers
    """From the last release to being taken back."""
    hits: Numbers
    """How often each content was hit."""


def _rows_of(columns: RunColumns, request_ids: pa.StringArray) -> Numbers:
    import pyarrow.compute as pc

    rows: Numbers = (
        pc.index_in(request_ids, columns.texts("requests", "request_id").combine_chunks())
        .fill_null(-1)
        .to_numpy()
    )
    return rows


class Holding(NamedTuple):
    """What fills the pool at one instant, in blocks."""

    of_requests: dict[str, int]
    """Held blocks by the request that brought their content in (or took it back), most first."""
    left_behind: int
    """Held blocks whose bringer has gone: others share them."""
    cached_free: int
    free: int

    @property
    def total(self) -> int:
        return sum(self.of_requests.values()) + self.left_behind + self.cached_free + self.free


def holding(res: Residencies, time_s: float, usable_blocks: int, present: Numbers) -> Holding:
    """`present` [request_ids]: whether each request runs at that instant."""
    held = res.held_at(time_s)
    counts = np.bincount(res.request[held], minlength=len(res.request_ids))
    mine = np.where(present, counts, 0)
    order = np.argsort(-mine, kind="stable")[: int((mine > 0).sum())]
    names = res.request_ids.take(order).to_pylist()
    cached = len(res.cached_at(time_s))
    return Holding(
        of_requests={name: int(mine[n]) for name, n in zip(names, order, strict=True)},
        left_behind=int(counts.sum() - mine.sum()),
        cached_free=cached,
        free=usable_blocks - int(counts.sum()) - cached,
    )
