"""Paged attention: every backend gives what dense attention in float64 gives, and reads nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from attention_batches import IMPOSSIBLE_BLOCK, MIXED, Batch, Requests, make_batch
from hypothesis import given
from hypothesis import strategies as st

from servetwin.kernels import ops

every_backend = pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
both_backends = pytest.mark.parametrize("backend", ["cpu", "triton"])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def needs_triton(request: pytest.FixtureRequest) -> None:
    if "backend" in request.fixturenames and request.getfixturevalue("backend") == "triton":
        pytest.importorskip("triton")


# ---------------------------------------------------------------- shapes

SHAPES = [
    (4, 16, 1),
    (16, 32, 3),
    (12, 64, 5),
    (16, 80, 7),
    (12, 96, 16),
    (32, 80, 48),
    (8, 72, 2),
    (5, 112, 4),
    (16, 128, 4),
    (12, 256, 2),
    (544, 64, 2),
]


@every_backend
@pytest.mark.parametrize(("block_size", "dim", "group"), SHAPES)
def test_mixed_batches_of_any_shape(backend: ops.Backend, block_size: int, dim: int, group: int) -> None:
    """Chunks, decode rows and empty requests in one batch, for sizes that are no powers of two (reports 48, 51, 52)."""
    make_batch(block_size=block_size, dim=dim, group=group).check(backend)


@pytest.mark.full
@both_backends
@pytest.mark.parametrize("block_size", [4, 12, 16])
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 256])
@pytest.mark.parametrize("group", [1, 3, 5, 7, 16, 48])
@pytest.mark.parametrize("sliding_window", [None, 4])
def test_mixed_batches_of_every_shape(
    backend: ops.Backend, block_size: int, dim: int, group: int, sliding_window: int | None
) -> None:
    """The whole grid of block sizes, head dims and group sizes, with and without a window."""
    batch = make_batch(block_size=block_size, dim=dim, group=group, sliding_window=sliding_window)
    batch.check(backend)


@both_backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("requests", [MIXED, ((1, 40), (1, 0), (1, 15))], ids=["mixed", "decode"])
def test_half_precision_storage(backend: ops.Backend, dtype: torch.dtype, requests: Requests) -> None:
    """16-bit storage costs no more than its own rounding, in chunk and in decode tiles."""
    make_batch(requests, dtype=dtype).check(backend)


@both_backends
def test_batch_of_decode_rows_only(backend: ops.Backend) -> None:
    """One row per request, the shape of most steps."""
    make_batch(((1, 47), (1, 0), (1, 11), (1, 12)), group=4).check(backend)


@both_backends
def test_long_chunk_over_several_tiles(backend: ops.Backend) -> None:
    """A chunk longer than a tile, on a context that ends inside a tile."""
    make_batch(((70, 37),), kv_heads=1, dim=16, dtype=torch.float16).check(backend)


# ---------------------------------------------------------------- window and softcap


@both_backends
@pytest.mark.parametrize("sliding_window", [1, 4, 100])
def test_sliding_window_reads_nothing_before_it(backend: ops.Backend, sliding_window: int) -> None:
    """Position p sees p - W + 1 .. p; blocks before the window hold NaN or do not exist (report 49)."""
    requests = ((1, 19), (6, 14), (20, 0), (0, 9))
    make_batch(requests, block_size=4, sliding_window=sliding_window).check(backend)


@both_backends
@pytest.mark.parametrize("sliding_window", [None, 7])
def test_softcap_holds_for_huge_scores(backend: ops.Backend, sliding_window: int | None) -> None:
    """Scores of more than 88 times the cap, where exp overflows, are capped rather than NaN."""
    batch = make_batch(softcap=0.5, query_factor=300.0, sliding_window=sliding_window)
    # The rounding of scores of this size, not yet capped, is all that may differ.
    batch.check(backend, tolerance=2e-4)


@every_backend
@pytest.mark.parametrize("softcap", [1e3, 1e6, 1e12])
def test_a_softcap_far_above_the_scores_changes_next_to_nothing(backend: ops.Backend, softcap: float) -> None:
    """tanh(x) of a small x is x, not what is left of 1 - 1."""
    batch = make_batch(softcap=softcap)
    actual = batch.attend(backend)
    batch.softcap = None
    torch.testing.assert_close(actual.double(), batch.expected(), rtol=1e-5, atol=1e-5)


@both_backends
def test_softcap_changes_the_result(backend: ops.Backend) -> None:
    """The cap is applied, not dropped."""
    batch = make_batch(softcap=1.0, query_factor=10.0)
    capped = batch.attend(backend)
    batch.softcap = None
    assert not torch.allclose(capped, batch.attend(backend), atol=1e-2)


# ---------------------------------------------------------------- padding


@both_backends
def test_padding_gives_zeros(backend: ops.Backend) -> None:
    """Rows of a request of length 0, and rows after the last request, are 0 (graph padding)."""
    batch = make_batch(((3, 5), (1, 0)))
    batch.seq_lens[1] = 0
    batch.query = torch.cat([batch.query, torch.full_like(batch.query[:2], torch.nan)])
    output = batch.attend(backend)
    assert output[:3].isfinite().all()
    assert output[3:].eq(0).all()


@every_backend
@pytest.mark.parametrize(("rows", "context", "group"), [(5, 13, 2), (40, 13, 16), (5, 600, 2)])
def test_rows_before_the_first_request_give_zeros(
    backend: ops.Backend, rows: int, context: int, group: int
) -> None:
    """Fewer than a program has, more of them, and over a context that is split."""
    batch = make_batch(((1, context), (3, 2)), group=group, kv_heads=1)
    batch.query = torch.cat([torch.full_like(batch.query[:1], torch.nan).expand(rows, -1, -1), batch.query])
    batch.query_start_loc = batch.query_start_loc + rows
    batch.check(backend)


@both_backends
@pytest.mark.parametrize("requests", [(), ((0, 0),), ((0, 5), (0, 0))])
def test_batch_without_tokens(backend: ops.Backend, requests: Requests) -> None:
    """No rows in, no rows out."""
    assert make_batch(requests).attend(backend).shape == (0, 4, 32)


# ---------------------------------------------------------------- memory layout


def interleaved(batch: Batch) -> None:
    """[blocks, 2, block_size, kv_heads, dim]: keys and values of a block side by side."""
    batch.key_cache, batch.value_cache = torch.stack([batch.key_cache, batch.value_cache], dim=1).unbind(1)


def head_major(batch: Batch) -> None:
    """[blocks, kv_heads, block_size, dim] for keys, [blocks, block_size, dim, kv_heads] for values."""
    batch.key_cache = batch.key_cache.transpose(1, 2).contiguous().transpose(1, 2)
    batch.value_cache = batch.value_cache.transpose(2, 3).contiguous().transpose(2, 3)


def sliced_inputs(batch: Batch) -> None:
    """A query that is part of a fused projection, and tables and lengths that are part of larger buffers."""
    batch.query = torch.cat([batch.query, torch.full_like(batch.query, torch.nan)], dim=1)[
        :, : batch.query.shape[1]
    ]
    columns = batch.block_table.shape[1]
    batch.block_table = torch.cat([batch.block_table, torch.full_like(batch.block_table, -7)], 1)[:, :columns]
    batch.seq_lens = torch.stack([batch.seq_lens, torch.full_like(batch.seq_lens, -7)], dim=1)[:, 0]


def dims_apart(batch: Batch) -> None:
    """A query whose dims lie apart."""
    batch.query = batch.query.transpose(1, 2).contiguous().transpose(1, 2)


def same_everywhere(batch: Batch) -> None:
    """A query of one number a head, expanded."""
    batch.query = batch.query[..., :1].expand_as(batch.query)


@both_backends
@pytest.mark.parametrize("layout", [interleaved, head_major, sliced_inputs, dims_apart, same_everywhere])
def test_any_strides(backend: ops.Backend, layout: Callable[[Batch], None]) -> None:
    """Strides are taken from the tensors; no layout is assumed."""
    batch = make_batch()
    layout(batch)
    batch.check(backend)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("layout", [dims_apart, same_everywhere])
def test_any_strides_in_plain_torch(layout: Callable[[Batch], None], group: int) -> None:
    """The same without the compiled kernels, which float16 is left to."""
    batch = make_batch(group=group, dtype=torch.float16)
    layout(batch)
    batch.check("cpu")


@both_backends
def test_offsets_beyond_32_bits(backend: ops.Backend) -> None:
    """Blocks that start past element 2^31 are read where they are (report 47); the pool is virtual memory."""
    pool = torch.empty(70_000, 2, 16, 8, 128, dtype=torch.float16)
    batch = make_batch(((3, 15), (1, 30)), kv_heads=8, group=1, dim=128, block_size=16, dtype=torch.float16)
    for near in set(batch.block_table.flatten().tolist()) - {IMPOSSIBLE_BLOCK}:
        pool[69_900 + near, 0], pool[69_900 + near, 1] = batch.key_cache[near], batch.value_cache[near]
    expected = batch.expected()
    batch.key_cache, batch.value_cache = pool.unbind(1)
    batch.block_table = torch.where(
        batch.block_table == IMPOSSIBLE_BLOCK, IMPOSSIBLE_BLOCK, batch.block_table + 69_900
    )
    torch.testing.assert_close(batch.attend(backend).double(), expected, rtol=2e-3, atol=2e-3)


# ---------------------------------------------------------------- properties

request_shapes = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), max_size=4).map(tuple)


@given(
    requests=request_shapes,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    dim=st.sampled_from([1, 8, 24, 64]),
    block_size=st.integers(1, 20),
    sliding_window=st.none() | st.integers(1, 50),
    softcap=st.none() | st.floats(0.1, 100),
)
def test_cpu_is_right_on_any_batch(
    requests: Requests,
    kv_heads: int,
    group: int,
    dim: int,
    block_size: int,
    sliding_window: int | None,
    softcap: float | None,
) -> None:
    """The cpu backend gives the float64 result whatever the batch."""
    make_batch(
        requests,
        kv_heads=kv_heads,
        group=group,
        dim=dim,
        block_size=block_size,
        sliding_window=sliding_window,
        softcap=softcap,
    ).check("cpu", tolerance=5e-6)


@given(requests=request_shapes.filter(len), data=st.data())
def test_rows_do_not_depend_on_their_batch(requests: Requests, data: st.DataObject) -> None:
    """A request attends the same alone as in a batch, to rounding: groups of decode rows are padded."""
    batch = make_batch(requests)
    request = data.draw(st.integers(0, len(requests) - 1))
    start, end = batch.query_start_loc[request : request + 2].tolist()
    together = batch.attend("cpu")[start:end]
    torch.testing.assert_close(batch.alone(request).attend("cpu"), together, rtol=1e-5, atol=1e-6)
