"""The fields that decide a simulated run, by name, whatever groups of flags they stand in.

They are found in the signature of `servetwin run`: a group of flags that it takes can at once be set by name here, and
a value is read and checked as the command line does it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from cyclopts import App, CycloptsError, Parameter

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flag_names import spelled
from servetwin.sim.commands.flags import RunFlags, SimulationFlags
from servetwin.sim.commands.run import run


class RunField(NamedTuple):
    """One field of one group."""

    group: str
    """The parameter of `run` that its group is."""
    annotation: Any
    """Type and flag, as cyclopts takes them."""
    default: Any


@cache
def groups() -> Mapping[str, Any]:
    """Parameter of `run` -> its group of flags at their defaults; of `flags`, those that make a run what it is."""
    parameters = inspect.signature(run).parameters.values()
    defaults = {p.name: p.default for p in parameters if is_dataclass(p.default)}
    return {
        name: SimulationFlags() if isinstance(default, RunFlags) else default
        for name, default in defaults.items()
    }


@cache
def run_fields() -> Mapping[str, RunField]:
    """Every field by its name, in the order of the groups."""
    found: dict[str, RunField] = {}
    for group, default in groups().items():
        hints = get_type_hints(type(default), include_extras=True)
        for f in fields(default):
            if f.name in found:
                raise AssertionError(f"{f.name} is a field of two groups: {found[f.name].group} and {group}")
            found[f.name] = RunField(group, hints[f.name], getattr(default, f.name))
    return found


def run_field(name: str) -> RunField:
    """Raises UsageError for a name that no field has, with those that come near."""
    found = run_fields().get(name)
    if found is None:
        near = get_close_matches(name, run_fields(), n=3) or get_close_matches(name, run_fields(), 3, 0.4)
        raise UsageError(
            f"{name!r} is no field of a run; near are: {', '.join(near)}"
            if near
            else f"{name!r} is no field of a run; `servetwin sweep --help` shows all, with - for _"
        )
    return found


def parsed(name: str, value: Any) -> Any:
    """The value of a field, from a text as typed or from a Python value. Raises UsageError like the command line."""
    one = run_field(name)
    if value is None or value == ():
        if value != one.default and not (value is None and takes_none(name)):
            raise UsageError(f"{spelled(name)}: must have a value, got {value!r}")
        return value
    command = _command_for(name)
    try:
        return command(
            _tokens(name, value), exit_on_error=False, print_error=False, result_action="return_value"
        )
    except CycloptsError as e:
        raise UsageError(" ".join(str(e).split())) from e


def plain(value: Any) -> Any:
    """A field's value as a JSON value, which `parsed` takes back."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def takes_none(name: str) -> bool:
    """The field may be without a value."""
    return type(None) in kinds_of(name)


def kinds_of(name: str) -> set[Any]:
    """The types that the value of a field may have."""
    kind = _type_of(name)
    return {*get_args(kind)} if get_origin(kind) in (Union, UnionType) else {kind}


def is_whole(name: str) -> bool:
    """Its numbers are whole ones."""
    return float not in kinds_of(name)


def _type_of(name: str) -> Any:
    annotation = run_field(name).annotation
    return annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation


def _notes(name: str) -> tuple[Any, ...]:
    notes: tuple[Any, ...] = getattr(run_field(name).annotation, "__metadata__", ())
    return notes


def _is_many(name: str) -> bool:
    """It holds a tuple."""
    return any(get_origin(kind) is tuple for kind in kinds_of(name))


def _tokens(name: str, value: Any) -> list[str]:
    flag = spelled(name)
    if _is_many(name):
        items: Iterable[Any] = value.split() if isinstance(value, str) else value
        texts = [_text(item) for item in items]
        if _takes_many(name):
            return [flag, *texts]
        return [f"{flag}={text}" for text in texts]
    return [f"{flag}={_text(value)}"]


def _takes_many(name: str) -> bool:
    """One flag takes several values (others are given several times)."""
    return any(isinstance(note, Parameter) and note.consume_multiple for note in _notes(name))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


@cache
def _command_for(name: str) -> App:
    """A command line with this flag alone, which returns its value."""
    one = run_field(name)
    # A field without a flag comes from a `vllm serve` line; it is read by its type.
    hidden = any(isinstance(note, Parameter) and note.parse is False for note in _notes(name))
    app = App(name="servetwin", help_flags=[], version_flags=[])

    def take(**values: Any) -> Any:
        return values.get(name, one.default)

    alone = inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=one.default,
        annotation=_type_of(name) if hidden else one.annotation,
    )
    take.__signature__ = inspect.Signature([alone])  # type: ignore[attr-defined]
    app.default(take)
    return app
