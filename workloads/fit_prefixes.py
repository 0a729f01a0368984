"""What prompts have in common, as a model file holds it, and its fit.

Two models are tried: a tree of blocks (`BlockTree`), whose one weight is set so that an endless cache finds as much as
in the trace, and continuations at the observed distances (`Continuations`). The tree, which says more in fewer numbers,
is kept where it also meets the caches of limited size, within TREE_TOLERATED points; else the one that is nearer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from servetwin.workloads.block_tree import BlockTree
from servetwin.workloads.continuations import Continuation, Continuations
from servetwin.workloads.lengths import IntArray
from servetwin.workloads.model_part import MAX_LISTED, Part, Share
from servetwin.workloads.prompts import Prefixes
from servetwin.workloads.reuse_points import PrefixedPrompts, ReusePoints, reuse_points, worst_difference
from servetwin.workloads.streams import stream

FITTED_PROMPTS = 10_000
"""The first ones, at most: a fit makes as many prompts again and again."""
TREE_TOLERATED = 2.0
"""Percentage points."""
TRUNK_SHARE = 0.995
"""Of the prompts that are long enough must have a block that counts as common to all."""
CLASSES = 4
"""Of prompts by length, equally many in each."""
CONTINUATIONS = 250
"""Kept of each class at most."""
TREE_PROMPTS = 2_000
"""Grown at most in the search for a tree's weight."""
SEEDS = (0, 1)
"""Under which prompts are made to see how much of them is reused."""
BISECTIONS = 10
LEAST_WEIGHT, GREATEST_WEIGHT = 1e-3, 1e3
"""Where a tree's weight is searched for."""
ADJUSTMENTS = 2


class TreeModel(Part):
    """A tree of blocks that grows with each prompt."""

    kind: Literal["block tree"] = "block tree"
    block_tokens: int = Field(ge=1)
    trunk_blocks: int = Field(ge=0)
    fresh_weight: float = Field(ge=1e-6, le=1e6)

    def build(self) -> Prefixes:
        """The model to draw from."""
        return BlockTree(
            fresh_weight=self.fresh_weight, trunk_blocks=self.trunk_blocks, block_tokens=self.block_tokens
        )


class ContinuationModel(Part):
    """Continuations among prompts up to some length (see `Continuation`)."""

    up_to_blocks: Annotated[int, Field(ge=1)] | None
    continuing: Share
    seen_share: Annotated[tuple[Share, ...], Field(max_length=MAX_LISTED)]
    requests_back: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(max_length=MAX_LISTED)]


class ContinuationsModel(Part):
    """Prompts that go on where an earlier one left off."""

    kind: Literal["continuations"] = "continuations"
    block_tokens: int = Field(ge=1)
    trunk_blocks: int = Field(ge=0)
    by_length: tuple[ContinuationModel, ...]

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        self.build()
        return self

    def build(self) -> Prefixes:
        """The model to draw from."""
        return Continuations(
            block_tokens=self.block_tokens,
            trunk_blocks=self.trunk_blocks,
            by_length=tuple(Continuation(**dict(one)) for one in self.by_length),
        )


class PrefixesModel(Part):
    """What prompts have in common, and how much of them caches found in the trace and in prompts of the model."""

    model: Annotated[TreeModel | ContinuationsModel, Field(discriminator="kind")]
    fitted_prompts: int = Field(ge=1)
    trace_hit_percent: dict[str, float] = Field(default_factory=dict)
    """Blocks in the cache ("infinite", or its size) -> blocks found in percent of all ids, in the trace."""
    model_hit_percent: dict[str, float] = Field(default_factory=dict)
    """The same of as many prompts of the model."""


def fit_prefixes(prompts: PrefixedPrompts) -> PrefixesModel:
    """The model whose prompts share as much as these do, which are in order of arrival."""
    some = prompts.first(FITTED_PROMPTS)
    observed = reuse_points(some)
    trunk = _trunk(some.whole_blocks())
    tree = _fit_tree(some.first(TREE_PROMPTS), trunk)
    tree_points = _points(tree.build(), some, observed)
    if worst_difference(observed, tree_points) <= TREE_TOLERATED:
        return _told(tree, tree_points, some, observed)
    chains = _adjusted(_fit_continuations(some, trunk), some, observed)
    chain_points = _points(chains.build(), some, observed)
    if worst_difference(observed, chain_points) < worst_difference(observed, tree_points):
        return _told(chains, chain_points, some, observed)
    return _told(tree, tree_points, some, observed)


def _told(
    model: TreeModel | ContinuationsModel,
    points: ReusePoints,
    prompts: PrefixedPrompts,
    observed: ReusePoints,
) -> PrefixesModel:
    return PrefixesModel(
        model=model,
        fitted_prompts=len(prompts.ids),
        trace_hit_percent=_by_size(observed),
        model_hit_percent=_by_size(points),
    )


def _by_size(points: ReusePoints) -> dict[str, float]:
    sized = {f"{size} blocks": round(percent, 2) for size, percent in points.lru_percent.items()}
    return {"infinite": round(points.infinite_percent, 2), **sized}


def _points(model: Prefixes, like: PrefixedPrompts, observed: ReusePoints, seed: int = 0) -> ReusePoints:
    """The reuse among prompts of `model` that are as long as those observed."""
    columns = model.attach(np.asarray(like.prompt_tokens), stream(seed, "prefixes"))
    made = PrefixedPrompts([*columns["prefix_ids"]], like.prompt_tokens, like.block_tokens)
    return reuse_points(made, [*observed.lru_percent])


def _trunk(whole: Sequence[Sequence[int]]) -> int:
    """Leading blocks that nearly all prompts which are long enough have in common."""
    depth = 0
    while True:
        ids = Counter(one[depth] for one in whole if len(one) > depth)
        if ids.total() < 2 or ids.most_common(1)[0][1] < TRUNK_SHARE * ids.total():
            return depth
        depth += 1


# ---------------------------------------------------------------- the tree


def _fit_tree(prompts: PrefixedPrompts, trunk: int) -> TreeModel:
    """The weight under which an endless cache finds as much as observed, by bisection of its logarithm."""
    observed = reuse_points(prompts, sizes=())

    def model(log_weight: float) -> TreeModel:
        weight = float(f"{math.exp(log_weight):.4g}")
        return TreeModel(block_tokens=prompts.block_tokens, trunk_blocks=trunk, fresh_weight=weight)

    low, high = math.log(LEAST_WEIGHT), math.log(GREATEST_WEIGHT)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        found = _mean_infinite_percent(model(middle).build(), prompts, observed)
        low, high = (middle, high) if found > observed.infinite_percent else (low, middle)
    return model((low + high) / 2)


def _mean_infinite_percent(model: Prefixes, like: PrefixedPrompts, observed: ReusePoints) -> float:
    endless = ReusePoints(observed.infinite_percent)
    return float(np.mean([_points(model, like, endless, seed).infinite_percent for seed in SEEDS]))


# ---------------------------------------------------------------- continuations


def _fit_continuations(prompts: PrefixedPrompts, trunk: int) -> ContinuationsModel:
    blocks, seen, back = _observed(prompts.whole_blocks(), trunk)
    some = blocks[blocks > 0]
    limits = (
        np.unique(np.quantile(some, np.arange(1, CLASSES) / CLASSES, method="lower")) if len(some) else some
    )
    place = np.searchsorted(limits, blocks)
    n = len(blocks)
    classes = [
        _class(n, blocks[here], seen[here], back[here], int(limits[i]) if i < len(limits) else None)
        for i in range(len(limits) + 1)
        for here in [(place == i) & (blocks > 0)]
    ]
    return ContinuationsModel(block_tokens=prompts.block_tokens, trunk_blocks=trunk, by_length=tuple(classes))


def _adjusted(
    model: ContinuationsModel, prompts: PrefixedPrompts, observed: ReusePoints
) -> ContinuationsModel:
    """The same with more or fewer prompts that continue, so that an endless cache finds as much as observed.

    Lengths and distances of a class are drawn together, but not together with the prompts that there are to continue.
    """
    for _ in range(ADJUSTMENTS):
        found = _mean_infinite_percent(model.build(), prompts, observed)
        if found == 0:
            return model
        factor = observed.infinite_percent / found
        classes = [
            one.model_copy(update={"continuing": min(1.0, round(one.continuing * factor, 4))})
            for one in model.by_length
        ]
        model = model.model_copy(update={"by_length": tuple(classes)})
    return model


def _observed(whole: Sequence[Sequence[int]], trunk: int) -> tuple[IntArray, IntArray, IntArray]:
    """Of each prompt, beyond the trunk: its whole blocks, those seen before, requests since the last of these."""
    used_by: dict[int, int] = {}
    rows = []
    for i, ids in enumerate(whole):
        depth = trunk
        while depth < len(ids) and ids[depth] in used_by:
            depth += 1
        back = i - used_by[ids[depth - 1]] if depth > trunk else 0
        rows.append((max(len(ids) - trunk, 0), depth - trunk, back))
        used_by.update(dict.fromkeys(ids, i))
    blocks, seen, back_ = np.array(rows, dtype=np.int64).T
    return blocks, seen, back_


def _class(n: int, blocks: IntArray, seen: IntArray, back: IntArray, limit: int | None) -> ContinuationModel:
    """One class. A distance that only late requests can show counts for more: it was seen in n - distance places."""
    continuing = np.flatnonzero(seen > 0)
    weights = n / (n - back[continuing]) / max(len(blocks), 1)
    kept = continuing[_evenly(back[continuing], weights)]
    return ContinuationModel(
        up_to_blocks=limit,
        continuing=min(1.0, round(float(weights.sum()), 4)),
        seen_share=tuple(np.round(seen[kept] / blocks[kept], 4).tolist()),
        requests_back=tuple(back[kept].tolist()),
    )


def _evenly(values: IntArray, weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Places of at most CONTINUATIONS of these, evenly through their weighted distribution."""
    order = np.argsort(values, kind="stable")
    number = min(len(values), CONTINUATIONS)
    reached = np.cumsum(weights[order])
    steps = (np.arange(number) + 0.5) / max(number, 1)
    return order[np.searchsorted(reached, steps * (reached[-1] if number else 0.0))]
