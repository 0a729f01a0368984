"""Lengths of prompts and answers together, as a model file holds them, and their fit."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from servetwin.workloads.joint_lengths import EmpiricalPairs, JointLengths, RankCorrelated
from servetwin.workloads.lengths import IntArray
from servetwin.workloads.model_part import MAX_LISTED, Part
from servetwin.workloads.observed_lengths import QuantileGrid
from servetwin.workloads.quantiles import TokenQuantiles, quantiles_of

PAIRS = 2000
"""Kept at most, evenly through the observed ones in order of their prompts."""
BINS = 10
"""Of either length, equally full, in the comparison of what joins them."""
TOLERATED = 0.05
"""Share of requests in other bins than observed, beyond chance, at which the pairs themselves are kept."""
MIN_ROWS = 100
"""With fewer rows the bins say nothing."""

Tokens = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, max_length=MAX_LISTED)]


class QuantileLengthsModel(Part):
    """Quantiles of either length and Spearman's rank correlation between them."""

    kind: Literal["quantiles"] = "quantiles"
    prompt_tokens: TokenQuantiles
    output_tokens: TokenQuantiles
    rank_correlation: float = Field(ge=-1, le=1)

    def build(self) -> JointLengths:
        """The distribution to draw from."""
        return RankCorrelated(
            input_lengths=QuantileGrid(self.prompt_tokens),
            output_lengths=QuantileGrid(self.output_tokens),
            rank_correlation=self.rank_correlation,
        )


class PairedLengthsModel(Part):
    """Observed pairs, each equally likely: for lengths that more than a correlation joins."""

    kind: Literal["pairs"] = "pairs"
    prompt_tokens: Tokens
    output_tokens: Tokens

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        if len(self.prompt_tokens) != len(self.output_tokens):
            raise ValueError(
                f"output_tokens: must be as many as prompt_tokens ({len(self.prompt_tokens)}), "
                f"not {len(self.output_tokens)}"
            )
        return self

    def build(self) -> JointLengths:
        """The distribution to draw from."""
        return EmpiricalPairs(self.prompt_tokens, self.output_tokens)


LengthsModel = Annotated[QuantileLengthsModel | PairedLengthsModel, Field(discriminator="kind")]


def fit_lengths(
    prompt_tokens: IntArray, output_tokens: IntArray
) -> QuantileLengthsModel | PairedLengthsModel:
    """Quantiles with a rank correlation where these make such pairs, shape [n] each, else the pairs, thinned."""
    ranked = RankCorrelated.from_pairs(prompt_tokens, output_tokens)
    if _joined_otherwise(ranked, prompt_tokens, output_tokens):
        return _pairs(prompt_tokens, output_tokens)
    return QuantileLengthsModel(
        prompt_tokens=quantiles_of(prompt_tokens),
        output_tokens=quantiles_of(output_tokens),
        rank_correlation=round(ranked.rank_correlation, 4),
    )


def _pairs(prompt_tokens: IntArray, output_tokens: IntArray) -> PairedLengthsModel:
    order = np.lexsort((output_tokens, prompt_tokens))
    kept = order[:: -(-len(order) // PAIRS)]
    return PairedLengthsModel(
        prompt_tokens=tuple(prompt_tokens[kept].tolist()), output_tokens=tuple(output_tokens[kept].tolist())
    )


def _joined_otherwise(ranked: RankCorrelated, prompt_tokens: IntArray, output_tokens: IntArray) -> bool:
    """Whether drawn pairs fall into other bins than the observed ones, by more than two draws differ."""
    n = len(prompt_tokens)
    if n < MIN_ROWS:
        return False
    inner = np.arange(1, BINS) / BINS
    edges = np.quantile(prompt_tokens, inner), np.quantile(output_tokens, inner)

    def shares(prompts: IntArray, outputs: IntArray) -> NDArray[np.float64]:
        place = np.searchsorted(edges[0], prompts) * BINS + np.searchsorted(edges[1], outputs)
        return np.bincount(place, minlength=BINS * BINS) / n

    observed = shares(prompt_tokens, output_tokens)
    drawn, other = (shares(*ranked.sample_pairs(n, seed)) for seed in (0, 1))
    by_chance = np.abs(drawn - other).sum() / 2
    return bool(np.abs(observed - drawn).sum() / 2 > by_chance + TOLERATED)
