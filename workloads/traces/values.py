"""Single values of foreign rows: checked, converted, and refused with field, value and what is allowed."""

from __future__ import annotations

import math
from typing import Any

from servetwin.workloads.checks import is_int
from servetwin.workloads.spec import MAX_TIME_S, MAX_TOKENS
from servetwin.workloads.traces.options import NS_PER, TimeUnit

LONGEST_VALUE = 80
"""Characters of a damaged value that a message shows."""
MAX_TIME_NS = int(MAX_TIME_S) * 1_000_000_000


class Damage(Exception):
    """A row that says something impossible."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} {shown(value)}: must be {allowed}")
        self.field = field


class Useless(Exception):
    """A whole row that nothing can be replayed from; the reason is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def shown(value: object) -> str:
    """A value for a message, shortened."""
    if isinstance(value, int) and value.bit_length() > 300:
        # Python refuses to print numbers of thousands of digits.
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} of too many levels to show"
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + " ..."


def count(field: str, value: object, at_least: int = 0) -> int:
    """A number of tokens: whole (12.0 is), `at_least` or more."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_TOKENS:
        value = int(value)
    if not isinstance(value, int) or not is_int(value) or not at_least <= value <= MAX_TOKENS:
        raise Damage(field, value, f"a whole number from {at_least} to {MAX_TOKENS:,}")
    return value


def time_ns(field: str, value: object, unit: TimeUnit) -> int:
    """A point in time or a duration in ns; never negative, finite."""
    if isinstance(value, float) and math.isfinite(value) and 0 <= value * NS_PER[unit] <= MAX_TIME_NS:
        return round(value * NS_PER[unit])
    if isinstance(value, int) and is_int(value) and 0 <= value * NS_PER[unit] <= MAX_TIME_NS:
        return value * NS_PER[unit]
    if isinstance(value, (int, float)) and 0 < value < math.inf:
        raise Damage(
            field,
            value,
            f"a time of at most {MAX_TIME_NS // NS_PER[unit]:,} {unit} (--time-unit: another unit)",
        )
    raise Damage(field, value, f"a finite time in {unit}, 0 or more")


def text(field: str, value: object) -> str:
    """A name: a text, not empty, or a whole number."""
    if isinstance(value, str) and value:
        return value
    if is_int(value):
        return str(value)
    raise Damage(field, value, "a text, not empty")


def ids(field: str, value: object) -> list[int]:
    """A list of ids of any size, negative ones too."""
    # By the set of types: there may be 100,000.
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        return value
    raise Damage(field, value, "a list of whole numbers")


def token_ids(field: str, value: object) -> list[int]:
    """A list of token ids."""
    found = ids(field, value)
    if found and not 0 <= min(found) <= max(found) < 2**31:
        raise Damage(field, value, "a list of token ids, 0 to 2147483647")
    return found


class Fields:
    """One JSON object, read field by field. A field that is null counts as absent."""

    __slots__ = ("row",)

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def get(self, *names: str) -> tuple[str, Any]:
        """The first of these spellings that the row has, with its value; the value None where it has none."""
        for name in names:
            if self.row.get(name) is not None:
                return name, self.row[name]
        return names[0], None

    def has(self, *names: str) -> bool:
        return self.get(*names)[1] is not None

    def count(self, *names: str, at_least: int = 0) -> int:
        return count(*self.get(*names), at_least=at_least)

    def time_ns(self, *names: str, unit: TimeUnit) -> int:
        return time_ns(*self.get(*names), unit=unit)

    def text(self, *names: str) -> str:
        return text(*self.get(*names))

    def text_or_none(self, *names: str) -> str | None:
        name, value = self.get(*names)
        return None if value is None else text(name, value)

    def ids(self, *names: str) -> list[int]:
        return ids(*self.get(*names))

    def token_ids(self, *names: str) -> list[int]:
        return token_ids(*self.get(*names))

    def objects(self, *names: str) -> list[Fields]:
        """A list of JSON objects."""
        name, value = self.get(*names)
        if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
            raise Damage(name, value, "a list of JSON objects")
        return [Fields(v) for v in value]
