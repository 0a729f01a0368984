"""Which blocks of prompts are the same: each named by a number that tells it and all before it from any other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.columns import RequestColumns

if TYPE_CHECKING:
    import pyarrow as pa

Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]

TOKEN_BLOCK = 16
"""Tokens per block where prompts are given by their tokens: vLLM's default block size."""
BATCH_ITEMS = 1 << 20
"""Ids or tokens hashed at once: what is made on the way there takes some tens of MB, however long a trace is."""
_CODE, _DEPTH, _ROOT = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedPrompts:
    """Prompts in blocks, in order of arrival. Shapes: [requests], for `hashes` [whole blocks]."""

    order: Ints
    """Place of the request in the trace."""
    tokens: Ints
    block_tokens: Ints
    begun: Ints
    """Blocks that have an id, the last one in part perhaps."""
    whole: Ints
    """Those that are full, and may therefore be kept."""
    hashes: Hashes
    """Identity of each whole block with all before it."""

    @property
    def usable(self) -> Ints:
        """Blocks of each prompt that may be hit: never the one with the last token."""
        usable: Ints = np.minimum((self.tokens - 1) // self.block_tokens, self.whole)
        return usable


def hashed_prompts(requests: RequestColumns) -> HashedPrompts | None:
    """The requests that say what their prompts begin with; None where none does."""
    kinds = [p for p in (_by_ids(requests), _by_tokens(requests)) if p is not None]
    return _together(kinds) if any(kind.begun.any() for kind in kinds) else None


def chained_hashes(lists: pa.ChunkedArray, whole: Ints, roots: Hashes, per_block: int = 1) -> Hashes:
    """A number for each of the `whole` leading blocks of every list; `per_block` items of it make a block.

    Two are equal by chance once in 2^64 pairs. `roots`: what each list hangs on. A number is the sum of numbers drawn
    for each pair of item and place, so that many lists are taken at once.
    """
    items, lengths = _flat(lists), _lengths(lists)
    hashes = np.empty(int(whole.sum()), dtype=np.uint64)
    ends = np.concatenate(([0], lengths.cumsum()))
    done = 0
    for rows in _batches(ends):
        some = items.slice(ends[rows.start], ends[rows.stop] - ends[rows.start]).to_numpy()
        length, places = lengths[rows], _places(lengths[rows])
        sums = _chained(some.astype(np.uint64), places, length, roots[rows])
        kept = sums[
            (places % per_block == per_block - 1) & (places // per_block < np.repeat(whole[rows], length))
        ]
        hashes[done : done + len(kept)] = kept
        done += len(kept)
    return hashes


def _by_ids(requests: RequestColumns) -> HashedPrompts | None:
    if not requests.has("prefix_ids"):
        return None
    order, lists = _present(requests, "prefix_ids")
    tokens, begun = requests.prompt_tokens[order], _lengths(lists)
    block = requests.table["prefix_block_tokens"].take(order).to_numpy()
    whole = np.minimum(tokens // block, begun)
    return HashedPrompts(
        order=order,
        tokens=tokens,
        block_tokens=block,
        begun=begun,
        whole=whole,
        hashes=chained_hashes(lists, whole, _roots(requests, order, block)),
    )


def _by_tokens(requests: RequestColumns) -> HashedPrompts | None:
    if not requests.has("prompt_token_ids"):
        return None
    order, lists = _present(requests, "prompt_token_ids")
    tokens, block = _lengths(lists), np.full(len(order), TOKEN_BLOCK)
    whole = tokens // TOKEN_BLOCK
    return HashedPrompts(
        order=order,
        tokens=tokens,
        block_tokens=block,
        begun=-(-tokens // TOKEN_BLOCK),
        whole=whole,
        hashes=chained_hashes(lists, whole, _roots(requests, order, -block), TOKEN_BLOCK),
    )


def _together(kinds: list[HashedPrompts]) -> HashedPrompts:
    """In order of arrival."""
    if len(kinds) == 1:
        return kinds[0]
    order, whole = (np.concatenate([getattr(k, n) for k in kinds]) for n in ("order", "whole"))
    by_arrival = np.argsort(order)
    by_row = np.argsort(np.repeat(order, whole), kind="stable")
    return HashedPrompts(
        hashes=np.concatenate([k.hashes for k in kinds])[by_row],
        **{
            name: np.concatenate([getattr(k, name) for k in kinds])[by_arrival]
            for name in ("order", "tokens", "block_tokens", "begun", "whole")
        },
    )


# ---------------------------------------------------------------- columns of lists


def _present(requests: RequestColumns, name: str) -> tuple[Ints, pa.ChunkedArray]:
    """Places of the requests that have this list, and these lists."""
    import pyarrow.compute as pc

    column = requests.table[name]
    return np.flatnonzero(pc.is_valid(column).to_numpy()), column.drop_null()


def _lengths(lists: pa.ChunkedArray) -> Ints:
    import pyarrow.compute as pc

    lengths: Ints = pc.list_value_length(lists).to_numpy().astype(np.int64)
    return lengths


def _flat(lists: pa.ChunkedArray) -> Any:
    """All items as numbers, below one another: an Arrow array, of numbers without copying them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    items = pc.list_flatten(lists)
    if not pa.types.is_string(items.type):
        return items
    return items.combine_chunks().dictionary_encode().indices


def _batches(ends: Ints) -> Iterator[slice]:
    """Rows whose items end at `ends`, shape [rows + 1], in batches of at most BATCH_ITEMS, or of one row."""
    start, rows = 0, len(ends) - 1
    while start < rows:
        stop = max(int(np.searchsorted(ends, ends[start] + BATCH_ITEMS, side="right")) - 1, start + 1)
        yield slice(start, stop)
        start = stop


# ---------------------------------------------------------------- numbers


def _roots(requests: RequestColumns, order: Ints, block: Ints) -> Hashes:
    """What the blocks of a prompt hang on: equal ids are equal tokens for one block size, and shared within a salt."""
    salts: dict[str | None, int] = {None: 0}
    names = requests.values("cache_salt") if requests.has("cache_salt") else [None] * len(requests)
    codes = np.array([salts.setdefault(names[place], len(salts)) for place in order.tolist()])
    return _mixed(_mixed(codes.astype(np.uint64) * _ROOT) + block.astype(np.uint64))


def _chained(items: Hashes, places: Ints, lengths: Ints, roots: Hashes) -> Hashes:
    """Of each item the number of it and all before it in its list."""
    terms = _mixed(_mixed(items * _CODE) + places.astype(np.uint64) * _DEPTH)
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(terms, dtype=np.uint64)])
    before = sums[lengths.cumsum() - lengths]
    return sums[1:] - np.repeat(before - roots, lengths)


def _mixed(x: Hashes) -> Hashes:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _places(lengths: Ints) -> Ints:
    """0, 1, ... within each list."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
