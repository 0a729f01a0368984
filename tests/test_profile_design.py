"""The design of a profile: steps that fit the engine, spread over everything it can run, always the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servetwin.executor.profile_design import designed_points
from servetwin.executor.profile_grid import GridLimits

LIMITS = GridLimits(
    max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=4096, num_blocks=3000, block_size=16
)
limits_strategy = st.builds(
    GridLimits,
    max_num_seqs=st.integers(1, 40),
    max_num_batched_tokens=st.integers(1, 300),
    max_model_len=st.integers(2, 500),
    num_blocks=st.integers(3, 200),
    block_size=st.integers(1, 32),
)


def test_all_kinds_are_there_from_the_smallest_to_the_largest() -> None:
    points = designed_points(LIMITS, 200, seed=0)
    assert len(points) == len(set(points)) == 200
    kinds = [point.kind for point in points]
    assert min(kinds.count(kind) for kind in ("decode", "mixed", "prefill")) >= 40
    rows = [len(p.query_lens) for p in points if p.kind == "decode"]
    chunks = [max(p.query_lens) for p in points if p.kind == "prefill"]
    assert (min(rows), max(rows)) == (1, 64)
    assert (min(chunks), max(chunks)) == (1, 1024)
    assert max(max(p.context_lens) for p in points) == 4095


def test_sizes_are_spread_evenly_on_a_logarithmic_scale() -> None:
    """Between any two powers of two there are about as many batches."""
    points = designed_points(LIMITS, 400, seed=3)
    rows = [len(p.query_lens) for p in points if p.kind == "decode"]
    counts, _ = np.histogram(np.log2(rows), bins=[0, 2, 4, 6.01])
    assert counts.min() > 0.6 * counts.max()


def test_some_batches_have_equal_contexts_and_some_very_unequal_ones() -> None:
    lens = [p.context_lens for p in designed_points(LIMITS, 200, seed=0) if p.kind == "decode"]
    skews = [max(c) / np.mean(c) for c in lens if len(c) >= 8]
    assert min(skews) == pytest.approx(1.0)
    assert max(skews) > 3


def test_chunks_begin_prompts_or_go_on_with_them() -> None:
    points = [p for p in designed_points(LIMITS, 200, seed=0) if p.kind == "prefill"]
    without = sum(max(p.context_lens) == 0 for p in points)
    assert 0.2 < without / len(points) < 0.7


def test_the_same_arguments_give_the_same_points_and_another_seed_others() -> None:
    assert designed_points(LIMITS, 50, seed=1) == designed_points(LIMITS, 50, seed=1)
    assert designed_points(LIMITS, 50, seed=1) != designed_points(LIMITS, 50, seed=2)


def test_captured_sizes_are_measured_and_the_rows_just_above() -> None:
    points = designed_points(LIMITS, 60, seed=0, graph_sizes=(8, 16))
    rows = {len(p.query_lens) for p in points if p.kind == "decode"}
    assert {8, 9, 16, 17} <= rows


def test_many_captured_sizes_do_not_crowd_out_the_rest() -> None:
    """As on a card with 64 sizes: a quarter of the points at most is for them, spread over small and large ones."""
    sizes = tuple(range(1, 65))
    points = designed_points(LIMITS, 120, seed=0, graph_sizes=sizes)
    kinds = [point.kind for point in points]
    assert kinds.count("mixed") >= 30 and kinds.count("prefill") >= 15
    first = [point.kind for point in points[:40]]
    assert first.count("mixed") >= 8


@given(limits_strategy, st.integers(1, 60), st.integers(0, 5))
def test_every_point_can_be_run_whatever_the_engine(limits: GridLimits, count: int, seed: int) -> None:
    points = designed_points(limits, count, seed)
    assert 1 <= len(points) <= count
    assert all(limits.allow(point) for point in points)
    assert all(min(p.query_lens) >= 1 and min(p.context_lens) >= 0 for p in points)
