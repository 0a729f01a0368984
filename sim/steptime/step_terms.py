"""What the time of a whole step is made of, as terms that more work can only enlarge."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.steptime.features import Bools, Ints, StepFeatures

Floats = NDArray[np.float64]
KNOTS = (4, 16, 64, 256, 1024)
"""Tokens from which on a further slope may set in: weights are read once a step, and from some batch on products take
longer than reading."""

NUM_DEVICE_TERMS, NUM_PREPARE_TERMS, NUM_EXTENTS = 15, 4, 9
"""Columns of `device_terms`, `prepare_terms` and `extent`."""


def device_terms(features: StepFeatures, tokens: Ints, eager: Bools) -> Floats:
    """[n, terms]: launch, tokens (with slopes that set in later), rows, logits, KV and pairs of attention.

    `tokens`: those that are computed, the padding of a captured graph included. `eager`: steps whose kernels are
    launched one by one where others run from graphs.
    """
    f, computed = features, tokens.astype(np.float64)
    chunk_pairs = f.prefill_pairs - f.prefill_tokens**2 / (2 * np.maximum(f.prefill_rows, 1))
    columns = [
        np.ones(len(f)),
        eager,
        # Measured beside kernels' own times, at any number of tokens and chunks (RTX 4090, RTX PRO 6000).
        f.prefill_rows > 0,
        computed,
        *(np.maximum(computed - knot, 0) for knot in KNOTS),
        f.rows,
        f.logits_rows,
        f.decode_context_tokens,
        # A batch ends with its longest row where rows are spread over threads or multiprocessors.
        f.decode_context_max_tokens,
        chunk_pairs,
        f.prefill_context_tokens,
    ]
    return np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)


def prepare_terms(features: StepFeatures) -> Floats:
    """[n, terms] of the worker's own time before a step: constant, rows, new requests, prompt tokens."""
    f = features
    columns = [np.ones(len(f)), f.rows, f.new_requests, f.prefill_tokens]
    return np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)


def coordinates(features: StepFeatures) -> Floats:
    """[n, 6], logarithms: where in the space of shapes a step lies."""
    f = features
    mean_context = f.decode_context_tokens / np.maximum(f.decode_rows, 1)
    history = f.prefill_context_tokens / np.maximum(f.prefill_rows, 1)
    columns = [
        f.decode_rows,
        mean_context,
        f.decode_context_max_tokens,
        f.prefill_tokens,
        f.prefill_rows,
        history,
    ]
    return np.log1p(np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1))


def extent(features: StepFeatures) -> Floats:
    """[n, 9]: how much of everything there is in a step, by which the measured region is bounded."""
    f = features
    columns = [
        f.new_tokens,
        f.rows,
        f.decode_rows,
        f.decode_context_tokens,
        f.decode_context_max_tokens,
        f.prefill_tokens,
        f.prefill_rows,
        f.prefill_pairs,
        f.prefill_context_tokens,
    ]
    return np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)
