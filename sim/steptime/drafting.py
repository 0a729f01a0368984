"""Speculative decoding without a model: drafts that are right at a given rate, and their verification.

Which drafts are right is a hash of (seed, request, position, draft), so it does not depend on the schedule. Drafts
are right independently of each other, each with the same probability; a wrong one ends what is accepted.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from hashlib import blake2b

from servetwin.sim.contract import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from servetwin.sim.steptime.plan_rows import PlanRow
from servetwin.sim.token_source import TokenSource

WRONG_DRAFT = -2
"""No token id."""
_WORDS = 2**32


class DraftModel:
    """A worker's drafter and verifier. It knows how many tokens each request has really got.

    `acceptance_rate` in [0, 1]; `reports_drafts`: hand the drafts to the scheduler (synchronous scheduling; with
    asynchronous scheduling they stay here).
    """

    def __init__(
        self,
        tokens: TokenSource,
        *,
        num_speculative_tokens: int,
        acceptance_rate: float,
        reports_drafts: bool,
        seed: int = 0,
    ) -> None:
        self._tokens = tokens
        self._num_drafts = num_speculative_tokens
        self._right_below = round(acceptance_rate * _WORDS)
        self._reports_drafts = reports_drafts
        self._seed = seed
        self._num_outputs: Counter[str] = Counter()

    def another(self) -> DraftModel:
        """One like it for another engine."""
        other = copy(self)
        other._num_outputs = Counter()
        return other

    def run(
        self, plan: SchedulerOutput, rows: list[PlanRow]
    ) -> tuple[ModelRunnerOutput, DraftTokenIds | None]:
        """The tokens of a step, and the drafts for the next one."""
        for request_id in plan.finished_req_ids:
            self._num_outputs.pop(request_id, None)
        drafts_of = plan.scheduled_spec_decode_tokens
        sampled = [self._verify(r, len(drafts_of.get(r.request_id, ()))) if r.samples else [] for r in rows]
        ids = [r.request_id for r in rows]
        output = ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, sampled)
        if not self._reports_drafts or not rows:
            return output, None
        return output, DraftTokenIds(ids, [self._draft(request_id) for request_id in ids])

    def _verify(self, row: PlanRow, num_drafts: int) -> list[int]:
        request_id, first = row.request_id, self._num_outputs[row.request_id]
        accepted = 0
        while accepted < num_drafts and self._is_right(request_id, first, accepted):
            accepted += 1
        self._num_outputs[request_id] += accepted + 1
        return [self._tokens.output_id(request_id, first + i) for i in range(accepted + 1)]

    def _draft(self, request_id: str) -> list[int]:
        first = self._num_outputs[request_id]
        return [
            self._tokens.output_id(request_id, first + i)
            if self._is_right(request_id, first, i)
            else WRONG_DRAFT
            for i in range(self._num_drafts)
        ]

    def _is_right(self, request_id: str, num_outputs: int, index: int) -> bool:
        # Not a CRC: those of neighbouring texts depend on each other.
        text = f"draft|{self._seed}|{request_id}|{num_outputs}|{index}"
        word = int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little")
        return word < self._right_below
