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
    num_left: Int64Array
    """[num_reqs]: known tokens and drafts of each row that stay uncomputed after this step."""
    token_ids: npt.NDArray[np.int32]
    """[num_tokens]"""
    slots: Int64Array
    """[num_tokens]"""


def lay_out(num_scheduled_tokens: Int64Array, num_computed_tokens: Int64Array) -> TokenLayout:
    """Packs `num_scheduled_tokens[i]` tokens of each row i, from position `num_computed_tokens[i]` on."""
    num_reqs = len(num_scheduled_tokens)
    query_start_loc = np.zeros(num_reqs + 1, dtype=np.int64)
    num_scheduled_tokens.cumsum(out=query_start_loc[1:])
    rows = np.arange(num_reqs).repeat(num_scheduled_tokens)
    offsets = np.arange(len(rows)) - query_start_loc[rows]
    return TokenLayout(
        rows=rows,
        positions=num_computed_tokens[rows] + offsets,
        query_start_loc=query_start_loc,
        seq_lens=num_computed_tokens + num_scheduled_tokens,
    )


def lay_out_rows(states: RequestStates) -> TokenLayout:
    """The scheduled tokens of every row, in row order."""
    num_reqs = len(states.rows)
    computed = states.num_computed_tokens[:num_reqs]
    if not states.one_token_each:
        return lay_out(states.num_scheduled_tokens, computed)
    counting = states.counting
    return TokenLayout(counting[:num_reqs], computed, counting[: num_reqs + 1], computed + 1)


def pack_rows(states: RequestStates) -> PackedTokens:
    """The tokens of the current step. PlanError when one of them, or its block, is unknown."""
    layout = lay_out_rows(states)
    num_left = _count_left(states, layout)
    slots = states.block_table.slots(layout.rows, layout.positions)
    if slots.min() < states.block_table.block_size:
        # Unused entries of a table lead to the null block.
        row = layout.rows[slots.argmin()]
        covered = states.block_table.num_blocks[row] * states.block_table.block_size
        raise _beyond(states, layout, row, f"{covered} are covered by its blocks")
    return PackedTokens(layout, num_left, states.token_ids[layout.rows, layout.positions], slots)


def lay_out_logits(states: RequestStates, packed: PackedTokens) -> LogitsLayout:
    """The rows of logits of a step: behind the last known token of each row that reaches it, and behind its drafts.

    A chunk that stops short of the last known token has nothing to predict yet.
    """
    layout = packed.layout
    sampling = (packed.num_left == 0).nonzero()[0]
    ends = layout.query_start_loc[1:][sampling]
    if not states.has_drafts:
        return LogitsLayout(sampling, np.zeros(len(sampling), dtype=np.int64), ends - 1)
    counts = states.num_draft_tokens[sampling] + 1
    spread = lay_out(counts, ends - counts)
    num_drafts_before = spread.positions - (ends - counts)[spread.rows]
    return LogitsLayout(sampling[spread.rows], num_drafts_before, spread.positions)


def build_input_batch(
    states: RequestStates, packed: PackedTokens, block_ids_to_zero: list[int] | None = None
) -> InputBatch:
    """The tensors of the step that `pack_rows` packed."""
    device, layout = states.device, packed.layout
    logits = lay_out_logits(states, packed)
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


def _count_left(states: RequestStates, layout: TokenLayout) -> Int64Array:
    """`PackedTokens.num_left`. PlanError when it is negative, or when a row with drafts has any left."""
    num_reqs = len(states.rows)
    num_left: Int64Array = states.num_tokens[:num_reqs] - layout.seq_lens
    if states.has_drafts:
        num_left += states.num_draft_tokens[:num_reqs]
    if num_left.min() < 0:
        row = num_left.argmin()
        raise _beyond(states, layout, row, f"{layout.seq_lens[row] + num_left[row]} are known")
    if states.has_drafts:
        for row in np.flatnonzero((states.num_draft_tokens[:num_reqs] > 0) & (num_left > 0)):
            raise PlanError(
                f"request {states.req_ids[row]!r} is scheduled up to token {layout.seq_lens[row]}, but its "
                f"{states.num_draft_tokens[row]} drafts reach to {layout.seq_lens[row] + num_left[row]}"
            )
    return num_left


def _beyond(states: RequestStates, layout: TokenLayout, row: np.integer[Any], limit: str) -> PlanError:
    return PlanError(
        f"request {states.req_ids[row]!r} is scheduled up to token {layout.seq_lens[row]}, but only {limit}"
    )


def _tensor(array: npt.NDArray[Any], dtype: type[np.integer[Any]], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array.astype(dtype, copy=False))
    return tensor if device.type == "cpu" else tensor.to(device)
