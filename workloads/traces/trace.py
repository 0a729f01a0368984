"""What every reader gives back, what a reader is, and how it refuses a damaged row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from servetwin.workloads.spec import RequestSpec, WorkloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The requests of a file, in order of arrival (ties as in the file), and what became of its rows."""

    requests: list[RequestSpec]
    format: str
    path: str
    """As it was asked for."""
    rows_read: int
    rows_dropped: dict[str, int] = field(default_factory=dict)
    """Whole rows without use: reason -> count."""

    def __post_init__(self) -> None:
        dropped = sum(self.rows_dropped.values())
        assert self.rows_read == self.rows_emitted + dropped, "a reader lost count of its rows"

    @property
    def rows_emitted(self) -> int:
        return len(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[RequestSpec]:
        return iter(self.requests)

    def counts(self) -> dict[str, Any]:
        """Rows read, emitted and dropped, as a run writes them down."""
        return {
            "rows_read": self.rows_read,
            "rows_emitted": self.rows_emitted,
            "rows_dropped": dict(self.rows_dropped),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """One format: how to know it and how to read it."""

    name: str
    looks_like: str
    """For people: what such a file begins with."""
    matches: Callable[[str], bool]
    """Whether a file whose first line with content is this one has the format."""
    read: Callable[[str, Iterator[str]], Trace]
    """Reads the lines of the file with the given name (for messages), the first one included."""


LONGEST_VALUE = 80
"""Characters of a damaged value that a message shows."""


def row_error(path: str, row: int, field_name: str, value: object, allowed: str) -> WorkloadError:
    """The refusal of a damaged row. `row` counts data rows from 1 (a header is not one)."""
    shown = repr(value)
    if len(shown) > LONGEST_VALUE:
        shown = shown[:LONGEST_VALUE] + " ..."
    return WorkloadError(f"{path}: row {row}: {field_name} {shown}: must be {allowed}")
