"""Packed, paged execution gives what transformers' own forward gives for each request alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from packed_engine import PackedEngine, prompt

from servetwin.executor.model_loader import SUPPORTED_MODEL_TYPES
from servetwin.executor.request_state import PlanError
from servetwin.executor.testing import TINY_VOCAB_SIZE, torch_threads
from servetwin.sim.contract import SamplingParams, SchedulerOutput

EVERY_TYPE = pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@EVERY_TYPE
def test_a_prompt_in_chunks_and_decode_steps_equal_one_forward(model_type: str) -> None:
    engine = PackedEngine(model_type)
    engine.plans.add("a", prompt(11))
    assert engine.step({"a": 7}) == {"a": []}
    engine.step({"a": 4})
    engine.decode("a", 12)
    engine.check("a")


@EVERY_TYPE
def test_prompts_and_decodes_of_unequal_length_share_a_batch(model_type: str) -> None:
    engine = PackedEngine(model_type)
    for req_id, length in {"a": 5, "b": 13, "c": 1}.items():
        engine.plans.add(req_id, prompt(length, start=length))
    engine.step({"a": 5, "b": 6})
    engine.step({"a": 1, "b": 7, "c": 1})
    for _ in range(6):
        engine.step({"a": 1, "b": 1, "c": 1})
    for req_id in ("a", "b", "c"):
        engine.check(req_id)


def test_generate_of_transformers_gives_the_same_tokens() -> None:
    engine = PackedEngine()
    engine.plans.add("a", prompt(9))
    engine.step({"a": 9})
    engine.decode("a", 9)
    inputs = torch.tensor([prompt(9)])
    reference: Any = engine.reference
    generated = reference.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=10, eos_token_id=None
    )
    assert engine.plans.output_of("a") == generated[0, 9:].tolist()


def test_a_starved_request_keeps_its_blocks_and_continues() -> None:
    """A running request that a step leaves out comes back with its old table and all_token_ids."""
    engine = PackedEngine()
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
    engine = PackedEngine(model_type)
    engine.plans.add("a", prompt(17))
    engine.plans.add("b", prompt(17))
    engine.step({"a": 17, "b": 1}, hits={"b": [1, 2, 3, 4]})
    for _ in range(3):
        engine.step({"a": 1, "b": 1})
    engine.check("a")
    engine.check("b")


def test_a_hit_whatever_the_order_of_rows_in_the_step() -> None:
    """The request that hits may lie in an earlier batch row than the one that computes."""
    engine = PackedEngine()
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


def test_a_seed_survives_preemption() -> None:
    def run(preempt: bool) -> list[int]:
        engine = PackedEngine()
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
    engine = PackedEngine()
    engine.plans.add("a", prompt(9))
    engine.plans.add("b", prompt(2, start=9))
    sampled = engine.step({"a": 4, "b": 2})
    assert sampled["a"] == []
    assert len(sampled["b"]) == 1


def test_an_empty_plan_drops_finished_requests_and_nothing_else() -> None:
    engine = PackedEngine()
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
    engine = PackedEngine()
    engine.plans.add("a", prompt(4))
    engine.step({"a": 4})
    engine.plans.finish("a")
    engine.recorder.rows.clear()
    engine.plans.add("a", prompt(6, start=8))
    engine.step({"a": 6})
    engine.decode("a", 2)
    engine.check("a")


def test_aborting_a_request_that_never_ran_is_ignored() -> None:
    engine = PackedEngine()
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


def _no_tokens(plan: SchedulerOutput) -> None:
    plan.num_scheduled_tokens["a"] = 0


def _unknown_request(plan: SchedulerOutput) -> None:
    plan.scheduled_new_reqs.clear()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_tokens, "'a' has no prompt_token_ids"),
        (_token_outside, r"'a': token id 160 at position 1 .* \(0 to 159\)"),
        (_too_few_blocks, "'a' is scheduled up to token 4, but only 0 are covered"),
        (_too_many_tokens, "'a' is scheduled up to token 5, but only 4 are known"),
        (_no_tokens, "'a' is scheduled with 0 tokens, not 1 or more"),
        (_unknown_request, r"names \['a'\]"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_by_request_and_reason(
    damage: Callable[[SchedulerOutput], None], message: str
) -> None:
    engine = PackedEngine()
    engine.plans.add("a", prompt(4))
    plan = engine.plans.plan({"a": 4})
    damage(plan)
    with pytest.raises(PlanError, match=message):
        engine.runner.execute_model(plan)


def test_a_continued_request_must_be_known() -> None:
    engine = PackedEngine()
    engine.plans.add("a", prompt(4))
    engine.plans.plan({"a": 4})
    with pytest.raises(PlanError, match="'a' is continued, but was never announced"):
        engine.runner.execute_model(engine.plans.plan({"a": 1}))


def test_more_requests_than_seats_are_refused() -> None:
    engine = PackedEngine(max_num_seqs=1)
    engine.plans.add("a", prompt(2))
    engine.plans.add("b", prompt(2))
    with pytest.raises(PlanError, match="max_num_seqs 1"):
        engine.runner.execute_model(engine.plans.plan({"a": 2, "b": 2}))
