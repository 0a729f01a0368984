"""The kinds of flags: a group of the help, what it says, and the names where they are not the parameter's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cyclopts import Group, Parameter, Token

from servetwin.sim.human_readable import human_readable_int


def whole_number(type_: Any, tokens: Sequence[Token]) -> int:
    """An integer as vLLM's parser takes it: 32k = 32,000; 32K = 32,768; 25.6k is legal, 25.6K is not."""
    return human_readable_int(tokens[0].value)


def flag(group: Group, text: str, *names: str) -> Parameter:
    """With a value, or a bool with its `--no-` twin."""
    return Parameter(names, group=group, help=text)


def count(group: Group, text: str, *names: str) -> Parameter:
    """With a whole number."""
    return Parameter(names, group=group, help=text, converter=whole_number)


def numbers(group: Group, text: str) -> Parameter:
    """One integer or more behind one flag."""
    return Parameter(group=group, help=text, consume_multiple=True, negative=())


def switch(group: Group, text: str) -> Parameter:
    """That can only be given, without a `--no-` twin."""
    return Parameter(group=group, help=text, negative=())
