"""Fair sharing between clients: whoever was served least comes first (a virtual token counter per client)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from servetwin.sim.policy import FCFS
from servetwin.sim.request import Request

PROMPT_TOKEN_WEIGHT, OUTPUT_TOKEN_WEIGHT = 1, 2
"""What a token costs its client: an output token occupies the engine about twice as much as one of a prompt."""


class FairShare(FCFS):
    """Requests of the client with the smallest counter first, in order of arrival among one client's.

    A counter grows by the weighted tokens computed for its client; what is computed again after a preemption is
    not charged. A client that comes back after having had nothing in the engine starts no lower than the least
    served of the others, so that idling earns no credit. Requests without a `client_id` share one counter.
    """

    dynamic_order = True

    def __init__(self) -> None:
        self._served: Counter[str | None] = Counter()
        self._unfinished: Counter[str | None] = Counter()

    def order_key(self, request: Request, now: int) -> tuple[Any, ...]:
        return (self._served[request.client_id], request.arrival_ns, request.request_id)

    def choose_victim(self, running: Sequence[Request], now: int) -> Request:
        """The latest request of the client that was served most."""
        return max(running, key=lambda r: self.order_key(r, now))

    def on_queued(self, request: Request, now: int) -> None:
        client = request.client_id
        if not self._unfinished[client] and (others := [c for c, n in self._unfinished.items() if n]):
            self._served[client] = max(self._served[client], min(self._served[c] for c in others))
        self._unfinished[client] += 1

    def on_scheduled(self, request: Request, num_tokens: int, now: int) -> None:
        first = max(request.num_computed_tokens, request.num_tokens_ever_computed)
        end = request.num_computed_tokens + num_tokens
        in_prompt = max(min(end, request.num_prompt_tokens) - first, 0)
        outputs = max(end - max(first, request.num_prompt_tokens), 0)
        self._served[request.client_id] += PROMPT_TOKEN_WEIGHT * in_prompt + OUTPUT_TOKEN_WEIGHT * outputs

    def on_ended(self, request: Request) -> None:
        self._unfinished[request.client_id] -= 1
