"""Asynchronous scheduling: a step is planned while the tokens of the step before it are still on their way.

Rules of `v1/core/sched/async_scheduler.py` of vLLM 0.22.0; `test_timeline.py` has the times.
"""

from __future__ import annotations

from typing import Any

import pytest
from engines import Engine, drafting, engine_config, preempted, scheduled, some_tokens
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from servetwin.sim.contract import ModelRunnerOutput
from servetwin.sim.request import RequestStatus

EOS = 2


def async_engine(*, right_drafts: int = 0, **options: Any) -> Engine:
    return Engine(engine_config(async_scheduling=True, **options), right_drafts=right_drafts)


def test_two_steps_are_in_flight() -> None:
    """The second is planned with a place for the token that the first will bring; a third has to wait."""
    engine = async_engine()
    r = engine.add("r", 5, 4)
    first, second = engine.schedule(), engine.schedule()
    assert engine.core.begin(0) is None
    assert (r.num_output_tokens, r.num_output_placeholders, r.num_computed_tokens) == (0, 2, 6)
    assert second.plan.scheduled_cached_reqs.num_output_tokens == [1]
    assert engine.complete(first).new_token_ids.keys() == {"r"}
    assert (r.num_output_tokens, r.num_output_placeholders) == (1, 1)


def test_steps_complete_in_order() -> None:
    """The oldest first; anything else is an error of the driver."""
    engine = async_engine()
    engine.add("r", 5, 4)
    first, second = engine.schedule(), engine.schedule()
    with pytest.raises(AssertionError, match="in the order in which they began"):
        engine.core.complete(second, engine.model_output(first.plan))


def test_an_eos_is_known_one_step_too_late() -> None:
    """One token more has been computed; it is dropped, and the blocks are freed once."""
    engine = async_engine(eos_token_id=EOS)
    r = engine.add("r", 3, 9, answer=[9, EOS, 9, 9])
    frames = engine.run()
    assert scheduled(frames, "r") == [3, 1, 1]
    assert (r.output_token_ids, r.finish_reason) == ([9, EOS], "stop")
    assert engine.pool.num_free == 100
    engine.scheduler.check_integrity()


@pytest.mark.parametrize(("max_model_len", "outputs"), [(400, 6), (12, 4)])
def test_nothing_is_computed_beyond_the_length_limits(max_model_len: int, outputs: int) -> None:
    """max_tokens and the window end a request without a surplus step: they need no token to be known."""
    engine = async_engine(max_model_len=max_model_len)
    r = engine.add("r", 8, 6)
    assert scheduled(engine.run(), "r") == [8] + [1] * (outputs - 1)
    assert (r.num_output_tokens, r.finish_reason) == (outputs, "length")


def test_a_block_is_found_only_when_its_last_token_is_known() -> None:
    """The token that fills the block is in flight, so nobody could name the content."""
    engine = async_engine(caching=True)
    r = engine.add("r", 7, 6)
    engine.turn()
    second = engine.schedule()
    assert (r.num_computed_tokens, engine.pool.num_cached_hashes) == (8, 1)
    engine.complete(engine.core.in_flight[0])
    assert (r.num_tokens, engine.pool.num_cached_hashes) == (8, 1)
    engine.complete(second)
    assert engine.pool.num_cached_hashes == 2


def test_a_victim_still_gets_the_token_in_flight() -> None:
    """It arrives while the victim waits, and is known when it resumes."""
    engine = async_engine(usable_blocks=5)
    engine.add("a", 8, 9)
    b = engine.add("b", 8, 9)
    first, second = engine.schedule(), engine.schedule()
    assert preempted([second]) == ["b"]
    assert (b.status, b.num_tokens, b.num_output_placeholders) == (RequestStatus.PREEMPTED, 8, 1)
    engine.complete(first)
    assert (b.status, b.num_tokens, b.num_output_placeholders) == (RequestStatus.PREEMPTED, 9, 0)
    engine.complete(second)
    assert scheduled(engine.run(), "b")[0] == 9
    assert b.num_output_tokens == 9


def test_a_victim_may_end_with_the_token_in_flight() -> None:
    """Then it leaves the queue in which it waited to come back."""
    engine = async_engine(usable_blocks=4)
    engine.add("a", 4, 9)
    b = engine.add("b", 4, 5)
    engine.run(until=lambda: b.num_preemptions == 1)
    assert b.num_output_tokens + b.num_output_placeholders == b.max_tokens
    engine.turn()
    assert (b.finish_reason, b.num_output_tokens, engine.waiting) == ("length", 5, [])
    engine.scheduler.check_integrity()


def test_an_abort_with_two_steps_in_flight_frees_the_blocks_once() -> None:
    """Both steps' tokens are dropped; the neighbour gets its own."""
    engine = async_engine(usable_blocks=8)
    gone, r = engine.add("gone", 8, 9), engine.add("r", 3, 9)
    first, second = engine.schedule(), engine.schedule()
    engine.abort("gone")
    assert engine.complete(first).new_token_ids.keys() == {"r"}
    assert engine.complete(second).new_token_ids.keys() == {"r"}
    assert (gone.num_output_tokens, r.num_output_tokens) == (0, 2)
    assert engine.pool.num_free == 8 - 1
    engine.scheduler.check_integrity()


# ---------------------------------------------------------------- drafts


def test_drafts_are_known_to_the_worker_alone() -> None:
    """The plan has -1 in their place, and room for one token more than there are drafts."""
    engine = async_engine(speculative=drafting("eagle", 3))
    r = engine.add("r", 5, 20)
    engine.schedule()
    plan = engine.schedule().plan
    assert plan.scheduled_spec_decode_tokens == {"r": [-1, -1, -1]}
    assert plan.num_scheduled_tokens == {"r": 4}
    assert r.num_output_placeholders == 1 + 4


@pytest.mark.parametrize("right", [0, 1, 3])
def test_rejected_drafts_give_their_places_back(right: int) -> None:
    """Every step brings one token and the right drafts; in the end nothing was counted that did not come."""
    engine = async_engine(speculative=drafting("eagle", 3), right_drafts=right)
    r = engine.add("r", 5, 20)
    frames = engine.run(until=lambda: r.num_output_tokens > 8)
    assert 0 <= r.num_output_placeholders <= 2 * 4
    brought = sum(min(n, right + 1) for n in scheduled(frames[:-1], "r")[1:]) + 1
    assert r.num_output_tokens == brought
    engine.run()
    assert (r.num_output_tokens, r.finish_reason, r.num_output_placeholders >= 0) == (20, "length", True)
    assert engine.pool.num_free == 100


def test_a_drafter_that_needs_the_tokens_does_not_go_with_it() -> None:
    """An n-gram look-up has nothing to look at while the tokens are in the worker."""
    with pytest.raises(ValidationError, match="async_scheduling does not go with speculative method 'ngram'"):
        async_engine(speculative=drafting("ngram", 2))


# ---------------------------------------------------------------- the answers do not depend on it


@st.composite
def loads(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """(prompt, max_tokens, priority, outputs before EOS), too much for eight blocks."""
    numbers = st.tuples(st.integers(1, 14), st.integers(1, 12), st.integers(0, 2), st.integers(0, 14))
    return draw(st.lists(numbers, min_size=1, max_size=6))


def answers(loads: list[tuple[int, int, int, int]], **options: Any) -> dict[str, list[int]]:
    """The outputs of each request; the books are checked at every step."""
    engine = Engine(engine_config(usable_blocks=8, eos_token_id=EOS, **options), right_drafts=1)
    for i, (prompt, max_tokens, priority, length) in enumerate(loads):
        answer = [9] * length + [EOS]
        engine.add(f"r{i}", some_tokens("shared", prompt), max_tokens, priority=priority, answer=answer)
    for _ in engine.frames():
        engine.scheduler.check_integrity()
    assert engine.pool.num_free == 8
    return {r: request.output_token_ids for r, request in engine.known.items()}


@given(
    loads(),
    st.sampled_from(["fcfs", "priority"]),
    st.booleans(),
    st.sampled_from([None, drafting("eagle", 2), drafting("draft_model", 3)]),
)
def test_the_answers_are_those_of_synchronous_scheduling(
    load: list[tuple[int, int, int, int]], policy: str, caching: bool, speculative: Any
) -> None:
    """Token for token, whatever is preempted, hit, drafted or stopped."""
    options = {"policy": policy, "caching": caching}
    plain = answers(load, **options)
    assert answers(load, **options, async_scheduling=True, speculative=speculative) == plain


def test_an_executor_may_answer_rows_in_another_order() -> None:
    """Outputs are looked up by request."""
    engine = async_engine()
    a, b = engine.add("a", 3, 4), engine.add("b", 3, 4)
    frame = engine.schedule()
    engine.core.complete(frame, ModelRunnerOutput(["b", "a"], {"b": 0, "a": 1}, [[20], [10]]))
    assert (a.output_token_ids, b.output_token_ids) == ([10], [20])


def test_a_step_in_flight_brings_nothing_to_a_later_request_with_the_same_id() -> None:
    """x is aborted while its step is in flight, and another x arrives: the old step's token is nobody's."""
    engine = Engine(engine_config(async_scheduling=True))
    engine.add("x", 4, 5)
    frame = engine.schedule()
    output = engine.model_output(frame.plan)
    engine.abort("x")
    successor = engine.request("x", 4, 5)
    engine.put(successor)
    engine.core.complete(frame, output)
    assert successor.output_token_ids == []
    assert not successor.finished
