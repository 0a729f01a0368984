"""What a reader of a run's figures must know before believing them, as sentences; from the run folder alone."""

from __future__ import annotations

from typing import Any

from servetwin.sim.runs import Run

STATES = {
    "running": "This run is still going on: figures cover what it has written so far.",
    "partial": "This run was cut short: figures cover what it had written.",
    "failed": "This run failed: figures cover what it had written.",
}
INTERRUPTED = "This run was interrupted: figures cover what it had written."
EXECUTED = "Recorded plans were executed here without a scheduler: there are steps, but no requests."


def caveats(run: Run, summary: dict[str, Any]) -> list[str]:
    """Most important first: state, where step times come from, what was assumed, what the figures leave out."""
    return [
        *([note] if (note := state_note(run)) else []),
        *_step_times(run, summary["servetwin"]),
        *summary["servetwin"].get("notes", ()),
        *(f"Assumed: {text}." for text in run.header.get("assumed", ())),
        *_workload(run.header.get("workload", {})),
        *_left_out(summary["servetwin"]),
    ]


def state_note(run: Run) -> str | None:
    """What a run that is not complete lacks; None for one that is."""
    if run.state == "complete":
        return None
    if run.reason == "interrupted":
        return INTERRUPTED
    return STATES[run.state] + (f" Reason: {run.reason}." if run.reason else "")


def _step_times(run: Run, ours: dict[str, Any]) -> list[str]:
    source = str(run.header.get("step_time_source", run.config.get("executor", "unknown")))
    found = []
    if "execute" in run.config:
        found.append(EXECUTED)
    elif run.config.get("live"):
        found.append(
            "Served on the wall clock by the real executor: times are those of the machine it ran on."
        )
    elif source == "torch":
        found.append(
            "Steps were run for real and measured on the machine they ran on; idle time was skipped."
        )
    elif source == "constant":
        found.append(
            "Every step took the same time, which was chosen: latencies show the scheduling, not a machine."
        )
    elif source == "roofline":
        found.append("Step times are an estimate from published peaks, not a measurement.")
    else:
        found.append(f"Step times come from {source}; they were not measured in this run.")
    if outside := ours["predicted_outside_steps"]:
        found.append(
            f"{outside:,} of {ours['steps']:,} steps lie outside the measured region: their times are guesses."
        )
    return found


def _workload(about: dict[str, Any]) -> list[str]:
    found = [str(text) for key in ("notes", "warnings") for text in about.get(key, ())]
    if dropped := about.get("rows_dropped"):
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        found.append(f"Rows of the trace that were left out: {reasons}.")
    return found


def _left_out(ours: dict[str, Any]) -> list[str]:
    ended = {reason: n for reason, n in ours["requests"].items() if n and reason not in ("length", "stop")}
    if not ended:
        return []
    counts = ", ".join(f"{n:,} {reason}" for reason, n in ended.items())
    return [f"Latencies and throughput cover completed requests only; left out: {counts}."]
