"""A run is the same whether its steps are taken one by one with plans, without plans, or many at once."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from engines import engine_config, serve, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from leaping_strategies import Case, cases

from servetwin.sim.decide import Line, ScenarioLoop
from servetwin.sim.events import MemorySink
from servetwin.sim.leap_times import LeapTimes
from servetwin.sim.leaping_core import LeapingCore
from servetwin.sim.metrics import step_figures
from servetwin.sim.policy import FCFS, Priority, load_policy, may_leap
from servetwin.sim.rules import Rules
from servetwin.sim.scenario import Scenario, read_scenario
from servetwin.sim.tables import differences

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
