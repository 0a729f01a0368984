"""Runs one plan on the model: update the request states, pack, forward, sample.

The reading order is that of `execute_model`. Whoever wants times calls its phases one by one
(`step_timer.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from servetwin.executor import kv_cache
from servetwin.executor.forward_context import ForwardContext, set_forward_context
from servetwin.executor.input_batch import InputBatch, build_input_batch, lay_out_rows
from servetwin.executor.kv_ledger import KVLedger
from servetwin.executor.model_loader import LoadedModel
from servetwin.executor.request_state import PlanError, RequestStates
from servetwin.executor.sampler import Sampler, SamplingRow
from servetwin.sim.contract import ModelRunnerOutput, SchedulerOutput

LogitsObserver = Callable[[list[str], torch.Tensor], None]


class ModelRunner:
    """Owns the model, its cache and the states of the requests. Plans come in order, one at a time.

    `observe_logits`, when set, is called in every step that samples with the ids of the sampling requests and
    their raw logits `[num_logits, vocab_size]`: for tests and debugging.
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
    ) -> None:
        device = loaded.device
        self.loaded = loaded
        self.kv_caches = kv_cache.allocate(loaded.kv_cache_spec, num_blocks, block_size, device)
        self.states = RequestStates(max_num_seqs, max_model_len, block_size, device)
        self.ledger = KVLedger(num_blocks, block_size, max_model_len)
        self.sampler = Sampler(loaded.eos_token_ids, seed, device)
        self.observe_logits: LogitsObserver | None = None

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
        layout = lay_out_rows(self.states, plan.num_scheduled_tokens)
        self.ledger.record_step(self.states, layout)
        return build_input_batch(self.states, layout)

    @torch.inference_mode()
    def forward(self, batch: InputBatch) -> torch.Tensor:
        """Writes the batch's K/V and gives the logits `[num_logits, vocab_size]` at `logits_indices`."""
        with set_forward_context(ForwardContext(batch.attention_metadata, self.kv_caches)):
            output = self.loaded.model(
                input_ids=batch.input_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=batch.logits_indices,
            )
        logits: torch.Tensor = output.logits.squeeze(0)
        return logits

    @torch.inference_mode()
    def sample(self, batch: InputBatch, logits: torch.Tensor) -> torch.Tensor:
        """Next tokens of the sampling rows, `[num_logits]` int64 on the device."""
        if self.observe_logits is not None:
            self.observe_logits([batch.req_ids[row] for row in batch.logits_rows], logits)
        return self.sampler.sample(logits, [self._sampling_row(row) for row in batch.logits_rows.tolist()])

    def finish(self, batch: InputBatch, token_ids: torch.Tensor) -> ModelRunnerOutput:
        """Brings the tokens to the host and makes each the next input of its request."""
        sampled: list[list[int]] = [[] for _ in batch.req_ids]
        for row, token_id in zip(batch.logits_rows.tolist(), token_ids.tolist(), strict=True):
            sampled[row] = [token_id]
            self.states.append_token(batch.req_ids[row], token_id)
        return ModelRunnerOutput(
            req_ids=batch.req_ids,
            req_id_to_index={req_id: row for row, req_id in enumerate(batch.req_ids)},
            sampled_token_ids=sampled,
        )

    def _sampling_row(self, row: int) -> SamplingRow:
        state = self.states.rows[row]
        return SamplingRow(state.sampling_params, state.generator, self.states.num_output_tokens(row))

    def _check_tokens(self, plan: SchedulerOutput) -> None:
        """An id outside the vocabulary would index past the embedding."""
        vocab_size = self.loaded.vocab_size
        prompts = {new.req_id: new.prompt_token_ids or [] for new in plan.scheduled_new_reqs}
        for req_id, token_ids in (prompts | plan.scheduled_cached_reqs.all_token_ids).items():
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
                index, token_id = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
                raise PlanError(
                    f"request {req_id!r}: token id {token_id} at position {index} is outside the model's "
                    f"vocabulary (0 to {vocab_size - 1})"
                )
