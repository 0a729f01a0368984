"""The requests that the executor knows, kept between steps and updated by the deltas of each plan.

Every request that the current plan schedules holds one row of the batch; rows are dense (0 .. num_reqs - 1)
and their order is the only order there is. A request that a plan leaves out (preempted, or starved of tokens)
loses its row but stays known, with its random generator and, if it was not preempted, its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from servetwin.executor.block_table import BlockTable
from servetwin.sim.contract import CachedRequestData, NewRequestData, SamplingParams, SchedulerOutput


class PlanError(ValueError):
    """A plan that cannot be executed as it stands; the message names the request and what is wrong."""


@dataclass(slots=True)
class RequestState:
    """What is known of a request beside its row."""

    req_id: str
    sampling_params: SamplingParams
    num_prompt_tokens: int
    generator: torch.Generator | None
    """Own random stream of a request with a seed."""
    parked_block_ids: list[int] = field(default_factory=list)
    """Its blocks while it has no row."""


class RequestStates:
    """All known requests, and the batch rows of those in the current step.

    Arrays are indexed by row; L = max_model_len.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.max_num_seqs, self.max_model_len, self.device = max_num_seqs, max_model_len, device
        self.known: dict[str, RequestState] = {}
        self.rows: list[RequestState] = []
        self.row_of: dict[str, int] = {}
        self.block_table = BlockTable(max_num_seqs, max_model_len, block_size)
        # Zeroed memory that no row has used yet is never touched, so this costs address space only.
        self.token_ids: npt.NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        """[max_num_seqs, L]: prompt and outputs."""
        self.num_tokens: npt.NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)
        """Known tokens of each row."""
        self.num_computed_tokens: npt.NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)
        """Tokens of each row whose K/V is in the cache before this step."""
        self._admitted: list[str] = []

    def update(self, plan: SchedulerOutput) -> None:
        """Applies a plan: afterwards the rows are exactly the scheduled requests. Raises PlanError."""
        for req_id in plan.finished_req_ids:
            self.known.pop(req_id, None)
        self._drop_rows(plan)
        self._admitted = []
        for new in plan.scheduled_new_reqs:
            self._add_new(new)
        cached = plan.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            self._update_cached(req_id, i, cached)
        if set(self.row_of) != set(plan.num_scheduled_tokens):
            raise PlanError(
                f"num_scheduled_tokens names {sorted(plan.num_scheduled_tokens)}, but the plan's new and "
                f"cached requests are {sorted(self.row_of)}"
            )

    def append_token(self, req_id: str, token_id: int) -> None:
        """Makes a sampled token the request's last known one: the input of its next step."""
        row = self.row_of[req_id]
        end = self.num_tokens[row]
        # The token that fills the context window ends the request and is never an input.
        if end < self.max_model_len:
            self.token_ids[row, end] = token_id
            self.num_tokens[row] = end + 1

    def admitted_rows(self) -> list[int]:
        """Rows of the requests that got a whole new block table in the last plan (new or resumed)."""
        return [self.row_of[req_id] for req_id in self._admitted]

    def num_output_tokens(self, row: int) -> int:
        return int(self.num_tokens[row]) - self.rows[row].num_prompt_tokens

    # ------------------------------------------------------------ rows

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
            self._readmit(new)
            return
        if new.prompt_token_ids is None:
            raise PlanError(f"request {new.req_id!r} has no prompt_token_ids: the executor needs the tokens")
        seed = new.sampling_params.seed
        generator = None if seed is None else torch.Generator(self.device).manual_seed(seed)
        state = RequestState(new.req_id, new.sampling_params, len(new.prompt_token_ids), generator)
        self.known[new.req_id] = state
        row = self._add_row(state)
        self._set_tokens(row, new.prompt_token_ids)
        self.block_table.replace(row, new.block_ids[0])
        self.num_computed_tokens[row] = new.num_computed_tokens
        self._admitted.append(new.req_id)

    def _readmit(self, new: NewRequestData) -> None:
        """A resumed request, reported as a new one with all its tokens (V2 model runner)."""
        if new.prefill_token_ids is None or new.req_id in self.row_of:
            raise PlanError(f"request {new.req_id!r} is announced as new, but is known already")
        row = self._add_row(self.known[new.req_id])
        self._set_tokens(row, new.prefill_token_ids)
        self.block_table.replace(row, new.block_ids[0])
        self.num_computed_tokens[row] = new.num_computed_tokens
        self._admitted.append(new.req_id)

    def _update_cached(self, req_id: str, index: int, cached: CachedRequestData) -> None:
        if req_id not in self.known:
            raise PlanError(f"request {req_id!r} is continued, but was never announced, or has finished")
        state, new_blocks = self.known[req_id], cached.new_block_ids[index]
        row = self.row_of.get(req_id)
        if row is None:
            row = self._return_row(state, cached)
        if req_id in cached.resumed_req_ids:
            self.block_table.replace(row, new_blocks[0] if new_blocks else [])
            self._admitted.append(req_id)
        elif new_blocks is not None:
            self.block_table.append(row, new_blocks[0])
        self.num_computed_tokens[row] = cached.num_computed_tokens[index]

    def _return_row(self, state: RequestState, cached: CachedRequestData) -> int:
        """A row for a request that the previous plan left out; the plan brings its tokens."""
        if state.req_id not in cached.all_token_ids:
            raise PlanError(
                f"request {state.req_id!r} was not in the previous plan: this one must give its all_token_ids"
            )
        row = self._add_row(state)
        self._set_tokens(row, cached.all_token_ids[state.req_id])
        self.block_table.replace(row, state.parked_block_ids)
        return row

    def _set_tokens(self, row: int, token_ids: Sequence[int]) -> None:
        if len(token_ids) > self.max_model_len:
            raise PlanError(
                f"request {self.rows[row].req_id!r} has {len(token_ids)} tokens, above max_model_len "
                f"{self.max_model_len}"
            )
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
