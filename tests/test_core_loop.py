"""The wall-clock driver of the engine core, on an executor that answers without a model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from core_loops import (
    AnsweringExecutor,
    OnRun,
    Told,
    answering_loop,
    engine_args,
    request,
    run_to_end,
    tokens_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from servetwin.executor.core_loop import CoreLoop, step_times
from servetwin.executor.core_outputs import OutputWriter
from servetwin.executor.engine_args import EngineArgs
from servetwin.executor.inbox import Inbox
from servetwin.executor.messages import AbortRequests, AddRequest
from servetwin.executor.request_state import PlanError
from servetwin.executor.step_worker import WorkerStep
from servetwin.sim.contract import LogprobsLists, ModelRunnerOutput, SchedulerOutput, StepResult, to_json
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.progress_guard import StalledError
from servetwin.sim.records import EngineCoreOutputs, Finish, WaitReason
from servetwin.sim.step_check import StepResultError
from servetwin.sim.timeline import StepTimes

WAIT_S = 30
"""Longer than anything takes: only a test that fails waits so long."""

CLOSED_DOOR = """
from servetwin.sim.policy import FCFS

class OnlyPairs(FCFS):
    def may_admit(self, request, state):
        return state.num_waiting > 1 or bool(state.running)
"""


@contextmanager
def engine(
    args: EngineArgs | None = None, *, listener: Told | None = None, on_run: OnRun | None = None
) -> Iterator[tuple[CoreLoop, AnsweringExecutor]]:
    loop, executor = answering_loop(args, listener=listener, on_run=on_run)
    try:
        yield loop, executor
    finally:
        loop.close()


# ---------------------------------------------------------------- requests and their outputs


def test_every_token_of_every_request_comes_out_with_what_happened_to_it() -> None:
    """More requests than seats: all get their tokens, and events in the order of happening."""
    with engine() as (loop, _):
        for name in "abcdef":
            assert loop.add_request(request(name, max_tokens=5)) is None
        outputs = run_to_end(loop)
    for name in "abcdef":
        own = [output for output in outputs if output.request_id == name]
        assert tokens_of(own) == [0, 1, 2, 3, 4]
        assert [output.finish_reason for output in own] == [None] * 4 + ["length"]
        events = [event for output in own for event in output.events]
        assert [event.type for event in events] == ["queued", "scheduled"]
        assert own[0].events == events
        assert events[0].timestamp_ns < events[1].timestamp_ns


def test_a_preempted_request_tells_of_it_once() -> None:
    """Two requests that outgrow the pool: the later one loses its blocks, waits and comes back."""
    args = engine_args(
        num_gpu_blocks_override=9, enable_prefix_caching=False, scheduler_reserve_full_isl=False
    )
    with engine(args) as (loop, _):
        loop.add_request(request("a", 20, max_tokens=30))
        loop.add_request(request("b", 20, max_tokens=30))
        outputs = run_to_end(loop)
    events = {
        name: [event.type for output in outputs if output.request_id == name for event in output.events]
        for name in "ab"
    }
    assert events == {"a": ["queued", "scheduled"], "b": ["queued", "scheduled", "preempted", "scheduled"]}
    assert all(tokens_of(o for o in outputs if o.request_id == name) == [*range(30)] for name in "ab")


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    """The second of two equal prompts hits the full blocks of the first, and says so with every output."""
    with engine() as (loop, _):
        loop.add_request(request("a", [7] * 20, max_tokens=2))
        run_to_end(loop)
        loop.add_request(request("b", [7] * 20, max_tokens=2))
        outputs = run_to_end(loop)
    assert [output.num_cached_tokens for output in outputs] == [16, 16]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (request("x", 64), "leaves no room for output: max_model_len is 64"),
        (request("x", []), "prompt is empty"),
        (request("x", [3, 160]), "prompt token id 160 is outside the model's vocabulary (0 to 159)"),
        (request("x", [3, -1]), "prompt token id -1 is outside the model's vocabulary (0 to 159)"),
        (request("a"), "request_id 'a' is in use by an unfinished request"),
    ],
)
def test_a_request_that_cannot_be_served_is_answered_and_the_others_go_on(wrong: Any, reason: str) -> None:
    with engine() as (loop, _):
        loop.add_request(request("a", max_tokens=3))
        refused = loop.add_request(wrong)
        outputs = run_to_end(loop)
    assert refused is not None
    assert (refused.finish_reason, refused.new_token_ids) == ("error", [])
    assert reason in (refused.error or "")
    assert tokens_of(outputs) == [0, 1, 2]


def test_log_probabilities_are_those_of_the_tokens_kept() -> None:
    """A stop in the midst of accepted drafts drops the tokens behind it, and what was said of them."""
    writer = OutputWriter()
    writer.queued("a", 1)
    probabilities = LogprobsLists([[5], [6], [7]], [[-1.0], [-2.0], [-3.0]], [1, 2, 3])
    [output] = writer.write(EngineCoreOutputs({"a": [5, 6]}, {"a": Finish("stop", 6)}), {"a": probabilities})
    assert output.logprobs == LogprobsLists([[5], [6]], [[-1.0], [-2.0]], [1, 2])
    assert (output.finish_reason, output.stop_reason) == ("stop", 6)


# ---------------------------------------------------------------- steps


@settings(max_examples=100)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=8),
    asynchronous=st.booleans(),
)
def test_it_decides_what_the_simulation_decides(lengths: list[tuple[int, int]], asynchronous: bool) -> None:
    """The same requests give the same plans, step by step, as the engine core driven by hand."""
    requests = [request(f"r{i}", prompt, max_tokens) for i, (prompt, max_tokens) in enumerate(lengths)]
    args = engine_args(async_scheduling=asynchronous, num_gpu_blocks_override=12)
    with engine(args) as (loop, executor):
        for each in requests:
            loop.add_request(each)
        run_to_end(loop)
        config = loop.config
    assert [to_json(plan) for plan in executor.plans] == plans_by_hand(EngineCore(config), requests, args)


def plans_by_hand(core: EngineCore, requests: list[Any], args: EngineArgs) -> list[dict[str, Any]]:
    executor, plans = AnsweringExecutor(args.for_executor()), []
    for each in requests:
        core.add_request(core.new_request(each), now=0)
    results: dict[int, ModelRunnerOutput] = {}
    while core.has_work() or core.in_flight:
        frame = core.begin(now=0)
        if frame is not None:
            plans.append(to_json(frame.plan))
            results[frame.step] = executor.run(frame.plan).output
            if frame.plan.num_scheduled_tokens and core.has_room:
                continue
        oldest = core.in_flight[0]
        core.complete(oldest, results[oldest.step])
    return plans


def test_with_asynchronous_scheduling_the_next_step_is_scheduled_while_one_runs() -> None:
    """The first step does not end before the second has been handed to the worker."""
    second_is_there = threading.Event()

    class Watching(Told):
        def scheduled(self, frame: Any) -> None:
            if frame.step == 1:
                second_is_there.set()

    def on_run(plan: SchedulerOutput) -> None:
        assert second_is_there.wait(WAIT_S)

    with engine(listener=Watching(), on_run=on_run) as (loop, _):
        assert loop.config.scheduler.async_scheduling
        loop.add_request(request("a", max_tokens=4))
        assert tokens_of(run_to_end(loop)) == [0, 1, 2, 3]


def test_the_executor_is_built_run_and_closed_in_one_thread_that_is_not_the_callers() -> None:
    threads = []

    class Noting(AnsweringExecutor):
        def __init__(self, options: Any) -> None:
            super().__init__(options, lambda plan: threads.append(threading.current_thread()))
            threads.append(threading.current_thread())

        def close(self) -> None:
            threads.append(threading.current_thread())

    loop = CoreLoop(engine_args(), build=Noting)
    loop.add_request(request("a", max_tokens=1))
    run_to_end(loop)
    loop.close()
    assert len(threads) >= 4
    assert {*threads} == {threads[0]} != {threading.current_thread()}
    assert not threads[0].is_alive()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_abort_between_schedule_and_update_leaves_no_output(asynchronous: bool) -> None:
    """It counts before the tokens of the step that ran meanwhile, and the worker hears of it."""
    told = Told()
    args = engine_args(async_scheduling=asynchronous)
    with engine(args, listener=told) as (loop, executor):
        loop.add_request(request("a"))
        loop.add_request(request("b", max_tokens=2))
        outputs = loop.step(lambda: ["a"]) + loop.step(lambda: ["a"])
        outputs += run_to_end(loop)
    assert {output.request_id for output in outputs} == {"b"}
    assert tokens_of(outputs) == [0, 1]
    assert [arguments[0] for arguments in told.of("aborted")] == ["a"]
    assert any("a" in plan.finished_req_ids for plan in executor.plans)


def test_the_worker_is_told_of_what_ended_last() -> None:
    """The end of the last request makes one more, empty step."""
    with engine() as (loop, executor):
        loop.add_request(request("a", max_tokens=2))
        run_to_end(loop)
    assert executor.plans[-1].finished_req_ids == {"a"}
    assert not executor.plans[-1].num_scheduled_tokens
    assert executor.closed


def test_what_the_executor_raises_comes_out_and_comes_again() -> None:
    def on_run(plan: SchedulerOutput) -> None:
        raise PlanError("block 7 was never written")

    with engine(on_run=on_run) as (loop, _):
        loop.add_request(request("a"))
        for _ in range(2):
            with pytest.raises(PlanError, match="block 7 was never written"):
                run_to_end(loop)


def test_a_result_that_cannot_be_is_refused() -> None:
    class NoTime(AnsweringExecutor):
        def run(self, plan: SchedulerOutput) -> StepResult:
            result = super().run(plan)
            return StepResult(0, 0, result.output, "no time")

    loop = CoreLoop(engine_args(), build=NoTime)
    loop.add_request(request("a"))
    with pytest.raises(StepResultError, match="'no time': a step of 5 tokens took 0 ns"):
        run_to_end(loop)
    loop.close()


# ---------------------------------------------------------------- nothing to schedule


@pytest.fixture
def pairs_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A policy that lets nobody in alone."""
    (tmp_path / "closed_door.py").write_text(CLOSED_DOOR)
    monkeypatch.syspath_prepend(tmp_path)
    return "closed_door:OnlyPairs"


def test_an_engine_whose_policy_lets_nobody_in_waits_for_something_to_come(pairs_only: str) -> None:
    """It has no work (so nobody spins), says why, and goes on with the next request."""
    told = Told()
    with engine(engine_args(scheduling_policy=pairs_only), listener=told) as (loop, executor):
        loop.add_request(request("a", max_tokens=3))
        assert run_to_end(loop) == []
        assert not loop.has_work()
        assert "may_admit of the policy closed_door:OnlyPairs refuses 'a'" in (loop.stalled or "")
        assert not executor.plans
        [(frame,)] = told.of("sat_out")
        assert (frame.record.head, frame.record.head_reason) == ("a", WaitReason.POLICY)
        loop.add_request(request("b", max_tokens=3))
        assert len(tokens_of(run_to_end(loop))) == 6


def test_a_head_that_nothing_could_ever_let_in_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing in flight and the pool free, a wait has no end; refusing at the door prevents it."""
    with engine(engine_args(num_gpu_blocks_override=8)) as (loop, _):
        monkeypatch.setattr(EngineCore, "refusal", lambda self, request: None)
        loop.add_request(request("a", 60))
        with pytest.raises(StalledError, match="unfinished requests: a; 'a' waits for: full-sequence gate"):
            run_to_end(loop)


# ---------------------------------------------------------------- what is told


def test_the_listener_is_told_everything_in_order() -> None:
    told = Told()
    with engine(engine_args(async_scheduling=False), listener=told) as (loop, _):
        loop.add_request(request("a", max_tokens=2))
        loop.add_request(request("x", 64))
        run_to_end(loop)
    names = [name for name, _ in told.calls if name != "block_changes"]
    assert names == ["arrived", "refused"] + ["scheduled", "stepped"] * 3
    assert [tuple(arguments[4].new_token_ids) for arguments in told.of("stepped")] == [("a",), ("a",), ()]
    kinds = [change.kind for changes, _ in told.of("block_changes") for change in changes]
    assert kinds.count("take") == kinds.count("release") == 1


def test_the_lanes_of_a_step_follow_each_other_on_the_wall_clock() -> None:
    """Scheduled, prepared, run, taken in; what is left up to the tokens is the update's."""
    told = Told()
    with engine(listener=told) as (loop, _):
        loop.add_request(request("a", max_tokens=4))
        run_to_end(loop)
    assert len(told.of("stepped")) >= 4
    for frame, result, times, end_ns, _ in told.of("stepped"):
        assert frame.start_ns + times.schedule_ns <= times.prepare_start_ns
        assert times.device_start_ns == times.prepare_start_ns + result.prepare_ns
        assert times.device_end_ns + times.update_ns == end_ns


def test_the_lanes_of_a_synchronous_step_fill_its_time() -> None:
    """Nothing goes on beside them: handing the plan over and waking the worker up is a part of scheduling."""
    told = Told()
    with engine(engine_args(async_scheduling=False), listener=told) as (loop, _):
        loop.add_request(request("a", max_tokens=4))
        run_to_end(loop)
    assert len(told.of("stepped")) == 5
    for frame, result, times, end_ns, _ in told.of("stepped"):
        host_ns = times.schedule_ns + times.update_ns
        assert frame.start_ns + times.schedule_ns == times.prepare_start_ns
        assert frame.start_ns + result.prepare_ns + result.device_ns + host_ns == end_ns


def test_an_executor_may_state_more_time_than_has_gone_by() -> None:
    done = WorkerStep(100, StepResult(10, 5_000, ModelRunnerOutput([], {}, []), "constant"))
    assert step_times(7, done, end_ns=300) == StepTimes(7, 100, 110, 5_110, 0)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "Asynchronous scheduling is enabled."),
        ({"async_scheduling": False}, "Asynchronous scheduling is disabled (as asked for)."),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "Asynchronous scheduling is disabled (the ngram drafter needs the tokens that it leaves in the worker).",
        ),
    ],
)
def test_the_start_is_logged(options: dict[str, Any], line: str, caplog: pytest.LogCaptureFixture) -> None:
    """The lines that people quote: size of the cache, concurrency, asynchronous scheduling and what forbids it."""
    with caplog.at_level(logging.INFO, logger="servetwin"), engine(engine_args(**options)):
        pass
    assert "KV cache size: 320 tokens" in caplog.messages
    assert "Maximum concurrency for 64 tokens per request: 5.00x" in caplog.messages
    assert line in caplog.messages


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 2}, "max_num_batched_tokens 2 is below max_num_seqs 4"),
        ({"block_size": 0}, "block_size 0"),
        ({"num_gpu_blocks_override": 3}, "num_gpu_blocks 3 of block_size 8 hold 24 tokens"),
        ({"scheduling_policy": "lifo"}, "scheduling policy 'lifo' is not known"),
    ],
)
def test_arguments_that_cannot_be_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        answering_loop(engine_args(**options))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- the inbox


def test_aborts_are_seen_ahead_of_their_turn_but_not_ahead_of_their_request() -> None:
    """An abort behind a new request of the same name must not end the one that runs; all stay in their order."""
    inbox = Inbox()
    messages = [
        AbortRequests(["a"]),
        AddRequest(request("b")),
        AbortRequests(["b", "c"]),
        AddRequest(request("a")),
    ]
    for message in messages:
        inbox.put(message)
    assert inbox.peek_aborts() == ["a", "c"]
    assert inbox.take(wait=True) == messages
    assert inbox.peek_aborts() == []


def test_a_message_that_could_not_be_read_is_raised_where_it_is_taken() -> None:
    inbox = Inbox()
    inbox.put(ValueError("Expected `int`, got `str`"))
    with pytest.raises(ValueError, match="Expected `int`"):
        inbox.take(wait=True)
