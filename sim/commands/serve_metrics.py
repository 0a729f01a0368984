"""`servetwin serve-metrics`: a run replayed as the /metrics endpoint of a running engine."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Group

from servetwin.sim.commands.export_flags import RunPath
from servetwin.sim.commands.flag_kinds import count, flag, switch
from servetwin.sim.commands.metrics_flags import DEFAULT, MetricsFlags

REPLAY = Group("Replay", sort_key=0)


def serve_metrics(
    run: RunPath,
    /,
    *,
    port: Annotated[
        int, count(REPLAY, "Port on the loopback interface (127.0.0.1); 0: any that is free, which is said.")
    ] = 8000,
    speed: Annotated[
        float, flag(REPLAY, "Simulated seconds per second of the wall clock, above 0; 60: a minute a second.")
    ] = 1.0,
    from_s: Annotated[float, flag(REPLAY, "Simulated second to begin with, 0 or more.")] = 0.0,
    loop: Annotated[
        bool,
        switch(
            REPLAY,
            "Begin again at the end, with counters at 0 as after a restart (default: the values of the end stay).",
        ),
    ] = False,
    metrics: MetricsFlags = DEFAULT,
) -> int:
    """Serve it; the help is `cli.DETAILS`."""
    from servetwin.sim.commands.serving_metrics import carry_out

    return carry_out(run, port=port, speed=speed, from_s=from_s, loop=loop, flags=metrics)
