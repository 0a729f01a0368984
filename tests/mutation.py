"""What a mutation is: see mutations.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One change and the tests that must notice it."""

    name: str
    rule: int
    path: str
    """Of the file, from the root of the repository."""
    old: str
    """Stands there exactly once."""
    new: str
    tests: tuple[str, ...] = ()
    """file::name in `tests`."""
