"""A step being put together: what is scheduled so far, and the plan and the record made of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from servetwin.sim.contract import CachedRequestData, NewRequestData, SchedulerOutput
from servetwin.sim.records import ScheduleRecord
from servetwin.sim.request import Request


@dataclass(slots=True)
class Step:
    """What one schedule call has given out."""

    budget: int
    """Tokens left to give."""
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    """In order of scheduling; the order of everything derived from the step."""
    new_blocks: dict[str, tuple[list[int]]] = field(default_factory=dict)
    """One list each (of the one KV-cache group). Running: blocks appended now, if any. Admitted: the whole table."""
    spec_tokens: dict[str, list[int]] = field(default_factory=dict)
    """Drafts to verify, for the requests that have some."""
    running: list[Request] = field(default_factory=list)
    new: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    asked: dict[str, Request] = field(default_factory=dict)
    """All but the plain decodes (of which the record needs only the number)."""
    record: ScheduleRecord = field(default_factory=ScheduleRecord)

    def give(self, request: Request, num_tokens: int, blocks: list[int]) -> None:
        """Schedules tokens, with the blocks to be reported."""
        self.num_scheduled_tokens[request.request_id] = num_tokens
        if blocks:
            self.new_blocks[request.request_id] = (blocks,)
        self.asked[request.request_id] = request
        self.budget -= num_tokens

    def take_back(self, request: Request) -> bool:
        """Undoes `give` for a running request that becomes a victim later in the same step; False if there was none."""
        request_id = request.request_id
        if request_id not in self.num_scheduled_tokens:
            return False
        self.budget += self.num_scheduled_tokens.pop(request_id)
        for given in (self.new_blocks, self.spec_tokens, self.asked):
            given.pop(request_id, None)
        self.running.remove(request)
        return True

    def admitted(self) -> list[Request]:
        """Those that came in with this step."""
        return self.new + self.resumed if self.resumed else self.new

    def rows(self) -> list[Request]:
        """Every scheduled request."""
        return self.running + self.new + self.resumed

    def count(self) -> None:
        """Fills in the record's tokens and rows. Computed tokens have not been advanced yet."""
        record, total, rows = self.record, 0, len(self.num_scheduled_tokens)
        for request_id, request in self.asked.items():
            if request.is_decoding:
                continue
            num_tokens = self.num_scheduled_tokens[request_id]
            total += num_tokens
            rows -= 1
            again = min(num_tokens, request.num_tokens_ever_computed - request.num_computed_tokens)
            if again > 0:
                record.recomputed[request_id] = again
        record.prefill_tokens = total
        record.decode_tokens = sum(self.num_scheduled_tokens.values()) - total
        record.decode_rows = rows


@dataclass(frozen=True, slots=True)
class PlanWriter:
    """Turns a finished step into the plan that a worker gets.

    `plan_tokens`: put token ids in. `v2_model_runner`: resumed requests are reported as new ones.
    `zero_blocks_of`: name the blocks to clear, of so many tokens each (None: none are to be cleared).
    """

    plan_tokens: bool
    v2_model_runner: bool
    zero_blocks_of: int | None = None

    def plan(
        self,
        step: Step,
        prev_step_ids: frozenset[str],
        num_common_prefix_blocks: int,
        finished_req_ids: set[str],
    ) -> SchedulerOutput:
        """The plan; `prev_step_ids`: the requests of the step before, whose tokens the worker has at hand."""
        as_new = [(r, False) for r in step.new]
        resumed = step.resumed
        if self.v2_model_runner:
            as_new += [(r, True) for r in resumed]
            resumed = []
        return SchedulerOutput(
            scheduled_new_reqs=[self._new(r, step, was_preempted) for r, was_preempted in as_new],
            scheduled_cached_reqs=self._cached(step, resumed, prev_step_ids),
            num_scheduled_tokens=step.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(step.num_scheduled_tokens.values()),
            scheduled_spec_decode_tokens=step.spec_tokens,
            num_common_prefix_blocks=[num_common_prefix_blocks],
            finished_req_ids=finished_req_ids,
            preempted_req_ids={p.request_id for p in step.record.preempted},
            new_block_ids_to_zero=self._fresh_blocks(step, self.zero_blocks_of)
            if self.zero_blocks_of
            else None,
        )

    def _fresh_blocks(self, step: Step, block_size: int) -> list[int]:
        """The blocks that this step took from the pool; the hits in front of an admitted table are not among them."""
        hit_blocks = {r.request_id: r.num_computed_tokens // block_size for r in step.admitted()}
        return [
            block
            for request_id, (blocks,) in step.new_blocks.items()
            for block in blocks[hit_blocks.get(request_id, 0) :]
        ]

    def _new(self, request: Request, step: Step, was_preempted: bool) -> NewRequestData:
        known = self.v2_model_runner and self.plan_tokens
        return NewRequestData(
            req_id=request.request_id,
            prompt_token_ids=request.prompt.token_ids() if self.plan_tokens else None,
            sampling_params=request.sampling_params,
            block_ids=step.new_blocks[request.request_id],
            num_computed_tokens=request.num_computed_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens if was_preempted else 0,
            prefill_token_ids=request.all_token_ids() if known else None,
        )

    def _cached(self, step: Step, resumed: list[Request], prev_step_ids: frozenset[str]) -> CachedRequestData:
        """Plain lists over all rows: this is the part of a plan that grows with the batch."""
        rows = step.running + resumed if resumed else step.running
        ids = [r.request_id for r in rows]
        return CachedRequestData(
            req_ids=ids,
            resumed_req_ids={r.request_id for r in resumed},
            all_token_ids={} if prev_step_ids.issuperset(ids) else self._all_tokens(rows, prev_step_ids),
            new_block_ids=list(map(step.new_blocks.get, ids)),
            num_computed_tokens=[r.num_computed_tokens for r in rows],
            num_output_tokens=[len(r.output_token_ids) + r.num_output_placeholders for r in rows],
        )

    def _all_tokens(self, rows: list[Request], prev_step_ids: frozenset[str]) -> dict[str, list[int]]:
        if not self.plan_tokens:
            return {}
        return {r.request_id: r.all_token_ids() for r in rows if r.request_id not in prev_step_ids}
