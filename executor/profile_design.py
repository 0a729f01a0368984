"""Which steps a profile measures: a space-filling design over the shapes that an engine can run.

A full product of sizes spends most of its time on corners that no workload visits. Here a Sobol sequence runs through
rows, context, its skew, chunk, number of chunks and their history, sizes on logarithmic scales: any number of first
points covers the whole evenly, so a profile may end early and go on later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import qmc

from servetwin.executor.profile_grid import GridLimits, GridPoint

Floats = NDArray[np.float64]
Kind = Literal["prefill", "decode", "mixed"]
KINDS: tuple[Kind, ...] = ("decode", "mixed", "decode", "prefill", "mixed")
"""In turns."""
DIMENSIONS = 6
EQUAL_SHARE = 0.4
"""Of the points with decode rows: all contexts alike; in the others they are lognormal ..."""
LARGEST_SIGMA = 1.2
"""... up to this spread."""
NO_HISTORY_SHARE = 0.4
"""Of the points with chunks: they begin their prompts."""
MOST_CHUNKS = 4
GRAPH_SHARE = 4
"""One point in so many at most is there for a captured graph."""


def designed_points(
    limits: GridLimits, count: int, seed: int, graph_sizes: Sequence[int] = ()
) -> list[GridPoint]:
    """At most `count` points, all of which `limits` allow; the same arguments give the same points.

    First the corners of what is possible; then the sequence, with decode batches around sizes of captured graphs among
    it, at most every fourth.
    """
    graphs = [*_around_graphs(limits, graph_sizes, count // GRAPH_SHARE)]
    wanted = [*_corners(limits), *_mixed(_sequence(limits, count, seed), graphs)]
    fitting = (_fitting(point, limits) for point in wanted)
    return [point for point in dict.fromkeys(fitting) if point is not None][:count]


def _corners(limits: GridLimits) -> Iterator[GridPoint]:
    """Between them lies what is measured."""
    seats, longest = limits.max_num_seqs, limits.max_model_len - 1
    chunk = min(limits.max_num_batched_tokens, longest)
    for rows, context in ((1, 1), (1, longest), (seats, 1), (seats, _most_context(limits, seats))):
        yield GridPoint("decode", (1,) * rows, (context,) * rows)
    for tokens, history in ((1, 0), (chunk, 0), (chunk, longest - chunk)):
        yield GridPoint("prefill", (tokens,), (history,))


def _around_graphs(limits: GridLimits, sizes: Sequence[int], most: int) -> Iterator[GridPoint]:
    """The size itself, and one row more, which is padded to the next; of many sizes some, evenly spread."""
    rows = sorted({r for size in sizes for r in (size, size + 1) if r <= limits.max_num_seqs})
    places = np.linspace(0, max(len(rows) - 1, 0), min(len(rows), most)).round().astype(int)
    for count in dict.fromkeys(rows[place] for place in places):
        context = int(np.sqrt(_most_context(limits, count)))
        yield GridPoint("decode", (1,) * count, (context,) * count)


def _mixed(sequence: Iterator[GridPoint], others: Sequence[GridPoint]) -> Iterator[GridPoint]:
    """One of the others after every third, as long as there are some."""
    left = iter(others)
    for number, point in enumerate(sequence, start=1):
        yield point
        if number % (GRAPH_SHARE - 1) == 0 and (other := next(left, None)) is not None:
            yield other


def _sequence(limits: GridLimits, count: int, seed: int) -> Iterator[GridPoint]:
    sobol = qmc.Sobol(DIMENSIONS, scramble=True, rng=seed)
    places = sobol.random_base2(int(np.ceil(np.log2(max(count, 1)))))
    for number, place in enumerate(places):
        yield _point(limits, KINDS[number % len(KINDS)], place.tolist())


def _point(limits: GridLimits, kind: Kind, place: Sequence[float]) -> GridPoint:
    """From a place in the unit cube."""
    at_rows, at_context, at_skew, at_chunk, at_chunks, at_history = place
    rows = 0
    if kind != "prefill":
        rows = _logarithmic(at_rows, limits.max_num_seqs - (kind == "mixed"))
    lens = _contexts(rows, _logarithmic(at_context, _most_context(limits, max(rows, 1))), at_skew)
    if kind == "decode":
        return GridPoint(kind, (1,) * rows, tuple(lens))
    count = min(1 + int(at_chunks * MOST_CHUNKS), max(limits.max_num_seqs - rows, 1))
    tokens = _logarithmic(at_chunk, (limits.max_num_batched_tokens - rows) // count)
    within = (at_history - NO_HISTORY_SHARE) / (1 - NO_HISTORY_SHARE)
    history = 0 if within < 0 else _logarithmic(within, _most_context(limits, rows + count) - tokens)
    return GridPoint(kind, (1,) * rows + (tokens,) * count, (*lens, *(history,) * count))


def _logarithmic(place: float, most: int) -> int:
    """From 1 to `most`, evenly in the logarithm."""
    most = max(most, 1)
    return min(max(round(math.pow(most, place)), 1), most)


def _most_context(limits: GridLimits, rows: int) -> int:
    """Tokens that each of `rows` requests can have in the cache before a step."""
    blocks = (limits.num_blocks - 1) // rows
    return max(min(blocks * limits.block_size, limits.max_model_len) - 1, 0)


def _contexts(rows: int, mean: int, at_skew: float) -> list[int]:
    """Contexts of about that mean: alike, or the quantiles of a lognormal distribution."""
    if at_skew < EQUAL_SHARE or rows < 2:
        return [mean] * rows
    sigma = LARGEST_SIGMA * (at_skew - EQUAL_SHARE) / (1 - EQUAL_SHARE)
    shape = np.exp(sigma * ndtri((np.arange(rows) + 0.5) / rows))
    lens: list[int] = np.maximum(np.floor(shape * mean * rows / shape.sum()), 1).astype(int).tolist()
    return lens


def _fitting(point: GridPoint, limits: GridLimits) -> GridPoint | None:
    """The point, with shorter contexts where they do not fit together; None where nothing helps."""
    longest = limits.max_model_len
    lens = [min(c, longest - q) for q, c in zip(point.query_lens, point.context_lens, strict=True)]
    if min(lens) < 0:
        return None
    while True:
        fitting = GridPoint(point.kind, point.query_lens, tuple(lens))
        if limits.allow(fitting):
            return fitting
        if not any(lens):
            return None
        lens = [length * 3 // 4 for length in lens]
