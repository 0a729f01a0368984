"""Durations of whole steps, fitted to measured ones."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import TypeAdapter

from servetwin.sim.contract import StepShape
from servetwin.sim.steptime.features import StepFeatures, regimes_of, shape_of
from servetwin.sim.steptime.measured_steps import MeasuredSteps
from servetwin.sim.steptime.plan_rows import PlanRow
from servetwin.sim.steptime.step_regression import BOUND, StepRegression


def step(decode: list[int], chunks: list[tuple[int, int]]) -> StepShape:
    """Decode rows that read so many tokens, and (new tokens, tokens before) of chunks that end their prompts."""
    rows = [PlanRow("d", 1, context - 1, context, 1) for context in decode]
    return shape_of(
        rows + [PlanRow("p", new, before, new + before, 0) for new, before in chunks], len(chunks)
    )


def some_steps(count: int, seed: int = 1) -> list[StepShape]:
    """Decode, prefill and mixed steps of all sizes up to 64 rows, contexts of 2,000 and chunks of 512."""
    random = np.random.default_rng(seed)

    def lengths(n: int) -> list[int]:
        return np.exp(random.uniform(np.log(4), np.log(2000), n)).astype(int).tolist()

    found = []
    for place in range(count):
        kind = place % 3
        decode = lengths(int(np.exp(random.uniform(0, np.log(64))))) if kind != 1 else []
        new = int(np.exp(random.uniform(np.log(4), np.log(512))))
        chunks = [(new, int(random.integers(0, 1000)))] if kind else []
        found.append(step(decode, chunks))
    return found


def true_us(f: StepFeatures) -> np.ndarray:
    """A made-up machine, which is no sum of the model's terms: an efficiency that depends on the batch."""
    work = 300 + 4.0 * np.maximum(f.new_tokens, 16) + 0.02 * f.decode_context_tokens + 2e-4 * f.prefill_pairs
    return work * (1 + 0.15 * np.sin(np.log1p(f.new_tokens)))


def measured(shapes: list[StepShape]) -> MeasuredSteps:
    features = StepFeatures.of(shapes)
    return MeasuredSteps(features, true_us(features), 50.0 + 2.0 * features.rows)


def test_steps_that_were_not_measured_are_foretold() -> None:
    """Within a few percent, and better than by the physical model alone."""
    model = StepRegression.fit([measured(some_steps(300)), measured(some_steps(300, seed=3))])
    others = StepFeatures.of(some_steps(200, seed=2))
    inside = ~model.outside(others)
    assert inside.mean() > 0.9
    errors = np.abs(model.durations_ns(others) / 1e3 / true_us(others) - 1)[inside]
    physical = np.abs(model.physical_us(others) / true_us(others) - 1)[inside]
    assert np.median(errors) < 0.03
    assert errors.mean() < physical.mean()


def test_the_host_is_a_model_of_its_own() -> None:
    model = StepRegression.fit([measured(some_steps(300))])
    shapes = StepFeatures.of([step([100] * 7, []), step([], [(30, 0)])])
    assert model.prepare_ns(shapes) == pytest.approx([64_000, 52_000], rel=0.02)


def test_outside_the_measured_region_the_physical_model_stands_alone() -> None:
    model = StepRegression.fit([measured(some_steps(300))])
    far = StepFeatures.of([step([1900] * 400, []), step([], [(5000, 0)])])
    assert model.outside(far).all()
    assert model.durations_ns(far) / 1e3 == pytest.approx(model.physical_us(far), rel=1e-3)


def test_the_correction_is_bounded() -> None:
    """One wild measurement does not bend the model by more than that."""
    shapes = some_steps(300)
    steps = measured(shapes)
    wild = np.where(np.arange(300) % 7 == 0, 50.0, 1.0)
    model = StepRegression.fit([MeasuredSteps(steps.features, steps.device_us * wild, steps.prepare_us)])
    ratio = model.durations_ns(steps.features) / 1e3 / model.physical_us(steps.features)
    assert (np.abs(np.log(ratio)) <= BOUND + 1e-3).all()


def test_a_step_without_tokens_takes_none_and_any_other_some() -> None:
    model = StepRegression.fit([measured(some_steps(60))])
    shapes = [StepShape(*[0] * len(StepShape._fields)), step([1], [])]
    durations = model.durations_ns(StepFeatures.of(shapes))
    assert durations[0] == 0
    assert durations[1] >= 1


def test_few_measurements_give_the_physical_model() -> None:
    steps = measured([step([100] * n, []) for n in (1, 8, 64)])
    model = StepRegression.fit([steps])
    assert model.durations_ns(steps.features) / 1e3 == pytest.approx(
        model.physical_us(steps.features), rel=1e-3
    )


def test_more_work_never_takes_less_time_by_the_physical_model() -> None:
    model = StepRegression.fit([measured(some_steps(300))])
    for more in (
        [step([100] * n, []) for n in (1, 2, 8, 40)],
        [step([n] * 8, []) for n in (10, 100, 1000)],
        [step([], [(n, 0)]) for n in (8, 64, 400)],
    ):
        assert (np.diff(model.physical_us(StepFeatures.of(more))) >= 0).all()


def test_regimes() -> None:
    features = StepFeatures.of([step([9], []), step([], [(4, 0)]), step([9], [(4, 0)])])
    assert list(regimes_of(features)) == ["decode", "prefill", "mixed"]


def test_no_measurement_is_no_model() -> None:
    with pytest.raises(ValueError, match="no measured steps"):
        StepRegression.fit([measured([])])


def test_decode_batches_are_padded_to_captured_sizes_and_others_are_not() -> None:
    """A machine whose time goes with the padded size: 9 to 16 rows take as long as 16."""
    shapes = [step([100] * n, []) for n in range(1, 25)] + [step([100] * 9, [(7, 0)])]
    features = StepFeatures.of(shapes)
    padded = np.array([8] * 8 + [16] * 8 + [24] * 8 + [16])
    steps = MeasuredSteps(features, 100.0 + 50.0 * padded, np.full(len(shapes), 5.0))
    model = StepRegression.fit([steps], graph_sizes=(8, 16, 24))
    assert model.graph_tokens(features).tolist() == [*padded[:-1].tolist(), 0]
    assert model.durations_ns(features)[8:16] / 1e3 == pytest.approx([900.0] * 8, rel=0.02)


def test_a_profile_keeps_the_model_to_the_last_digit() -> None:
    model = StepRegression.fit([measured(some_steps(100))])
    adapter = TypeAdapter(StepRegression)
    again = adapter.validate_json(adapter.dump_json(model))
    others = StepFeatures.of(some_steps(50, seed=5))
    assert again == model
    assert (again.durations_ns(others) == model.durations_ns(others)).all()
    assert (again.outside(others) == model.outside(others)).all()


def test_one_step_at_a_time_is_the_same_as_many_at_once() -> None:
    model = StepRegression.fit([measured(some_steps(100))])
    shapes = some_steps(20, seed=6)
    one_by_one = [int(model.durations_ns(StepFeatures.of([shape]))[0]) for shape in shapes]
    assert one_by_one == model.durations_ns(StepFeatures.of(shapes)).tolist()
