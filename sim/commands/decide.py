"""`servetwin decide`: the scheduler's decisions for a scenario."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def decide(
    scenario: Annotated[
        Path, Parameter(help="Scenario file (JSON): engine limits, requests, arrival steps or times.")
    ],
    /,
    *,
    output: Annotated[
        Path | None, Parameter(name=["--output", "-o"], help="File to write instead of stdout.")
    ] = None,
    vllm_compat: Annotated[
        str, Parameter(help="0.22:exact (0.22.0 to the letter) or 0.22:safe (its known defects corrected).")
    ] = "0.22:exact",
) -> int:
    """Print what the scheduler decides in every engine iteration, one JSON line each.

    The tokens that requests produce are a hash of their name and index, so the lines depend on nothing but the file.
    A scenario that can never run is refused (exit 2), and nothing is written.

    An item of `sched` is [id, N new / C running / R resumed, tokens given, tokens computed before, block ids (N and R:
    the whole table; C: those added now, or null), output tokens known]; *_crc are CRC-32 of ids joined by commas.
    Scheduling is synchronous unless the scenario says async_scheduling.
    """
    import json
    import sys

    from servetwin.sim.commands.compat import rules_of
    from servetwin.sim.decide import decide as decisions
    from servetwin.sim.scenario import read_scenario

    rules = rules_of(vllm_compat)
    lines = [
        json.dumps(line, separators=(",", ":")) + "\n" for line in decisions(read_scenario(scenario), rules)
    ]
    if output is None:
        sys.stdout.writelines(lines)
    else:
        output.write_text("".join(lines), encoding="ascii")
    return 0
