"""`servetwin trace presets`: the synthetic workloads that have names."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter


def presets(
    *,
    json: Annotated[bool, Parameter(negative=(), help="Print them as one JSON object.")] = False,
) -> int:
    """List the synthetic workloads that have names; `servetwin run NAME` serves one."""
    from rich.table import Table

    from servetwin.sim.commands.show import print_json, results_console
    from servetwin.workloads import PRESETS

    if json:
        described = (
            {"name": p.name, "description": p.description, "rate_per_s": p.rate_per_s, "requests": p.n}
            for p in PRESETS.values()
        )
        print_json({"presets": list(described)})
        return 0
    table = Table("name", "description")
    for preset in PRESETS.values():
        table.add_row(preset.name, preset.description)
    results_console().print(table)
    return 0
