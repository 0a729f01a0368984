"""A run is the same whether its steps are taken one by one with plans, without plans, or many at once."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import engine_config, serve, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from leaping_strategies import Case, cases, plain_cases

from servetwin.sim.block_hash import TokenPrompt
from servetwin.sim.cli import run
from servetwin.sim.config import RunConfig
from servetwin.sim.contract import SamplingParams, StepShape
from servetwin.sim.decide import Line, ScenarioLoop
from servetwin.sim.decode_calendar import DecodeCalendar
from servetwin.sim.events import EventLog, MemorySink
from servetwin.sim.host_model import LinearHostModel
from servetwin.sim.leap_times import LeapTimes
from servetwin.sim.leaping_core import LeapingCore
from servetwin.sim.metrics import step_figures
from servetwin.sim.policy import FCFS, Priority, load_policy, may_leap
from servetwin.sim.request import Request
from servetwin.sim.rules import Rules
from servetwin.sim.runs import read_run
from servetwin.sim.scenario import Scenario, read_scenario
from servetwin.sim.simulation import simulate, why_stepped
from servetwin.sim.step_rows import SUMMED
from servetwin.sim.steptime.features import StepFeatures
from servetwin.sim.steptime.modelled import ConstantStepModel, LinearStepModel, ModelledStepTimer
from servetwin.sim.tables import differences
from servetwin.sim.token_source import TokenSource
from servetwin.workloads import ListWorkload

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(p.name.removesuffix(".scenario.json") for p in GOLDEN.glob("*.scenario.json"))


def assert_the_same(case: Case) -> MemorySink:
    """The log with plans, after a look at the others."""
    expected, error = case.run(plans=True)
    for how in ({"leaps": False}, {"leaps": True}):
        found, other_error = case.run(**how)
        assert differences(expected, found) == [], how
        assert other_error == error, how
    return expected


@given(cases())
def test_a_run_is_the_same_with_leaps(case: Case) -> None:
    """Every table, every column, every row: steps, times, blocks, gaps, waits, and how it ended."""
    assert_the_same(case)


@given(plain_cases(async_scheduling=False))
def test_a_run_is_the_same_on_the_short_way(case: Case) -> None:
    """The same for engines that take one plain step at a time."""
    assert_the_same(case)


@given(plain_cases(async_scheduling=True))
def test_a_run_is_the_same_on_the_short_way_of_overlapping_steps(case: Case) -> None:
    """The same for engines that take one plain step behind the other."""
    assert_the_same(case)


@pytest.mark.nightly
@settings(max_examples=20_000)
@given(cases())
def test_many_runs_are_the_same_with_leaps(case: Case) -> None:
    """The same, looked at once for each release."""
    assert_the_same(case)


# ------------------------------------------------------------------ the recorded decisions


class LightLoop(ScenarioLoop):
    """The iterations of a scenario over the scheduler whose plain decodes sleep."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.core: Any = LeapingCore(scenario.engine_config(Rules.exact()), tokens=self)  # type: ignore[arg-type]

    def output_id(self, request_id: str, index: int) -> int:
        """As a TokenSource would."""
        return self.scenario.output_token(self.out_keys[request_id], index)

    def _submit(self, frame: Any) -> Line:
        self._frame_steps.append(self.step)
        record, shape = frame.record, frame.shape
        if self.scenario.step_time is not None and self.by_clock:
            self.clock_ns += self.scenario.step_time.duration_ns(shape.new_tokens, shape.rows)
        return {
            "total_tokens": shape.new_tokens,
            "preempted": [p.request_id for p in record.preempted],
            "unscheduled": [p.request_id for p in record.preempted if p.unscheduled],
            "prefix": asdict(record.prefix),
            "after_schedule": self._state(),
        }

    def _update(self) -> Line:
        line: Line = {"aborted_during": self._abort_due("during")}
        outputs = self.core.complete(self.core.in_flight[0])
        freed = sorted(outputs.finished)
        return line | {
            "updated_step": self._frame_steps.popleft(),
            "freed_ids": freed,
            "after_update": self._state(),
        }

    def _abort_due(self, phase: str) -> list[list[object]]:
        for waiting in self.aborts:
            known = self.core.scheduler.requests.get(waiting.id)
            if known is not None and known.asleep and self._abort_key(waiting) <= self.now:
                self.core.leaping.rouse(known)
        return super()._abort_due(phase)


@pytest.mark.parametrize("name", [n for n in NAMES if "spec" not in n and "eagle" not in n])
def test_decisions_without_plans_equal_the_recorded_ones(name: str) -> None:
    """Who is preempted, admitted and freed when, the free queue block by block, and the counters of look-ups."""
    with gzip.open(GOLDEN / f"{name}.expected.jsonl.gz", "rt") as f:
        expected = [json.loads(line) for line in f]
    lines = list(LightLoop(read_scenario(GOLDEN / f"{name}.scenario.json")).lines())
    assert len(lines) == len(expected)
    for ours, theirs in zip(lines, expected, strict=True):
        ours = json.loads(json.dumps(ours))
        assert ours == {field: theirs[field] for field in ours}, f"step {theirs['step']}"


# ------------------------------------------------------------------ what is leapt over


def leapt(requests: Sequence[Any], **config: Any) -> tuple[int, int]:
    """Steps that were taken many at once, and all that had tokens."""
    log = serve(list(requests), engine_config(**config))
    return step_figures(log).num_leapt, int((log.steps.rows > 0).sum())


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_lone_decode_is_one_leap(async_scheduling: bool) -> None:
    """Its prompt is a step, its last tokens belong to the leap."""
    many, steps = leapt([spec("a", 8, 100)], max_model_len=200, async_scheduling=async_scheduling)
    assert steps == 100
    assert many >= 96


def test_an_arrival_ends_a_leap_at_the_boundary() -> None:
    """On a boundary it belongs to the step that starts there, between two to the one that starts after it."""
    for at_s, starts_s in ((20, 20), (20.5, 21)):
        log = serve([spec("a", 8, 60), spec("b", 8, 4, at_s)], engine_config(max_model_len=200))
        row = log.requests.set_index("request_id").loc["b"]
        assert (row.queued_s, row.first_scheduled_s) == (starts_s, starts_s)
        assert step_figures(log).num_leapt > 50


def test_a_queue_that_cannot_move_is_leapt_over() -> None:
    """One seat: the second request waits for the first's end, and nobody asks for it step by step."""
    many, steps = leapt([spec("a", 8, 60), spec("b", 8, 60)], max_model_len=200, max_num_seqs=1)
    assert many > 0.9 * steps


@pytest.mark.parametrize("log_blocks", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_who_comes_while_the_head_is_stuck_waits_behind_it(async_scheduling: bool, log_blocks: bool) -> None:
    """An arrival ends a leap, and the next one begins without a look at the queue."""
    config = engine_config(max_model_len=200, max_num_seqs=1, async_scheduling=async_scheduling)
    requests = [spec("a", 8, 60), spec("b", 8, 60), spec("c", 8, 3, 10), spec("d", 8, 3, 20.5)]
    case = Case(config, requests, ConstantStepModel(10**9), None, log_blocks, [], None, 0, 1000)
    waits = assert_the_same(case).events.query("kind == 'wait'").set_index("request_id")
    assert waits.reason.loc["d"].iloc[0] == "head of line"


def test_a_leap_waits_for_a_worker_that_turns_around() -> None:
    """With fewer rows the update is over sooner, so the worker comes later after it than in the steps before."""
    host = LinearHostModel(update_per_row_ns=500_000_000)
    requests = [spec("a", 8, 30), spec("b", 8, 60)]
    config, model = engine_config(max_model_len=200), ConstantStepModel(10**9)
    log = assert_the_same(Case(config, requests, model, host, False, [], None, 3 * 10**9, 1000))
    assert (log.steps.prepare_start_s - log.steps.start_s).nunique() > 2


def test_a_leap_is_one_row_in_the_log() -> None:
    """Rows are told apart by a reader."""
    log = serve([spec("a", 8, 100)], engine_config(max_model_len=200))
    assert sum(part.num_rows for part in log.parts("steps")) < 10
    assert len(log.steps) == 101


# ------------------------------------------------------------------ policies


class NoTwoAtOnce(FCFS):
    """Looks at every step."""

    leaps = True

    def may_admit(self, request: Any, state: Any) -> bool:
        return len(state.running) < 2


class Silent(FCFS):
    """Declares nothing."""


def test_a_policy_is_stepped_unless_it_declares_leaps() -> None:
    """A declaration is the class's own, and does not hold for one with a say in every step."""
    assert [may_leap(load_policy(name)) for name in ("fcfs", "priority", "sjf", "fair")] == [
        True,
        True,
        True,
        False,
    ]
    assert may_leap(Priority()) and not may_leap(Silent()) and not may_leap(NoTwoAtOnce())


@pytest.mark.parametrize("policy", [Silent(), NoTwoAtOnce()])
def test_a_stepped_policy_leaps_over_nothing(policy: FCFS) -> None:
    log = serve([spec("a", 8, 60), spec("b", 8, 60)], engine_config(max_model_len=200), policy=policy)
    assert step_figures(log).num_leapt == 0


# ------------------------------------------------------------------ times


@given(
    st.integers(1, 10**9),
    st.sampled_from([0, 1, 7, 10**6]),
    st.integers(1, 200),
    st.integers(1, 10**11),
)
def test_the_steps_until_an_instant_are_counted_exactly(
    first: int, growth: int, most: int, time_ns: int
) -> None:
    """The least number whose end is not before it; the sum is that of the steps one by one."""
    times = LeapTimes(first, growth)
    each = [first + growth * i for i in range(most)]
    ends = [sum(each[: n + 1]) for n in range(most)]
    assert [times.duration_ns(n + 1) for n in range(most)] == ends
    expected = next((n + 1 for n, end in enumerate(ends) if end >= time_ns), most)
    assert times.steps_until(time_ns, most) == expected
    assert LeapTimes(0, 0, each).steps_until(time_ns, most) == expected
    for boundary in ends[:3]:
        assert times.duration_ns(times.steps_until(boundary, most)) == boundary


# ------------------------------------------------------------------ runs that break off


class Broken(Exception):
    """What ends a run early."""


def stopped(after_s: float, async_scheduling: bool, **how: bool) -> tuple[MemorySink, int]:
    """The log of a run that is stopped at the first step that ends then or later, and how far it had come."""
    requests = [spec(f"r{i}", 8, 60, at_s) for i, at_s in enumerate([0, 3, 6, 25])]
    tokens, sink, seen = TokenSource(50), MemorySink(), []

    def on_progress(num_steps: int, num_ended: int, now_ns: int) -> None:
        seen.append(num_steps)
        if now_ns >= after_s * 1e9:
            raise Broken

    with pytest.raises(Broken):
        simulate(
            RunConfig(
                engine=engine_config(max_model_len=200, async_scheduling=async_scheduling),
                executor="constant",
            ),
            ListWorkload(requests),
            ModelledStepTimer(ConstantStepModel(10**9), tokens, "constant"),
            EventLog(sink, log_blocks=False),
            tokens=tokens,
            plan_tokens=False,
            log_blocks=False,
            on_progress=on_progress,
            **how,
        )
    return sink, sum(seen)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("how", [{"leaps": False}, {"leaps": True}])
def test_a_run_that_breaks_off_knows_how_far_each_request_had_come(
    how: dict[str, bool], async_scheduling: bool
) -> None:
    """Outputs are those of the steps that are logged; nobody completed, so no gaps are left."""
    log, num_steps = stopped(20.5, async_scheduling, **how)
    rows = log.requests.set_index("request_id")
    assert len(log.steps) == num_steps >= 21
    end = log.steps.end_s.max()
    assert rows.last_token_s.dropna().eq(end).all() and len(rows.last_token_s.dropna()) == 3
    assert rows.num_output_tokens["r0"] == num_steps
    # With asynchronous scheduling a request comes in with the step behind the one that runs.
    assert rows.num_output_tokens["r1"] == num_steps - 3 - async_scheduling
    assert len(log.itl) == 0


class Remembers(TokenSource):
    """Keeps what each request got."""

    def __init__(self) -> None:
        super().__init__(50)
        self.outputs: dict[str, list[int]] = {}

    def ended(self, spec: Any, output_token_ids: Sequence[int]) -> None:
        self.outputs[spec.request_id] = [*output_token_ids]
        super().ended(spec, output_token_ids)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("how", [{"plans": True}, {"leaps": False}, {"leaps": True}])
def test_a_turn_of_a_session_knows_each_output_once(
    how: dict[str, bool], async_scheduling: bool, caching: bool
) -> None:
    """The next turn begins with them; a request beside it keeps the engine going."""
    config = engine_config(max_model_len=200, async_scheduling=async_scheduling, caching=caching)
    requests = [
        spec("a", 8, 20, 0, session_id="s"),
        spec("b", 8, 60, 3),
        spec("c", 30, 20, 25, session_id="s", context_tokens=28),
    ]
    tokens = Remembers()
    simulate(
        RunConfig(engine=config, executor="constant"),
        ListWorkload(requests),
        ModelledStepTimer(ConstantStepModel(10**9), tokens, "constant"),
        EventLog(MemorySink(), log_blocks=False),
        tokens=tokens,
        plan_tokens=False,
        log_blocks=False,
        **how,
    )
    for name in "ac":
        assert tokens.outputs[name] == [tokens.output_id(name, i) for i in range(20)]


class Sulks(FCFS):
    """Gives nobody up."""

    leaps = True

    def choose_victim(self, running: Any, now: int) -> Any:
        raise Broken


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_policy_that_raises_leaves_the_same_log(async_scheduling: bool) -> None:
    """In the middle of a schedule call, for which all rows had to wake."""
    config = engine_config(usable_blocks=12, max_model_len=40, async_scheduling=async_scheduling,
                           scheduler_reserve_full_isl=False)  # fmt: skip
    logs = []
    for plans in (True, False):
        sink, tokens = MemorySink(), TokenSource(50)
        with pytest.raises(Broken):
            simulate(
                RunConfig(engine=config, executor="constant"),
                ListWorkload([spec("a", 8, 32), spec("b", 8, 32), spec("c", 4, 30)]),
                ModelledStepTimer(ConstantStepModel(10**9), tokens, "constant"),
                EventLog(sink, log_blocks=False),
                tokens=tokens,
                plan_tokens=False,
                log_blocks=False,
                policy=Sulks(),
                plans=plans,
            )
        logs.append(sink)
    assert differences(*logs) == []
    assert logs[0].requests.num_output_tokens.max() > 5


# ------------------------------------------------------------------ what stands against it


class OwnTimer(ModelledStepTimer):
    """Looks at plans, perhaps."""


class OwnHost(LinearHostModel):
    """The same."""


def test_own_kinds_of_timer_and_host_get_their_plans() -> None:
    tokens, config = TokenSource(50), engine_config()
    timer = ModelledStepTimer(ConstantStepModel(1), tokens, "constant")
    assert why_stepped(config, FCFS(), timer) is None
    assert why_stepped(config, FCFS(), OwnTimer(ConstantStepModel(1), tokens, "own")) is not None
    assert why_stepped(config, FCFS(), timer, OwnHost()) is not None
    assert why_stepped(config, Silent(), timer) is not None


@dataclass(frozen=True)
class BadModel:
    """Says what must not be."""

    device: Any = 10
    prepare: Any = 0

    def durations_ns(self, features: StepFeatures) -> Any:
        return np.full(len(features), self.device)

    def prepare_ns(self, features: StepFeatures) -> Any:
        return np.full(len(features), self.prepare)


@pytest.mark.parametrize("model", [BadModel(prepare=-5), BadModel(device=0)])
@pytest.mark.parametrize("how", [{"plans": True}, {"leaps": False}, {"leaps": True}])
def test_times_that_cannot_be_are_refused(model: BadModel, how: dict[str, bool]) -> None:
    """With the same words, however steps are taken."""
    tokens = TokenSource(50)
    with pytest.raises(ValueError, match=r"allowed: whole ns, 0 or more|must take at least 1 ns"):
        simulate(
            RunConfig(engine=engine_config(), executor="bad"),
            ListWorkload([spec("a", 8, 30)]),
            ModelledStepTimer(model, tokens, "bad"),
            EventLog(MemorySink()),
            tokens=tokens,
            plan_tokens=False,
            log_blocks=True,
            **how,
        )


def test_times_of_a_later_step_that_cannot_be_are_refused() -> None:
    """The leap ends before it."""

    class Fading(BadModel):
        def decode_durations_ns(self, shape: StepShape, num_steps: int) -> Any:
            return np.maximum(20 - shape.decode_context_tokens - np.arange(num_steps), 0)

        def durations_ns(self, features: StepFeatures) -> Any:
            return np.maximum(20 - features.decode_context_tokens, 0)

    for how in ({"plans": True}, {"leaps": True}):
        tokens = TokenSource(50)
        with pytest.raises(ValueError, match="gives 0 ns for a step of 1 tokens"):
            simulate(
                RunConfig(engine=engine_config(), executor="bad"),
                ListWorkload([spec("a", 8, 30)]),
                ModelledStepTimer(Fading(), tokens, "bad"),
                EventLog(MemorySink()),
                tokens=tokens,
                plan_tokens=False,
                log_blocks=True,
                **how,
            )


# ------------------------------------------------------------------ figures and memory


@given(cases())
@settings(max_examples=60)
def test_figures_of_runs_of_steps_are_those_of_the_steps(case: Case) -> None:
    """Sums, times and the peak, against the frame in which every step is a row."""
    log, _ = case.run()
    found, steps = step_figures(log), log.steps
    assert {name: found.totals[name] for name in SUMMED} == {
        name: int(steps[name].fillna(0).sum()) for name in SUMMED
    }
    assert found.num_steps == int((steps.rows > 0).sum())
    assert found.busy_ns == round(float((steps.prepare_s + steps.device_s).sum()) * 1e9)
    if len(steps):
        usable = steps.used_blocks + steps.cached_free_blocks + steps.free_blocks
        assert found.peak_used_fraction == (steps.used_blocks / usable).max()


def test_a_calendar_forgets_those_that_are_gone() -> None:
    """Also where nobody leaps, so that nobody asks for the next end."""
    calendar = DecodeCalendar(4)
    for i in range(2000):
        row = Request(f"r{i}", TokenPrompt([1] * 8), SamplingParams(), block_size=4, max_model_len=99)
        row.base, row.last_step, row.place = 8 - i, i + 5, i
        calendar.add(row)
        if i >= 3:
            calendar.leave_batch(i + 3)
            calendar.forget(i + 2)
    assert len(calendar._end_steps) < 200 and len(calendar._longest) < 200


def test_a_run_far_from_its_origin_is_exact() -> None:
    """Traces keep their own times, which may be those since 1970."""
    requests = [spec(f"r{i}", 8, 40, 1.7e9 + 0.7 * i) for i in range(5)]
    config = engine_config(max_model_len=200)
    model = LinearStepModel(10**7, 3, 1001, 7)
    logs = [serve(requests, config, timer=ModelledStepTimer(model, TokenSource(50), "x"), on_step=on_step)
            for on_step in (None, lambda *_: None)]  # fmt: skip
    assert differences(*logs) == []
    assert step_figures(logs[0]).num_leapt > 0 == step_figures(logs[1]).num_leapt


# ------------------------------------------------------------------ the command


@pytest.fixture
def load(tmp_path: Path) -> Path:
    path = tmp_path / "load.jsonl"
    rows = [
        {"request_id": f"r{i}", "arrival_s": i, "prompt_tokens": 40, "output_tokens": 90} for i in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_no_leap_writes_the_same_run(load: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the summary says how many steps were leapt over."""
    flags = [str(load), "--executor", "constant", "--step-time-s", "0.01", "--json"]
    summaries = []
    for name, more in (("a", []), ("b", ["--no-leap"])):
        assert run(["run", *flags, "--out", str(tmp_path / name), *more]) == 0
        summaries.append(json.loads(capsys.readouterr().out)["servetwin"])
    assert differences(read_run(tmp_path / "a"), read_run(tmp_path / "b")) == []
    assert summaries[0]["leapt_fraction"] > 0.8
    assert (summaries[1]["leapt_steps"], summaries[1]["steps"]) == (0, summaries[0]["steps"])


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--scheduling-policy", "fair"], "the policy fair does not declare leaps"),
        (["--save-plans"], "--save-plans wants to see each"),
    ],
)
def test_a_run_that_takes_every_step_says_why(
    load: Path, tmp_path: Path, flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "run",
        str(load),
        "--executor",
        "constant",
        "--step-time-s",
        "0.01",
        "--out",
        str(tmp_path / "r"),
    ]
    assert run([*command, *flags]) == 0
    assert reason in " ".join(capsys.readouterr().err.split())
    assert run([*command, *flags, "--overwrite", "--no-leap"]) == 2
    assert "--no-leap has no effect" in capsys.readouterr().err
