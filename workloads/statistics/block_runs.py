"""Blocks of prompts that a cache holds when they come: an endless one, and one with the least recently used out.

Prompts are paths from the root of a tree of blocks, each used from its deepest block up to the root, as vLLM frees
them. So a block is always younger than those behind it, and a prompt falls into a few runs of blocks: each was last
used by one earlier prompt, as the first blocks that this prompt still has of its own. The blocks that have been used
since, which decide what an LRU cache of any size holds (Mattson et al. 1970), are counted run by run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]

PARTS = 16
"""Blocks are sorted in so many parts, by their hashes, to take less memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRuns:
    """What earlier prompts had of each prompt. Shapes: [prompts], or [runs] in order of prompts, from the head on."""

    whole: Ints
    """Whole blocks of each prompt: what it leaves in a cache."""
    usable: Ints
    """The leading ones that may be found."""
    prompt: Ints
    """Of each run the prompt that it is part of."""
    before: NDArray[np.int32]
    """The last earlier prompt that had its blocks."""
    blocks: Ints
    """How many these are."""
    distinct: int
    """Different blocks of all prompts."""

    def found_ever(self) -> Ints:
        """Leading blocks of each prompt that an endless cache holds, shape [prompts]."""
        known = np.bincount(self.prompt, weights=self.blocks, minlength=len(self.whole)).astype(np.int64)
        return np.minimum(known, self.usable)

    def found_in(self, capacity: int) -> Ints:
        """Leading blocks of each prompt that an LRU cache of `capacity` blocks (1 or more) holds, shape [prompts].

        It holds what prompts after `oldest` have of their own, `inside` blocks, and fills its room from `oldest`.
        """
        if self.distinct <= capacity:
            return self.found_ever()
        own = [0] * len(self.whole)
        """Blocks that each prompt was the last to use."""
        oldest, inside = -1, 0
        found = []
        runs = zip(self.before.tolist(), self.blocks.tolist(), strict=True)
        runs_of_each = np.bincount(self.prompt, minlength=len(self.whole)).tolist()
        for prompt, (whole, number) in enumerate(zip(self.whole.tolist(), runs_of_each, strict=True)):
            room, here = capacity - inside, 0
            for before, blocks in islice(runs, number):
                own[before] -= blocks
                if before > oldest:
                    here += blocks
                    inside -= blocks
                elif before == oldest:
                    here += min(blocks, room)
            found.append(here)
            own[prompt] = whole
            inside += whole
            while inside > capacity:
                oldest += 1
                inside -= own[oldest]
        return np.minimum(np.array(found, dtype=np.int64), self.usable)


def block_runs(hashes: Hashes, whole: Ints, usable: Ints) -> BlockRuns:
    """The runs of prompts in order of arrival: `hashes` name the `whole` blocks of each, below one another.

    Takes 4 bytes for each block beside the hashes, and some for each run.
    """
    before, distinct = _last_users(hashes, whole)
    ends = whole.cumsum()
    new = np.ones(len(before), dtype=np.bool_)
    new[1:] = before[1:] != before[:-1]
    new[(ends - whole)[whole > 0]] = True
    starts = np.flatnonzero(new)
    blocks, users = np.diff(np.append(starts, len(before))), before[starts]
    known = users >= 0
    return BlockRuns(
        whole=whole,
        usable=usable,
        prompt=np.searchsorted(ends, starts[known], side="right"),
        before=users[known],
        blocks=blocks[known],
        distinct=distinct,
    )


def _last_users(hashes: Hashes, whole: Ints) -> tuple[NDArray[np.int32], int]:
    """Of each block the last prompt before its own that had it, or -1; and how many different ones there are."""
    users = np.repeat(np.arange(len(whole), dtype=np.int32), whole)
    part_of_each = hashes.view(np.uint8)[:: hashes.itemsize] % np.uint8(PARTS)
    distinct = 0
    for part in range(PARTS):
        places = np.flatnonzero(part_of_each == part)
        some = hashes[places]
        by_hash = np.argsort(some, kind="stable")
        places, some = places[by_hash], some[by_hash]
        again = some[1:] == some[:-1]
        before = np.full(len(places), -1, dtype=np.int32)
        before[1:][again] = users[places[:-1][again]]
        users[places] = before
        distinct += len(places) - int(again.sum())
    return users, distinct
