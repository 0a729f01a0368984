"""What a run's log says of its replicas: how much each did, how long it was there, how even the load was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from servetwin.sim.columns import COMPLETED
from servetwin.sim.event_figures import EventFigures
from servetwin.sim.tables import ns_array
from servetwin.sim.units import NS_PER_S

if TYPE_CHECKING:
    import pandas as pd

ON = ("replica_starting", "replica_ready")
OFF = "replica_stopped"
DOWN, UP = "replica_failed", "replica_recovered"


def cluster_figures(
    requests: pd.DataFrame, events: EventFigures, busy_ns_of: Mapping[int, int]
) -> dict[str, Any]:
    """`{"cluster": {...}}` as JSON values; nothing for a run of one engine. `requests`: `Tables.request_figures`.

    `replica_hours`: from the decision to start a replica, or the start of the run, to its being off, or the last event
    of the run; times the cards of a replica these are GPU-hours. A replica that has failed is there. `utilization` =
    busy time / the time that it is there; `imbalance` = the largest over the mean, of those that were ever there.
    """
    changes = events.of_replicas
    indices = sorted({*changes.replica.astype(int), *busy_ns_of} - {-1})
    if len(indices) < 2 and changes.empty:
        return {}
    # Of the last thing that happened.
    end_ns = max(events.last_ns, int(ns_array(requests.finish_s.dropna()).max(initial=0)))
    changes_of = {index: [*rows.itertuples()] for index, rows in changes.groupby("replica")}
    each = [
        {"replica": index, "admitted_requests": events.counts[index, "scheduled"]}
        | _served(requests[requests.replica == index])
        | _presence(changes_of.get(index, []), busy_ns_of.get(index, 0), end_ns)
        for index in indices
    ]
    there_s = sum(one["there_s"] for one in each)
    return {
        "cluster": {
            "replicas": len(each),
            "replica_hours": there_s / 3600,
            "busy_time_s": sum(one["busy_time_s"] for one in each),
            "utilization": _ratio(sum(one["busy_time_s"] for one in each), there_s),
            "imbalance": {
                name: _imbalance(one[name] for one in each) for name in ("admitted_requests", "busy_time_s")
            },
            "of_each": each,
        }
    }


def _served(requests: pd.DataFrame) -> dict[str, Any]:
    """Of the requests of one replica."""
    done = requests[requests.finish_reason.isin(COMPLETED)]
    return {
        "completed": len(done),
        "refused": int((requests.finish_reason == "refused").sum()),
        "lost": int((requests.finish_reason == "lost").sum()),
        "input_tokens": int(done.num_prompt_tokens.sum()),
        "output_tokens": int(done.num_output_tokens.sum()),
        "cached_prompt_tokens": int(requests.cached_tokens.sum()),
    }


def _presence(changes: list[Any], busy_ns: int, end_ns: int) -> dict[str, Any]:
    """Of one replica that came and went so."""
    there_ns = _there_ns(changes, end_ns)
    return {
        "there_s": there_ns / NS_PER_S,
        "failed_s": _failed_ns(changes, end_ns) / NS_PER_S,
        "busy_time_s": busy_ns / NS_PER_S,
        "utilization": _ratio(busy_ns, there_ns),
    }


def _there_ns(events: list[Any], end_ns: int) -> int:
    """How long it was there; a run without such events has its replicas from 0 on."""
    since = None if any(e.kind in ON for e in events) else 0
    total = 0
    for event in events:
        time_ns = round(event.time_s * NS_PER_S)
        if event.kind in ON and since is None:
            since = time_ns
        elif event.kind == OFF and since is not None:
            total, since = total + time_ns - since, None
    return total if since is None else total + max(end_ns - since, 0)


def _failed_ns(events: list[Any], end_ns: int) -> int:
    total, since = 0, None
    for event in events:
        time_ns = round(event.time_s * NS_PER_S)
        if event.kind == DOWN:
            since = time_ns
        elif event.kind == UP and since is not None:
            total, since = total + time_ns - since, None
    return total if since is None else total + max(end_ns - since, 0)


def _imbalance(values: Iterable[float]) -> float | None:
    amounts = [*values]
    return _ratio(max(amounts) * len(amounts), sum(amounts))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
