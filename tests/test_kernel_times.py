"""Step times from per-kernel tables: reading, interpolating, summing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_folders import LAYER, attention_us, dense_us, write_csv, write_skew, write_tables

from servetwin.sim.contract import StepShape
from servetwin.sim.steptime.attention_times import AttentionTimes
from servetwin.sim.steptime.features import StepFeatures, shape_of
from servetwin.sim.steptime.fit import fit_tables
from servetwin.sim.steptime.graph_sizes import graph_tokens, padded_tokens
from servetwin.sim.steptime.kernel_model import KernelStepModel
from servetwin.sim.steptime.kernel_tables import ATTENTION_AXES, TableError, read_tables
from servetwin.sim.steptime.kernel_times import KernelTimes
from servetwin.sim.steptime.physical import PhysicalModel
from servetwin.sim.steptime.plan_rows import PlanRow
from servetwin.sim.steptime.ratio_grid import RatioGrid, filled
from servetwin.sim.steptime.staircase import Staircase
from servetwin.sim.steptime.table_check import EVERY_FOURTH, check_tables

CARDS = ("rtx4090_llama-3.1-8b", "rtxpro6000_llama-3.1-8b")


@pytest.fixture
def times(tmp_path: Path) -> KernelTimes:
    return fit_tables(write_tables(tmp_path / "tables"))


def chunk(tokens: int, history: int) -> PlanRow:
    """A piece of a prompt that goes on."""
    return PlanRow("p", tokens, history, tokens + history + 50, 0)


def decode(context: int) -> PlanRow:
    """A row that reads `context` tokens, its new one included."""
    return PlanRow("d", 1, context - 1, context, 1)


def features(*rows: PlanRow) -> StepFeatures:
    return StepFeatures.of([shape_of(rows)])


# ---------------------------------------------------------------- tables


def test_measured_points_come_out_as_they_were_measured(times: KernelTimes) -> None:
    assert times.attention_us(0, 0, 4, 128) == pytest.approx(attention_us(0, 0, 4, 128), rel=1e-9)
    assert times.attention_us(64, 512, 16, 1024) == pytest.approx(attention_us(64, 512, 16, 1024), rel=1e-9)
    assert times.dense_us("qkv_proj", 64) == pytest.approx(dense_us(64))
    assert times.sequence_us("lm_head", 8) == pytest.approx(108)


def test_arrays_come_out_in_their_common_shape(times: KernelTimes) -> None:
    found = times.attention_us(0, 0, np.array([1, 4, 16]), 128)
    assert found == pytest.approx([attention_us(0, 0, n, 128) for n in (1, 4, 16)])
    assert times.dense_us("o_proj", np.array([[1, 64], [65, 100]])).shape == (2, 2)
    assert times.attention_us(0, 0, 0, 0) == 0


def test_points_between_measured_ones_follow_the_physics(times: KernelTimes) -> None:
    """Halfway between grid points on every axis; the made-up card is a sum of physical terms."""
    assert times.attention_us(0, 0, 10, 500) == pytest.approx(attention_us(0, 0, 10, 500), rel=0.03)
    assert times.attention_us(150, 300, 0, 0) == pytest.approx(attention_us(150, 300, 0, 0), rel=0.03)
    assert times.attention_us(150, 300, 10, 500) == pytest.approx(attention_us(150, 300, 10, 500), rel=0.03)


def test_a_mixed_call_is_measured_as_one(times: KernelTimes) -> None:
    """Not the sum of its parts, which would launch twice."""
    alone = times.attention_us(64, 64, 0, 0) + times.attention_us(0, 0, 4, 128)
    assert times.attention_us(64, 64, 4, 128) == pytest.approx(alone - 8 + 2)


def test_unknown_operators_are_named(times: KernelTimes) -> None:
    with pytest.raises(KeyError, match="'fc1': must be one of qkv_proj, rotary_emb"):
        times.dense_us("fc1", 3)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("attention.csv", "a,b\n1,2\n", "attention.csv: there is no column 'prefill_chunk'"),
        (
            "dense.csv",
            "layer,tokens,time_us\nx,16,0\n",
            "dense.csv, row 1: time_us .*0.* must be a number, above 0",
        ),
        (
            "dense.csv",
            "layer,tokens,time_us\nx,16,5\nx,-1,3\n",
            "row 2: tokens .*-1.* must be a number, 0 or more",
        ),
        ("dense.csv", "layer,tokens,time_us\nx,16,inf\n", "row 1: time_us .*inf.* must be a number"),
        ("dense.csv", "layer,tokens,time_us\nx,16,fast\n", "row 1: time_us 'fast' must be a number"),
        ("dense.csv", "layer,tokens,time_us\n", "dense.csv: there are no rows"),
        ("meta.yaml", "- a\n- b\n", "meta.yaml: must be a mapping"),
    ],
)
def test_damaged_tables_are_refused(tmp_path: Path, file: str, text: str, message: str) -> None:
    folder = write_tables(tmp_path)
    (folder / file).write_text(text)
    with pytest.raises(TableError, match=message):
        fit_tables(folder)


def test_a_kind_of_call_that_was_not_measured_is_refused(tmp_path: Path) -> None:
    folder = write_tables(tmp_path)
    rows = pd.read_csv(folder / "attention.csv")
    rows[rows.n_decode == 0].to_csv(folder / "attention.csv", index=False)
    with pytest.raises(TableError, match="there are no decode calls in the table"):
        fit_tables(folder)


def test_repeated_measurements_count_as_their_median(tmp_path: Path) -> None:
    folder = write_tables(tmp_path)
    write_csv(
        folder / "per_sequence.csv", "layer,sequences,time_us", [("lm_head", 1, t) for t in (5, 900, 7)]
    )
    assert fit_tables(folder).sequence_us("lm_head", 1) == 7


# ---------------------------------------------------------------- staircase


def test_a_tile_is_computed_whole() -> None:
    """257 tokens take as long as 320, not a little more than 256."""
    steps = Staircase(*zip(*((t, dense_us(t)) for t in range(16, 513, 16)), strict=True))
    assert steps.tile == 64
    assert steps([256, 257, 300, 320]) == pytest.approx([dense_us(t) for t in (256, 257, 300, 320)])


def test_what_grows_with_tokens_is_a_line() -> None:
    line = Staircase([16, 32, 64, 128, 256], [2 + t / 10 for t in (16, 32, 64, 128, 256)])
    assert line.tile is None
    assert line([100, 200]) == pytest.approx([12, 22])


def test_beyond_the_measured_region_time_grows_with_tokens() -> None:
    assert Staircase([10, 20], [1.0, 2.0])([0, 5, 40]) == pytest.approx([0, 1, 4])


# ---------------------------------------------------------------- grid


@settings(max_examples=50)
@given(missing=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=12))
def test_a_plane_is_filled_in_exactly_where_it_has_neighbours(missing: set[tuple[int, int]]) -> None:
    """Straight lines between neighbours; where there are none on both sides the nearest node stands."""
    axes = [np.array([0.0, 1.0, 3.0, 4.0]), np.array([0.0, 2.0, 3.0, 5.0, 9.0])]
    plane = axes[0][:, None] * 0.5 + axes[1][None, :] * 0.25
    holes = plane.copy()
    for place in missing:
        holes[place] = np.nan
    found = filled(holes, axes)
    assert not np.isnan(found).any()
    for i, j in missing:
        row, column = np.flatnonzero(~np.isnan(holes[i])), np.flatnonzero(~np.isnan(holes[:, j]))
        between = [len(a) and a.min() < p < a.max() for a, p in ((row, j), (column, i))]
        if any(between):
            assert found[i, j] == pytest.approx(plane[i, j])


def test_outside_the_grid_the_ratio_of_the_edge_stands() -> None:
    grid = RatioGrid(
        np.array([[1.0, 1.0], [1.0, 9.0], [9.0, 1.0], [9.0, 9.0]]), np.array([1.0, 2.0, 3.0, 4.0])
    )
    assert grid(np.array([[100.0, 1.0], [9.0, 0.0]])) == pytest.approx([3, 3])


def test_an_axis_with_one_value_does_not_count() -> None:
    grid = RatioGrid(np.array([[5.0, 1.0], [5.0, 3.0]]), np.array([1.0, 2.0]))
    assert grid(np.array([[77.0, 1.0], [2.0, 3.0]])) == pytest.approx([1, 2])
    assert RatioGrid(np.array([[5.0]]), np.array([1.5]))(np.array([[1.0], [9.0]])) == pytest.approx(
        [1.5, 1.5]
    )


def test_weights_are_never_negative() -> None:
    terms = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    model = PhysicalModel.fit(terms, np.array([3.0, 2.0, 1.0]))
    assert (model.weights >= 0).all()


# ---------------------------------------------------------------- steps


def test_a_step_is_the_sum_of_its_kernels(times: KernelTimes) -> None:
    """Four layers of seven operators (layernorm twice) and attention; embedding, last norm, head and sampler once."""
    model = KernelStepModel(times, num_layers=4)
    step = features(*[decode(100)] * 4)
    dense = (len(LAYER) + 1) * dense_us(4)
    once = 2 * (2 + 4 / 100) + 2 * 104
    attention = times.attention_us(0, 0, 4, 100)
    assert model.durations_ns(step)[0] == pytest.approx(1e3 * (4 * (dense + attention) + once), abs=1)


def test_only_rows_that_sample_go_through_the_head(times: KernelTimes) -> None:
    model = KernelStepModel(times, num_layers=4)
    assert model.parts(features(chunk(64, 0))).head[0] == 0
    assert model.parts(features(decode(64))).head[0] == pytest.approx(2 * 101)


def test_an_empty_step_takes_no_time(times: KernelTimes) -> None:
    empty = StepFeatures.of([StepShape(*[0] * len(StepShape._fields))])
    assert KernelStepModel(times, num_layers=4).durations_ns(empty).tolist() == [0]


def test_many_steps_at_once_are_as_one_by_one(times: KernelTimes) -> None:
    model = KernelStepModel(times, num_layers=2)
    shapes = [
        shape_of([decode(c)] * n + [chunk(*c2) for c2 in chunks])
        for c, n, chunks in (
            (50, 3, []),
            (900, 16, [(64, 0)]),
            (20, 0, [(256, 300), (100, 0), (40, 512)]),
            (70, 1, []),
        )
    ]
    together = model.durations_ns(StepFeatures.of(shapes))
    assert together.tolist() == [int(model.durations_ns(StepFeatures.of([s]))[0]) for s in shapes]


def test_further_chunks_are_lone_calls_that_share_the_launch(times: KernelTimes) -> None:
    one = KernelStepModel(times, 1).parts(features(chunk(256, 0))).attention[0]
    two = KernelStepModel(times, 1).parts(features(chunk(256, 0), chunk(64, 64))).attention[0]
    assert two - one == pytest.approx(times.attention_us(64, 64, 0, 0) - times.floor_us)


def test_unequal_rows_take_longer_than_equal_ones(tmp_path: Path) -> None:
    folder = write_tables(tmp_path)
    rows = [decode(1000), *[decode(100)] * 7]
    write_skew(folder, alpha=0.25)
    uneven = KernelStepModel(fit_tables(folder), 1).parts(features(*rows))
    mean = sum(r.num_computed_tokens + 1 for r in rows) / 8
    times = fit_tables(folder)
    expected = 0.25 * (times.attention_us(0, 0, 8, 1000) - times.attention_us(0, 0, 8, mean))
    assert uneven.skew[0] == pytest.approx(expected)
    even = KernelStepModel(times, 1).parts(features(*[decode(100)] * 8))
    assert even.skew[0] == 0


def test_the_calibrated_factor_is_of_the_dense_operators(times: KernelTimes) -> None:
    model, step = KernelStepModel(times, 4), features(decode(100))
    parts = model.parts(step)
    slower = model.scaled(1.5).durations_ns(step)[0] - model.durations_ns(step)[0]
    assert slower == pytest.approx(500 * parts.dense[0], abs=2)


def test_a_step_beyond_the_tables_is_told(times: KernelTimes) -> None:
    model = KernelStepModel(times, 4)
    inside = [features(decode(1024)), features(chunk(256, 512)), features(decode(5), chunk(3, 0))]
    beyond = [
        features(decode(1025)),
        features(*[decode(10)] * 17),
        features(chunk(257, 0)),
        features(chunk(16, 513)),
    ]
    assert [bool(model.outside(f)[0]) for f in inside] == [False] * 3
    assert [bool(model.outside(f)[0]) for f in beyond] == [True] * 4


def test_steps_are_padded_to_captured_sizes() -> None:
    """With and without prompts in them, as far as a size holds them."""
    shapes = [shape_of([decode(9)] * n) for n in (0, 1, 2, 3, 5)] + [shape_of([decode(9), chunk(2, 0)])]
    steps = StepFeatures.of(shapes)
    assert padded_tokens(steps, (1, 2, 4)).tolist() == [0, 1, 2, 4, 5, 4]
    assert graph_tokens(steps, (1, 2, 4)).tolist() == [0, 1, 2, 4, 0, 4]
    assert padded_tokens(steps, ()).tolist() == [0, 1, 2, 3, 5, 3]
    assert graph_tokens(steps, ()).tolist() == [0] * 6


def test_a_padded_step_takes_as_long_as_its_size(times: KernelTimes) -> None:
    """In its dense operators; attention and head know how many rows there are."""
    plain, padded = (KernelStepModel(times, 4, capture_sizes=sizes) for sizes in ((), (128,)))
    step = features(*[decode(100)] * 4)
    assert padded.parts(step).dense == pytest.approx(plain.parts(features(*[decode(100)] * 128)).dense)
    assert padded.parts(step).attention == plain.parts(step).attention
    assert padded.parts(step).head == plain.parts(step).head
    assert padded.graph_tokens(step).tolist() == [128]


def test_a_step_padded_beyond_the_tables_is_outside(times: KernelTimes) -> None:
    step = features(decode(10))
    assert KernelStepModel(times, 4, capture_sizes=(512,)).outside(step).tolist() == [False]
    assert KernelStepModel(times, 4, capture_sizes=(513,)).outside(step).tolist() == [True]


# ---------------------------------------------------------------- real tables


@pytest.mark.parametrize("card", CARDS)
def test_every_fourth_row_of_a_real_table_is_foretold(shared_data: Path, card: str) -> None:
    """Worst of four phases: attention within 2.5 %, dense operators within 1.5 %, a layer of them within 0.8 %."""
    checks = {
        c.what: c
        for c in check_tables(read_tables(shared_data / "profiles" / card))
        if c.name == EVERY_FOURTH
    }
    assert checks["attention"].errors.mape < 2.5
    assert checks["dense, each"].errors.mape < 1.5
    assert checks["dense, all of a layer"].errors.mape < 0.8
    physical = checks["attention"].physical
    assert physical is not None
    assert physical.mape > 4 * checks["attention"].errors.mape


def test_chunk_sizes_that_were_not_measured_are_foretold(shared_data: Path) -> None:
    """Chunks of 128 and 1,024 tokens out of both tables: within 6 %."""
    for card in CARDS:
        rows = doubling_grid(shared_data / "profiles" / card)
        out = rows["prefill_chunk"].isin([128, 1024])
        assert error(AttentionTimes(rows[~out]), rows[out]).mean() < 0.06


def test_points_off_the_grid_are_foretold_without_bias(shared_data: Path) -> None:
    """The PRO 6000's second grid from its first: within 3.5 %, decode calls within 1.5 %, mean error within 1 %."""
    folder = shared_data / "profiles" / CARDS[1]
    rows, grid = pd.read_csv(folder / "attention.csv"), doubling_grid(folder)
    off = rows.drop(grid.index)
    assert len(off) > 10_000
    times = AttentionTimes(grid)
    assert error(times, off).mean() < 0.035
    assert error(times, off[off.prefill_chunk == 0]).mean() < 0.015
    assert abs(signed(times, off).mean()) < 0.01


def doubling_grid(folder: Path) -> pd.DataFrame:
    """The rows whose coordinates are all 0 or powers of two."""
    rows = pd.read_csv(folder / "attention.csv")
    whole = [(rows[axis] & (rows[axis] - 1)) == 0 for axis in ATTENTION_AXES]
    return rows[np.logical_and.reduce(whole)]


def signed(times: AttentionTimes, rows: pd.DataFrame) -> np.ndarray:
    return times(*(rows[axis] for axis in ATTENTION_AXES)) / rows["time_us"].to_numpy() - 1


def error(times: AttentionTimes, rows: pd.DataFrame) -> np.ndarray:
    return np.abs(signed(times, rows))
