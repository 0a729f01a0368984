"""What a summary needs of the events of a run, part by part: a long run has more of them than fit into memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from servetwin.sim.columns import REPLICA, SCHEMAS
from servetwin.sim.tables import Tables, ns_array, replica_of

if TYPE_CHECKING:
    import pandas as pd

NAMES = ("time_s", "request_id", "kind", REPLICA)


@dataclass(frozen=True, slots=True)
class EventFigures:
    """Of all events of a run."""

    counts: Counter[tuple[int, str]]
    """By replica (below 0: the door) and kind."""
    of_replicas: pd.DataFrame
    """Those of no request but resets of the cache, in order of time: columns NAMES."""
    last_ns: int
    """When the last one was; 0 without any."""

    def number_of(self, kind: str) -> int:
        """Of all replicas."""
        return sum(count for (_, found), count in self.counts.items() if found == kind)


def event_figures(log: Tables) -> EventFigures:
    """Reads the events of a log, one part after the other."""
    import pyarrow.compute as pc

    counts: Counter[tuple[int, str]] = Counter()
    rows: dict[int, list[pd.DataFrame]] = {}
    last_ns = 0
    for part in log.iter_columns("events", NAMES):
        replica = replica_of(part)
        for found in pc.value_counts(part["kind"]).to_pylist():
            counts[replica, found["values"]] += found["counts"]
        nobody = pc.and_(pc.is_null(part["request_id"]), pc.not_equal(part["kind"], "cache_reset"))
        rows.setdefault(replica, []).append(part.filter(nobody).to_pandas())
        last_ns = max(last_ns, int(ns_array(part["time_s"].to_pandas()).max(initial=0)))
    return EventFigures(counts, _in_order(rows, NAMES), last_ns)


def events_of_kind(log: Tables, kind: str) -> pd.DataFrame:
    """Those rows of the table of events."""
    import pyarrow.compute as pc

    rows: dict[int, list[pd.DataFrame]] = {}
    for part in log.iter_parts("events"):
        found = part.filter(pc.equal(part["kind"], kind))
        rows.setdefault(replica_of(part), []).append(found.to_pandas())
    return _in_order(rows, [*SCHEMAS["events"]])


def _in_order(rows: Mapping[int, Sequence[pd.DataFrame]], names: Sequence[str]) -> pd.DataFrame:
    """By time; each replica writes when it has enough, so the order among them is nobody's."""
    import pandas as pd

    parts = [frame for replica in sorted(rows) for frame in rows[replica]]
    events = pd.concat(parts) if parts else pd.DataFrame(columns=[*names])
    return events.sort_values("time_s", kind="stable", ignore_index=True)
