"""The list of runs: what each was and how it went, and where their configurations differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from servetwin.dashboard.figures import completed
from servetwin.dashboard.run_columns import Numbers, RunColumns
from servetwin.sim.planning.steady import Lives, steady_state
from servetwin.sim.runs import Run, RunFolderError, read_run

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {
    "state": "state",
    "verdict": "verdict",
    "requests": "requests",
    "duration_s": "duration (s)",
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "p50_ttft_ms": "TTFT p50 (ms)",
    "p99_ttft_ms": "TTFT p99 (ms)",
    "p50_tpot_ms": "TPOT p50 (ms)",
    "kv_peak": "KV peak (%)",
    "preemptions": "preemptions",
    "steps_from": "step times from",
    "wall_started": "started",
}
"""Key of a row -> heading with its unit."""
ABSENT = "-"


def row_of(path: Path, *, judged: bool = True) -> dict[str, Any]:
    """One run as a row; `judged`: with a verdict, which takes a look at its requests.

    What cannot be read is a row that says so.
    """
    try:
        run = read_run(path)
        row = {
            "state": run.state if run.reason is None else f"{run.state} ({run.reason})",
            "steps_from": run.header.get("step_time_source"),
            "wall_started": str(run.header.get("wall_started"))[:19],
        }
        row |= _figures(run.summary) if run.state == "complete" else _so_far(run)
        return row | {"verdict": _verdict(run) if judged else None}
    except (RunFolderError, OSError) as e:
        return {"state": f"cannot be read: {e}"}


def _figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    ours = summary["servetwin"]
    peak = ours["kv_peak_used_fraction"]
    latency = ours["latency"]
    return {
        "requests": sum(ours["requests"].values()),
        "duration_s": summary["duration"],
        "request_throughput": summary["request_throughput"],
        "output_throughput": summary["output_throughput"],
        "p50_ttft_ms": latency["ttft_ms"]["p50"],
        "p99_ttft_ms": latency["ttft_ms"]["p99"],
        "p50_tpot_ms": latency["tpot_ms"]["p50"],
        "kv_peak": None if peak is None else 100 * peak,
        "preemptions": ours["preemptions"],
    }


def _so_far(run: Run) -> dict[str, Any]:
    """Of a run that has no summary: how many requests have ended. Its own page sums it up."""
    return {"requests": sum(len(part) for part in run.iter_columns("requests", ["request_id"]))}


def _verdict(run: Run) -> str | None:
    """stable, backlogged or overloaded; None for fewer than two requests, and where none was served."""
    columns = RunColumns(run)
    sent, arrival = (columns.numbers("requests", name) for name in ("sent_s", "arrival_s"))
    served = completed(columns)
    if len(arrival) < 2 or not served.any():
        return None
    order = np.argsort(arrival, kind="stable")

    def ns(seconds: Numbers) -> Numbers:
        return np.rint(seconds[order] * 1e9)

    lives = Lives(
        sent=ns(np.where(np.isnan(sent), arrival, sent)),
        first_scheduled=ns(columns.numbers("requests", "first_scheduled_s")),
        finish=ns(columns.numbers("requests", "finish_s")),
        completed=served[order],
    )
    return str(steady_state(lives).verdict)


def differences(configs: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Fields (rows) in which the configurations of these runs (columns) are not all the same."""
    import pandas as pd

    flat = {name: dict(_flat(config)) for name, config in configs.items()}
    fields = dict.fromkeys(field for config in flat.values() for field in config)
    differing = [f for f in fields if len({repr(config.get(f, ABSENT)) for config in flat.values()}) > 1]
    rows = [[_text(config.get(field, ABSENT)) for config in flat.values()] for field in differing]
    return pd.DataFrame(rows, index=pd.Index(differing, name="field"), columns=[*flat])


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted names of everything that is no object itself."""
    pairs: list[tuple[str, Any]] = []
    for name, value in config.items():
        if isinstance(value, dict) and value:
            pairs += _flat(value, f"{prefix}{name}.")
        else:
            pairs.append((f"{prefix}{name}", value))
    return pairs


def _text(value: object) -> str:
    return "none" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def described(run: Run) -> Mapping[str, Any]:
    """What makes a run what it is: workload, configuration, where its step times come from."""
    header = run.header
    parts: Sequence[str] = ("workload", "config", "executor")
    named = {part: header[part] for part in parts if isinstance(header.get(part), dict)}
    return {
        **named,
        "step_time_source": header.get("step_time_source"),
        "versions": header.get("versions", {}),
    }
