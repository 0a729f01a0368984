"""Field reports about hangs, livelock and starvation, as small cases with the behaviour of vLLM 0.22.0.

The numbers in the names are those of the reports. Where that behaviour is a defect, `safe` rules are tested to be
right and `exact` rules to have it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import pytest
from engines import NO_SHAPE, Engine, engine_config, preempted, scheduled, serve, spec
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from servetwin.sim.cli import run
from servetwin.sim.contract import ModelRunnerOutput, StepResult
from servetwin.sim.records import Frame, WaitReason
from servetwin.sim.request import Request
from servetwin.sim.rules import Rules
from servetwin.sim.steptime.modelled import ConstantStepModel, ModelledStepTimer
from servetwin.sim.token_source import TokenSource

SAFE, EXACT = Rules.safe(), Rules.exact()


def test_01_a_pool_that_cannot_hold_a_request_is_refused() -> None:
    """A window larger than the pool would let a request wait for ever at the head: no such engine is built."""
    with pytest.raises(ValidationError, match="hold 44 tokens, below max_model_len 64"):
        engine_config(usable_blocks=10, max_model_len=64, max_num_batched_tokens=64)


def test_01_the_null_block_is_counted_as_room_unless_corrected() -> None:
    """Sixteen blocks pass for a window of 64 tokens in 0.22.0, although only fifteen of them serve anybody."""
    engine_config(usable_blocks=15, max_model_len=64, rules=EXACT)
    with pytest.raises(
        ValidationError, match=r"null_block_is_no_room.* hold 60 tokens, below max_model_len 64"
    ):
        engine_config(usable_blocks=15, max_model_len=64, rules=SAFE)


def test_01_a_prompt_that_can_never_fit_holds_nobody_up() -> None:
    """R0 needs eleven blocks of ten: refused at its arrival without touching a block; R1 behind it is served."""
    config = engine_config(usable_blocks=10, max_model_len=44, max_num_batched_tokens=64)
    log = serve([spec("R0", 41, 1), spec("R1", 4, 2)], config)
    assert dict(zip(log.requests.request_id, log.requests.finish_reason, strict=True)) == {
        "R0": "refused",
        "R1": "length",
    }
    assert (
        "need 11 blocks; the pool has 10 usable ones"
        in log.events.reason[log.events.kind == "refused"].iloc[0]
    )
    assert "R0" not in set(log.blocks.request_id)


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


def cursor_case(rules: Rules) -> Frame:
    """Running [A, X, Y] on a full pool: A, the least urgent, holds three blocks and has 0 new tokens; X needs one."""
    config = engine_config(usable_blocks=5, policy="priority", async_scheduling=True, rules=rules)
    engine = Engine(config)
    a = engine.add("A", 9, 3, priority=9)
    engine.turn()
    engine.add("X", 3, 9)
    engine.add("Y", 2, 9)
    assert [engine.step() for _ in range(2)] == [{"A": 1, "X": 3, "Y": 2}, {"A": 1, "X": 1, "Y": 1}]
    # The steps in flight will bring A its last token.
    assert a.num_output_tokens + a.num_output_placeholders == a.max_tokens
    assert (engine.running, engine.pool.num_free, len(engine.table("A"))) == (["A", "X", "Y"], 0, 3)
    frame = engine.schedule()
    assert preempted([frame]) == ["A"]
    assert engine.pool.num_free == 2
    return frame


def test_03_a_victim_before_the_cursor_costs_nobody_a_turn() -> None:
    """Right (safe): A goes, X and Y are both scheduled in that step."""
    assert cursor_case(SAFE).plan.num_scheduled_tokens == {"X": 1, "Y": 1}
    assert cursor_case(Rules(keep_cursor=True)).plan.num_scheduled_tokens == {"X": 1, "Y": 1}


def test_03_the_cursor_is_not_corrected_for_an_unscheduled_victim() -> None:
    """0.22.0 (exact): the list moves up under the cursor, and Y gets no token although blocks are free."""
    assert cursor_case(EXACT).plan.num_scheduled_tokens == {"X": 1}


Loads = list[tuple[int, int, int]]
"""(prompt, max_tokens, priority) of requests that arrive one after the other, a step apart."""


def lost_turns(loads: Loads, rules: Rules) -> list[list[str]]:
    """Per step in which a turn is lost: the running requests that have work and get no token.

    A request that gives up its own blocks ends the step's running pass: those behind it idle by rule.
    """
    engine = Engine(engine_config(usable_blocks=5, policy="priority", async_scheduling=True, rules=rules))
    arrivals = iter(loads)
    lost: list[list[str]] = []
    before: list[str] = []
    add_next(engine, arrivals)
    for frame in engine.frames():
        with_work = [r.request_id for r in engine.scheduler.running if has_work(r)]
        idle = [r for r in with_work if not scheduled([frame], r)]
        victims = preempted([frame])
        by_rule = before[before.index(victims[-1]) :] if victims else []
        if idle and idle != [r for r in with_work if r in by_rule]:
            lost.append(idle)
        before = engine.running
        add_next(engine, arrivals)
    return lost


def add_next(engine: Engine, loads: Iterator[tuple[int, int, int]]) -> None:
    for prompt, max_tokens, priority in islice(loads, 1):
        engine.add(f"r{len(engine.known)}", prompt, max_tokens, priority=priority)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3)), min_size=3, max_size=9))
def test_03_with_the_cursor_kept_nobody_loses_a_turn(loads: Loads) -> None:
    """Right (safe), as a property: every running request with work gets a token in every step."""
    assert lost_turns(loads, SAFE) == []


def test_03_the_property_sees_a_lost_turn() -> None:
    """0.22.0 (exact) has loads that break it."""
    loads = [(1, 4, 3), (6, 7, 2), (4, 8, 2)]
    assert lost_turns(loads, EXACT) == [["r2"]]
    assert lost_turns(loads, SAFE) == []


def has_work(request: Request) -> bool:
    """It has tokens to compute that no step has been given yet (scheduler.md 3.1 and 3.2)."""
    ahead = request.num_output_placeholders
    last = ahead > 0 and request.num_computed_tokens + 2 - ahead >= request.max_total_tokens
    return not last and request.num_tokens + ahead > request.num_computed_tokens


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


def test_05_a_request_that_could_not_grow_to_its_end_is_refused_at_the_door() -> None:
    """R0 = (8, 4) in a pool of two blocks whose third is the null block: slot 9 does not exist."""
    core = Engine(engine_config(usable_blocks=2, max_model_len=12)).core
    r0 = Engine(core.config).request("R0", 8, 4)
    assert core.refusal(r0) == "prompt of 8 and output of 4 tokens need 3 blocks; the pool has 2 usable ones"


def test_05_an_abort_just_before_the_schedule_leaves_an_empty_plan() -> None:
    """The plan then only tells the worker who is gone."""
    engine = Engine(engine_config())
    engine.add("r", 8, 4)
    engine.step()
    engine.abort("r")
    frame = engine.schedule()
    assert frame.plan.total_num_scheduled_tokens == 0
    assert frame.plan.finished_req_ids == {"r"}
    timer = ModelledStepTimer(ConstantStepModel(7), TokenSource(1000), "constant")
    result = StepResult(0, 0, ModelRunnerOutput([], {}, []), "constant", shape=NO_SHAPE)
    assert timer.run(frame.plan) == result
    engine.complete(frame)
    assert not engine.core.has_work()


def test_06_the_window_outranks_min_tokens() -> None:
    """Right (safe): (10, 20) with min_tokens 20 ends in a window of 16 with six outputs, and its blocks are free."""
    for rules in (SAFE, Rules(length_outranks_min_tokens=True)):
        engine = Engine(engine_config(max_model_len=16, rules=rules))
        r = engine.add("r", 10, 20, min_tokens=20, ignore_eos=True)
        assert engine.core.refusal(r) is None
        engine.run()
        assert (r.finish_reason, r.num_output_tokens, r.num_tokens) == ("length", 6, 16)
        assert engine.pool.num_free == 100


def test_06_min_tokens_beyond_the_window_are_refused() -> None:
    """Exact, at the door: 10 prompt tokens leave 6 of a window of 16; 20 are demanded."""
    engine = Engine(engine_config(max_model_len=16))
    refusal = engine.core.refusal(engine.request("r", 10, 20, min_tokens=20, ignore_eos=True))
    assert refusal is not None
    assert "min_tokens 20 cannot be reached" in refusal
    assert engine.core.refusal(engine.request("r", 10, 20, min_tokens=6)) is None


def test_06_behind_that_door_the_scheduler_stalls_as_vllm_does() -> None:
    """0.22.0 (exact): the length caps stand behind min_tokens, so at the window's edge it gets 0 tokens a step."""
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


@pytest.mark.parametrize("knob", ["--max-num-partial-prefills", "--max-long-partial-prefills"])
def test_07_as_a_flag_of_ours_it_is_refused_and_in_a_vllm_line_warned_about(
    knob: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four long prompts: a command line of ours does not take the knob, a pasted one is told that it limits nothing."""
    workload = tmp_path / "w.jsonl"
    rows = [
        {"request_id": f"r{i}", "arrival_s": 0, "prompt_tokens": 900, "output_tokens": 2} for i in range(4)
    ]
    workload.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["run", str(workload), "--executor", "constant", "--step-time-s", "0.01"]
    assert run([*command, knob, "2"]) == 2
    assert knob in capsys.readouterr().err
    assert run([*command, "--vllm-args", f"serve --max-model-len 4096 {knob} 2"]) == 0
    assert (
        f"--vllm-args: {knob}: the scheduler of vLLM 0.22.0 limits no partial prefills"
        in capsys.readouterr().err
    )


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
