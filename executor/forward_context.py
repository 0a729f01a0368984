"""How attention layers find the batch and their cache while a model's own code runs.

transformers' modelling code has no parameter to carry them, so they stand in a context for the time of one
forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from servetwin.executor.attention_metadata import AttentionMetadata
from servetwin.executor.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What one forward pass reads."""

    attention_metadata: AttentionMetadata
    kv_caches: list[KVCache]
    """One per layer, found by the layer's index."""


_current: ContextVar[ForwardContext | None] = ContextVar("servetwin_forward_context", default=None)


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[None]:
    """Makes `context` the current one until the block is left, however. Nesting raises RuntimeError."""
    if _current.get() is not None:
        raise RuntimeError("a forward pass is already running: forward contexts do not nest")
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def get_forward_context() -> ForwardContext:
    """The context of the running forward pass; RuntimeError outside of one."""
    context = _current.get()
    if context is None:
        raise RuntimeError("attention was called outside of a forward pass: use set_forward_context")
    return context
