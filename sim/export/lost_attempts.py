"""What requests had got when their replica failed and they began anew: it counts in no metric of requests or tokens.

The log takes back the gaps between those outputs (`columns.STORED_GAPS`), and says when a request was lost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.columns import STORED_GAPS, arrow_schema
from servetwin.sim.tables import Tables, ns_array
from servetwin.sim.token_times import LongGaps

Int64s = NDArray[np.int64]


class LostAttempts:
    """Of one replica: when each request was lost there last, if it began anew after that."""

    def __init__(self, log: Tables, replica: int) -> None:
        import pyarrow.compute as pc

        self._until: dict[str, int] = {}
        self._log, self._replica = log, replica
        for part in log.iter_parts("events"):
            rows = part.filter((pc.field("kind") == "lost") & (pc.field("replica") == replica)).to_pandas()
            self._until.update(
                zip(rows.request_id, ns_array(rows.time_s).astype(np.int64).tolist(), strict=True)
            )
        if self._until:
            ended = log.requests[log.requests.finish_reason == "lost"]
            for request_id in ended.request_id[ended.replica == replica]:
                self._until.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._until)

    def long_gaps(self, gaps: LongGaps) -> NDArray[np.bool_]:
        """Which of these gaps of the replica are theirs."""
        pairs = zip(gaps.request_id, gaps.end_ns.tolist(), strict=True)
        return np.array([end_ns <= self._until.get(name, -1) for name, end_ns in pairs], dtype=bool)

    def regular_outputs(self, end_ns: Int64s) -> Int64s:
        """How many of the outputs behind one of the step before are theirs, for the replica's steps by their ends."""
        import pyarrow as pa
        import pyarrow.compute as pc

        stored = pa.concat_tables([arrow_schema(STORED_GAPS).empty_table(), *self._log.iter_parts("itl")])
        series = (
            (pc.field("samples") < 0)
            & ~pc.field("from_step").is_null()
            & (pc.field("replica") == self._replica)
        )
        change = np.zeros(len(end_ns) + 1, dtype=np.int64)
        for row in stored.filter(series).to_pylist():
            if end_ns[row["to_step"]] <= self._until.get(row["request_id"], -1):
                change[row["from_step"] + 1] += 1
                change[row["to_step"] + 1] -= 1
        return np.cumsum(change)[:-1]
