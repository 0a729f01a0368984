"""What a load costs, from prices that the user gives: none is known here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from servetwin.sim.cards import find_card
from servetwin.sim.commands.errors import UsageError

ANY_CARD = ""
"""Key of a price that was given without a name."""
Prices = Mapping[str, float]
"""Name of a card -> USD per GPU and hour."""


@dataclass(frozen=True)
class Cost:
    """Of a fleet at a load."""

    gpus: float
    usd_per_gpu_hour: float | None
    """None: no price was given for this card; then whatever is in USD is None, too."""
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float

    @property
    def usd_per_hour(self) -> float | None:
        return None if self.usd_per_gpu_hour is None else self.gpus * self.usd_per_gpu_hour

    def gpu_hours_per_million(self, per_s: float) -> float | None:
        """GPU-hours for a million of what comes at this rate."""
        return None if per_s <= 0 else self.gpus * 1e6 / (3600 * per_s)

    def usd_per_million(self, per_s: float) -> float | None:
        hours = self.gpu_hours_per_million(per_s)
        return None if hours is None or self.usd_per_gpu_hour is None else hours * self.usd_per_gpu_hour

    def to_json(self) -> dict[str, Any]:
        return {
            "gpus": self.gpus,
            "usd_per_gpu_hour": self.usd_per_gpu_hour,
            "usd_per_hour": self.usd_per_hour,
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": self.total_tokens_per_s,
            "gpu_hours_per_million_output_tokens": self.gpu_hours_per_million(self.output_tokens_per_s),
            "gpu_hours_per_million_requests": self.gpu_hours_per_million(self.requests_per_s),
            "usd_per_million_output_tokens": self.usd_per_million(self.output_tokens_per_s),
            "usd_per_million_tokens": self.usd_per_million(self.total_tokens_per_s),
        }


def read_prices(texts: Iterable[str]) -> dict[str, float]:
    """From `NAME=USD` (a card by any of its names) and `USD` (every card). Raises UsageError."""
    prices: dict[str, float] = {}
    for text in texts:
        name, _, price = text.rpartition("=")
        key = find_card(name).name if name else ANY_CARD
        try:
            value = float(price)
        except ValueError as e:
            raise UsageError(
                f"--price {text!r} must be NAME=USD per GPU and hour, for example H100=2.5"
            ) from e
        if not 0 <= value < inf:
            raise UsageError(f"--price {text!r}: the price must be 0 or more, in USD per GPU and hour")
        if key in prices:
            raise UsageError(f"--price {text!r}: {key or 'every card'} has a price already, {prices[key]:g}")
        prices[key] = value
    return prices


def price_of(prices: Prices, gpu: str | None) -> float | None:
    """Of a card by any of its names; a price without a name is that of every card without one of its own."""
    named = None if gpu is None else prices.get(find_card(gpu).name)
    return prices.get(ANY_CARD) if named is None else named


def unused_prices(prices: Prices, gpus: Iterable[str | None]) -> list[str]:
    """Cards with a price that none of these configurations has."""
    asked = {find_card(gpu).name for gpu in gpus if gpu is not None}
    return [name for name in prices if name not in {ANY_CARD, *asked}]
