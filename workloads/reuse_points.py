"""Prompts whose leading blocks are named, and how many of these blocks caches of some sizes hold.

Counted as for `servetwin trace info`, of all blocks that prompts begin: what is not named is shared with no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from servetwin.workloads.columns import column_array, values_of
from servetwin.workloads.spec import RequestSpec
from servetwin.workloads.statistics.block_hashes import TOKEN_BLOCK, chained_hashes
from servetwin.workloads.statistics.block_runs import block_runs


@dataclass(frozen=True, slots=True)
class PrefixedPrompts:
    """Prompts whose leading blocks are named, in order of arrival."""

    ids: Sequence[Sequence[int]]
    """One id per block that a prompt begins."""
    prompt_tokens: Sequence[int]
    block_tokens: int

    def first(self, n: int) -> PrefixedPrompts:
        """The first `n` of them."""
        return PrefixedPrompts(self.ids[:n], self.prompt_tokens[:n], self.block_tokens)

    def whole_blocks(self) -> list[Sequence[int]]:
        """Of each prompt the ids that can be kept in a cache."""
        block = self.block_tokens
        return [ids[: n // block] for ids, n in zip(self.ids, self.prompt_tokens, strict=True)]


@dataclass(frozen=True, slots=True)
class ReusePoints:
    """Blocks found in a cache, in percent of all ids."""

    infinite_percent: float
    lru_percent: dict[int, float] = field(default_factory=dict)
    """Size of the cache in blocks -> blocks found."""
    distinct_blocks: int = 0


def prefixed_prompts(requests: Sequence[RequestSpec]) -> PrefixedPrompts | None:
    """The requests whose prefixes are known, or None: no request names any, or their blocks differ in size."""
    ids, sizes = values_of(requests, "prefix_ids"), values_of(requests, "prefix_block_tokens")
    prompts = values_of(requests, "prompt_tokens")
    if all(one is None for one in ids):
        ids = _derived(values_of(requests, "prompt_token_ids"))
        sizes = [TOKEN_BLOCK] * len(ids)
    known = [i for i, one in enumerate(ids) if one is not None]
    if not known or len({sizes[i] for i in known}) > 1:
        return None
    block = sizes[known[0]]
    lengths = [prompts[i] for i in known]
    return PrefixedPrompts(_of_all_blocks([ids[i] for i in known], lengths, block), lengths, block)


def _of_all_blocks(
    ids: Sequence[Sequence[int]], prompt_tokens: Sequence[int], block_tokens: int
) -> list[Sequence[int]]:
    """One id per begun block: those that are not named, as after a system prompt, are shared with no other prompt."""
    unused = min((min(one, default=0) for one in ids), default=0) - 1
    whole: list[Sequence[int]] = []
    for one, tokens in zip(ids, prompt_tokens, strict=True):
        missing = -(-tokens // block_tokens) - len(one)
        whole.append([*one, *range(unused, unused - missing, -1)] if missing > 0 else one)
        unused -= max(missing, 0)
    return whole


def _derived(token_ids: Sequence[tuple[int, ...] | None]) -> list[list[int] | None]:
    """Ids of the blocks of explicit prompts: equal where the block and all before it are."""
    names: dict[tuple[int, tuple[int, ...]], int] = {}
    return [None if tokens is None else _chain(tokens, names) for tokens in token_ids]


def _chain(tokens: tuple[int, ...], names: dict[tuple[int, tuple[int, ...]], int]) -> list[int]:
    chain, parent = [], -1
    for start in range(0, len(tokens), TOKEN_BLOCK):
        parent = names.setdefault((parent, tokens[start : start + TOKEN_BLOCK]), len(names))
        chain.append(parent)
    return chain


def cache_sizes(distinct_blocks: int) -> tuple[int, ...]:
    """Sizes at which reuse is compared: a hundredth, a tenth and a third of all different blocks."""
    return tuple(sorted({max(1, distinct_blocks // part) for part in (100, 10, 3)}))


def reuse_points(prompts: PrefixedPrompts, sizes: Sequence[int] | None = None) -> ReusePoints:
    """Blocks found in caches of these sizes (None: `cache_sizes`) and of endless size."""
    import pyarrow as pa

    tokens, block = np.asarray(prompts.prompt_tokens, dtype=np.int64), prompts.block_tokens
    begun = np.array([*map(len, prompts.ids)], dtype=np.int64)
    whole = np.minimum(tokens // block, begun)
    lists = pa.chunked_array([column_array("prefix_ids", prompts.ids)])
    hashes = chained_hashes(lists, whole, np.zeros(len(begun), dtype=np.uint64))
    runs = block_runs(hashes, whole, usable=np.minimum((tokens - 1) // block, begun))
    total = int(begun.sum()) or 1
    wanted = cache_sizes(runs.distinct) if sizes is None else sizes
    return ReusePoints(
        infinite_percent=100 * int(runs.found_ever().sum()) / total,
        lru_percent={size: 100 * int(runs.found_in(size).sum()) / total for size in wanted},
        distinct_blocks=runs.distinct,
    )


def worst_difference(a: ReusePoints, b: ReusePoints) -> float:
    """The largest difference between points of both, in percentage points."""
    pairs = [(a.infinite_percent, b.infinite_percent)]
    pairs += [(a.lru_percent[size], b.lru_percent[size]) for size in a.lru_percent]
    return float(np.abs(np.subtract(*np.transpose(pairs))).max())
