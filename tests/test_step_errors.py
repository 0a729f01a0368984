"""Measured steps one by one against a step model, the spread of like steps, and a second measured run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from engines import engine_config, spec

from servetwin.sim.contract import StepShape
from servetwin.sim.steptime.features import Bools, Ints, StepFeatures, shape_of
from servetwin.sim.steptime.measured_steps import MeasuredSteps
from servetwin.sim.steptime.plan_rows import PlanRow
from servetwin.sim.validation.like_steps import FEWEST, medians_of_like
from servetwin.sim.validation.replay import NoisyModel, simulated
from servetwin.sim.validation.step_errors import ALL, LEAST, OUTSIDE, measured_steps, step_errors


def step(decode: list[int], chunks: list[int]) -> StepShape:
    """Decode rows that read so many tokens, and prompts of so many."""
    rows = [PlanRow("d", 1, context - 1, context, 1) for context in decode]
    return shape_of(rows + [PlanRow("p", new, 0, new, 0) for new in chunks], len(chunks))


@dataclass(frozen=True)
class Machine:
    """A millisecond a step, 10 us a row; prompts by `prefill` times 2 us a token."""

    prefill: float = 1.0

    def durations_ns(self, features: StepFeatures) -> Ints:
        us = 1000 + 10 * features.rows + 2 * self.prefill * features.prefill_tokens
        return np.where(features.new_tokens > 0, np.rint(1e3 * us), 0).astype(np.int64)


@dataclass(frozen=True)
class WholeMachine(Machine):
    """It also knows the host, and that nothing beyond 8 rows was measured."""

    def prepare_ns(self, features: StepFeatures) -> Ints:
        return 5_000 * features.rows

    def outside(self, features: StepFeatures) -> Bools:
        beyond: Bools = features.rows > 8
        return beyond


def measured(shapes: list[StepShape], spread: float = 0.0, prepare_us: float = 20.0) -> MeasuredSteps:
    """What Machine() would take, every other step `spread` slower."""
    features = StepFeatures.of(shapes)
    us = Machine().durations_ns(features) / 1e3
    slower = np.where(np.arange(len(us)) % 2 == 1, 1 + spread, 1.0)
    return MeasuredSteps(features, us * slower, np.full(len(us), prepare_us))


MANY = [step([103 + place % 2] * 4, []) for place in range(40)]


def test_the_steps_of_a_run_are_read_back() -> None:
    """Every batch as it was, so the model that made the run foretells all of them to the nanosecond."""
    requests = [spec("a", 20, 30), spec("b", 100, 10, 0.01), spec("c", 30, 20, 0.01)]
    log = simulated(requests, engine_config(max_num_batched_tokens=64), Machine()).log
    steps = measured_steps(log)
    assert steps is not None
    assert len(steps) == (log.steps["rows"] > 0).sum()
    found = step_errors(steps, Machine())
    assert set(found) == {"prefill", "decode", "mixed", ALL}
    for errors in found.values():
        assert errors.device.mape == pytest.approx(0, abs=1e-6)
        assert errors.prepare is None


def test_errors_are_told_by_regime() -> None:
    """Prompts foretold half as long again: decode steps know nothing of it."""
    steps = measured([step([50] * 3, []), step([], [500]), step([50] * 3, [500])])
    found = step_errors(steps, Machine(prefill=1.5))
    assert found["decode"].device.bias == pytest.approx(0)
    assert found["prefill"].device.bias == pytest.approx(100 * 500 / 2010)
    assert found["mixed"].device.mape == pytest.approx(100 * 500 / 2040)
    assert found[ALL].device.n == 3
    assert found[ALL].total_percent == pytest.approx(100 * 1000 / (1030 + 2010 + 2040))


def test_steps_outside_the_measured_region_stand_apart() -> None:
    steps = measured([step([50] * 3, []), step([50] * 9, []), step([50] * 12, [])], spread=0.5)
    found = step_errors(steps, WholeMachine())
    assert found["decode"].device.n == found[ALL].device.n == 1
    assert found[OUTSIDE].device.n == 2
    assert found[ALL].device.mape == 0 < found[OUTSIDE].device.mape


def test_the_host_is_foretold_where_the_model_knows_it() -> None:
    found = step_errors(measured([step([50] * 3, []), step([50] * 5, [])]), WholeMachine())
    assert found["decode"].prepare is not None
    assert found["decode"].prepare.bias == pytest.approx(100 * (15 / 20 + 25 / 20 - 2) / 2)


def test_like_steps_show_what_no_model_beats() -> None:
    """Half of them take 10 % longer: the median lies between, and so far off are all."""
    steps = measured(MANY, spread=0.1)
    found = step_errors(steps, Machine())["decode"]
    assert found.like is not None
    assert found.like.n == len(MANY)
    low, high = 1.0, 1.1
    assert found.like.mape == pytest.approx(100 * (1.05 / low - 1 + 1 - 1.05 / high) / 2)
    assert found.again is None


def test_few_like_steps_say_nothing() -> None:
    few = measured(MANY[: LEAST - 1])
    assert step_errors(few, Machine())["decode"].like is None
    alone = measured([step([100], []), *MANY[: FEWEST - 1]])
    assert np.isnan(medians_of_like(alone, alone)).all()


def test_rows_prompts_and_contexts_make_steps_alike() -> None:
    """As many rows and prompts; contexts and prompt tokens may differ a little."""
    of = measured([step([103] * 4, [])])
    for shape, alike in (
        (step([104] * 4, []), True),
        (step([130] * 4, []), False),
        (step([103] * 5, []), False),
        (step([103] * 4, [16]), False),
    ):
        medians = medians_of_like(of, measured([shape] * FEWEST))
        assert np.isnan(medians[0]) != alike


def test_a_second_run_foretells_the_first_by_its_like_steps() -> None:
    """It was 5 % slower throughout."""
    first, second = measured(MANY), measured(MANY)
    slower = MeasuredSteps(second.features, 1.05 * second.device_us, second.prepare_us)
    found = step_errors(first, Machine(), slower)["decode"]
    assert found.again is not None
    assert found.again.bias == pytest.approx(5)
    assert found.to_json()["again"]["bias_percent"] == pytest.approx(5)


def test_noise_leaves_what_else_a_model_knows() -> None:
    features = StepFeatures.of(MANY)
    noisy = NoisyModel(WholeMachine(), 0.03, seed=1)
    assert (noisy.prepare_ns(features) == 20_000).all()
    assert not hasattr(NoisyModel(Machine(), 0.03, seed=1), "prepare_ns")
    ratio = noisy.durations_ns(features) / Machine().durations_ns(features)
    assert 0.01 < ratio.std() < 0.06
