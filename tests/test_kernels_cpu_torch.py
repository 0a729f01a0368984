"""The plain torch path, which runs where no C++ compiler is: decode in groups, chunks merged from two parts."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from attention_batches import MIXED, TOLERANCE, Batch, Requests, make_batch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from servetwin.kernels import cpu_torch, cpu_torch_prefill

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def attend(batch: Batch) -> Tensor:
    return cpu_torch.paged_attention(
        *(batch.query, batch.key_cache, batch.value_cache),
        *(batch.block_table, batch.seq_lens, batch.query_start_loc),
        scale=batch.query.shape[-1] ** -0.5,
        sliding_window=batch.sliding_window,
        softcap=batch.softcap,
        key_scale=batch.key_scale,
        value_scale=batch.value_scale,
    )


def check(batch: Batch) -> None:
    limit = TOLERANCE[batch.query.dtype]
    torch.testing.assert_close(attend(batch).double(), batch.expected(), rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("block_size", "dim", "group"),
    [(4, 64, 5), (16, 80, 7), (12, 96, 16), (544, 72, 3), (5, 112, 48), (1, 10, 1)],
)
def test_mixed_batches_of_any_shape(dtype: torch.dtype, block_size: int, dim: int, group: int) -> None:
    """Chunks, decode rows and empty requests, amid NaN."""
    check(make_batch(block_size=block_size, dim=dim, group=group, dtype=dtype))


@pytest.mark.parametrize("context", [0, 1, 15, 300])
@pytest.mark.parametrize("rows", [2, 17, 300])
def test_chunks_are_merged_from_context_and_itself(rows: int, context: int) -> None:
    """With and without context, with more rows than context and fewer."""
    check(make_batch(((rows, context),), kv_heads=3, group=2, dim=16))


def test_a_chunk_far_from_its_context_in_score() -> None:
    """Where one part outweighs the other beyond all digits, the merge gives that part, not NaN."""
    query = torch.ones(2, 1, 4)
    keys = torch.zeros(1, 4, 4)
    values = torch.arange(4.0)[None, :, None].expand(1, 4, 4).contiguous()
    for high, expected in ((slice(0, 2), 0.5), (slice(2, 3), 2.0)):
        outweighing = keys.clone()
        outweighing[:, high] = 1000
        output = cpu_torch_prefill.attend_chunk(query, outweighing, values, scale=1.0)
        assert output.eq(expected).all()


def test_a_chunk_longer_than_its_sequence() -> None:
    """Rows before the first position are padding and give 0; the rest is a chunk without context."""
    batch = make_batch(((6, 0),))
    batch.seq_lens = torch.tensor([4], dtype=torch.int32)
    assert attend(batch)[:2].eq(0).all()
    check(batch)


@pytest.mark.parametrize(("sliding_window", "softcap"), [(4, None), (None, 5.0), (30, 5.0)])
def test_windows_and_softcap_keep_the_masked_tiles(sliding_window: int | None, softcap: float | None) -> None:
    """In several tiles, which a small limit makes of a short chunk."""
    with mock.patch.object(cpu_torch, "MAX_TILE_QUERIES", 3):
        check(make_batch((*MIXED, (10, 40)), sliding_window=sliding_window, softcap=softcap))


@given(
    requests=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 60)), max_size=4).map(tuple),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    sliding_window=st.none() | st.integers(1, 70),
    softcap=st.none() | st.floats(1, 50),
)
def test_any_batch(
    requests: Requests, kv_heads: int, group: int, sliding_window: int | None, softcap: float | None
) -> None:
    """Any batch equals dense attention in float64."""
    check(
        make_batch(
            requests,
            kv_heads=kv_heads,
            group=group,
            dim=12,
            sliding_window=sliding_window,
            softcap=softcap,
        )
    )
