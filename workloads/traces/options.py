"""What a user says about a trace that the file itself leaves open, and how damaged rows are treated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from servetwin.workloads.checks import check_count, check_seed
from servetwin.workloads.spec import ArgumentError

TimeUnit = Literal["s", "ms", "us", "ns"]
NS_PER: Mapping[TimeUnit, int] = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
Tokenize = Callable[[str], list[int]]
"""Token ids of a text, without special tokens."""


class Tolerance(IntEnum):
    """What happens to rows that cannot be used."""

    LENIENT = 0
    """All of them are dropped and counted: to look at a file."""
    NORMAL = 1
    """Damaged rows are refused; whole rows without use (zero length, failed) are dropped and counted: to replay it."""
    STRICT = 2
    """The first one is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How to read a trace. Every field left at its default is found out from the file, or refused if it cannot be."""

    format: str | None = None
    """Name of the format; None: told by the content."""
    time_unit: TimeUnit | None = None
    """Unit of the times in the file; None: the format's, where it is beyond doubt."""
    block_size: int | None = None
    """Tokens that one prefix id stands for; None: the format's, where the lengths agree with it."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Generic csv and JSONL: our field name (`arrival` and `think_time` too) -> name in the file."""
    tokenize: Tokenize | None = None
    """Turns texts into token ids, for formats that hold texts."""
    output_tokens: int | None = None
    """Answers of this many tokens, for formats that do not say how long they were."""
    model: str | None = None
    """Only the rows of this model, for formats that name one."""
    window_s: tuple[float, float] | None = None
    """From and to, in seconds of the source's own clock, for formats that are generated from; None: its first hour."""
    seed: int = 0
    """Root of all random numbers, for formats that are generated from."""
    tolerance: Tolerance = Tolerance.NORMAL

    def __post_init__(self) -> None:
        """Raises ArgumentError for a value that no format could use."""
        # The field is in seconds; what is mapped onto it need not be.
        renamed = {"arrival": "arrival_s", "think_time": "think_time_s"}
        columns: dict[str, str] = {}
        for name, column in self.columns.items():
            ours = renamed.get(name, name)
            if ours in columns:
                raise ArgumentError(
                    "columns", f"{name}={column}: {ours} is mapped already, to {columns[ours]}"
                )
            columns[ours] = column
        object.__setattr__(self, "columns", columns)
        if self.time_unit is not None and self.time_unit not in NS_PER:
            raise ArgumentError("time_unit", f"{self.time_unit!r}: must be one of {', '.join(NS_PER)}")
        for name in ("block_size", "output_tokens"):
            if (value := getattr(self, name)) is not None:
                check_count(name, value)
        check_seed(self.seed)
        if self.window_s is not None and not 0 <= self.window_s[0] < self.window_s[1] < math.inf:
            raise ArgumentError(
                "window_s", f"{self.window_s!r}: must be two finite times, the second after the first"
            )
