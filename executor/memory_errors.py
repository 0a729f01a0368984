"""Memory that is not there when an engine starts: one line instead of an allocator's trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ALLOCATION_FAILED = ("can't allocate memory", "Storage size calculation overflowed")
"""What torch's allocator on the CPU says in a plain RuntimeError."""


class StartMemoryError(ValueError):
    """Model, batch and KV cache do not fit into the memory of the device."""


@contextmanager
def memory_errors_told() -> Iterator[None]:
    """An allocation that fails, in Python, on the host or on a GPU, becomes a StartMemoryError with its first line."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        if not _is_out_of_memory(e):
            raise
        said = str(e).partition("\n")[0] or type(e).__name__
        raise StartMemoryError(
            f"the model with its KV cache does not fit into memory: {said}; lower num_gpu_blocks, "
            "kv_cache_memory_bytes or max_num_batched_tokens"
        ) from e


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        text in str(error) for text in ALLOCATION_FAILED
    )
