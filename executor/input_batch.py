"""The tensors of one step, packed from the rows of `RequestStates`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from servetwin.executor.attention_metadata import AttentionMetadata
from servetwin.executor.request_state import PlanError, RequestStates
from servetwin.executor.verification import NO_DRAFT

Int64Array = npt.NDArray[np.int64]
PADDING_SLOT = -1
"""A token with this slot writes no K/V."""


@dataclass(frozen=True, slots=True)
class LogitsLayout:
    """Where logits are computed, on the host. A row that samples has one row of logits, and one more per draft."""

    rows: Int64Array
    """[num_logits], ascending: the batch row of each row of logits."""
    num_drafts_before: Int64Array
    """[num_logits]: 0 behind the last known token, then 1, 2, ... behind the drafts."""
    indices: Int64Array
    """[num_logits]: the packed token behind which the next one is predicted."""


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's packed input. Request i holds batch row i; all tensors lie on the device.

    On a CPU `block_table` is a view of the persistent table: a batch is good until the next plan is prepared.
    """

    req_ids: list[str]
    """[num_reqs], in row order."""
    logits_layout: LogitsLayout
    """Which rows sample, and where."""
    next_draft_ids: Int64Array | None
    """[num_logits], on the host: the draft in the place of each sampled token, or NO_DRAFT; None without drafts."""
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
    """[num_logits] int64: `logits_layout.indices` on the device."""
    block_ids_to_zero: torch.Tensor | None = None
    """[num_blocks] int64: to be cleared before this step writes; None: none are."""

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


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """A step's tokens on the host, and the slots that their K/V goes to."""

    layout: TokenLayout
    token_ids: npt.NDArray[np.int32]
    """[num_tokens]"""
    slots: Int64Array
    """[num_tokens]"""


def lay_out(num_scheduled_tokens: Int64Array, num_computed_tokens: Int64Array) -> TokenLayout:
    """Packs `num_scheduled_tokens[i]` tokens of each row i, from position `num_computed_tokens[i]` on."""
    num_reqs = len(num_scheduled_tokens)
    seq_lens = num_computed_tokens + num_scheduled_tokens
    query_start_loc = np.zeros(num_reqs + 1, dtype=np.int64)
    num_scheduled_tokens.cumsum(out=query_start_loc[1:])
    rows = np.arange(num_reqs)
    if query_start_loc[-1] == num_reqs:
        # One token each: nearly all steps of a busy engine are such.
        return TokenLayout(rows, seq_lens - 1, query_start_loc, seq_lens)
    rows = rows.repeat(num_scheduled_tokens)
    offsets = np.arange(len(rows)) - query_start_loc[rows]
    return TokenLayout(rows, num_computed_tokens[rows] + offsets, query_start_loc, seq_lens)


def pack_rows(states: RequestStates) -> PackedTokens:
    """The scheduled tokens of every row, in row order. PlanError when a token or its block is unknown."""
    layout = lay_out(states.num_scheduled_tokens, states.num_computed_tokens[: len(states.rows)])
    _check(states, layout)
    token_ids = states.token_ids[layout.rows, layout.positions]
    return PackedTokens(layout, token_ids, states.block_table.slots(layout.rows, layout.positions))


def lay_out_logits(states: RequestStates, layout: TokenLayout) -> LogitsLayout:
    """The rows of logits of a step: behind the last known token of each row that reaches it, and behind its drafts."""
    num_reqs = len(states.rows)
    if not states.has_drafts:
        # A chunk that stops short of the last known token has nothing to predict yet.
        sampling = (layout.seq_lens == states.num_tokens[:num_reqs]).nonzero()[0]
        indices = sampling if len(layout.rows) == num_reqs else layout.query_start_loc[sampling + 1] - 1
        return LogitsLayout(sampling, np.zeros(len(sampling), dtype=np.int64), indices)
    num_drafts = states.num_draft_tokens[:num_reqs]
    sampling = np.flatnonzero(layout.seq_lens == states.num_tokens[:num_reqs] + num_drafts)
    counts = num_drafts[sampling] + 1
    first = layout.query_start_loc[1:][sampling] - counts
    spread = lay_out(counts, first)
    return LogitsLayout(sampling[spread.rows], spread.positions - first[spread.rows], spread.positions)


def build_input_batch(
    states: RequestStates, packed: PackedTokens, block_ids_to_zero: list[int] | None = None
) -> InputBatch:
    """The tensors of the step that `pack_rows` packed."""
    device, layout = states.device, packed.layout
    logits = lay_out_logits(states, layout)
    zeroed = _tensor(np.array(block_ids_to_zero), np.int64, device) if block_ids_to_zero else None
    return InputBatch(
        req_ids=states.req_ids,
        logits_layout=logits,
        next_draft_ids=_next_draft_ids(packed.token_ids, logits) if states.has_drafts else None,
        input_ids=_tensor(packed.token_ids, np.int64, device),
        positions=_tensor(layout.positions, np.int64, device),
        query_start_loc=_tensor(layout.query_start_loc, np.int32, device),
        seq_lens=_tensor(layout.seq_lens, np.int32, device),
        slot_mapping=_tensor(packed.slots, np.int64, device),
        block_table=_tensor(states.block_table.of_rows(len(states.rows)), np.int32, device),
        logits_indices=_tensor(logits.indices, np.int64, device),
        block_ids_to_zero=zeroed,
    )


def build_warm_up_batch(query_lens: list[int], block_size: int, device: torch.device) -> InputBatch:
    """A batch of requests that exist nowhere: every token is 0, reads the null block and writes nothing."""
    counts = np.array(query_lens, dtype=np.int64)
    layout = lay_out(counts, np.zeros_like(counts))
    num_tokens, rows = len(layout.rows), np.arange(len(counts))
    width = -(-int(counts.max()) // block_size)
    logits = LogitsLayout(rows, np.zeros_like(rows), layout.query_start_loc[1:] - 1)
    return InputBatch(
        req_ids=[f"warm-up {i}" for i in range(len(counts))],
        logits_layout=logits,
        next_draft_ids=None,
        input_ids=_tensor(np.zeros(num_tokens), np.int64, device),
        positions=_tensor(layout.positions, np.int64, device),
        query_start_loc=_tensor(layout.query_start_loc, np.int32, device),
        seq_lens=_tensor(layout.seq_lens, np.int32, device),
        slot_mapping=_tensor(np.full(num_tokens, PADDING_SLOT), np.int64, device),
        block_table=_tensor(np.zeros((len(counts), width)), np.int32, device),
        logits_indices=_tensor(logits.indices, np.int64, device),
    )


def _next_draft_ids(token_ids: npt.NDArray[np.int32], logits: LogitsLayout) -> Int64Array:
    """A draft is the input behind the token whose logits are to confirm it."""
    drafts = np.flatnonzero(logits.num_drafts_before)
    next_ids = np.full(len(logits.indices), NO_DRAFT, dtype=np.int64)
    next_ids[drafts - 1] = token_ids[logits.indices[drafts]]
    return next_ids


def _check(states: RequestStates, layout: TokenLayout) -> None:
    num_reqs = len(layout.seq_lens)
    known = states.num_tokens[:num_reqs]
    if states.has_drafts:
        known = known + states.num_draft_tokens[:num_reqs]
        _check_drafts(states, layout, known)
    capacity = states.block_table.num_blocks[:num_reqs] * states.block_table.block_size
    if (layout.seq_lens <= np.minimum(known, capacity)).all():
        return
    for limit, what in ((known, "known"), (capacity, "covered by its blocks")):
        for row in np.flatnonzero(layout.seq_lens > limit):
            raise PlanError(
                f"request {states.req_ids[row]!r} is scheduled up to token {layout.seq_lens[row]}, "
                f"but only {limit[row]} are {what}"
            )


def _check_drafts(states: RequestStates, layout: TokenLayout, known: Int64Array) -> None:
    num_drafts = states.num_draft_tokens[: len(known)]
    for row in np.flatnonzero((num_drafts > 0) & (layout.seq_lens < known)):
        raise PlanError(
            f"request {states.req_ids[row]!r} is scheduled up to token {layout.seq_lens[row]}, but its "
            f"{num_drafts[row]} drafts reach to {known[row]}"
        )


def _tensor(array: npt.NDArray[Any], dtype: type[np.integer[Any]], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array.astype(dtype, copy=False))
    return tensor if device.type == "cpu" else tensor.to(device)
