"""What is kept of a finished run, and the figures that stand in its row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import orjson

RECORD_VERSION = 1
OURS = "servetwin"


@dataclass(frozen=True)
class Record:
    """A run that has ended: its figures, or its error."""

    spec_hash: str
    spec: Mapping[str, Any]
    summary: Mapping[str, Any] | None
    """As in `summary.json`; None where it failed."""
    error: str | None
    """Why it failed, in one line."""
    final: bool
    """It would end like this again; False: the machine was to blame (memory, a killed process)."""
    notes: tuple[str, ...]
    wall_time_s: float
    host: str
    date: str

    def to_bytes(self) -> bytes:
        """As JSON; what cannot be said in JSON (NaN, infinity) is null from then on."""
        option = orjson.OPT_SERIALIZE_NUMPY
        return orjson.dumps({"record_version": RECORD_VERSION, **asdict(self)}, option=option) + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Raises ValueError for content that is no record."""
        try:
            data = orjson.loads(content)
            if data.pop("record_version") != RECORD_VERSION:
                raise ValueError("another version of records")
            return cls(**data | {"notes": tuple(data["notes"])})
        except (KeyError, TypeError, AttributeError, orjson.JSONDecodeError) as e:
            raise ValueError(f"is no record of a run: {e}") from e


OF_A_CLUSTER = ("replica_hours", "utilization")
"""What several replicas cost and how busy they were."""


def figures(summary: Mapping[str, Any]) -> dict[str, float | int | None]:
    """The numbers of a summary, each under a name of its own: p90_queue_ms, requests_length, preemptions ..."""
    found: dict[str, float | int | None] = {}
    for name, value in _numbers(summary):
        found.setdefault(name, value)
    return found


def _numbers(summary: Mapping[str, Any]) -> Iterator[tuple[str, float | int | None]]:
    ours = summary.get(OURS, {})
    for values in (summary, ours):
        for name, value in values.items():
            if isinstance(value, int | float | None):
                yield name, value
    for metric, statistics in (ours.get("latency") or {}).items():
        for statistic, value in (statistics or {}).items():
            yield f"{statistic}_{metric}", value
    for reason, count in (ours.get("requests") or {}).items():
        yield f"requests_{reason}", count
    cluster = ours.get("cluster") or {}
    for name in OF_A_CLUSTER:
        if name in cluster:
            yield name, cluster[name]
