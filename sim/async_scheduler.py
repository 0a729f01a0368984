"""Asynchronous scheduling: a step is planned before the output of the step before it is known.

Rules of `vllm/v1/core/sched/async_scheduler.py` 0.22.0. A request counts the tokens that steps in flight will bring
as placeholders, so that its next token can be scheduled; what they are only matters once they are there.
"""

from __future__ import annotations

from servetwin.sim.request import Request, RequestStatus
from servetwin.sim.scheduler import Scheduler
from servetwin.sim.step import Step

UNKNOWN_DRAFT = -1
"""Stands for a draft whose token only the worker knows."""


class AsyncScheduler(Scheduler):
    """Arguments as for `Scheduler`."""

    _counts_ahead = True

    def _next_tokens(self, request: Request, budget: int) -> int:
        """No token for a request that the steps in flight will bring to its max_tokens."""
        placeholders = request.num_output_placeholders
        last = request.num_computed_tokens + 2 - placeholders >= request.max_total_tokens
        if placeholders > 0 and last:
            return 0
        return super()._next_tokens(request, budget)

    def _advance(self, step: Step) -> None:
        super()._advance(step)
        for request in step.rows():
            if not request.is_prefill_chunk:
                request.num_output_placeholders += 1
        if self.config.speculative is not None:
            self._expect_drafts(step, self.config.speculative.num_speculative_tokens)

    def _expect_drafts(self, step: Step, num_drafts: int) -> None:
        """Every draft may become a token, and as many will follow it."""
        for request in step.rows():
            if not request.is_prefill_chunk:
                request.num_output_placeholders += len(step.spec_tokens.get(request.request_id, ()))
                request.spec_token_ids = [UNKNOWN_DRAFT] * num_drafts

    def _reject(self, request: Request, num_rejected: int) -> None:
        super()._reject(request, num_rejected)
        if request.num_output_placeholders > 0:
            request.num_output_placeholders -= num_rejected

    def _tokens_arrived(self, request: Request, num_tokens: int) -> None:
        """Placeholders have become tokens: blocks that are full of known tokens can be hit from now on."""
        request.num_output_placeholders -= num_tokens
        if request.status == RequestStatus.RUNNING:
            known = request.num_computed_tokens - request.num_output_placeholders
            if known >= (request.num_hashed_blocks + 1) * self.kv.block_size:
                self.kv.cache_blocks(request, known)
