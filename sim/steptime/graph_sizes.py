"""CUDA graphs: a decode step runs as the next larger size that was captured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from servetwin.sim.steptime.features import Ints, StepFeatures


def padded_tokens(features: StepFeatures, capture_sizes: Sequence[int]) -> Ints:
    """Tokens that the model computes, [n]: steps of decode rows alone are padded where a captured size holds them."""
    tokens = features.new_tokens
    if not capture_sizes:
        return tokens
    sizes = np.array(sorted(capture_sizes), dtype=np.int64)
    graphed = (features.prefill_rows == 0) & (tokens > 0) & (tokens <= sizes[-1])
    padded: Ints = np.where(
        graphed, sizes[np.minimum(np.searchsorted(sizes, tokens), len(sizes) - 1)], tokens
    )
    return padded
