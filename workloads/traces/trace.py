"""What every reader gives back, and what a reader is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from servetwin.workloads.columns import RequestColumns
from servetwin.workloads.spec import RequestSpec
from servetwin.workloads.traces.options import ReadOptions
from servetwin.workloads.traces.rows import Offence, Rows
from servetwin.workloads.traces.source import Head, Source

ArrivalTimes = Literal["recorded", "first turns", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The requests of a file, in order of arrival (ties as in the file), and what became of its rows."""

    requests: RequestColumns
    format: str
    path: str
    """As it was asked for."""
    rows_read: int
    rows_dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> count."""
    offences: Sequence[Offence] = ()
    """The first dropped rows of each reason."""
    unwanted: frozenset[str] = frozenset()
    """Those of the reasons that are wishes of the user, as for one model only."""
    arrivals: ArrivalTimes = "recorded"
    """Which requests have times of their own. First turns: later turns of a session wait for the one before and
    stand at the start of their session. None: all stand at 0, an arrival process is wanted."""
    about: dict[str, Any] = field(default_factory=dict)
    """What was found out or told: unit of time, tokens per prefix id."""
    notes: tuple[str, ...] = ()
    """What a reader of this file should know."""

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


@dataclass(slots=True)
class Reading:
    """A reader at work: where it reads from, what it was told, where its rows go, what it found out."""

    source: Source
    options: ReadOptions
    rows: Rows
    arrivals: ArrivalTimes = "recorded"
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    afterwards: Callable[[RequestColumns], RequestColumns] = field(default=lambda requests: requests)
    """What can be said of requests only when all of them are known, in order of arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """One format: how to know it and how to read it."""

    name: str
    looks_like: str
    """For people: what such a file begins with."""
    matches: Callable[[Head], bool]
    """Whether a file that begins so has the format. At most one format may match a file."""
    read: Callable[[Reading], None]
    """Reads the whole source into the rows."""
    uses: frozenset[str] = frozenset()
    """Names of the ReadOptions that it can act on, beside format and tolerance; others are refused."""
