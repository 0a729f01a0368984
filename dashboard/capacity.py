"""Results of `servetwin sweep` and `servetwin plan` among the folders of the dashboard, and what is on the frontier."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from servetwin.sim.planning.results import RESULTS, Results
from servetwin.sim.runs import HEADER, RunFolderError

if TYPE_CHECKING:
    import pandas as pd

DEEPEST = 3
"""Folders below one that is given in which results are looked for."""
RESULTS_AT_MOST = 500
FIRST_KEY, SNIFFED_BYTES = b'"feasible"', 64
"""What the JSON of a plan begins with: other files are not read any further."""
PLAN_KEYS = {"feasible", "max_request_rate", "configurations", "slo"}
HOURS_PER_S = 1 / 3600


def results_of(folders: Iterable[Path]) -> list[Path]:
    """Tables of sweeps (results.parquet) and answers of plans (JSON files, as `plan --json` prints them)."""
    found: dict[Path, None] = {}
    for folder in folders:
        found |= dict.fromkeys(_below(folder, DEEPEST))
    return [*found][:RESULTS_AT_MOST]


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """A run folder has none below it."""
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    if any(entry.name == HEADER for entry in found):
        return
    for entry in found:
        path = Path(entry.path)
        if entry.name == RESULTS or (entry.name.endswith(".json") and entry.is_file() and _is_plan(path)):
            yield path
        elif depth > 0 and entry.is_dir(follow_symlinks=False):
            yield from _below(path, depth - 1)


def _is_plan(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return FIRST_KEY in file.read(SNIFFED_BYTES)
    except OSError:
        return False


def read_plan(path: Path) -> dict[str, Any]:
    """What `servetwin plan --json` printed. Raises RunFolderError for a file that is something else, or damaged."""
    try:
        found = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as e:
        raise RunFolderError(f"{path}: is no answer of `servetwin plan --json`: {e}") from e
    if not isinstance(found, dict) or not found.keys() >= PLAN_KEYS:
        raise RunFolderError(
            f"{path}: is no answer of `servetwin plan --json`: {', '.join(PLAN_KEYS)} are wanted"
        )
    return found


def configurations(plan: Mapping[str, Any]) -> pd.DataFrame:
    """One row for each configuration of a plan: its settings, what it can take, what that costs."""
    import pandas as pd

    rows = []
    for row in plan["configurations"]:
        cost = row.get("cost") or {}
        rows.append(
            {
                **row["settings"],
                "feasible": row["feasible"],
                "max_request_rate": row.get("max_request_rate"),
                "replicas": row.get("replicas"),
                "headroom": row.get("headroom"),
                "binding": row.get("binding"),
                "gpus": cost.get("gpus"),
                "usd_per_hour": cost.get("usd_per_hour"),
                "gpu_hours_per_million_requests": cost.get("gpu_hours_per_million_requests"),
                "usd_per_million_output_tokens": cost.get("usd_per_million_output_tokens"),
                "problem": row.get("problem"),
            }
        )
    return pd.DataFrame(rows)


def setting_text(settings: Mapping[str, Any]) -> str:
    """A configuration in a few words."""
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "as given"


def with_cost(points: pd.DataFrame, usd_per_gpu_hour: float) -> pd.DataFrame:
    """The points of a sweep with what they cost: GPUs are those of tensor parallelism and replicas, where varied."""
    gpus = np.ones(len(points))
    for name in ("tensor_parallel_size", "replicas", "data_parallel_size"):
        if name in points:
            gpus = gpus * points[name].fillna(1).to_numpy(dtype=np.float64)
    per_s = (
        points["output_throughput"].to_numpy(dtype=np.float64) if "output_throughput" in points else np.nan
    )
    usd_per_hour = gpus * usd_per_gpu_hour
    with np.errstate(divide="ignore", invalid="ignore"):
        per_million = 1e6 * usd_per_hour * HOURS_PER_S / per_s
    return points.assign(gpus=gpus, usd_per_hour=usd_per_hour, usd_per_million_output_tokens=per_million)


def lower_is_better(figure: str) -> bool:
    """Latencies, costs and losses; everything that is served is better when there is more of it."""
    return not figure.endswith(("throughput", "goodput", "hit_rate", "completed", "rate", "tokens_per_s"))


def frontier(
    x: Sequence[float] | pd.Series[float],
    y: Sequence[float] | pd.Series[float],
    *,
    x_lower: bool,
    y_lower: bool,
) -> list[int]:
    """Places of the points that no other one beats in both figures, in order of x; of equal ones the first."""
    a = np.asarray(x, dtype=np.float64) * (1 if x_lower else -1)
    b = np.asarray(y, dtype=np.float64) * (1 if y_lower else -1)
    best, kept = np.inf, []
    for place in np.lexsort((b, a)):
        if np.isfinite(a[place]) and b[place] < best:
            best = b[place]
            kept.append(int(place))
    return kept if x_lower else kept[::-1]


def failures(results: Results) -> pd.DataFrame:
    """Runs of a sweep that ended with an error."""
    frame = results.frame
    failed: pd.DataFrame = frame[frame["state"] == "failed"]
    return failed[["run", *results.parameters, "seed", "error"]]
