"""Checks of arguments; each raises ArgumentError with name, value and what is allowed."""

from __future__ import annotations

import math

from servetwin.workloads.spec import MAX_REQUESTS, ArgumentError


def is_int(value: object) -> bool:
    """True for a whole number; a bool is not one, although Python says so."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_count(name: str, value: int, at_least: int = 1) -> None:
    """`value` must be a whole number, `at_least` or more."""
    if not is_int(value) or value < at_least:
        raise ArgumentError(name, f"{value!r}: must be a whole number, {at_least} or more")


def check_requests(name: str, value: int) -> None:
    """`value` must be a number of requests that can be made up."""
    check_count(name, value)
    if value > MAX_REQUESTS:
        raise ArgumentError(name, f"{value!r}: must be at most {MAX_REQUESTS:,} requests")


def check_positive(name: str, value: float, hint: str = "") -> None:
    """`value` must be a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ArgumentError(name, f"{value!r}: must be a finite number above 0{hint}")


def check_above_0(name: str, value: float) -> None:
    """`value` must be a number above 0, which may be infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ArgumentError(name, f"{value!r}: must be a number above 0, or infinite")


def check_seed(value: int | None) -> None:
    """`value` must be a whole number, 0 or more, or None."""
    if value is not None:
        check_count("seed", value, at_least=0)


def check_between(name: str, value: float, low: float, high: float, hint: str = "") -> None:
    """`value` must be a number of [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ArgumentError(name, f"{value!r}: must be between {low:g} and {high:g}{hint}")
