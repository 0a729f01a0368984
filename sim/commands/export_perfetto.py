"""`servetwin export perfetto`: a run as a trace that Perfetto opens."""

from __future__ import annotations

from typing import Annotated

from servetwin.sim.commands.export_flags import CONTENT, FileFlags, RunPath, opened, wrote
from servetwin.sim.commands.flag_kinds import count, flag


def perfetto(
    run: RunPath,
    /,
    *,
    file: FileFlags,
    from_s: Annotated[
        float | None,
        flag(CONTENT, "Only what happens from this simulated second on (default: the beginning)."),
    ] = None,
    to_s: Annotated[
        float | None, flag(CONTENT, "Only what happens until this simulated second (default: the end).")
    ] = None,
    max_events: Annotated[
        int,
        count(
            CONTENT,
            "Stop at the second at which there are about so many events, and say so (k, m are taken).",
        ),
    ] = 1_000_000,
) -> int:
    """Write it; the help is that of `export.COMMANDS`."""
    from servetwin.sim.commands.errors import UsageError
    from servetwin.sim.commands.show import say
    from servetwin.sim.export.perfetto import perfetto_json, window_of
    from servetwin.sim.export.writing import check_file, compressed, write

    for name, value in (("--from-s", from_s), ("--to-s", to_s)):
        if value is not None and not 0 <= value < float("inf"):
            raise UsageError(f"{name} {value}: must be 0 or more, and finite")
    if from_s is not None and to_s is not None and to_s <= from_s:
        raise UsageError(f"--to-s {to_s}: must be after --from-s {from_s}")
    if max_events < 1:
        raise UsageError(f"--max-events {max_events}: must be 1 or more")
    check_file(file.out, overwrite=file.overwrite)
    log = opened(run)
    window, capped = window_of(log, from_s, to_s, max_events)
    if capped:
        say(
            f"note: there are more than {max_events:,} events: written is what happens until "
            f"{window.to_ns / 1e9:,.3f} s; --from-s and --to-s choose another window, --max-events allows more"
        )
    pieces = perfetto_json(log, window)
    write(file.out, compressed(pieces) if file.out.endswith(".gz") else pieces, overwrite=file.overwrite)
    return wrote(file, "open it at ui.perfetto.dev")
