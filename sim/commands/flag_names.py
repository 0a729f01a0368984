"""The names of flags in the messages of the parts below, which know parameters only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from servetwin.sim.commands.errors import UsageError
from servetwin.workloads.spec import ArgumentError


@contextmanager
def flags_named(**flags: str) -> Iterator[None]:
    """Parameter -> the flag that was typed for it, which an ArgumentError raised inside then names."""
    try:
        yield
    except ArgumentError as e:
        if e.name not in flags:
            raise
        raise UsageError(f"{flags[e.name]} {e.problem}") from e


def spelled(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def given(flags: Any) -> list[str]:
    """The flags among the fields of a dataclass that differ from their defaults."""
    return [spelled(f.name) for f in fields(flags) if getattr(flags, f.name) != f.default]
