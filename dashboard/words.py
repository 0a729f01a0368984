"""Numbers as people read them."""

from __future__ import annotations

NO_DATA = "no data"


def quantity(value: float | None, unit: str) -> str:
    """About four digits and the unit."""
    if value is None or value != value:
        return NO_DATA
    return f"{value:,.0f}{unit}" if abs(value) >= 1000 else f"{value:,.4g}{unit}"


def percent(value: float | None) -> str:
    return NO_DATA if value is None or value != value else f"{value:.1%}"


def counted(count: int, noun: str) -> str:
    """A number with its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
