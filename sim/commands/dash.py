"""`servetwin dash`: runs in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from servetwin.sim.commands.flag_kinds import whole_number

DEFAULT_FOLDER = Path("runs")


def dash(
    *folders: Annotated[
        Path,
        Parameter(name="FOLDER", help="Run folders, or folders with runs below them (default: runs/)."),
    ],
    port: Annotated[int, Parameter(converter=whole_number, help="Port on the loopback interface.")] = 8501,
) -> int:
    """Show runs in the browser: queue and KV cache over time, the life of a request, latencies, who holds which block.

    A run that is still being written is followed. Serves on 127.0.0.1 only; Ctrl-C or SIGTERM ends it.
    """
    from servetwin.sim.commands.errors import UsageError
    from servetwin.sim.plugins import load

    if not folders and not DEFAULT_FOLDER.is_dir():
        raise UsageError(
            "dash needs a folder with runs: there is no runs/ in the current directory; servetwin dash FOLDER"
        )
    serve = load("servetwin.dashboards", "streamlit")
    code: int = serve([*(folders or (DEFAULT_FOLDER,))], port)
    return code
