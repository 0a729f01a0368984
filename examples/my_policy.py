"""A scheduling policy of one's own: short prompts first, and a reserve of KV blocks for those who run already.

    servetwin run TRACE --executor constant --step-time-s 0.02 --scheduling-policy my_policy:ShortPromptFirst

Run it from this folder (or put the folder on PYTHONPATH), and have it checked before you trust it:

    python -c "from servetwin.sim.testing import check_policy; print(check_policy('my_policy:ShortPromptFirst'))"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servetwin.sim.policy import FCFS, AdmissionState
from servetwin.sim.request import Request

AGEING_TOKENS_PER_S = 200
"""One second of waiting makes a prompt count as this many tokens shorter, so that long ones come in at last."""
RESERVE_BLOCKS_PER_REQUEST = 1
"""Admission leaves a free block for every request that runs: each will soon need its next one."""


class ShortPromptFirst(FCFS):
    """The three decisions of a policy; what is not written here is inherited from first come, first served."""

    def order_key(self, request: Request, now: int) -> tuple[Any, ...]:
        """Smallest first. All requests age alike, so the order of two of them never changes while they wait."""
        aged = request.num_prompt_tokens * 1_000_000_000 + AGEING_TOKENS_PER_S * request.arrival_ns
        return (aged, request.request_id)

    def choose_victim(self, running: Sequence[Request], now: int) -> Request:
        """Whoever would have been admitted last goes first."""
        return max(running, key=lambda request: self.order_key(request, now))

    def may_admit(self, request: Request, state: AdmissionState) -> bool:
        """Not while the pool is about to run dry; with nobody running there is nobody to protect."""
        return state.free_blocks >= RESERVE_BLOCKS_PER_REQUEST * len(state.running)
