"""Speculative decoding on a real model: whatever is drafted, every request gets the tokens it gets without drafts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from packed_engine import PackedEngine, prompt

from servetwin.executor.request_state import PlanError
from servetwin.executor.testing import torch_threads
from servetwin.sim.config import SpeculativeConfig
from servetwin.sim.contract import DraftTokenIds, SamplingParams

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=2)
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=1.5, seed=11, repetition_penalty=1.3, presence_penalty=0.5)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def alone(params: SamplingParams, tokens: int) -> list[int]:
    """The first tokens of the request "a", without drafts."""
    engine = PackedEngine()
    engine.plans.add("a", prompt(6), params)
    engine.step({"a": 6})
    engine.decode("a", tokens - 1)
    return engine.plans.output_of("a")


def started(params: SamplingParams) -> PackedEngine:
    engine = PackedEngine()
    engine.plans.add("a", prompt(6), params)
    engine.step({"a": 6})
    return engine


def wrong(token_id: int) -> int:
    return (token_id + 1) % 160


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_right_drafts_save_steps_and_wrong_ones_cost_nothing(params: SamplingParams, right: int) -> None:
    """So many right drafts bring one token more than that; draws and penalties see accepted drafts as outputs."""
    expected = alone(params, 9)
    engine = started(params)
    drafts = [*expected[1 : 1 + right], *map(wrong, expected[1 + right : 4])]
    output = engine.verify({"a": drafts})
    assert output.sampled_token_ids == [expected[1 : 2 + right]]
    engine.decode("a", 7 - right)
    assert engine.plans.output_of("a") == expected


def test_rejected_drafts_leave_nothing_behind() -> None:
    """Several rounds of wrong drafts across blocks: the slots are written again, the logits are those of the model."""
    engine = started(GREEDY)
    for _ in range(6):
        expected = alone(GREEDY, len(engine.plans.output_of("a")) + 1)
        engine.verify({"a": [wrong(expected[-1]), 5, 6, 7, 8]})
    assert len(engine.plans.output_of("a")) == 7
    engine.check("a")


def test_a_batch_of_drafts_decodes_and_chunks() -> None:
    """Rows with drafts, without, and with a chunk that does not sample, in one step."""
    expected = alone(GREEDY, 6)
    engine = PackedEngine()
    for req_id, length in {"a": 6, "b": 3}.items():
        engine.plans.add(req_id, prompt(length))
    engine.step({"a": 6, "b": 3})
    engine.plans.add("c", prompt(9, start=40))
    output = engine.verify({"b": [1, 2, 3], "a": expected[1:3]}, c=5)
    assert output.sampled_token_ids[output.req_id_to_index["a"]] == expected[1:4]
    assert output.sampled_token_ids[output.req_id_to_index["c"]] == []
    engine.verify({"a": [wrong(expected[4])], "b": []}, c=4)
    for req_id in "abc":
        engine.check(req_id)


def test_log_probabilities_come_for_the_tokens_that_were_kept() -> None:
    params = SamplingParams(temperature=0, logprobs=1)
    expected = alone(params, 5)
    output = started(params).verify({"a": [*expected[1:3], wrong(expected[3])]})
    assert output.logprobs is not None
    entries = output.logprobs["a"]
    assert [ids[0] for ids in entries.logprob_token_ids] == output.sampled_token_ids[0] == expected[1:4]
    assert entries.sampled_token_ranks == [1, 1, 1]
    assert len(entries.logprobs) == 3


def test_a_request_preempted_after_drafts_resumes_as_it_was() -> None:
    """What was accepted is its output; what was rejected is not."""
    expected = alone(DRAWN, 9)
    engine = started(DRAWN)
    engine.verify({"a": [expected[1], wrong(expected[2])]})
    engine.plans.preempt("a")
    engine.step({"a": 9})
    engine.decode("a", 5)
    assert engine.plans.output_of("a") == expected


# ---------------------------------------------------------------- the drafter in the runner


def test_every_request_that_sampled_is_drafted_for() -> None:
    """Those for which nothing is found too; not the chunk that did not sample."""
    engine = PackedEngine(speculative=NGRAM)
    engine.plans.add("a", prompt(6))
    engine.plans.add("b", prompt(9, start=40))
    output = engine.execute(engine.plans.plan({"a": 6, "b": 4}))
    drafts = engine.runner.propose_draft_token_ids(output)
    assert drafts == DraftTokenIds(["a"], [[]])
    token = engine.plans.output_of("a")[0]
    engine.plans.add("c", [token, 7, 8, token, 9])
    output = engine.execute(engine.plans.plan({"a": 1, "c": 5, "b": 5}))
    drafts = engine.runner.propose_draft_token_ids(output)
    assert drafts is not None
    assert drafts.req_ids == output.req_ids
    assert PackedEngine().runner.propose_draft_token_ids(output) is None, "nobody drafts unless asked to"


def test_drafting_finds_what_a_loop_brings_next() -> None:
    """Driven by its own drafts to the end of the context window, with the tokens of plain decoding."""
    engine = PackedEngine(speculative=NGRAM)
    tokens = [5, 6, 7, 8] * 3
    engine.plans.add("a", tokens)
    output = engine.execute(engine.plans.plan({"a": len(tokens)}))
    request = engine.plans.requests["a"]
    while len(request.token_ids) < 64:
        drafts = engine.runner.propose_draft_token_ids(output)
        assert drafts is not None
        output = engine.verify({"a": drafts.draft_token_ids[0][: 63 - len(request.token_ids)]})
    assert len(request.token_ids) == 64
    assert engine.runner.propose_draft_token_ids(output) == DraftTokenIds(["a"], [[]])
    engine.check("a")


# ---------------------------------------------------------------- plans that cannot be run


@pytest.mark.parametrize(
    ("drafts", "count", "message"),
    [
        ({"a": [-1, -1]}, 3, "'a': its drafts are known to the worker only .*--no-async-scheduling"),
        ({"a": [3, 160]}, 3, "'a': token id 160 at position 1 is outside"),
        ({"a": [3, 4]}, 2, "'a' is scheduled up to token 8, but its 2 drafts reach to 9"),
        ({"a": [3, 4]}, 4, "'a' is scheduled up to token 10, but only 9 are known"),
        ({"x": [3]}, 1, "drafts for request 'x', which it does not schedule"),
        ({"a": [3] * 57}, 58, "'a' has 57 drafts behind 7 tokens: with max_model_len 64 at most 56"),
    ],
)
def test_drafts_that_cannot_be_verified_are_refused_by_request_and_reason(
    drafts: dict[str, list[int]], count: int, message: str
) -> None:
    engine = started(GREEDY)
    plan = engine.plans.plan({"a": count})
    plan.scheduled_spec_decode_tokens = drafts
    with pytest.raises(PlanError, match=message):
        engine.runner.execute_model(plan)
