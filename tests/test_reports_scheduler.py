"""Field reports about hangs, starvation and stop conditions, as small cases with the behaviour of vLLM 0.22.0.

The numbers in the names are those of the reports.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from engines import Engine, engine_config, preempted, scheduled
from pydantic import ValidationError

from servetwin.sim.records import WaitReason
from servetwin.sim.request import RequestStatus

EOS = 2


# ---------------------------------------------------------------- (a) hang, livelock, starvation


def test_01_a_pool_that_cannot_hold_a_request_is_refused() -> None:
    """A window larger than the pool would let a request wait for ever at the head: no such engine is built."""
    with pytest.raises(ValidationError, match="hold 44 tokens, below max_model_len 64"):
        engine_config(usable_blocks=10, max_model_len=64, max_num_batched_tokens=64)


def test_01_a_request_that_would_need_the_null_block_is_refused_and_the_rest_go_on() -> None:
    """Such a pool passes the check of the window, as in vLLM; the one request that can never run is named."""
    engine = Engine(engine_config(usable_blocks=15, max_model_len=64))
    too_long, fits = engine.request("R0", 60, 4), engine.request("R1", 57, 4)
    assert engine.core.refusal(too_long) == (
        "prompt of 60 and output of 4 tokens need 16 blocks; the pool has 15 usable ones"
    )
    assert engine.core.refusal(fits) is None


def test_02_a_long_prompt_waits_for_its_whole_sequence() -> None:
    """C is not admitted by its first chunk: it starts after A has ended, and each of its tokens is computed once."""
    engine = Engine(engine_config(usable_blocks=20, max_num_batched_tokens=8))
    a = engine.add("A", 53, 20)
    engine.run(until=lambda: a.num_computed_tokens == 56)
    assert len(engine.table("A")) == 14
    engine.add("C", 40, 4)
    frames = engine.run()
    assert preempted(frames) == []
    first_of_c = next(i for i, f in enumerate(frames) if "C" in f.plan.num_scheduled_tokens)
    assert all("A" not in f.plan.num_scheduled_tokens for f in frames[first_of_c:])
    assert scheduled(frames, "C") == [8, 8, 8, 8, 8, 1, 1, 1]


def test_03_the_cursor_is_not_corrected_for_an_unscheduled_victim() -> None:
    """As in 0.22.0, the request behind the grown one idles in the step in which a victim before it goes.

    A has reached the window without its min_tokens, so it gets 0 tokens in every step.
    """
    engine = Engine(engine_config(usable_blocks=6, max_model_len=16, policy="priority"))
    engine.add("A", 10, 20, min_tokens=20, priority=9)
    engine.run(until=lambda: engine.known["A"].num_tokens == 16)
    engine.add("X", 3, 9)
    engine.add("Y", 2, 9)
    assert engine.step() == {"X": 3, "Y": 2}
    assert engine.step() == {"X": 1, "Y": 1}
    assert engine.running == ["A", "X", "Y"]
    frame = engine.schedule()
    assert preempted([frame]) == ["A"]
    assert frame.plan.num_scheduled_tokens == {"X": 1}
    assert engine.pool.num_free == 3
    engine.complete(frame)
    assert engine.step().keys() >= {"X", "Y"}


@pytest.mark.parametrize("chunked", [False, True])
def test_04_a_budget_below_the_window_needs_chunked_prefill(chunked: bool) -> None:
    """Without chunked prefill a prompt above the token budget could never be scheduled: refused."""
    expected = pytest.raises(ValidationError, match="max_num_batched_tokens 16 is below max_model_len 32")
    with nullcontext() if chunked else expected:
        engine_config(max_model_len=32, max_num_batched_tokens=16, enable_chunked_prefill=chunked)


def test_04_chunked_prefill_cannot_be_switched_off_afterwards() -> None:
    """A configuration does not change once it has been checked."""
    config = engine_config(usable_blocks=8, max_num_batched_tokens=16)
    with pytest.raises(ValidationError, match="frozen"):
        config.scheduler.enable_chunked_prefill = False


def test_04_a_budget_below_the_seats_is_refused() -> None:
    """Every running request needs a token of the budget."""
    with pytest.raises(ValidationError, match="max_num_batched_tokens 7 is below max_num_seqs 8"):
        engine_config(max_num_batched_tokens=7, max_num_seqs=8)


def test_05_a_request_that_could_not_grow_to_its_end_is_refused() -> None:
    """Two blocks of four for a window of 64: the only running request would preempt itself for ever."""
    with pytest.raises(ValidationError, match="raise the number of blocks"):
        engine_config(usable_blocks=2, max_model_len=64)


def test_05_an_abort_just_before_the_schedule_leaves_an_empty_plan() -> None:
    """The plan then only tells the worker who is gone."""
    engine = Engine(engine_config())
    engine.add("r", 8, 4)
    engine.step()
    engine.abort("r")
    frame = engine.schedule()
    assert frame.plan.total_num_scheduled_tokens == 0
    assert frame.plan.finished_req_ids == {"r"}
    engine.complete(frame)
    assert not engine.core.has_work()


def test_06_min_tokens_beyond_the_window_are_refused() -> None:
    """10 prompt tokens leave 6 of a window of 16; 20 are demanded."""
    engine = Engine(engine_config(max_model_len=16))
    refusal = engine.core.refusal(engine.request("r", 10, 20, min_tokens=20, ignore_eos=True))
    assert refusal is not None
    assert "min_tokens 20 cannot be reached" in refusal
    assert engine.core.refusal(engine.request("r", 10, 20, min_tokens=6)) is None


def test_06_behind_that_door_the_scheduler_stalls_as_vllm_does() -> None:
    """The length caps stand behind min_tokens: at the window's edge the request gets 0 tokens in every step."""
    engine = Engine(engine_config(max_model_len=16))
    r = engine.add("r", 10, 20, min_tokens=20, ignore_eos=True)
    engine.run(until=lambda: r.num_tokens == 16)
    assert [engine.step() for _ in range(5)] == [{}] * 5
    assert (engine.running, len(engine.table("r"))) == (["r"], 4)


@pytest.mark.parametrize("knob", ["max_num_partial_prefills", "max_long_partial_prefills"])
def test_07_a_knob_that_would_do_nothing_is_refused(knob: str) -> None:
    """The V1 scheduler never looks at it, so neither do we pretend to."""
    with pytest.raises(ValidationError, match=knob):
        engine_config(**{knob: 2})  # type: ignore[arg-type]


def test_08_unequal_lengths_alone_preempt_nobody() -> None:
    """All four decode together, and nothing is computed twice."""
    engine = Engine(engine_config(usable_blocks=1000))
    prompts = [3, 50, 120, 7]
    for p in prompts:
        engine.add(f"p{p}", p, 40)
    frames = engine.run()
    assert preempted(frames) == []
    total = sum(f.plan.total_num_scheduled_tokens for f in frames)
    assert total == sum(p + 40 - 1 for p in prompts)
    assert [len(f.plan.num_scheduled_tokens) for f in frames] == [4] * 40 + [0]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("order", [("A", "C"), ("C", "A")])
def test_09_nobody_holds_blocks_while_waiting(order: tuple[str, str], policy: str) -> None:
    """Two requests of half the pool each: whoever has to wait owns nothing, and an empty engine admits the head."""
    engine = Engine(engine_config(usable_blocks=7, policy=policy))
    prompts = {"A": 16, "C": 12}
    for name in order:
        engine.add(name, prompts[name], 5)
    victims = []
    for frame in engine.frames():
        assert all(engine.table(r) == [] for r in engine.waiting)
        assert engine.running or not engine.waiting
        victims += preempted([frame])
    assert victims
    assert {r.num_output_tokens for r in engine.known.values()} == {5}


def test_10_a_more_urgent_arrival_waits_for_a_seat() -> None:
    """Priority orders the queue; it does not take seats from running requests."""
    engine = Engine(engine_config(max_num_seqs=1, policy="priority"))
    engine.add("low", 4, 50, priority=5)
    engine.step()
    engine.add("high", 4, 2, priority=0)
    frames = engine.run(until=lambda: engine.known["low"].finished)
    assert preempted(frames) == []
    assert all("high" not in f.plan.num_scheduled_tokens for f in frames)
    assert frames[0].record.head_reason is WaitReason.SEATS
    assert engine.step() == {"high": 4}


def test_10_the_victim_has_the_largest_priority_then_the_latest_arrival() -> None:
    """Three running requests on a full pool: c and b share the worst priority, c came later."""
    engine = Engine(engine_config(usable_blocks=6, policy="priority", max_num_seqs=3))
    for name, priority in (("a", 1), ("b", 5), ("c", 5)):
        engine.add(name, 8, 10, priority=priority)
    engine.step()
    assert engine.pool.num_free == 0
    frame = engine.schedule()
    # a takes c's blocks, b the other one: c goes alone.
    assert preempted([frame]) == ["c"]
    assert list(frame.plan.num_scheduled_tokens) == ["a", "b"]


def test_10_a_request_may_be_its_own_victim() -> None:
    """The least urgent request needs the block: it goes itself, quietly."""
    engine = Engine(engine_config(usable_blocks=5, policy="priority"))
    engine.add("low", 8, 9, priority=5)
    engine.add("high", 9, 3, priority=0)
    engine.step()
    frame = engine.schedule()
    assert preempted([frame]) == ["low"]
    assert frame.plan.num_scheduled_tokens == {"high": 1}
    assert frame.plan.preempted_req_ids == {"low"}


# ---------------------------------------------------------------- (e) stop conditions


def test_42_what_comes_after_a_stop_in_the_same_step_is_dropped() -> None:
    """Eight outputs so far, then [EOS, t, t] with room for two: a stop with nine outputs."""
    engine = Engine(engine_config(eos_token_id=EOS))
    r = engine.add("r", 4, 10)
    engine.run(until=lambda: r.num_output_tokens == 8)
    frame = engine.schedule()
    output = engine.model_output(frame.plan)
    output.sampled_token_ids = [[EOS, 7, 7]]
    outputs = engine.core.complete(frame, output)
    assert (r.num_output_tokens, r.output_token_ids[-1], r.finish_reason) == (9, EOS, "stop")
    assert outputs.outputs[0].new_token_ids == [EOS]


@pytest.mark.parametrize("prompt", [15, 16, 17])
def test_43_a_prompt_at_the_edge_of_the_window(prompt: int) -> None:
    """One token fits after 15 of 16; a prompt that fills the window is refused."""
    engine = Engine(engine_config(max_model_len=16))
    refusal = engine.core.refusal(engine.request("r", prompt, 5))
    if prompt == 15:
        assert refusal is None
        r = engine.add("r", prompt, 5)
        engine.run()
        assert (r.num_output_tokens, r.finish_reason) == (1, "length")
    else:
        assert refusal == f"prompt of {prompt} tokens leaves no room for output: max_model_len is 16"


def test_46_stop_tokens_count_although_eos_is_ignored() -> None:
    """EOS at output 3 is passed over; the stop token at output 6 ends it and is the reason."""
    engine = Engine(engine_config(eos_token_id=EOS))
    r = engine.add("r", 4, 10, ignore_eos=True, stop_token_ids=[5], answer=[9, 9, EOS, 9, 9, 5, 9])
    engine.run()
    assert r.output_token_ids == [9, 9, EOS, 9, 9, 5]
    assert (r.finish_reason, r.stop_reason) == ("stop", 5)


def test_46_load_without_stop_rules_gets_exactly_its_length() -> None:
    """Length-controlled load ignores EOS, has no stop tokens, and gets max_tokens."""
    engine = Engine(engine_config(eos_token_id=EOS))
    r = engine.add("r", 4, 10, ignore_eos=True, answer=[EOS] * 10)
    engine.run()
    assert (r.num_output_tokens, r.status) == (10, RequestStatus.FINISHED_LENGTH_CAPPED)
