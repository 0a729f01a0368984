"""How much of the prompts a prefix cache could give back: an infinite one, and LRU caches of several sizes.

Counted as vLLM's V1 cache does: whole blocks only, from the beginning of the prompt to the first one that is not
there, and never the block with the last prompt token, which must be computed. Answers and the blocks that running
requests hold are left out: these are figures of a trace, not of an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from servetwin.workloads.columns import RequestColumns
from servetwin.workloads.statistics.block_hashes import HashedPrompts, Ints, hashed_prompts
from servetwin.workloads.statistics.block_runs import block_runs

LRU_BLOCKS = (50_000, 10_000, 1_000)


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


def prefix_figures(requests: RequestColumns) -> PrefixFigures | None:
    """None where no request says what its prompt begins with: then reuse is unknown."""
    prompts = hashed_prompts(requests)
    if prompts is None:
        return None
    runs = block_runs(prompts.hashes, prompts.whole, prompts.usable)
    return PrefixFigures(
        requests=len(prompts.order),
        block_tokens=tuple(np.unique(prompts.block_tokens).tolist()),
        blocks=int(prompts.begun.sum()),
        infinite=_rate(prompts, runs.found_ever()),
        lru={size: _rate(prompts, runs.found_in(size)) for size in LRU_BLOCKS},
    )


def _rate(prompts: HashedPrompts, hit_blocks: Ints) -> HitRate:
    """`hit_blocks`: of each prompt."""
    hit_tokens = int((hit_blocks * prompts.block_tokens).sum())
    return HitRate(
        block_hit_percent=100 * int(hit_blocks.sum()) / max(int(prompts.begun.sum()), 1),
        token_hit_percent=100 * hit_tokens / int(prompts.tokens.sum()),
    )
