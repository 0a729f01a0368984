"""Lives of requests: which ones are looked at, when each was queued, in prefill, decoding or preempted, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from servetwin.dashboard.figures import completed, timestamps
from servetwin.dashboard.life_log import LifeLog
from servetwin.dashboard.residencies import Residencies
from servetwin.dashboard.run_columns import Numbers
from servetwin.dashboard.run_data import RunData, Window
from servetwin.sim.config import EngineConfig
from servetwin.sim.definitions import CLIENT_E2E, ENGINE_INTERVALS, TPOT, TTFT
from servetwin.sim.explain import Story, explain

if TYPE_CHECKING:
    import pandas as pd

QUEUED, PREFILL, DECODE, PREEMPTED = "queued", "prefill", "decode", "preempted"
ORDERS = {
    "arrival": "arrival_s",
    "longest queue time": "queue_ms",
    "longest TTFT": "ttft_ms",
    "longest E2E": "e2e_ms",
    "most preemptions": "preemptions",
}
"""What is looked at first -> column."""
SHOWN = (
    "request_id", "arrival_s", "num_prompt_tokens", "num_output_tokens", "cached_tokens", "queue_ms", "ttft_ms",
    "tpot_ms", "e2e_ms", "preemptions", "recomputed_tokens", "finish_reason",
)  # fmt: skip
OPEN = "open"
"""Stands for the finish reason of a request that has not ended."""


@dataclass(frozen=True)
class Filter:
    """Which requests are looked at."""

    window: Window
    """They touch it between arrival and end."""
    reasons: tuple[str, ...] = ()
    """How they ended (OPEN: not yet); none: however."""
    only_preempted: bool = False
    order: str = "arrival"
    limit: int = 40


class Chosen(NamedTuple):
    """Requests in the order asked for."""

    rows: Numbers
    """Of requests/ as written."""
    total: int
    """How many pass the filter, before the limit."""


def choose(data: RunData, wanted: Filter) -> Chosen:
    """The rows that a filter lets through."""
    columns = data.columns
    arrival, finish = (columns.numbers("requests", name) for name in ("arrival_s", "finish_s"))
    low, high = wanted.window
    passes = (arrival <= high) & ~(finish < low)
    if wanted.only_preempted:
        passes &= columns.numbers("requests", "preemptions") > 0
    if wanted.reasons:
        reasons = columns.categories("requests", "finish_reason")
        named = np.asarray(reasons.isin(wanted.reasons))
        passes &= named | (reasons.codes < 0) if OPEN in wanted.reasons else named
    rows = np.flatnonzero(passes)
    key = _key(data, rows, wanted.order)
    return Chosen(rows[np.argsort(key, kind="stable")][: wanted.limit], len(rows))


def _key(data: RunData, rows: Numbers, order: str) -> Numbers:
    """What to sort by; what has no value stands last."""
    if order == "arrival":
        return data.columns.numbers("requests", "arrival_s")[rows]
    if order == "most preemptions":
        return -data.columns.numbers("requests", "preemptions")[rows]
    times = timestamps(data.columns, rows)
    metric = {"queue_ms": ENGINE_INTERVALS["queue"], "ttft_ms": TTFT, "e2e_ms": CLIENT_E2E}[ORDERS[order]]
    return -metric.of(times)


def table(data: RunData, rows: Numbers) -> pd.DataFrame:
    """Some requests with SHOWN, one row each: lengths, latencies in ms, how they ended."""
    import pandas as pd

    columns, times = data.columns, timestamps(data.columns, rows)
    reasons = columns.categories("requests", "finish_reason")[rows].astype(object)
    done = completed(columns)[rows]
    tpot, e2e = (np.where(done, m.of(times), np.nan) for m in (TPOT, CLIENT_E2E))
    found = {
        "request_id": data.request_ids(rows),
        "queue_ms": ENGINE_INTERVALS["queue"].of(times) / 1e6,
        "ttft_ms": TTFT.of(times) / 1e6,
        "tpot_ms": tpot / 1e6,
        "e2e_ms": e2e / 1e6,
        "finish_reason": [reason if isinstance(reason, str) else OPEN for reason in reasons],
    }
    rest = {name: columns.numbers("requests", name)[rows] for name in SHOWN if name not in found}
    return pd.DataFrame(found | rest)[[*SHOWN]]


def segments(data: RunData, rows: Numbers) -> pd.DataFrame:
    """What these requests did when: request_id, phase, from_s, to_s, without gap from queued to end."""
    import pandas as pd

    names = ("queued_s", "arrival_s", "first_scheduled_s", "first_token_s", "finish_s")
    times = {name: data.columns.numbers("requests", name)[rows] for name in names}
    preempted = data.columns.numbers("requests", "preemptions")[rows] > 0
    ids = data.request_ids(rows)
    turns = _turns(data, {i for i, p in zip(ids, preempted, strict=True) if p})
    found = []
    for n, request_id in enumerate(ids):
        queued, arrival, scheduled, first, finish = (float(times[name][n]) for name in names)
        end = data.span_s[1] if np.isnan(finish) else finish
        since = arrival if np.isnan(queued) else queued
        for phase, begin, until in _phases(since, scheduled, first, end, turns.get(request_id, [])):
            found.append((request_id, phase, begin, until))
    return pd.DataFrame(found, columns=["request_id", "phase", "from_s", "to_s"])


def _turns(data: RunData, ids: set[str]) -> dict[str, list[tuple[str, float]]]:
    """When each of these was preempted and resumed."""
    if not ids:
        return {}
    events = data.events("preempted", "resumed")
    turns: dict[str, list[tuple[str, float]]] = {}
    mine = events[events.request_id.isin(ids)]
    for request_id, kind, time_s in zip(mine.request_id, mine.kind, mine.time_s, strict=True):
        turns.setdefault(request_id, []).append((kind, float(time_s)))
    return turns


def _phases(
    queued: float, scheduled: float, first_token: float, end: float, turns: Sequence[tuple[str, float]]
) -> Iterator[tuple[str, float, float]]:
    """(phase, from, to): what runs before the first token is prefill, what runs after it decode, recomputation too."""
    if np.isnan(scheduled):
        yield QUEUED, queued, end
        return
    yield QUEUED, queued, scheduled
    since, running = scheduled, True
    for kind, time_s in [*turns, ("end", end)]:
        if running:
            split = end if np.isnan(first_token) else min(max(first_token, since), time_s)
            yield PREFILL, since, min(split, time_s)
            yield DECODE, min(split, time_s), time_s
        else:
            yield PREEMPTED, since, time_s
        since, running = time_s, kind == "resumed"


def running_at(data: RunData, res: Residencies, time_s: float) -> Numbers:
    """Whether each request of `res.request_ids` runs at an instant: scheduled, not ended, not preempted."""
    columns = data.columns
    begun, finish = (columns.numbers("requests", name) for name in ("first_scheduled_s", "finish_s"))
    runs = (begun <= time_s) & ~(finish <= time_s)
    # An open request of a killed run has no row; it counts as running since its first block.
    known = res.request_rows >= 0
    present: Numbers = np.where(known, runs[res.request_rows], True)
    turns = data.events("preempted", "resumed")
    last = turns[turns.time_s <= time_s].groupby("request_id").kind.last()
    away = res.numbers_of(last.index[last == "preempted"].to_list())
    present[away[away >= 0]] = False
    return present


def story(data: RunData, request_id: str) -> Story:
    """The life of one request in words. Raises UnknownRequestError; needs a run that a scheduler wrote."""
    config = EngineConfig.model_validate(data.run.config["engine"])
    return explain(LifeLog(data, request_id), config, request_id, data.run.cut_short)
