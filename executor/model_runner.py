"""Runs one plan on the model: update the request states, pack, forward, sample, verify drafts, draft anew.

The reading order is that of `execute_model`. Whoever wants times calls its phases one by one
(`step_timer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from servetwin.executor import kv_cache
from servetwin.executor.cuda_graphs import DecodeGraphs, GraphCapture
from servetwin.executor.forward_context import ForwardContext
from servetwin.executor.input_batch import InputBatch, build_input_batch, pack_rows
from servetwin.executor.kv_ledger import KVLedger
from servetwin.executor.model_loader import LoadedModel
from servetwin.executor.ngram_proposer import NgramProposer
from servetwin.executor.packed_model import PackedModel
from servetwin.executor.request_state import PlanError, RequestStates
from servetwin.executor.sampler import RowLogprobs, Sampler, SamplerOutput, SamplingRow
from servetwin.executor.verification import Int64Array, kept_tokens
from servetwin.kernels import ops
from servetwin.sim.contract import DraftTokenIds, LogprobsLists, ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from servetwin.sim.config import SpeculativeConfig

LogitsObserver = Callable[[list[str], torch.Tensor], None]
UNKNOWN_DRAFT = -1
"""Stands in plans of asynchronous scheduling for a draft that only the worker knows."""


class ModelRunner:
    """Owns the model, its cache and the states of the requests. Plans come in order, one at a time.

    `model`: what runs the forward pass (default: `loaded` as it is, not compiled).
    `speculative`: who drafts (method ngram only; ValueError for another). Drafts that a plan brings are verified in
    any case. `observe_logits`, when set, is called in every step that samples with the request of each row of
    logits and the raw logits `[num_logits, vocab_size]`: for tests and debugging.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        seed: int = 0,
        speculative: SpeculativeConfig | None = None,
        model: PackedModel | None = None,
    ) -> None:
        device = loaded.device
        self.loaded = loaded
        self.model = model or PackedModel(loaded.model)
        self.kv_caches = kv_cache.allocate(loaded.kv_cache_spec, num_blocks, block_size, device)
        self.states = RequestStates(max_num_seqs, max_model_len, block_size, device, seed)
        self.ledger = KVLedger(num_blocks, block_size, max_model_len)
        self.sampler = Sampler(loaded.eos_token_ids)
        self.proposer = None if speculative is None else NgramProposer(speculative, max_model_len)
        self.decode_graphs: DecodeGraphs | None = None
        self.observe_logits: LogitsObserver | None = None

    def capture_decode_graphs(self, sizes: Sequence[int], capture: GraphCapture) -> None:
        """From now on decode batches run from graphs of these sizes (ascending). Raises GraphCaptureError."""
        self.decode_graphs = DecodeGraphs(
            self.model, self.kv_caches, sizes, self.states.block_table.max_blocks, capture
        )

    def graph_tokens(self, batch: InputBatch) -> int | None:
        """The padded size at which `forward` replays this batch; None where it runs eagerly."""
        return None if self.decode_graphs is None else self.decode_graphs.size_for(batch)

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step and remembers the sampled tokens. Raises PlanError for a plan that cannot be run."""
        batch = self.prepare(plan)
        if batch is None:
            return ModelRunnerOutput([], {}, [])
        return self.finish(batch, self.sample(batch, self.forward(batch)))

    def prepare(self, plan: SchedulerOutput) -> InputBatch | None:
        """Applies the plan's deltas and packs its tokens; None when it schedules none."""
        self._check_tokens(plan)
        self.states.update(plan)
        if not plan.num_scheduled_tokens:
            return None
        if plan.new_block_ids_to_zero:
            self.ledger.forget(plan.new_block_ids_to_zero)
        packed = pack_rows(self.states)
        self.ledger.record_step(self.states, packed)
        return build_input_batch(self.states, packed, plan.new_block_ids_to_zero)

    @torch.inference_mode()
    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Writes the batch's K/V and gives the logits `[num_logits, vocab_size]`, good until the next call."""
        if batch.block_ids_to_zero is not None:
            for cache in self.kv_caches:
                ops.zero_blocks(cache.key, cache.value, batch.block_ids_to_zero)
        if self.decode_graphs is not None and (size := self.decode_graphs.size_for(batch)) is not None:
            return self.decode_graphs.forward(batch, size)
        context = ForwardContext(batch.attention_metadata, self.kv_caches)
        return self.model.forward(batch.input_ids, batch.positions, batch.logits_indices, context)

    @torch.inference_mode()
    def sample(self, batch: InputBatch, logits: torch.Tensor) -> SamplerOutput:
        """Next tokens behind every row of logits, those behind drafts as if the drafts were outputs."""
        if self.observe_logits is not None:
            self.observe_logits([batch.req_ids[row] for row in batch.logits_layout.rows], logits)
        return self.sampler.sample(logits, self._sampling_rows(batch))

    def finish(self, batch: InputBatch, sampled: SamplerOutput) -> ModelRunnerOutput:
        """Brings the tokens to the host, drops those behind a wrong draft, and makes the others inputs to come."""
        logits = batch.logits_layout
        rows, places, token_ids = logits.rows, logits.num_drafts_before, sampled.token_ids.cpu().numpy()
        logprobs = sampled.logprobs
        if batch.next_draft_ids is not None:
            kept = np.flatnonzero(kept_tokens(token_ids, batch.next_draft_ids, places))
            rows, places, token_ids = rows[kept], places[kept], token_ids[kept]
            logprobs = [logprobs[i] for i in kept]
        self.states.append_tokens(rows, places, token_ids)
        return ModelRunnerOutput(
            req_ids=batch.req_ids,
            req_id_to_index={req_id: row for row, req_id in enumerate(batch.req_ids)},
            sampled_token_ids=_by_row(rows, token_ids, len(batch.req_ids)),
            logprobs=_logprobs_by_request(batch.req_ids, rows, logprobs),
        )

    def propose_draft_token_ids(self, output: ModelRunnerOutput) -> DraftTokenIds | None:
        """What the drafter expects behind the tokens of the step just run; None without one.

        Names the requests that sampled, also those for which nothing can be proposed.
        """
        if self.proposer is None:
            return None
        states = self.states
        req_ids = [r for r, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True) if tokens]
        drafts = [self.proposer.propose(states.known_tokens(states.row_of[r])) for r in req_ids]
        return DraftTokenIds(req_ids, drafts)

    def _sampling_rows(self, batch: InputBatch) -> list[SamplingRow]:
        states = self.states
        rows, places = batch.logits_layout.rows.tolist(), batch.logits_layout.num_drafts_before.tolist()
        return [
            states.rows[row].constant_sampling_row or states.sampling_row(row, place)
            for row, place in zip(rows, places, strict=True)
        ]

    def _check_tokens(self, plan: SchedulerOutput) -> None:
        """An id outside the vocabulary would index past the embedding."""
        for new in plan.scheduled_new_reqs:
            self._check_ids(new.req_id, new.prompt_token_ids or ())
            self._check_ids(new.req_id, new.prefill_token_ids or ())
        for req_id, token_ids in plan.scheduled_cached_reqs.all_token_ids.items():
            self._check_ids(req_id, token_ids)
        for req_id, token_ids in plan.scheduled_spec_decode_tokens.items():
            if UNKNOWN_DRAFT in token_ids:
                raise PlanError(
                    f"request {req_id!r}: its drafts are known to the worker only (asynchronous scheduling), and "
                    "this executor drafts for the scheduler: use --no-async-scheduling"
                )
            self._check_ids(req_id, token_ids)

    def _check_ids(self, req_id: str, token_ids: Sequence[int]) -> None:
        vocab_size = self.loaded.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            index, token_id = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
            raise PlanError(
                f"request {req_id!r}: token id {token_id} at position {index} is outside the model's "
                f"vocabulary (0 to {vocab_size - 1})"
            )


def _by_row(rows: Int64Array, token_ids: Int64Array, num_rows: int) -> list[list[int]]:
    by_row: list[list[int]] = [[] for _ in range(num_rows)]
    for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
        by_row[row].append(token_id)
    return by_row


def _logprobs_by_request(
    req_ids: list[str], rows: Int64Array, logprobs: Iterable[RowLogprobs | None]
) -> dict[str, LogprobsLists] | None:
    """None when nobody asked for any."""
    found: dict[str, LogprobsLists] = {}
    for row, entry in zip(rows.tolist(), logprobs, strict=True):
        if entry is not None:
            lists = found.setdefault(req_ids[row], LogprobsLists())
            lists.logprob_token_ids.append(entry.token_ids)
            lists.logprobs.append(entry.logprobs)
            lists.sampled_token_ranks.append(entry.rank)
    return found or None
