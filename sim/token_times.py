"""When each request got its outputs, from the steps: exact, although no log holds a row for every token.

A request has an output in every step between its first and its last one, but for its gaps over more than one step,
which the log has one by one (`columns.STORED_GAPS`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.columns import STORED_GAPS, arrow_schema
from servetwin.sim.step_rows import expanded, regular_gaps
from servetwin.sim.tables import Tables, ns_array, replica_of

if TYPE_CHECKING:
    import pandas as pd

Int64s = NDArray[np.int64]


class LogTooOldError(ValueError):
    """A log of an earlier version, which does not say whose gaps its gaps are."""


class OutputTimes:
    """Of one log. A step with speculative decoding is one output, however many tokens it brought."""

    def __init__(self, log: Tables) -> None:
        """Raises LogTooOldError."""
        ends: dict[int, list[Int64s]] = {}
        for part in log.iter_parts("steps"):
            # Steps without rows bring nothing, and may end at the same instant as the one before.
            with_rows = expanded(part, ["rows"])["rows"].to_numpy() > 0
            ends.setdefault(replica_of(part), []).append(regular_gaps(part)[0][with_rows])
        self._ends = {replica: np.concatenate(parts) for replica, parts in ends.items()}
        self._gaps = _gaps_by_request(log)

    def of(self, request_id: str, replica: int, first_ns: int, last_ns: int) -> Int64s:
        """Of a request whose first and last tokens came at these instants, in ns, ascending."""
        ends = self._ends[replica]
        times = ends[np.searchsorted(ends, first_ns) : np.searchsorted(ends, last_ns, side="right")]
        gaps = self._gaps.get(request_id)
        if gaps is None:
            return times
        kept = np.ones(len(times), dtype=bool)
        for begin_ns, end_ns in gaps:
            within = np.searchsorted(times, begin_ns, side="right"), np.searchsorted(times, end_ns)
            kept[slice(*within)] = False
        return times[kept]

    def of_each(self, requests: pd.DataFrame) -> Iterator[Int64s]:
        """Of each row of a table of requests; nothing of one without a token."""
        first, last = ns_array(requests.first_token_s), ns_array(requests.last_token_s)
        replicas = requests.replica.fillna(0).to_numpy(dtype=np.int64)
        for request_id, replica, first_ns, last_ns in zip(
            requests.request_id, replicas.tolist(), first.tolist(), last.tolist(), strict=True
        ):
            if np.isnan(first_ns):
                yield np.zeros(0, dtype=np.int64)
            else:
                yield self.of(request_id, replica, int(first_ns), int(last_ns))


class LongGaps(NamedTuple):
    """Gaps over more than one step, of all requests, whether they completed or not."""

    request_id: list[str]
    replica: Int64s
    end_ns: Int64s
    length_ns: Int64s


def long_gaps(log: Tables) -> LongGaps:
    """Those of a log. Raises LogTooOldError where it does not say whose they are."""
    import pyarrow as pa
    import pyarrow.compute as pc

    stored = pa.concat_tables([arrow_schema(STORED_GAPS).empty_table(), *log.iter_parts("itl")])
    stored = stored.filter(pc.field("samples") > 0)
    if stored["request_id"].null_count:
        raise LogTooOldError(
            "the run was written by an earlier version, which does not say when preempted requests got their tokens: "
            "run it again (a run folder is a workload)"
        )
    frame = stored.to_pandas()
    return LongGaps(
        frame.request_id.tolist(),
        frame.replica.fillna(0).to_numpy(dtype=np.int64),
        ns_array(frame.time_s).astype(np.int64),
        ns_array(frame.gap_s).astype(np.int64),
    )


def _gaps_by_request(log: Tables) -> dict[str, list[tuple[int, int]]]:
    """Of each request: (instant of the output before, of the output after) of its gaps."""
    gaps: dict[str, list[tuple[int, int]]] = {}
    found = long_gaps(log)
    for request_id, end_ns, length_ns in zip(
        found.request_id, found.end_ns.tolist(), found.length_ns.tolist(), strict=True
    ):
        gaps.setdefault(request_id, []).append((end_ns - length_ns, end_ns))
    return gaps
