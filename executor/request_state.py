"""The requests that the executor knows, kept between steps and updated by the deltas of each plan.

Every request that the current plan schedules holds one row of the batch; rows are dense (0 .. num_reqs - 1)
and their order is the only order there is. A request that a plan leaves out (preempted, or starved of tokens)
loses its row but stays known, with the name of its random stream and, if it was not preempted, its blocks.

Nearly every plan continues exactly the requests of the plan before it. Such a plan costs a comparison of two
lists and a few array operations: nothing in Python is done per row but for rows that get a new block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
import numpy.typing as npt
import torch

from servetwin.executor.block_table import BlockTable
from servetwin.executor.constant_row import constant_sampling_row
from servetwin.executor.sampler import SamplingRow, random_stream
from servetwin.sim.contract import CachedRequestData, NewRequestData, SamplingParams, SchedulerOutput

Int64Array = npt.NDArray[np.int64]


class PlanError(ValueError):
    """A plan that cannot be executed as it stands; the message names the request and what is wrong."""


@dataclass(slots=True)
class RequestState:
    """What is known of a request beside its row."""

    req_id: str
    sampling_params: SamplingParams
    num_prompt_tokens: int
    stream: int
    """Names its random draws, together with the place of an output."""
    constant_sampling_row: SamplingRow | None = None
    """How every token of it is chosen, if that does not depend on the tokens before."""
    parked_block_ids: list[int] = field(default_factory=list)
    """Its blocks while it has no row."""


class RequestStates:
    """All known requests, and the batch rows of those in the current step.

    Arrays are indexed by row; L = max_model_len. `seed`: the engine's, for requests without one of their own.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device, seed: int = 0
    ) -> None:
        self.max_num_seqs, self.max_model_len, self.device = max_num_seqs, max_model_len, device
        self.seed = seed
        self.known: dict[str, RequestState] = {}
        self.rows: list[RequestState] = []
        self.row_of: dict[str, int] = {}
        self.block_table = BlockTable(max_num_seqs, max_model_len, block_size)
        # Zeroed memory that no row has used yet is never touched, so this costs address space only.
        self.token_ids: npt.NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        """[max_num_seqs, L]: prompt and outputs, then the drafts of the current step."""
        self.num_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        """Known tokens of each row."""
        self.num_draft_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        """Drafts of each row that the current step verifies."""
        self.num_computed_tokens: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)
        """Tokens of each row whose K/V is in the cache before this step."""
        self.num_scheduled_tokens: Int64Array = np.zeros(0, dtype=np.int64)
        """[num_reqs]: tokens of each row that the current step computes, unless it is one of each."""
        self.one_token_each = False
        """Nearly all steps of a busy engine are such."""
        self.counting: Int64Array = np.arange(max_num_seqs + 1)
        """0, 1, 2, ...: the numbers of the rows, and where their tokens lie when there is one of each."""
        self.has_drafts = False
        """The current step verifies some."""
        self.continued = False
        """The current plan schedules the requests of the one before it, each in its old row."""
        self.req_ids: list[str] = []
        """Of the rows."""
        self._plan_ids: list[str] = []
        """The requests of the current plan in its order, ..."""
        self._plan_rows: Int64Array = np.zeros(0, dtype=np.int64)
        """... and their rows."""
        self._admitted: list[str] = []

    def update(self, plan: SchedulerOutput) -> None:
        """Applies a plan: afterwards the rows are exactly the scheduled requests. Raises PlanError."""
        cached = plan.scheduled_cached_reqs
        self._admitted = []
        self.continued = self._continues(plan)
        if self.continued:
            cached_rows = self._plan_rows
        else:
            self._change_rows(plan)
            cached_rows = self._rows_of(cached.req_ids)
        self.num_computed_tokens[cached_rows] = np.array(cached.num_computed_tokens, dtype=np.int64)
        self._take_blocks(cached, cached_rows)
        self._take_counts(plan.num_scheduled_tokens)
        self._take_drafts(plan.scheduled_spec_decode_tokens)

    def append_tokens(self, rows: Int64Array, places: Int64Array, token_ids: Int64Array) -> None:
        """Makes sampled tokens known, the last one of each row being its next input. All arrays are `[num_tokens]`.

        `places`: 0 for the first token of a row, 1 for the one behind it, and so on, in this order. What lies beyond
        the context window has ended its request, and is dropped.
        """
        ends = self.num_tokens[rows] + places
        fits = ends < self.max_model_len
        if not fits.all():
            rows, ends, token_ids = rows[fits], ends[fits], token_ids[fits]
        self.token_ids[rows, ends] = token_ids
        # Of several tokens of one row the last one remains.
        self.num_tokens[rows] = ends + 1

    def sampling_row(self, row: int, num_drafts: int) -> SamplingRow:
        """How the token behind the known ones and the first `num_drafts` drafts is chosen."""
        state = self.rows[row]
        start, end = state.num_prompt_tokens, self.num_tokens[row] + num_drafts
        tokens = self.token_ids[row]
        return SamplingRow(state.sampling_params, state.stream, tokens[:start], tokens[start:end])

    def admitted_rows(self) -> list[int]:
        """Rows of the requests that got a whole new block table in the last plan (new or resumed)."""
        return [self.row_of[req_id] for req_id in self._admitted]

    def known_tokens(self, row: int) -> npt.NDArray[np.int32]:
        """The row's prompt and outputs, `[num_tokens of the row]` (a view)."""
        return self.token_ids[row, : self.num_tokens[row]]

    # ------------------------------------------------------------ rows

    def _continues(self, plan: SchedulerOutput) -> bool:
        """The plan schedules the requests of the one before it, in the same order, and no others."""
        cached = plan.scheduled_cached_reqs
        return (
            not (plan.scheduled_new_reqs or plan.finished_req_ids or cached.resumed_req_ids)
            and cached.req_ids == self._plan_ids
            and list(plan.num_scheduled_tokens) == self._plan_ids
        )

    def _change_rows(self, plan: SchedulerOutput) -> None:
        """Rows for the requests that the plan schedules, and for no others."""
        for req_id in plan.finished_req_ids:
            self.known.pop(req_id, None)
        self._drop_rows(plan)
        for new in plan.scheduled_new_reqs:
            self._add_new(new)
        for req_id in plan.scheduled_cached_reqs.req_ids:
            if req_id not in self.row_of:
                self._return_row(req_id, plan.scheduled_cached_reqs)
            if req_id in plan.scheduled_cached_reqs.resumed_req_ids:
                self._admitted.append(req_id)
        if self.row_of.keys() != plan.num_scheduled_tokens.keys():
            raise PlanError(
                f"num_scheduled_tokens names {sorted(plan.num_scheduled_tokens)}, but the plan's new and "
                f"cached requests are {sorted(self.row_of)}"
            )
        self.req_ids = [state.req_id for state in self.rows]
        self._plan_ids = list(plan.num_scheduled_tokens)
        self._plan_rows = self._rows_of(self._plan_ids)

    def _rows_of(self, req_ids: Sequence[str]) -> Int64Array:
        return np.fromiter(map(self.row_of.__getitem__, req_ids), np.int64, len(req_ids))

    def _drop_rows(self, plan: SchedulerOutput) -> None:
        # From the last row down: the row that fills a hole then always belongs to a request that stays.
        for row in reversed(range(len(self.rows))):
            req_id = self.rows[row].req_id
            if req_id not in plan.num_scheduled_tokens or req_id not in self.known:
                self._remove_row(row)

    def _remove_row(self, row: int) -> None:
        state = self.rows[row]
        state.parked_block_ids = self.block_table.row(row).tolist()
        self.block_table.clear(row)
        del self.row_of[state.req_id]
        last_state = self.rows.pop()
        if last_state is not state:
            self._move_row(len(self.rows), row, last_state)

    def _move_row(self, source: int, target: int, state: RequestState) -> None:
        end = self.num_tokens[source]
        self.token_ids[target, :end] = self.token_ids[source, :end]
        self.num_tokens[target] = end
        self.num_computed_tokens[target] = self.num_computed_tokens[source]
        self.block_table.move(source, target)
        self.rows[target] = state
        self.row_of[state.req_id] = target

    def _add_row(self, state: RequestState) -> int:
        if len(self.rows) == self.max_num_seqs:
            raise PlanError(f"the plan schedules more requests than max_num_seqs {self.max_num_seqs}")
        row = len(self.rows)
        self.rows.append(state)
        self.row_of[state.req_id] = row
        return row

    # ------------------------------------------------------------ deltas

    def _add_new(self, new: NewRequestData) -> None:
        if new.req_id in self.known:
            token_ids = self._resumed_tokens(new)
        else:
            token_ids = self._announced_tokens(new)
        row = self._add_row(self.known[new.req_id])
        self._set_tokens(row, token_ids)
        self.block_table.replace(row, new.block_ids[0])
        self.num_computed_tokens[row] = new.num_computed_tokens
        self._admitted.append(new.req_id)

    def _announced_tokens(self, new: NewRequestData) -> list[int]:
        """The prompt of a request that was not known before, and is now."""
        if new.prompt_token_ids is None:
            raise PlanError(f"request {new.req_id!r} has no prompt_token_ids: the executor needs the tokens")
        params = new.sampling_params
        stream = random_stream(self.seed, new.req_id, params)
        row = constant_sampling_row(params, stream)
        self.known[new.req_id] = RequestState(new.req_id, params, len(new.prompt_token_ids), stream, row)
        return new.prompt_token_ids

    def _resumed_tokens(self, new: NewRequestData) -> list[int]:
        """All tokens of a request that is resumed, and reported as a new one (V2 model runner)."""
        if new.prefill_token_ids is None or new.req_id in self.row_of:
            raise PlanError(f"request {new.req_id!r} is announced as new, but is known already")
        return new.prefill_token_ids

    def _return_row(self, req_id: str, cached: CachedRequestData) -> None:
        """A row for a request that the previous plan left out; this plan brings its tokens."""
        if req_id not in self.known:
            raise PlanError(f"request {req_id!r} is continued, but was never announced, or has finished")
        if req_id not in cached.all_token_ids:
            raise PlanError(
                f"request {req_id!r} was not in the previous plan: this one must give its all_token_ids"
            )
        state = self.known[req_id]
        row = self._add_row(state)
        self._set_tokens(row, cached.all_token_ids[req_id])
        if req_id not in cached.resumed_req_ids:
            self.block_table.replace(row, state.parked_block_ids)

    def _set_tokens(self, row: int, token_ids: Sequence[int]) -> None:
        if len(token_ids) > self.max_model_len:
            raise PlanError(
                f"request {self.rows[row].req_id!r} has {len(token_ids)} tokens, above max_model_len "
                f"{self.max_model_len}"
            )
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)

    def _take_blocks(self, cached: CachedRequestData, rows: Int64Array) -> None:
        """`rows`: of the cached requests. A resumed one gets a whole table, the others what they need more."""
        # Most rows get none, and are not looked at one by one.
        new = cached.new_block_ids
        given = [(index, blocks[0]) for index, blocks in compress(enumerate(new), new) if blocks is not None]
        if self.continued and all(len(block_ids) == 1 for _, block_ids in given):
            if given:
                growing = rows[[index for index, _ in given]]
                self.block_table.append_one_each(growing, [block_ids[0] for _, block_ids in given])
            return
        for index, block_ids in given:
            row = int(rows[index])
            if cached.req_ids[index] in cached.resumed_req_ids:
                self.block_table.replace(row, block_ids)
            else:
                self.block_table.append(row, block_ids)

    def _take_counts(self, scheduled: dict[str, int]) -> None:
        self.one_token_each = set(scheduled.values()) == {1}
        if self.one_token_each:
            return
        counts = np.empty(len(self.rows), dtype=np.int64)
        counts[self._plan_rows] = np.fromiter(scheduled.values(), np.int64, len(scheduled))
        if counts.min(initial=1) < 1:
            row = int(counts.argmin())
            raise PlanError(
                f"request {self.req_ids[row]!r} is scheduled with {counts[row]} tokens, not 1 or more"
            )
        self.num_scheduled_tokens = counts

    def _take_drafts(self, drafts: dict[str, list[int]]) -> None:
        """Puts the drafts behind the known tokens, as inputs of this step; they do not become known by that."""
        if self.has_drafts:
            self.num_draft_tokens[:] = 0
        self.has_drafts = any(drafts.values())
        for req_id, token_ids in drafts.items():
            row = self.row_of.get(req_id)
            if row is None:
                raise PlanError(f"the plan has drafts for request {req_id!r}, which it does not schedule")
            start = int(self.num_tokens[row])
            end = start + len(token_ids)
            # A token is sampled behind the last draft, too.
            if end >= self.max_model_len:
                raise PlanError(
                    f"request {req_id!r} has {len(token_ids)} drafts behind {start} tokens: with max_model_len "
                    f"{self.max_model_len} at most {self.max_model_len - 1 - start} can be verified"
                )
            self.token_ids[row, start:end] = token_ids
            self.num_draft_tokens[row] = len(token_ids)
