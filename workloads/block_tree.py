"""Prompts that share prefixes as a growing tree does: the shape of Mooncake's traces.

A radix tree: a node stands for a run of blocks that no prompt has branched off within, and counts who entered it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from servetwin.workloads.checks import check_between, check_count
from servetwin.workloads.lengths import IntArray
from servetwin.workloads.prompts import Columns


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTree:
    """Each prompt walks from the root of a tree of blocks; where it branches off, the rest of its blocks are fresh.

    After each block it goes on as an earlier prompt did with probability v/(v + fresh_weight), where v earlier prompts
    came here: within a run of blocks all that entered it, at a fork those that went on. There it follows one of
    these, each equally likely, so popular ways attract more. A part of a block at the end of a prompt is always
    fresh; in Mooncake's traces it hardly ever repeats. A prompt of t tokens, its input, has ceil(t/block_tokens) ids.
    """

    fresh_weight: float
    """1e-6 (nearly everything shared) to 1e6 (nearly nothing)."""
    trunk_blocks: int = 0
    """Leading blocks that every prompt has in common, as far as it is long enough."""
    block_tokens: int = 512
    """Tokens per id. An id stands for its tokens whatever the block size of the engine is."""

    def __post_init__(self) -> None:
        check_between("fresh_weight", self.fresh_weight, 1e-6, 1e6)
        check_count("trunk_blocks", self.trunk_blocks, at_least=0)
        check_count("block_tokens", self.block_tokens)

    def attach(self, input_tokens: IntArray, rng: np.random.Generator) -> Columns:
        """Columns of requests with these input tokens, shape [n]; a longer draw begins with a shorter one."""
        tree = _Tree(self.fresh_weight, self.trunk_blocks, rng)
        whole, part = np.divmod(input_tokens, self.block_tokens)
        ids = [tree.prompt(w, p > 0) for w, p in zip(whole.tolist(), part.tolist(), strict=True)]
        return {
            "prompt_tokens": input_tokens,
            "prefix_ids": ids,
            "prefix_block_tokens": np.full(len(input_tokens), self.block_tokens),
        }


@dataclass(slots=True)
class _Node:
    """A run of blocks with consecutive ids."""

    first_id: int
    blocks: int
    entered: int = 0
    """Prompts that went through the first of them."""
    ways: list[_Node] = field(default_factory=list)
    """The child that each prompt took which went on, in their order: drawing one draws by popularity."""

    def split(self, blocks: int) -> None:
        """Makes it end after so many blocks; what follows becomes its only child so far."""
        rest = _Node(self.first_id + blocks, self.blocks - blocks, self.entered, self.ways)
        self.blocks, self.ways = blocks, [rest] * self.entered

    def ids(self, blocks: int) -> IntArray:
        """The ids of its first blocks, shape [blocks]."""
        return np.arange(self.first_id, self.first_id + blocks)


class _Tree:
    """The tree of one workload and the ids it has given out."""

    def __init__(self, fresh_weight: float, trunk_blocks: int, rng: np.random.Generator) -> None:
        self._fresh_weight = fresh_weight
        self._rng = rng
        self._trunk = trunk_blocks
        self._root = _Node(0, 0)
        self._next_id = trunk_blocks

    def prompt(self, whole_blocks: int, has_part: bool) -> IntArray:
        """The ids of a new prompt, which is part of the tree from then on, shape [blocks]."""
        ids = [np.arange(min(whole_blocks, self._trunk))]
        ids += self._walk(max(whole_blocks - self._trunk, 0))
        if has_part:
            ids.append(np.array([self._fresh(1)]))
        return np.concatenate(ids)

    def _walk(self, wanted: int) -> Iterator[IntArray]:
        """The ids of so many whole blocks after the trunk, run by run."""
        node = self._root
        while wanted and self._rng.random() * (len(node.ways) + self._fresh_weight) < len(node.ways):
            child = node.ways[int(self._rng.random() * len(node.ways))]
            node.ways.append(child)
            followed = min(self._followed(child), wanted)
            branches_off = followed < min(child.blocks, wanted)
            if branches_off:
                child.split(followed)
            child.entered += 1
            yield child.ids(followed)
            node, wanted = child, wanted - followed
            if branches_off:
                break
        if wanted:
            node.ways.append(_Node(self._fresh(wanted), wanted, entered=1))
            yield node.ways[-1].ids(wanted)

    def _followed(self, node: _Node) -> int:
        """Blocks of a run that a prompt which entered it goes along: the first, then each with the same chance."""
        stay = node.entered / (node.entered + self._fresh_weight)
        further = math.log(1.0 - self._rng.random()) / math.log(stay)
        return min(node.blocks, 1 + int(min(further, node.blocks)))

    def _fresh(self, blocks: int) -> int:
        """The first of so many ids that nobody has."""
        first = self._next_id
        self._next_id += blocks
        return first
