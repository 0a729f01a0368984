"""The life of a request is told as it was, and every reason to wait is the reason: without it nobody waits."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engines import NO_SHAPE, engine_config, spec
from engines import serve as serve_with
from hypothesis import given, settings
from hypothesis import strategies as st

from servetwin.sim.cli import run
from servetwin.sim.config import EngineConfig, RunConfig
from servetwin.sim.contract import CachedRequestData, ModelRunnerOutput, SchedulerOutput, StepResult
from servetwin.sim.events import EventLog, MemorySink, Sink
from servetwin.sim.explain import Story, explain
from servetwin.sim.explain_life import UnknownRequestError
from servetwin.sim.explain_text import lines, milliseconds
from servetwin.sim.policy import FCFS, AdmissionState
from servetwin.sim.records import Admission, EngineCoreOutputs, Finish, Frame, ScheduleRecord
from servetwin.sim.request import Request
from servetwin.sim.runs import RunWriter
from servetwin.sim.tables import Tables
from servetwin.sim.timeline import StepTimes
from servetwin.workloads import RequestSpec

STEP_NS = 10_000_000
WHOLE_RUNS = settings(max_examples=settings().max_examples // 5)
"""Every example serves a workload and reads its log."""

Reasons = dict[str, list[str]]


class Stop(Exception):
    """Ends a run from within."""


def serve(
    requests: list[RequestSpec], config: EngineConfig, sink: Sink, *, stop_after: int | None = None
) -> None:
    """Serves requests in steps of 10 ms; raises Stop after so many steps."""

    def on_step(frame: Frame, result: StepResult, outputs: EngineCoreOutputs) -> None:
        if frame.step + 1 == stop_after:
            raise Stop

    serve_with(requests, config, step_ns=STEP_NS, save_tokens=True, on_step=on_step, sink=sink)


def log_of(requests: list[RequestSpec], config: EngineConfig) -> MemorySink:
    sink = MemorySink()
    serve(requests, config, sink)
    return sink


def reasons(log: Tables) -> Reasons:
    """Request -> the reasons it waited for, in order."""
    waits = log.events[log.events.kind == "wait"]
    return {str(r): rows.reason.tolist() for r, rows in waits.groupby("request_id")}


# ---------------------------------------------------------------- reasons are true


class AtMostTwo(FCFS):
    """Lets a third request wait although there are seats."""

    def may_admit(self, request: Request, state: AdmissionState) -> bool:
        return len(state.running) < 2


@dataclass(frozen=True)
class Case:
    """Somebody waits for one reason; without the named cause nobody waits at all."""

    reason: str
    who: str
    requests: list[RequestSpec]
    config: dict[str, Any]
    without: dict[str, Any] = field(default_factory=dict)
    """What takes the cause away in the configuration ..."""
    leave_out: str | None = None
    """... or the request that is the cause."""
    figures: str = ""
    """Part of what `explain` says about the wait."""

    @property
    def id(self) -> str:
        return f"{self.reason}: {self.figures}"


CASES = [
    Case(
        "seats",
        "b",
        [spec("a", 4, 10), spec("b", 4, 2)],
        {"max_num_seqs": 1},
        {"max_num_seqs": 2},
        figures="1 of max_num_seqs 1 ran",
    ),
    Case(
        "blocks",
        "b",
        [spec("a", 33, 3), spec("b", 8, 2)],
        {"usable_blocks": 10, "scheduler_reserve_full_isl": False},
        {"usable_blocks": 20},
        figures="a first chunk of 8 tokens needs 2 blocks; 1 free block",
    ),
    Case(
        "full-sequence gate",
        "b",
        [spec("a", 53, 4), spec("b", 40, 4, 0.075)],
        {"usable_blocks": 20, "max_num_batched_tokens": 8},
        {"scheduler_reserve_full_isl": False},
        figures="its 40 known tokens need 10 blocks; 6 free blocks",
    ),
    Case(
        "blocks",
        "b",
        [spec("a", 33, 3), spec("b", 8, 2)],
        {"usable_blocks": 10},
        {"usable_blocks": 20},
        figures="needs 2 blocks; 1 free block",
    ),
    Case(
        "seats",
        "b",
        [spec("a", 16, 2), spec("b", 8, 2)],
        {"max_num_seqs": 1, "max_num_batched_tokens": 16},
        {"max_num_seqs": 2, "max_num_batched_tokens": 32},
        figures="1 of max_num_seqs 1 ran",
    ),
    Case(
        "full-sequence gate",
        "b",
        [spec("a", 53, 4), spec("b", 40, 4, 0.075)],
        {"usable_blocks": 20, "max_num_batched_tokens": 8},
        {"usable_blocks": 40},
        figures="6 free blocks",
    ),
    Case(
        "token budget",
        "b",
        [spec("a", 40, 2), spec("b", 8, 2)],
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 64},
        figures="16 of 16 were spent on 1 request before it",
    ),
    Case(
        "token budget",
        "b",
        [spec("a", 40, 2), spec("b", 30, 2)],
        {"max_num_batched_tokens": 64, "max_model_len": 64, "enable_chunked_prefill": False},
        {"max_num_batched_tokens": 128},
        figures="without chunked prefill its 30 tokens go into one step; 24 of 64 were left",
    ),
    Case(
        "head of line",
        "small",
        [spec("a", 33, 5), spec("big", 20, 2), spec("small", 4, 2)],
        {"usable_blocks": 11},
        leave_out="big",
        figures="big (blocks)",
    ),
    Case(
        "preemption",
        "b",
        [spec("a", 8, 6), spec("b", 8, 6)],
        {"usable_blocks": 5},
        {"usable_blocks": 8},
        figures="preempted: this request",
    ),
    Case(
        "preemption",
        "urgent",
        [spec("a", 8, 6), spec("b", 8, 6, priority=1), spec("urgent", 4, 1, 0.01, priority=-1)],
        {"usable_blocks": 4, "policy": "priority"},
        {"usable_blocks": 9},
        figures="preempted: b",
    ),
    Case(
        "policy",
        "c",
        [spec("a", 4, 6), spec("b", 4, 6), spec("c", 4, 2)],
        {"policy": "test_explain:AtMostTwo"},
        {"policy": "fcfs"},
        figures="test_explain:AtMostTwo: 2 ran, 1 waited",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_without_its_cause_a_wait_is_not_there(case: Case) -> None:
    """More seats, more blocks, no gate, a bigger budget, no head before it, no preemption: nobody waits any more."""
    before = log_of(case.requests, engine_config(**case.config))
    assert case.reason in reasons(before)[case.who]
    rest = [r for r in case.requests if r.request_id != case.leave_out]
    assert reasons(log_of(rest, engine_config(**case.config | case.without))) == {}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_a_wait_is_told_with_its_figures(case: Case) -> None:
    """The line of a wait has the word of the log and what was short at that time."""
    config = engine_config(**case.config)
    told = text(explain(log_of(case.requests, config), config, case.who))
    (line,) = [line for line in told.splitlines() if f", {case.reason}: " in line]
    assert case.figures in line


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[RequestSpec], EngineConfig]:
    """Requests that share nothing, on engines where something is always short."""
    config = engine_config(
        usable_blocks=draw(st.integers(12, 24)),
        max_model_len=48,
        max_num_seqs=draw(st.integers(1, 4)),
        max_num_batched_tokens=draw(st.sampled_from([6, 16, 48])),
        scheduler_reserve_full_isl=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        async_scheduling=draw(st.booleans()),
    )
    request = st.tuples(st.integers(1, 24), st.integers(1, 16), st.integers(0, 12), st.integers(0, 1))
    drawn = draw(st.lists(request, min_size=2, max_size=8))
    requests = [spec(f"r{i}", p, o, t * 0.005, priority=u) for i, (p, o, t, u) in enumerate(drawn)]
    return requests, config


def holds(reason: str, step: Any, known_tokens: int, config: EngineConfig) -> bool:
    """Whether the counts of one step bear out a reason for which somebody waited in it."""
    spent = step.prefill_tokens + step.decode_tokens
    room = (step.free_blocks + step.cached_free_blocks) * config.cache.block_size
    chunk = min(known_tokens, config.scheduler.token_budget - spent)
    borne_out: dict[str, bool] = {
        "seats": step.running == config.scheduler.max_num_seqs,
        "token budget": spent == config.scheduler.token_budget,
        "full-sequence gate": chunk <= room < known_tokens and config.scheduler.scheduler_reserve_full_isl,
        "blocks": room < chunk,
        "preemption": step.preemptions > 0,
        "head of line": step.waiting > 1,
    }
    return borne_out[reason]


@WHOLE_RUNS
@given(loads())
def test_every_reason_holds_in_every_step_of_its_wait(load: tuple[list[RequestSpec], EngineConfig]) -> None:
    """The counts of each step bear out the reason that the log gives; at most one request is not behind another."""
    requests, config = load
    log = log_of(requests, config)
    prompts = {r.request_id: r.prompt_tokens for r in requests}
    waits = log.events[log.events.kind == "wait"]
    steps: Any = log.steps.groupby("start_s").tail(1).itertuples()
    for step in steps:
        now = waits[(waits.time_s <= step.start_s) & (waits.until_s > step.start_s)]
        assert len(now) == step.waiting
        assert (now.reason != "head of line").sum() == min(step.waiting, 1)
        for request_id, reason, since_s in zip(now.request_id, now.reason, now.time_s, strict=True):
            tokens = log.tokens[log.tokens.request_id == request_id]
            known = prompts[request_id] + int((tokens.time_s <= since_s).sum())
            assert holds(reason, step, known, config), (request_id, reason, step)


# ---------------------------------------------------------------- the story


def text(story: Story) -> str:
    return "\n".join(lines(story))


def kinds(story: Story) -> list[str]:
    """What happened, waits with their reason."""
    return [m.reason or m.kind for m in story.moments]


def phases_ms(story: Story) -> dict[tuple[str, str | None], float]:
    return {(p["phase"], p["reason"]): p["duration_ms"] for p in story.to_json()["phases"]}


TIGHT = engine_config(usable_blocks=5)
PAIR = [spec("a", 8, 6), spec("b", 8, 6)]
"""With TIGHT: b loses its blocks to a after its first token, and comes back when a has ended."""


def test_a_whole_life() -> None:
    """Arrival, admission, first token, preemption, waits, resumption, end; the time adds up."""
    story = explain(log_of(PAIR, TIGHT), TIGHT, "b")
    assert kinds(story) == [
        "arrived", "scheduled", "first token", "preempted", "preemption", "blocks", "resumed", "finished",
    ]  # fmt: skip
    assert phases_ms(story) == {
        ("running before the first token", None): 10.0,
        ("preempted", "preemption"): 10.0,
        ("preempted", "blocks"): 40.0,
        ("decoding", None): 50.0,
    }
    assert story.to_json()["total_ms"] == story.to_json()["e2e_ms"] == 110.0
    told = text(story)
    assert "preempted because blocks ran out: 8 computed tokens and 2 blocks lost" in told
    assert "resumed: 0 tokens found in the prefix cache, 8 to be computed again, 3 blocks taken" in told
    assert "a first chunk of 9 tokens needs 3 blocks; 1 to 2 free blocks while it waited)" in told
    assert "TTFT 10.00 ms = first_token - arrival" in told
    assert (
        "finished (length) with 6 output tokens; E2E 110.0 ms = finish - arrival; TPOT 20.00 ms = (" in told
    )


def test_prefix_hits_are_told() -> None:
    """At admission, and as what a refused request would still need."""
    config = engine_config(usable_blocks=10, caching=True)
    shared: dict[str, Any] = {"prefix_ids": (1, 2), "prefix_block_tokens": 4}
    requests = [spec("a", 12, 9, **shared), spec("filler", 17, 4), spec("b", 16, 2, 0.015, **shared)]
    told = text(explain(log_of(requests, config), config, "b"))
    assert (
        "a first chunk of 8 tokens after 8 hit ones needs 4 blocks, 2 of them found in the prefix cache; 1 free block)"
        in told
    )
    assert "first scheduled: 8 tokens found in the prefix cache, 4 blocks taken" in told


def test_a_request_is_taken_in_between_steps() -> None:
    """What arrives while a step runs waits for its end: a part of the whole, with a name of its own."""
    config = engine_config()
    story = explain(log_of([spec("a", 4, 3), spec("b", 4, 1, 0.004)], config), config, "b")
    assert phases_ms(story) == {
        ("waiting", "step boundary"): 6.0,
        ("running before the first token", None): 10.0,
    }
    assert "taken in at the end of the step that ran when it arrived, 6.000 ms later" in text(story)


def test_on_the_wall_clock_sending_and_the_next_schedule_call_take_time() -> None:
    """Nothing ran when it was sent, and nothing held it up: neither is called a step or a gap of the log."""
    sink = MemorySink()
    log = EventLog(sink, log_blocks=False)
    log.arrived(spec("a", 4, 1), 2_000_000)
    plan = SchedulerOutput([], CachedRequestData(), {"a": 4}, 4, {}, [0], set())
    frame = Frame(
        0, 3_000_000, plan, ScheduleRecord(admitted=[Admission("a", resumed=False, hit_tokens=0, blocks=1)])
    )
    log.scheduled(frame)
    result = StepResult(0, 7_000_000, ModelRunnerOutput([], {}, []), "story", shape=NO_SHAPE)
    times = StepTimes(0, 3_000_000, 3_000_000, 10_000_000)
    outputs = EngineCoreOutputs({"a": [7]}, {"a": Finish("length", None)})
    log.stepped(frame, result, times, 10_000_000, outputs)
    log.close(10_000_000)
    story = explain(sink, engine_config(), "a")
    assert phases_ms(story) == {
        ("waiting", "on its way to the engine"): 2.0,
        ("waiting", "next schedule call"): 1.0,
        ("running before the first token", None): 7.0,
    }
    assert "reached the engine, 2.000 ms later" in text(story)


def test_who_stood_before_it_is_named() -> None:
    """Those that waited for a reason of their own meanwhile, in order; not more than three."""
    config = engine_config(max_num_seqs=1)
    log = log_of([spec(f"r{i}", 4, 2) for i in range(7)], config)
    assert "(r1 (seats), then r2 (seats))" in text(explain(log, config, "r3"))
    assert "(r1 (seats), then r2 (seats), then r3 (seats), and 2 more)" in text(explain(log, config, "r6"))


def test_refused_and_aborted_requests_have_their_story() -> None:
    """With the reason; neither has an E2E latency, which is that of a whole answer."""
    config = engine_config(usable_blocks=10, max_num_seqs=1)
    requests = [spec("long", 41, 1), spec("a", 4, 9), spec("gone", 4, 9, 0.01, abort_s=0.035)]
    log = log_of(requests, config)
    long, gone = explain(log, config, "long"), explain(log, config, "gone")
    assert kinds(long) == ["arrived", "refused"]
    assert "refused: prompt of 41 tokens leaves no room for output" in text(long)
    assert kinds(gone) == ["arrived", "seats", "aborted"]
    assert "aborted by its client: 0 computed tokens and 0 blocks given up" in text(gone)
    assert gone.latencies_ns == long.latencies_ns == {}
    assert (gone.outcome, long.outcome) == ("abort", "refused")


@WHOLE_RUNS
@given(loads())
def test_the_time_adds_up(load: tuple[list[RequestSpec], EngineConfig]) -> None:
    """The phases of every request fill the time from its arrival to its end, and the waits are those of the log."""
    requests, config = load
    log = log_of(requests, config)
    waits = log.events[log.events.kind == "wait"]
    for request in requests:
        story = explain(log, config, request.request_id)
        assert sum(p.duration_ns for p in story.phases) == story.total_ns == story.latencies_ns["e2e"]
        assert all(p.reason != "not in the log" for p in story.phases)
        mine = waits[waits.request_id == request.request_id]
        waited = sum(p.duration_ns for p in story.phases if p.reason not in (None, "step boundary"))
        assert waited == round((mine.until_s - mine.time_s).sum() * 1e9)
        assert [m.time_ns for m in story.moments] == sorted(m.time_ns for m in story.moments)


@pytest.mark.parametrize(
    ("duration_ns", "shown"),
    [
        (1_500, "0.002 ms"),
        (9_999_000, "9.999 ms"),
        (25_000_000, "25.00 ms"),
        (12_345_000_000, "12,345 ms"),
    ],
)
def test_durations_have_sensible_digits(duration_ns: int, shown: str) -> None:
    """About four."""
    assert milliseconds(duration_ns) == shown


# ---------------------------------------------------------------- unknown requests, and runs that did not end


def test_an_unknown_request_is_named_with_close_ones() -> None:
    """And the number of requests, for whoever took the wrong run."""
    log = log_of([spec(f"chat-{i}", 4, 1) for i in range(5)], engine_config())
    with pytest.raises(
        UnknownRequestError, match=r"'chat-9' is none of the 5 requests .*close to it: .*chat-4"
    ):
        explain(log, engine_config(), "chat-9")


def folder_of(path: Path, *, stop_after: int | None = None) -> Path:
    """A run folder of PAIR on TIGHT; stopped after so many steps, failed."""
    config = RunConfig(engine=TIGHT, executor="constant")
    writer = RunWriter.create(path, {"config": config.model_dump(mode="json")}, save_tokens=True)
    try:
        serve(PAIR, TIGHT, writer, stop_after=stop_after)
    except Stop:
        writer.fail("interrupted")
    else:
        writer.complete()
    return path


def test_a_run_that_was_stopped_is_told_as_far_as_it_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Waits and phases end with the log; the output says that it is partial, and why."""
    folder = folder_of(tmp_path / "run", stop_after=3)
    assert run(["explain", "b", "--run", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "partial: the run failed (interrupted); the story ends where the log does" in told
    assert "0.0300 s  had not ended when the run stopped" in told
    assert "TPOT" not in told


def test_a_killed_run_is_told_from_its_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No row for open requests, no open waits: what is missing is called so, and the time still adds up."""
    folder = folder_of(tmp_path / "run", stop_after=3)
    header = json.loads((folder / "run.json").read_text())
    header |= {"state": "running", "process": header["process"] | {"host": "elsewhere"}}
    header["parts"]["requests"] = []
    header["parts"]["events"] = header["parts"]["events"][:1]
    (folder / "run.json").write_text(json.dumps(header))
    assert run(["explain", "b", "--run", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["partial"] == "the process of the run was killed"
    assert told["outcome"] is told["num_prompt_tokens"] is told["ttft_ms"] is None
    assert sum(p["duration_ms"] for p in told["phases"]) == told["total_ms"] == 30.0


# ---------------------------------------------------------------- the command


def test_the_command_tells_a_story(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text on stdout; --json: one object and nothing else."""
    folder = folder_of(tmp_path / "run")
    assert run(["explain", "b", "--run", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("request b: 8 prompt tokens, 6 output tokens, length\n")
    assert run(["explain", "b", "--run", str(folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["partial"] is None
    assert [m["reason"] for m in printed["moments"] if m["kind"] == "wait"] == ["preemption", "blocks"]


def test_the_command_refuses_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2: an unknown request, no folder, a folder without a run, a run that no scheduler made."""
    folder = folder_of(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    shutil.copytree(folder, tmp_path / "executed")
    header = json.loads((folder / "run.json").read_text())
    (tmp_path / "executed" / "run.json").write_text(json.dumps(header | {"config": {}}))
    for request_id, name, message in [
        ("c", "run", "request_id 'c' is none of the 2 requests of this run"),
        ("b", "nowhere", "nowhere is not a run folder"),
        ("b", "empty", "empty is not a run folder"),
        ("b", "executed", "executed was not written by a scheduler"),
    ]:
        assert run(["explain", request_id, "--run", str(tmp_path / name)]) == 2
        said = capsys.readouterr()
        assert message in said.err
        assert said.err.count("\n") == 1
        assert not said.out
