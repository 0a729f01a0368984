"""`servetwin demo`: the whole loop in one command, on a CPU, with a small trained model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from servetwin.sim.commands.flag_kinds import whole_number


def demo(
    *,
    out: Annotated[
        Path, Parameter(help="Folder to write the run to; an earlier run in it is replaced.")
    ] = Path("runs/demo"),
    models: Annotated[
        Path | None, Parameter(help="Folder to keep the converted model in (default: the user's cache).")
    ] = None,
    temperature: Annotated[float, Parameter(help="0 is greedy.")] = 0.7,
    seed: Annotated[
        int, Parameter(converter=whole_number, help="Root of the sampling's random streams.")
    ] = 0,
) -> int:
    """Run a small trained model on a shipped workload: the whole loop in one command.

    96 requests arrive within about three seconds; the scheduler packs them into steps, the model (852,608 parameters,
    from the package glassllm) runs each step on the CPU with a paged KV cache that is too small for all of them, and
    the measured times move the simulated clock.
    """
    from servetwin.sim.commands.demonstrating import DemoRequest, carry_out

    return carry_out(DemoRequest(out, models or cache_folder() / "models", temperature, seed))


def cache_folder() -> Path:
    """Where this user's caches are kept."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "servetwin"
