"""Shortest job first on a predicted output length, with ageing so that nobody starves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servetwin.sim.policy import FCFS
from servetwin.sim.request import Request
from servetwin.sim.units import NS_PER_S

AGEING_TOKENS_PER_S = 50
"""A request that has waited one second longer counts as this many tokens shorter."""


class ShortestJobFirst(FCFS):
    """Least predicted output left first; waiting makes a request count as shorter.

    The length is the request's `predicted_output_tokens`, or its `max_tokens` where nobody predicted one (in a
    replayed trace that is the true length: an oracle). Since all requests age at one rate, their order does not
    change while they wait: a request can be overtaken only by those that arrive at most
    `its length / AGEING_TOKENS_PER_S` seconds after it.
    """

    leaps = True

    def order_key(self, request: Request, now: int) -> tuple[Any, ...]:
        predicted = request.predicted_output_tokens or request.max_tokens
        left = max(predicted - request.num_output_tokens, 1)
        return (left * NS_PER_S + AGEING_TOKENS_PER_S * request.arrival_ns, request.request_id)

    def choose_victim(self, running: Sequence[Request], now: int) -> Request:
        """The one that would be admitted last."""
        return max(running, key=lambda r: self.order_key(r, now))
