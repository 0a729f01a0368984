"""CUDA graphs: a step runs as the next larger size that was captured, and above the largest without a graph.

As in vLLM's default mode (FULL_AND_PIECEWISE) this holds for every step, whether prompts are in it or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from servetwin.sim.steptime.features import Ints, StepFeatures


def graph_tokens(features: StepFeatures, capture_sizes: Sequence[int]) -> Ints:
    """The size that each step runs at, [n]; 0 where it runs without a graph. `capture_sizes`: ascending."""
    tokens = features.new_tokens
    if not capture_sizes:
        return np.zeros_like(tokens)
    sizes = np.array(capture_sizes, dtype=np.int64)
    next_larger = sizes[np.minimum(np.searchsorted(sizes, tokens), len(sizes) - 1)]
    return np.where((tokens > 0) & (tokens <= sizes[-1]), next_larger, 0)


def padded_tokens(features: StepFeatures, capture_sizes: Sequence[int]) -> Ints:
    """Tokens that the model computes, [n], padding included."""
    return np.maximum(features.new_tokens, graph_tokens(features, capture_sizes))
