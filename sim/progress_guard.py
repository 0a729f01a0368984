"""Tells a slow stretch from a livelock: requests that preempt each other for ever, without a token coming out.

vLLM 0.22.0 can fall into one, for example with priority scheduling, equal (priority, arrival) and the full-sequence
gate off: each request in turn takes the other's blocks before either has computed its known tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from servetwin.sim.records import EngineCoreOutputs, Frame
from servetwin.sim.request import Request

FREE_TOKENS = 20_000
"""Tokens that may always be computed without an output before anybody looks closer."""
ROUNDS = 100
"""How often over everything that is known may be computed without an output, an arrival or an end."""


class StalledError(ValueError):
    """Requests are left, and nothing will ever come out of them; the message says why and names some."""


class ProgressGuard:
    """Counts the tokens computed since the last sign of progress."""

    def __init__(self) -> None:
        self._tokens = 0
        self._preemptions = 0
        self._limit = FREE_TOKENS

    def progress(self) -> None:
        """Something came in, came out or ended."""
        self._tokens = self._preemptions = 0
        self._limit = FREE_TOKENS

    def step(self, frame: Frame, outputs: EngineCoreOutputs, unfinished: Iterable[Request]) -> None:
        """Takes note of a step. Raises StalledError when the engine turns in circles."""
        if outputs.new_token_ids:
            self.progress()
            return
        self.no_output(
            frame.step, frame.plan.total_num_scheduled_tokens, len(frame.record.preempted), unfinished
        )

    def no_output(
        self, step: int, num_tokens: int, num_preemptions: int, unfinished: Iterable[Request]
    ) -> None:
        """Takes note of a step of so many tokens that brought nobody one. Raises as `step` does."""
        self._tokens += num_tokens
        self._preemptions += num_preemptions
        if self._tokens <= self._limit or not self._preemptions:
            return
        requests = list(unfinished)
        self._limit = max(FREE_TOKENS, ROUNDS * sum(r.num_tokens for r in requests))
        if self._tokens > self._limit:
            raise StalledError(
                f"livelock at step {step}: {self._tokens} tokens and {self._preemptions} preemptions since the "
                f"last output; preempted again and again: {_some(requests)}. vLLM 0.22.0 would do so, "
                "too. More blocks, the full-sequence gate (--scheduler-reserve-full-isl) or fewer seats avoid it"
            )


def _some(requests: list[Request], count: int = 5) -> str:
    names = ", ".join(r.request_id for r in requests[:count])
    return names + (f" and {len(requests) - count} more" if len(requests) > count else "")
