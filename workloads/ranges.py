"""Checks of numbers against a range; each raises WorkloadError with name, value and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence

from servetwin.workloads.checks import check_positive
from servetwin.workloads.spec import WorkloadError


def check_between(name: str, value: float, low: float, high: float, hint: str = "") -> None:
    """`value` must be a number of [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise WorkloadError(f"{name} {value!r}: must be between {low:g} and {high:g}{hint}")


def check_each_positive(name: str, values: Sequence[float]) -> None:
    """`values` must be finite numbers above 0, at least one."""
    if not values:
        raise WorkloadError(f"{name} {values!r}: must hold at least one number above 0")
    for i, value in enumerate(values):
        check_positive(f"{name}[{i}]", value)
