"""How much of the prompts a prefix cache could give back: an infinite one, and LRU caches of several sizes.

Counted as vLLM's V1 cache does: whole blocks only, from the beginning of the prompt to the first one that is not
there, and never the block with the last prompt token, which must be computed. Answers and the blocks that running
requests hold are left out: these are figures of a trace, not of an engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.columns import RequestColumns

LRU_BLOCKS = (50_000, 10_000, 1_000)
TOKEN_BLOCK = 16
"""Tokens per block where prompts are given by their tokens: vLLM's default block size."""
_CODE, _DEPTH, _ROOT = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRate:
    """Of all blocks that prompts begin, and of all their tokens."""

    block_hit_percent: float
    token_hit_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFigures:
    requests: int
    """Those whose prompts are known; the figures are of these."""
    block_tokens: tuple[int, ...]
    """Sizes of the blocks that are known."""
    blocks: int
    """Blocks that prompts begin (their ids)."""
    infinite: HitRate
    lru: dict[int, HitRate]
    """Size of the cache in blocks -> hits."""

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "block_tokens": list(self.block_tokens),
            "blocks": self.blocks,
            "block_hit_percent_infinite": self.infinite.block_hit_percent,
            "token_hit_percent_infinite": self.infinite.token_hit_percent,
            "lru": [
                {
                    "blocks": size,
                    "block_hit_percent": rate.block_hit_percent,
                    "token_hit_percent": rate.token_hit_percent,
                }
                for size, rate in self.lru.items()
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompts:
    """Prompts in blocks, in order of arrival. Shapes: [requests], and [whole blocks] for `rows` and `hashes`."""

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
        """Blocks of each prompt that may be hit."""
        usable: Ints = np.minimum((self.tokens - 1) // self.block_tokens, self.whole)
        return usable


def prefix_figures(requests: RequestColumns) -> PrefixFigures | None:
    """None where no request says what its prompt begins with: then reuse is unknown."""
    kinds = [p for p in (_by_ids(requests), _by_tokens(requests)) if p is not None]
    if not sum(int(kind.begun.sum()) for kind in kinds):
        return None
    prompts = _together(kinds)
    distinct, nodes = np.unique(prompts.hashes, return_inverse=True)
    infinite = _infinite_hits(prompts, nodes)
    return PrefixFigures(
        requests=len(prompts.order),
        block_tokens=tuple(np.unique(prompts.block_tokens).tolist()),
        blocks=int(prompts.begun.sum()),
        infinite=_rate(prompts, infinite),
        lru={
            size: _rate(prompts, infinite if len(distinct) <= size else _lru_hits(prompts, nodes, size))
            for size in LRU_BLOCKS
        },
    )


# ---------------------------------------------------------------- which blocks are the same


def _by_ids(requests: RequestColumns) -> _Prompts | None:
    if not requests.has("prefix_ids"):
        return None
    order, items, lengths = _lists(requests, "prefix_ids")
    tokens = requests.prompt_tokens[order]
    block = requests.table["prefix_block_tokens"].take(order).to_numpy()
    whole = np.minimum(tokens // block, lengths)
    hashes = _chained(items, lengths, _roots(requests, order, block))
    return _Prompts(
        order=order,
        tokens=tokens,
        block_tokens=block,
        begun=lengths,
        whole=whole,
        hashes=hashes[_places(lengths) < np.repeat(whole, lengths)],
    )


def _by_tokens(requests: RequestColumns) -> _Prompts | None:
    if not requests.has("prompt_token_ids"):
        return None
    order, items, lengths = _lists(requests, "prompt_token_ids")
    block = np.full(len(order), TOKEN_BLOCK)
    hashes = _chained(items, lengths, _roots(requests, order, -block))
    return _Prompts(
        order=order,
        tokens=lengths,
        block_tokens=block,
        begun=-(-lengths // TOKEN_BLOCK),
        whole=lengths // TOKEN_BLOCK,
        hashes=hashes[_places(lengths) % TOKEN_BLOCK == TOKEN_BLOCK - 1],
    )


def _lists(requests: RequestColumns, name: str) -> tuple[Ints, Hashes, Ints]:
    """Of the requests that have this list: their places, all items as numbers below one another, their lengths."""
    import pyarrow.compute as pc

    column = requests.table[name]
    there = pc.is_valid(column).to_numpy()
    kept = column.drop_null()
    codes = pc.list_flatten(kept).combine_chunks().dictionary_encode().indices.to_numpy()
    lengths = pc.list_value_length(kept).to_numpy()
    return np.flatnonzero(there), codes.astype(np.uint64), lengths.astype(np.int64)


def _roots(requests: RequestColumns, order: Ints, block: Ints) -> Hashes:
    """What the blocks of a prompt hang on: equal ids are equal tokens for one block size, and shared within a salt."""
    salts: dict[str | None, int] = {None: 0}
    names = requests.values("cache_salt") if requests.has("cache_salt") else [None] * len(requests)
    codes = np.array([salts.setdefault(names[place], len(salts)) for place in order.tolist()])
    return _mixed(_mixed(codes.astype(np.uint64) * _ROOT) + block.astype(np.uint64))


def _chained(items: Hashes, lengths: Ints, roots: Hashes) -> Hashes:
    """A number for each item that tells it and all before it in its list from any other; two are equal by chance once
    in 2^64 pairs. A sum of numbers drawn for each pair of item and place, so that whole columns are taken at once.
    """
    terms = _mixed(_mixed(items * _CODE) + _places(lengths).astype(np.uint64) * _DEPTH)
    sums = np.cumsum(terms, dtype=np.uint64)
    starts = lengths.cumsum() - lengths
    before = np.concatenate([np.zeros(1, dtype=np.uint64), sums])[starts]
    return sums - np.repeat(before - roots, lengths)


def _mixed(x: Hashes) -> Hashes:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _places(lengths: Ints) -> Ints:
    """0, 1, ... within each list."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)


def _together(kinds: list[_Prompts]) -> _Prompts:
    """In order of arrival."""
    if len(kinds) == 1:
        return kinds[0]
    order, whole = (np.concatenate([getattr(k, n) for k in kinds]) for n in ("order", "whole"))
    by_arrival = np.argsort(order)
    by_row = np.argsort(np.repeat(order, whole), kind="stable")
    return _Prompts(
        hashes=np.concatenate([k.hashes for k in kinds])[by_row],
        **{
            name: np.concatenate([getattr(k, name) for k in kinds])[by_arrival]
            for name in ("order", "tokens", "block_tokens", "begun", "whole")
        },
    )


# ---------------------------------------------------------------- hits


def _rate(prompts: _Prompts, hit_blocks: Ints) -> HitRate:
    """`hit_blocks`: of each prompt."""
    hit_tokens = int((hit_blocks * prompts.block_tokens).sum())
    return HitRate(
        block_hit_percent=100 * int(hit_blocks.sum()) / max(int(prompts.begun.sum()), 1),
        token_hit_percent=100 * hit_tokens / int(prompts.tokens.sum()),
    )


def _infinite_hits(prompts: _Prompts, nodes: Ints) -> Ints:
    """Blocks of each prompt that an earlier prompt had. What is before such a block was there, too."""
    rows = np.repeat(np.arange(len(prompts.whole)), prompts.whole)
    _, first = np.unique(nodes, return_index=True)
    seen = rows[first][nodes] < rows
    usable = _places(prompts.whole) < np.repeat(prompts.usable, prompts.whole)
    return np.bincount(rows[seen & usable], minlength=len(prompts.whole))


def _lru_hits(prompts: _Prompts, nodes: Ints, capacity: int) -> Ints:
    """Blocks of each prompt that a cache of `capacity` blocks holds when it arrives.

    A prompt's last block is the first of it to go, as in vLLM.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for blocks, usable in zip(_slices(nodes, prompts.whole), prompts.usable.tolist(), strict=True):
        hits.append(next((n for n, block in enumerate(blocks[:usable]) if block not in cache), usable))
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        for _ in range(len(cache) - capacity):
            cache.popitem(last=False)
    return np.array(hits, dtype=np.int64)


def _slices(nodes: Ints, lengths: Ints) -> Iterator[list[int]]:
    end = 0
    for length in lengths.tolist():
        start, end = end, end + length
        yield nodes[start:end].tolist()
