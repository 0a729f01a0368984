"""A model runner fed by hand-written plans, on a cache full of NaN, with what comes out on record."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from servetwin.executor.model_loader import describe_model
from servetwin.executor.model_runner import ModelRunner
from servetwin.executor.testing import (
    TINY_VOCAB_SIZE,
    LogitsRecorder,
    PlanWriter,
    reference_logits,
    tiny_model,
)
from servetwin.sim.config import SpeculativeConfig
from servetwin.sim.contract import ModelRunnerOutput, SchedulerOutput

BLOCK_SIZE = 4
NUM_BLOCKS = 40


@functools.cache
def model_and_reference(model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    return tiny_model(model_type), tiny_model(model_type, attention="eager")


def prompt(length: int, start: int = 3) -> list[int]:
    """Tokens that do not repeat."""
    return [(start + 37 * i) % TINY_VOCAB_SIZE for i in range(length)]


def poison(runner: ModelRunner) -> None:
    """Fills the cache with NaN: whatever is read before it was written shows."""
    for cache in runner.kv_caches:
        cache.key.fill_(torch.nan)
        cache.value.fill_(torch.nan)


class PackedEngine:
    """A runner and the plans that feed it."""

    def __init__(
        self,
        model_type: str = "llama",
        *,
        max_num_seqs: int = 8,
        seed: int = 0,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        model, self.reference = model_and_reference(model_type)
        self.runner = ModelRunner(
            describe_model(model, model_type),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_model_len=64,
            seed=seed,
            speculative=speculative,
        )
        poison(self.runner)
        self.recorder = LogitsRecorder()
        self.runner.observe_logits = self.recorder
        self.plans = PlanWriter(BLOCK_SIZE, NUM_BLOCKS)

    def step(self, counts: dict[str, int], hits: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
        output = self.execute(self.plans.plan(counts, hits))
        return dict(zip(output.req_ids, output.sampled_token_ids, strict=True))

    def verify(self, drafts: dict[str, Sequence[int]], **others: int) -> ModelRunnerOutput:
        """One step in which requests decode with these drafts; `others`: tokens of the rest."""
        counts = {req_id: 1 + len(ids) for req_id, ids in drafts.items()}
        plan = self.plans.plan(counts | others)
        plan.scheduled_spec_decode_tokens = {req_id: list(ids) for req_id, ids in drafts.items() if ids}
        output = self.execute(plan)
        for req_id, ids in drafts.items():
            tokens = output.sampled_token_ids[output.req_id_to_index[req_id]]
            # As the scheduler does: what was computed for wrong drafts is computed again.
            self.plans.requests[req_id].num_computed_tokens -= 1 + len(ids) - len(tokens)
        return output

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        output = self.runner.execute_model(plan)
        self.plans.take(output)
        self.check_tables(plan)
        self._forget_rejected()
        return output

    def decode(self, req_id: str, steps: int) -> None:
        for _ in range(steps):
            self.step({req_id: 1})

    def check_tables(self, plan: SchedulerOutput) -> None:
        """The runner's rows are the manager's block lists."""
        states = self.runner.states
        for req_id in plan.num_scheduled_tokens:
            row = states.block_table.row(states.row_of[req_id])
            assert row.tolist() == self.plans.requests[req_id].block_ids

    def check(self, req_id: str) -> None:
        """Logits of every token kept within 1e-4 of the reference, and the token its argmax."""
        request = self.plans.requests[req_id]
        ours = self.recorder.of(req_id)
        expected = reference_logits(self.reference, request.token_ids[:-1])[request.num_prompt_tokens - 1 :]
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
        assert self.plans.output_of(req_id) == expected.argmax(dim=-1).tolist()

    def _forget_rejected(self) -> None:
        """Only the logits behind tokens that were kept mean anything."""
        for req_id, logits in self.recorder.rows.items():
            if req_id in self.plans.requests:
                del logits[len(self.plans.output_of(req_id)) :]
