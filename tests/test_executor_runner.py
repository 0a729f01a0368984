"""Packed, paged execution gives what transformers' own forward gives for each request alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from servetwin.executor.model_loader import SUPPORTED_MODEL_TYPES, describe_model
from servetwin.executor.model_runner import ModelRunner
from servetwin.executor.request_state import PlanError
from servetwin.executor.testing import (
    TINY_VOCAB_SIZE,
    LogitsRecorder,
    PlanWriter,
    reference_logits,
    tiny_model,
    torch_threads,
)
from servetwin.sim.contract import SamplingParams, SchedulerOutput

BLOCK_SIZE = 4
NUM_BLOCKS = 40
EVERY_TYPE = pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@functools.cache
def model_and_reference(model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    return tiny_model(model_type), tiny_model(model_type, attention="eager")


def prompt(length: int, start: int = 3) -> list[int]:
    return [(start + 37 * i) % TINY_VOCAB_SIZE for i in range(length)]


class Engine:
    """A runner on a cache full of NaN, the plans that feed it, and what comes out."""

    def __init__(self, model_type: str = "llama", *, max_num_seqs: int = 8, seed: int = 0) -> None:
        model, self.reference = model_and_reference(model_type)
        self.runner = ModelRunner(
            describe_model(model, model_type),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_model_len=64,
            seed=seed,
        )
        for cache in self.runner.kv_caches:
            cache.key.fill_(torch.nan)
            cache.value.fill_(torch.nan)
        self.recorder = LogitsRecorder()
        self.runner.observe_logits = self.recorder
        self.plans = PlanWriter(BLOCK_SIZE, NUM_BLOCKS)

    def step(self, counts: dict[str, int], hits: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
        output = self.runner.execute_model(self.plans.plan(counts, hits))
        self.plans.take(output)
        self.check_tables(counts)
        return dict(zip(output.req_ids, output.sampled_token_ids, strict=True))

    def decode(self, req_id: str, steps: int) -> None:
        for _ in range(steps):
            self.step({req_id: 1})

    def check_tables(self, counts: dict[str, int]) -> None:
        """Case 24: the runner's rows are the manager's block lists."""
        states = self.runner.states
        for req_id in counts:
            row = states.block_table.row(states.row_of[req_id])
            assert row.tolist() == self.plans.requests[req_id].block_ids

    def check(self, req_id: str) -> None:
        """Logits of every sampled token within 1e-4 of the reference, and the token its argmax."""
        request = self.plans.requests[req_id]
        ours = self.recorder.of(req_id)
        expected = reference_logits(self.reference, request.token_ids[:-1])[request.num_prompt_tokens - 1 :]
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
        assert self.plans.output_of(req_id) == expected.argmax(dim=-1).tolist()


@EVERY_TYPE
def test_a_prompt_in_chunks_and_decode_steps_equal_one_forward(model_type: str) -> None:
    engine = Engine(model_type)
    engine.plans.add("a", prompt(11))
    assert engine.step({"a": 7}) == {"a": []}
    engine.step({"a": 4})
    engine.decode("a", 12)
    engine.check("a")


@EVERY_TYPE
def test_prompts_and_decodes_of_unequal_length_share_a_batch(model_type: str) -> None:
    engine = Engine(model_type)
    for req_id, length in {"a": 5, "b": 13, "c": 1}.items():
        engine.plans.add(req_id, prompt(length, start=length))
    engine.step({"a": 5, "b": 6})
    engine.step({"a": 1, "b": 7, "c": 1})
    for _ in range(6):
        engine.step({"a": 1, "b": 1, "c": 1})
    for req_id in ("a", "b", "c"):
        engine.check(req_id)


def test_generate_of_transformers_gives_the_same_tokens() -> None:
    engine = Engine()
    engine.plans.add("a", prompt(9))
    engine.step({"a": 9})
    engine.decode("a", 9)
    inputs = torch.tensor([prompt(9)])
    reference: Any = engine.reference
    generated = reference.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=10, eos_token_id=None
    )
    assert engine.plans.output_of("a") == generated[0, 9:].tolist()


@EVERY_TYPE
def test_resuming_is_a_prefill_over_prompt_and_outputs(model_type: str) -> None:
    """Case 23: 3 prompt tokens and 5 outputs come back as 8 inputs, and the next token is output number 6."""
    engine = Engine(model_type)
    engine.plans.add("a", prompt(3))
    engine.step({"a": 3})
    engine.decode("a", 4)
    engine.plans.preempt("a")
    plan = engine.plans.plan({"a": 8})
    batch = engine.runner.prepare(plan)
    assert batch is not None
    assert batch.input_ids.tolist() == engine.plans.requests["a"].token_ids
    assert batch.positions.tolist() == list(range(8))
    assert batch.seq_lens.tolist() == [8]
    assert batch.logits_indices.tolist() == [7]
    logits = engine.runner.forward(batch)
    engine.plans.take(engine.runner.finish(batch, engine.runner.sample(batch, logits)))
    engine.decode("a", 3)
    assert len(engine.plans.output_of("a")) == 9
    engine.check("a")


def test_a_starved_request_keeps_its_blocks_and_continues() -> None:
    """A running request that a step leaves out comes back with its old table and all_token_ids."""
    engine = Engine()
    engine.plans.add("a", prompt(6))
    engine.plans.add("b", prompt(4, start=9))
    engine.step({"a": 6, "b": 4})
    engine.decode("b", 3)
    engine.step({"a": 1, "b": 1})
    engine.decode("a", 5)
    engine.check("a")
    engine.check("b")


@EVERY_TYPE
def test_a_hit_on_blocks_computed_in_the_same_step(model_type: str) -> None:
    """Case 32: all K/V of a layer is written before any row reads."""
    engine = Engine(model_type)
    engine.plans.add("a", prompt(17))
    engine.plans.add("b", prompt(17))
    engine.step({"a": 17, "b": 1}, hits={"b": [1, 2, 3, 4]})
    for _ in range(3):
        engine.step({"a": 1, "b": 1})
    engine.check("a")
    engine.check("b")


def test_a_hit_whatever_the_order_of_rows_in_the_step() -> None:
    """The request that hits may lie in an earlier batch row than the one that computes."""
    engine = Engine()
    engine.plans.add("x", prompt(2, start=5))
    engine.step({"x": 2})
    engine.plans.add("a", prompt(17))
    engine.plans.add("b", prompt(17))
    first = engine.plans.plan({"a": 17, "b": 1, "x": 1}, hits={"b": [2, 3, 4, 5]})
    first.scheduled_new_reqs.reverse()
    engine.plans.take(engine.runner.execute_model(first))
    assert engine.runner.states.row_of["b"] < engine.runner.states.row_of["a"]
    engine.check("a")
    engine.check("b")


def test_rows_that_move_keep_their_requests_apart() -> None:
    """Cases 26, 27 and 30: several requests end in one step, short rows move over long ones."""
    engine = Engine(max_num_seqs=4)
    lengths = {"r1": 20, "r2": 3, "r3": 6, "r4": 2}
    for req_id, length in lengths.items():
        engine.plans.add(req_id, prompt(length, start=length))
    engine.step(lengths)
    engine.step(dict.fromkeys(lengths, 1))
    engine.plans.finish("r1")
    engine.plans.finish("r2")
    engine.plans.add("r5", prompt(7, start=50))
    engine.step({"r3": 1, "r4": 1, "r5": 7})
    states = engine.runner.states
    assert [state.req_id for state in states.rows] == ["r3", "r4", "r5"]
    for row in range(3):
        assert not states.block_table.table[row, states.block_table.num_blocks[row] :].any()
    for _ in range(4):
        engine.step({"r5": 1, "r3": 1, "r4": 1})
    for req_id in ("r3", "r4", "r5"):
        engine.check(req_id)


def test_all_rows_of_finished_requests_are_free_for_the_next_step() -> None:
    """Case 30: four requests end together, four more take their rows."""
    engine = Engine(max_num_seqs=4)
    for i in range(8):
        engine.plans.add(f"r{i}", prompt(5, start=i + 1))
    engine.step({f"r{i}": 5 for i in range(4)})
    for i in range(4):
        engine.plans.finish(f"r{i}")
    engine.step({f"r{i}": 5 for i in range(4, 8)})
    assert set(engine.runner.states.known) == {"r4", "r5", "r6", "r7"}
    for i in range(4, 8):
        engine.check(f"r{i}")


def test_the_order_of_the_plan_changes_nothing() -> None:
    """Case 27: outputs belong to request ids, however num_scheduled_tokens was filled."""
    outputs = []
    for order in (["a", "b", "c"], ["c", "a", "b"]):
        engine = Engine()
        for req_id in "abc":
            engine.plans.add(req_id, prompt(4 + ord(req_id) % 5, start=ord(req_id)))
        engine.step({r: len(engine.plans.requests[r].token_ids) for r in "abc"})
        for _ in range(3):
            engine.step(dict.fromkeys(order, 1))
        outputs.append({r: engine.plans.output_of(r) for r in "abc"})
    assert outputs[0] == outputs[1]


def test_a_seed_does_not_depend_on_chunking() -> None:
    """Case 29: a chunk that stops short of the last known token draws nothing from the generator."""
    outputs = []
    for chunks in ([10], [4, 4, 2]):
        engine = Engine()
        engine.plans.add("a", prompt(10), SamplingParams(temperature=1, seed=7))
        for chunk in chunks:
            engine.step({"a": chunk})
        engine.decode("a", 5)
        outputs.append(engine.plans.output_of("a"))
        assert len(engine.recorder.rows["a"]) == 6
    assert outputs[0] == outputs[1]


def test_a_seed_survives_preemption() -> None:
    def run(preempt: bool) -> list[int]:
        engine = Engine()
        engine.plans.add("a", prompt(4), SamplingParams(temperature=1, seed=11))
        engine.step({"a": 4})
        engine.decode("a", 3)
        if preempt:
            engine.plans.preempt("a")
            engine.step({"a": 8})
        else:
            engine.decode("a", 1)
        engine.decode("a", 3)
        return engine.plans.output_of("a")

    assert run(preempt=True) == run(preempt=False)


def test_unscheduled_and_partial_rows_have_no_sampled_token() -> None:
    engine = Engine()
    engine.plans.add("a", prompt(9))
    engine.plans.add("b", prompt(2, start=9))
    sampled = engine.step({"a": 4, "b": 2})
    assert sampled["a"] == []
    assert len(sampled["b"]) == 1


def test_an_empty_plan_drops_finished_requests_and_nothing_else() -> None:
    engine = Engine()
    engine.plans.add("a", prompt(4))
    engine.plans.add("b", prompt(6, start=8))
    engine.step({"a": 4, "b": 6})
    engine.plans.finish("a")
    output = engine.runner.execute_model(engine.plans.plan({}))
    assert (output.req_ids, output.sampled_token_ids) == ([], [])
    assert set(engine.runner.states.known) == {"b"}
    engine.decode("b", 3)
    engine.check("b")


def test_a_finished_id_may_come_back_as_a_new_request_in_the_same_plan() -> None:
    engine = Engine()
    engine.plans.add("a", prompt(4))
    engine.step({"a": 4})
    engine.plans.finish("a")
    engine.recorder.rows.clear()
    engine.plans.add("a", prompt(6, start=8))
    engine.step({"a": 6})
    engine.decode("a", 2)
    engine.check("a")


def test_aborting_a_request_that_never_ran_is_ignored() -> None:
    engine = Engine()
    plan = engine.plans.plan({})
    plan.finished_req_ids.add("ghost")
    assert engine.runner.execute_model(plan).req_ids == []


def _without_tokens(plan: SchedulerOutput) -> None:
    plan.scheduled_new_reqs[0].prompt_token_ids = None


def _token_outside(plan: SchedulerOutput) -> None:
    plan.scheduled_new_reqs[0].prompt_token_ids = [1, TINY_VOCAB_SIZE, 2, 3]


def _too_few_blocks(plan: SchedulerOutput) -> None:
    plan.scheduled_new_reqs[0].block_ids = ([],)


def _too_many_tokens(plan: SchedulerOutput) -> None:
    plan.num_scheduled_tokens["a"] = 5


def _unknown_request(plan: SchedulerOutput) -> None:
    plan.scheduled_new_reqs.clear()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_tokens, "'a' has no prompt_token_ids"),
        (_token_outside, r"'a': token id 160 at position 1 .* \(0 to 159\)"),
        (_too_few_blocks, "'a' is scheduled up to token 4, but only 0 are covered"),
        (_too_many_tokens, "'a' is scheduled up to token 5, but only 4 are known"),
        (_unknown_request, r"names \['a'\]"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_by_request_and_reason(
    damage: Callable[[SchedulerOutput], None], message: str
) -> None:
    engine = Engine()
    engine.plans.add("a", prompt(4))
    plan = engine.plans.plan({"a": 4})
    damage(plan)
    with pytest.raises(PlanError, match=message):
        engine.runner.execute_model(plan)


def test_a_continued_request_must_be_known() -> None:
    engine = Engine()
    engine.plans.add("a", prompt(4))
    engine.plans.plan({"a": 4})
    with pytest.raises(PlanError, match="'a' is continued, but was never announced"):
        engine.runner.execute_model(engine.plans.plan({"a": 1}))


def test_more_requests_than_seats_are_refused() -> None:
    engine = Engine(max_num_seqs=1)
    engine.plans.add("a", prompt(2))
    engine.plans.add("b", prompt(2))
    with pytest.raises(PlanError, match="max_num_seqs 1"):
        engine.runner.execute_model(engine.plans.plan({"a": 2, "b": 2}))
