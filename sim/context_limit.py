"""How long a context a model's positions allow, by vLLM's rules; read off the rope settings of its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STRETCHING = ("dynamic", "linear", "yarn")
"""Rope types whose factor multiplies the context."""

Rope = Mapping[str, Any]
"""One set of rope settings; the old spelling has `type` in place of `rope_type`."""


def rope_type(rope: Rope) -> str | None:
    """None where nothing is set."""
    found: str | None = rope.get("rope_type", rope.get("type"))
    return found


def rope_sets(rope: Rope) -> list[Rope]:
    """The settings of a model: none, one, or one for each type of layer."""
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or ([rope] if rope else [])


def max_positions(max_position_embeddings: int, rope: Rope) -> int:
    """Longest context in tokens that the positions allow."""
    kind, positions = rope_type(rope), max_position_embeddings
    if kind not in STRETCHING:
        return positions
    if kind == "yarn":
        positions = rope.get("original_max_position_embeddings", positions)
    return int(positions * rope.get("factor", 1))


def default_max_model_len(max_position_embeddings: int, rope: Rope) -> int:
    """Context of an engine that was not told one, in tokens.

    `max_positions`; under longrope the original length, as in vLLM: the long factors serve short texts worse.
    """
    for one in rope_sets(rope):
        if rope_type(one) == "longrope" and "original_max_position_embeddings" in one:
            return int(one["original_max_position_embeddings"])
    return max_positions(max_position_embeddings, rope)
