"""The sizes that vLLM captures CUDA graphs at: a step runs as the next larger one, and above the largest without."""

from __future__ import annotations

from collections.abc import Sequence

MAX_DEFAULT_SIZE = 512
"""Largest size that is captured unless others are asked for."""


def cuda_graph_sizes(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    sizes: Sequence[int] | None = None,
    max_size: int | None = None,
) -> tuple[int, ...]:
    """Tokens of a step, ascending, by vLLM 0.22.0's rule: `sizes`, else 1, 2, 4, then steps of 8, from 256 of 16.

    `max_size`: the largest of the default sizes (None: twice `max_num_seqs`, at most 512). None is above
    `max_num_batched_tokens`. What speculative decoding changes there (multiples of drafts + 1) is left out.
    """
    if sizes is None:
        limit = min(2 * max_num_seqs, MAX_DEFAULT_SIZE) if max_size is None else max_size
        sizes = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16)) if size <= limit]
    return tuple(size for size in sorted({*sizes}) if size <= max_num_batched_tokens)
