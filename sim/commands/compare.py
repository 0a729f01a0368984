"""`servetwin compare`: what differs between two runs, how sure that is, and whether it is too much."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from servetwin.sim.commands.flag_kinds import count, flag, switch
from servetwin.sim.definitions import DEFINITIONS

COMPARISON = Group("Comparison", sort_key=0)


def compare(
    a: Annotated[Path, Parameter(help="Run folder to compare with.")],
    b: Annotated[Path, Parameter(help="Run folder that is judged: deltas are B - A, percents are of A.")],
    /,
    *,
    fail_on: Annotated[
        tuple[str, ...],
        switch(
            COMPARISON,
            "NAME:LIMIT, several times; exit code 4 when one is exceeded. +5%: B may lie 5 % above A at most; -3%: 3 % "
            "below at most; +10ms (us, ms, s) for times; a number alone is in the figure's own unit. NAME is p99_ttft, "
            "mean_tpot, median_e2el ... (mean, median, std, max or pN of ttft, tpot, itl, e2el, queue, prefill, decode "
            "and inference) or a figure of the run: request_throughput, preemptions, ...; a wrong name "
            "lists all.",
        ),
    ] = (),
    metric_defs: Annotated[
        str, flag(COMPARISON, f"Whose definitions of the latencies: {', '.join(DEFINITIONS)}.")
    ] = "vllm-bench",
    confidence: Annotated[
        float, flag(COMPARISON, "Confidence of the intervals in percent, above 0 and below 100.")
    ] = 95.0,
    resamples: Annotated[int, count(COMPARISON, "Resamples of the bootstrap, 100 or more.")] = 1000,
    seed: Annotated[int, count(COMPARISON, "Of the bootstrap; the same seed gives the same intervals.")] = 0,
    json: Annotated[bool, switch(COMPARISON, "Print one JSON object.")] = False,
) -> int:
    """Compare two runs request by request; the help is `cli.DETAILS`."""
    from servetwin.sim.commands.comparing import carry_out

    return carry_out(
        a,
        b,
        fail_on=fail_on,
        metric_defs=metric_defs,
        confidence=confidence,
        resamples=resamples,
        seed=seed,
        json=json,
    )
