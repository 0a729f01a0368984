"""The pool over time as a picture: blocks by times, with what was in each."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from servetwin.dashboard.residencies import Residencies
from servetwin.dashboard.run_columns import Numbers

Picture = np.ndarray[tuple[int, int], np.dtype[Any]]
TIMES, BLOCKS = 240, 120
"""Cells of the picture at most."""
FREE, HELD, SHARED, CACHED = 0, 1, 2, 3
NOBODY = -1


class BlockMap(NamedTuple):
    """Cells [blocks, times]; each shows one block at the middle of its stretch of time."""

    block_ids: Numbers
    """[blocks]: every block, or some at equal distances."""
    times_s: Numbers
    """[times]: middles."""
    state: Picture
    """FREE, HELD, SHARED (held, and by several requests at some time), CACHED: nobody holds it, it can be hit."""
    request: Picture
    """A number into `Residencies.request_ids`; NOBODY where the block is free."""
    references: Picture
    """The most requests that held it at once in this residency; 0 where nobody holds it."""


def block_map(
    res: Residencies,
    window: tuple[float, float],
    blocks: tuple[int, int],
    times: int = TIMES,
    rows: int = BLOCKS,
) -> BlockMap:
    """`blocks`: first and last block id shown; where there are more than `rows`, some at equal distances are."""
    first, last = blocks
    shown = np.unique(np.linspace(first, last, min(rows, last - first + 1)).round().astype(np.int64))
    low, high = window
    length = (high - low) / times or 1.0
    middles = low + (np.arange(times) + 0.5) * length
    place = np.full(max(last, int(res.block.max(initial=0))) + 1, -1)
    place[shown] = np.arange(len(shown))
    mine = np.flatnonzero((place[res.block] >= 0) & (res.begin < high) & (res.until > low))
    row = place[res.block[mine]]
    begin, released, until = (
        _cell(t[mine], low, length, times) for t in (res.begin, res.released, res.until)
    )
    # A residency that is evicted and its successor may share an instant: the later one is painted last.
    shape = (len(shown), times)
    state = np.full(shape, FREE, dtype=np.int8)
    request = np.full(shape, NOBODY, dtype=np.int32)
    references = np.zeros(shape, dtype=np.int32)
    peak = res.peak_references[mine]
    _paint(state, row, begin, released, np.where(peak > 1, SHARED, HELD))
    _paint(request, row, begin, released, res.request[mine])
    _paint(references, row, begin, released, peak)
    cached = res.content[mine] >= 0
    _paint(state, row[cached], released[cached], until[cached], np.full(int(cached.sum()), CACHED))
    _paint(request, row[cached], released[cached], until[cached], res.request[mine][cached])
    return BlockMap(shown, middles, state, request, references)


def _cell(times_s: Numbers, low: float, length: float, times: int) -> Numbers:
    """The first cell whose middle is not before each instant."""
    return np.clip(np.ceil((times_s - low) / length - 0.5), 0, times).astype(np.int64)


def _paint(picture: Picture, row: Numbers, begin: Numbers, end: Numbers, value: Numbers) -> None:
    """Cells [begin, end) of a row for each; none overlap but by an instant."""
    length = np.maximum(end - begin, 0)
    starts = np.repeat(row * picture.shape[1] + begin - (np.cumsum(length) - length), length)
    picture.reshape(-1)[starts + np.arange(int(length.sum()))] = np.repeat(value, length)
