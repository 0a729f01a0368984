"""Measured runs of an engine: what each request was and when it was served, and the curves of the queue.

Read are our run folders, folders with `requests.jsonl` (LLMServingSim's: `queued_ts, scheduled_ts, first_token_ts,
last_token_ts` of one clock, optionally `timeseries.csv` and `meta.json`), and results of `vllm bench serve
--save-detailed`. A time that a source does not say is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.definitions import POOLED_ITL
from servetwin.sim.metrics import Distribution
from servetwin.sim.tables import Tables, ns_array

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
TIMES = ("arrival_s", "queued_s", "first_scheduled_s", "first_token_s", "last_token_s")


class MeasuredRunError(ValueError):
    """A run that cannot be compared; the message says what is missing where."""


@dataclass(frozen=True)
class MeasuredRun:
    """Requests in order of arrival; all times are seconds since the first arrival."""

    source: str
    """What kind of source it is."""
    path: str
    requests: pd.DataFrame
    """Columns request_id, prompt_tokens, output_tokens and those of TIMES (NaN: not known)."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Settings that the source says, under the names of the flags: max_num_seqs, num_gpu_blocks_override, ..."""
    hardware: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    """What the executor of a run folder says of itself."""
    rows: Sequence[int] = ()
    """0-based place of each request in the source, where that is a file of rows."""
    curves: pd.DataFrame | None = None
    """Columns time_s, running, waiting, kv_percent: samples of the queue; None where none were taken."""
    curves_have_own_clock: bool = False
    """They may lie a constant apart from the requests' times."""
    gaps: Distribution | None = None
    """ITL: the gaps between outputs of all requests, in ns; None where the source does not say them."""
    log: Tables | None = None
    """The tables of a run folder, on a clock of their own."""


FORMULAS = {
    "ttft": "first token - queued",
    "tpot": "(last token - first token) / (output tokens - 1), of requests with two tokens or more",
    "itl": POOLED_ITL.formula,
    "e2e": "last token - queued",
    "queue": "first scheduled - queued",
    "scheduled_to_first": "first token - first scheduled",
}


def metrics_of(requests: pd.DataFrame) -> dict[str, Floats]:
    """Seconds by name of FORMULAS without the pooled ITL, each [n], NaN where a request lacks a time.

    Where nobody says when requests were queued, they count from their arrival (their sending).
    """
    times = {name: requests[name].to_numpy(dtype=np.float64) for name in TIMES}
    queued = np.where(np.isnan(times["queued_s"]), times["arrival_s"], times["queued_s"])
    first, last, scheduled = times["first_token_s"], times["last_token_s"], times["first_scheduled_s"]
    tokens = requests["output_tokens"].to_numpy(dtype=np.float64)
    between = np.where(tokens > 1, tokens - 1, np.nan)
    return {
        "ttft": first - queued,
        "tpot": (last - first) / between,
        "e2e": last - queued,
        "queue": scheduled - queued,
        "scheduled_to_first": first - scheduled,
    }


def gaps_of(log: Tables) -> Distribution:
    """The gaps of a run's table itl/, in ns."""
    return Distribution.of(ns_array(log.itl["gap_s"]), log.itl["samples"].to_numpy(dtype=np.float64))
