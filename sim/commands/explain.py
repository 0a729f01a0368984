"""`servetwin explain`: the life of one request in words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def explain(
    request_id: Annotated[str, Parameter(help="A request of the run.")],
    /,
    *,
    run: Annotated[Path, Parameter(help="Run folder, as written by run --out; it may be still growing.")],
    json: Annotated[
        bool,
        Parameter(negative=(), help="Print the story as one JSON object: instants in s, durations in ms."),
    ] = False,
) -> int:
    """Tell the life of one request: what happened when, why it waited, where its time went.

    Instants are seconds since the start of the run, on its own clock; TTFT, TPOT and E2E stand with their formulas.
    """
    from rich.console import Console

    from servetwin.sim.commands.errors import UsageError
    from servetwin.sim.commands.show import print_json
    from servetwin.sim.config import EngineConfig
    from servetwin.sim.explain import explain as tell
    from servetwin.sim.explain_text import lines
    from servetwin.sim.runs import read_run

    log = read_run(run)
    if "engine" not in log.config:
        raise UsageError(f"{run} was not written by a scheduler: its run.json has no engine configuration")
    story = tell(log, EngineConfig.model_validate(log.config["engine"]), request_id, log.cut_short)
    if json:
        print_json(story.to_json())
    else:
        console = Console()
        for line in lines(story):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    return 0
