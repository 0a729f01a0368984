"""`servetwin export prometheus`: a run as metrics under vLLM's names."""

from __future__ import annotations

from typing import Annotated, Literal

from servetwin.sim.commands.export_flags import CONTENT, FileFlags, RunPath, opened, wrote
from servetwin.sim.commands.flag_kinds import flag
from servetwin.sim.commands.metrics_flags import DEFAULT, MetricsFlags


def prometheus(
    run: RunPath,
    /,
    *,
    file: FileFlags,
    at_s: Annotated[
        float | None,
        flag(CONTENT, "As of this simulated second, 0 or more (default: when all requests have ended)."),
    ] = None,
    format: Annotated[
        Literal["text", "openmetrics"], flag(CONTENT, "Text format of Prometheus, or OpenMetrics.")
    ] = "text",
    metrics: MetricsFlags = DEFAULT,
) -> int:
    """Write it; the help is that of `export.COMMANDS`."""
    from servetwin.sim.commands.errors import UsageError
    from servetwin.sim.commands.metrics_flags import metrics_of
    from servetwin.sim.export.prometheus import AT_THE_END, openmetrics_text, prometheus_text
    from servetwin.sim.export.writing import check_file, write

    if at_s is not None and not 0 <= at_s < float("inf"):
        raise UsageError(f"--at-s {at_s}: must be 0 or more, and finite")
    check_file(file.out, overwrite=file.overwrite)
    found = metrics_of(opened(run), metrics)
    at_ns = AT_THE_END if at_s is None else at_s * 1e9
    text = prometheus_text if format == "text" else openmetrics_text
    write(file.out, text(found, at_ns), overwrite=file.overwrite)
    return wrote(
        file, f"{sum(1 for _ in found.families())} metrics; not modelled: {', '.join(found.not_modelled)}"
    )
