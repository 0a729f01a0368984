"""How `--help` is laid out: cyclopts' own panels, with room for the longest flag, which must never be broken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cyclopts.help import DefaultFormatter

if TYPE_CHECKING:
    from cyclopts.help import ColumnSpec

NAME_WIDTH = 34
"""Characters: `--no-scheduler-reserve-full-isl` and a margin."""


def help_formatter() -> DefaultFormatter:
    return DefaultFormatter(column_specs=_columns)


def _columns(console: Any, options: Any, entries: Sequence[Any]) -> tuple[ColumnSpec, ...]:
    # Imported here: only a call for help needs them.
    from cyclopts.help import ColumnSpec, NameRenderer
    from cyclopts.help.specs import AsteriskColumn, DescriptionColumn

    name = ColumnSpec(
        renderer=NameRenderer(max_width=NAME_WIDTH), style="cyclopts.name", max_width=NAME_WIDTH
    )
    required = (AsteriskColumn,) if any(entry.required for entry in entries) else ()
    return (*required, name, DescriptionColumn)
