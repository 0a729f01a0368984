"""The profile's grid: points that fit the engine, rows in the documented format, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from packed_engine import PackedEngine

from servetwin.executor import profile_grid
from servetwin.executor.cuda_graphs import ReplayedCall
from servetwin.executor.profile_grid import GridLimits, GridPoint, measure_point
from servetwin.executor.testing import torch_threads

FIELDS = [
    "kind", "num_tokens", "num_reqs", "query_lens", "context_lens", "graph_tokens",
    "device_us", "device_us_p10", "device_us_p90", "forward_us", "prepare_us",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def test_every_point_of_the_grid_fits_the_engine_and_all_kinds_are_there() -> None:
    limits = GridLimits(
        max_num_seqs=64, max_num_batched_tokens=600, max_model_len=8192, num_blocks=5000, block_size=16
    )
    points = profile_grid.profile_grid(limits)
    assert {point.kind for point in points} == {"prefill", "decode", "mixed"}
    assert max(len(point.query_lens) for point in points) == 64
    assert max(sum(point.query_lens) for point in points) == 512 + 8
    assert max(max(point.seq_lens) for point in points) <= 8192
    assert max(sum(-(-n // 16) for n in point.seq_lens) for point in points) <= 4999


def test_a_skewed_batch_has_the_mean_of_an_even_one() -> None:
    contexts = profile_grid._skewed(32, 1024)
    assert max(contexts) == 8 * 1024
    assert sum(contexts) == pytest.approx(32 * 1024, rel=0.001)


@pytest.mark.parametrize(
    ("point", "graph_tokens"),
    [
        (GridPoint("prefill", (9,), (20,)), None),
        (GridPoint("decode", (1, 1, 1), (0, 8, 60)), 4),
        (GridPoint("mixed", (1, 1, 6), (5, 6, 0)), None),
    ],
)
def test_a_row_says_what_ran_and_how_long_and_leaves_no_request(
    point: GridPoint, graph_tokens: int | None
) -> None:
    engine = PackedEngine()
    engine.runner.capture_decode_graphs((4,), ReplayedCall())
    for _ in range(2):
        row = measure_point(engine.runner, point, repetitions=3)
        assert list(row) == FIELDS
        assert (row["kind"], row["graph_tokens"]) == (point.kind, graph_tokens)
        assert row["query_lens"] == list(point.query_lens)
        assert (row["num_tokens"], row["num_reqs"]) == (sum(point.query_lens), len(point.query_lens))
        assert 0 < row["device_us_p10"] <= row["device_us"] <= row["device_us_p90"]
        assert 0 < row["forward_us"] <= row["device_us"]
        assert row["prepare_us"] > 0
    assert not engine.runner.states.known
