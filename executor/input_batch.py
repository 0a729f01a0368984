"""The tensors of one step, packed from the rows of `RequestStates`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from servetwin.executor.attention_metadata import AttentionMetadata
from servetwin.executor.request_state import PlanError, RequestStates

Int64Array = npt.NDArray[np.int64]
PADDING_SLOT = -1
"""A token with this slot writes no K/V."""


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's packed input. Request i holds batch row i; all tensors lie on the device."""

    req_ids: list[str]
    """[num_reqs], in row order."""
    logits_rows: Int64Array
    """[num_logits], on the host: the rows that sample, ascending."""
    input_ids: torch.Tensor
    """[num_tokens] int64"""
    positions: torch.Tensor
    """[num_tokens] int64"""
    query_start_loc: torch.Tensor
    """[num_reqs + 1] int32"""
    seq_lens: torch.Tensor
    """[num_reqs] int32"""
    slot_mapping: torch.Tensor
    """[num_tokens] int64"""
    block_table: torch.Tensor
    """[num_reqs, max_blocks of this batch] int32, unused entries 0"""
    logits_indices: torch.Tensor
    """[num_logits] int64: packed index of the last token of each row that samples."""

    @property
    def attention_metadata(self) -> AttentionMetadata:
        return AttentionMetadata(
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            slot_mapping=self.slot_mapping,
        )


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Where each packed token comes from, on the host."""

    rows: Int64Array
    """[num_tokens]: batch row of each token."""
    positions: Int64Array
    """[num_tokens]"""
    query_start_loc: Int64Array
    """[num_reqs + 1]"""
    seq_lens: Int64Array
    """[num_reqs]"""


def lay_out(num_scheduled_tokens: Int64Array, num_computed_tokens: Int64Array) -> TokenLayout:
    """Packs `num_scheduled_tokens[i]` tokens of each row i, from position `num_computed_tokens[i]` on."""
    query_start_loc = np.concatenate([[0], np.cumsum(num_scheduled_tokens)])
    rows = np.repeat(np.arange(len(num_scheduled_tokens)), num_scheduled_tokens)
    offsets = np.arange(query_start_loc[-1]) - query_start_loc[rows]
    return TokenLayout(
        rows=rows,
        positions=num_computed_tokens[rows] + offsets,
        query_start_loc=query_start_loc,
        seq_lens=num_computed_tokens + num_scheduled_tokens,
    )


def lay_out_rows(states: RequestStates, num_scheduled_tokens: dict[str, int]) -> TokenLayout:
    """The scheduled tokens of every row, in row order. PlanError when a token or its block is unknown."""
    num_reqs = len(states.rows)
    counts = np.array([num_scheduled_tokens[state.req_id] for state in states.rows], dtype=np.int64)
    layout = lay_out(counts, states.num_computed_tokens[:num_reqs])
    _check(states, layout)
    return layout


def build_input_batch(states: RequestStates, layout: TokenLayout) -> InputBatch:
    """The tensors of the step that `lay_out_rows` laid out."""
    num_reqs = len(states.rows)
    num_tokens = states.num_tokens[:num_reqs]
    # A chunk that stops short of the last known token has nothing to predict yet.
    logits_rows = np.flatnonzero(layout.seq_lens == num_tokens)
    table = states.block_table
    width = int(table.num_blocks[:num_reqs].max())
    device = states.device
    return InputBatch(
        req_ids=[state.req_id for state in states.rows],
        logits_rows=logits_rows,
        input_ids=_tensor(states.token_ids[layout.rows, layout.positions], np.int64, device),
        positions=_tensor(layout.positions, np.int64, device),
        query_start_loc=_tensor(layout.query_start_loc, np.int32, device),
        seq_lens=_tensor(layout.seq_lens, np.int32, device),
        slot_mapping=_tensor(table.slots(layout.rows, layout.positions), np.int64, device),
        block_table=_tensor(table.table[:num_reqs, :width].copy(), np.int32, device),
        logits_indices=_tensor(layout.query_start_loc[logits_rows + 1] - 1, np.int64, device),
    )


def build_warm_up_batch(query_lens: list[int], block_size: int, device: torch.device) -> InputBatch:
    """A batch of requests that exist nowhere: every token is 0, reads the null block and writes nothing."""
    counts = np.array(query_lens, dtype=np.int64)
    layout = lay_out(counts, np.zeros_like(counts))
    num_tokens = len(layout.rows)
    width = -(-int(counts.max()) // block_size)
    return InputBatch(
        req_ids=[f"warm-up {i}" for i in range(len(counts))],
        logits_rows=np.arange(len(counts)),
        input_ids=_tensor(np.zeros(num_tokens), np.int64, device),
        positions=_tensor(layout.positions, np.int64, device),
        query_start_loc=_tensor(layout.query_start_loc, np.int32, device),
        seq_lens=_tensor(layout.seq_lens, np.int32, device),
        slot_mapping=_tensor(np.full(num_tokens, PADDING_SLOT), np.int64, device),
        block_table=_tensor(np.zeros((len(counts), width)), np.int32, device),
        logits_indices=_tensor(layout.query_start_loc[1:] - 1, np.int64, device),
    )


def _check(states: RequestStates, layout: TokenLayout) -> None:
    num_reqs = len(layout.seq_lens)
    capacity = states.block_table.num_blocks[:num_reqs].astype(np.int64) * states.block_table.block_size
    for limit, what in ((states.num_tokens[:num_reqs], "known"), (capacity, "covered by its blocks")):
        for row in np.flatnonzero(layout.seq_lens > limit):
            raise PlanError(
                f"request {states.rows[row].req_id!r} is scheduled up to token {layout.seq_lens[row]}, "
                f"but only {limit[row]} are {what}"
            )


def _tensor(array: npt.NDArray[Any], dtype: type[np.integer[Any]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array.astype(dtype, copy=False)).to(device)
