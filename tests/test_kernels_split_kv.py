"""Decode over long contexts: cut into splits it gives what it gives in one piece, to the bit where that is promised.

Interpreted programs are slow, so most tests make splits of 32 positions rather than 256.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_batches import IMPOSSIBLE_BLOCK, TOLERANCE, Batch, Requests, make_batch
from torch import Tensor

pytest.importorskip("triton")
from servetwin.kernels import triton_attention_plan, triton_split_kv
from servetwin.kernels.triton_attention_plan import AttentionCall
from servetwin.kernels.triton_paged_attention import plan_launch

SMALL_SPLIT = 32


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_split_kv, "SPLIT_SIZE", SMALL_SPLIT)


def call_of(batch: Batch) -> AttentionCall:
    return AttentionCall(**batch.__dict__, scale=batch.query.shape[-1] ** -0.5)


def split_attention(batch: Batch) -> Tensor:
    """The output of the split kernels, whose partial results start as NaN."""
    call = call_of(batch)
    assert triton_split_kv.use_split_kv(call)
    partials = triton_split_kv.new_partials(call)
    for part in partials:
        part.fill_(torch.nan)
    output = torch.zeros_like(batch.query)
    triton_split_kv.plan_decode(partials, call).run()
    triton_split_kv.plan_merge(output, partials, call).run()
    return output


def plain_attention(batch: Batch) -> Tensor:
    output = torch.zeros_like(batch.query)
    plan_launch(output, call_of(batch)).run()
    return output


# ---------------------------------------------------------------- results

DECODE: Requests = ((1, 99), (1, 0), (1, 31), (0, 40), (1, 32), (0, 0))
"""Contexts of several splits, of exactly one with and without its own position, of none."""
VERIFY: Requests = ((8, 60), (3, 30), (1, 5), (5, 0))
"""Draft tokens to verify: rows of one request that end in different splits."""


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize(
    ("requests", "options"),
    [
        (DECODE, {"group": 1, "block_size": 4, "dim": 16}),
        (((2, 40),), {"group": 7, "block_size": 12, "dim": 80}),
        (((1, 40),), {"group": 48, "block_size": 16, "dim": 112}),
        (((1, 50), (1, 3)), {"kv_heads": 3, "block_size": 16, "dim": 256}),
        (VERIFY, {"sliding_window": 45, "softcap": 2.0, "query_factor": 5.0}),
        (DECODE, {"sliding_window": 33, "block_size": 4}),
        (VERIFY, {"dtype": torch.float16, "block_size": 32}),
        (DECODE, {"dtype": torch.bfloat16}),
        (VERIFY, {"scales": (0.02, 0.5), "group": 3}),
    ],
    ids=str,
)
def test_splits_give_the_whole(requests: Requests, options: dict[str, Any]) -> None:
    """Any shape, window, cap and storage; what no split wrote is NaN and never read (reports 49, 51)."""
    batch = make_batch(requests, **({"kv_heads": 1} | options))
    limit = max(1e-5, TOLERANCE[batch.query.dtype])
    torch.testing.assert_close(split_attention(batch).double(), batch.expected(), rtol=limit, atol=limit)


@pytest.mark.usefixtures("small_splits")
def test_the_public_function_splits() -> None:
    """`ops.paged_attention` takes the split kernels where the rule says so."""
    batch = make_batch(((1, 60), (1, 9)))
    assert torch.equal(batch.attend("triton"), split_attention(batch))


def test_the_shipped_split_size() -> None:
    """Contexts around one and two splits of 256, with their own position on either side of the border."""
    batch = make_batch(((1, 254), (1, 255), (1, 256), (2, 511)), kv_heads=1, dim=16, block_size=16)
    torch.testing.assert_close(split_attention(batch).double(), batch.expected(), rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("small_splits")
def test_bits_depend_on_neither_batch_nor_table() -> None:
    """A row attends the same alone, in a batch, and with a wider block table (sglang #2465)."""
    batch = make_batch(((1, 99), (1, 70), (1, 31)))
    together = split_attention(batch)
    for request in range(3):
        assert torch.equal(split_attention(batch.alone(request)), together[request : request + 1])
    unused = torch.full((3, 40), IMPOSSIBLE_BLOCK, dtype=torch.int32)
    batch.block_table = torch.cat([batch.block_table, unused], dim=1)
    assert torch.equal(split_attention(batch), together)


@pytest.mark.usefixtures("small_splits")
def test_bits_do_not_depend_on_the_number_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that walks all splits stores the same partial results as one program per split."""
    batch = make_batch(((1, 127), (2, 40)), kv_heads=1)
    many = split_attention(batch)
    monkeypatch.setattr(triton_split_kv, "MAX_PROGRAMS", 1)
    assert (
        triton_split_kv.plan_decode(triton_split_kv.new_partials(call_of(batch)), call_of(batch)).grid[2] == 1
    )
    assert torch.equal(split_attention(batch), many)


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_split_has_the_bits_of_the_plain_kernel(dtype: torch.dtype) -> None:
    """Within its first split a row does not tell which kernel ran."""
    batch = make_batch(((1, 31), (1, 4), (1, 0)), dtype=dtype)
    assert torch.equal(split_attention(batch), plain_attention(batch))


@pytest.mark.usefixtures("small_splits")
def test_graph_padding() -> None:
    """Rows of length 0, rows of no request, and a dummy length beyond the table neither fail nor give NaN."""
    batch = make_batch(((1, 69), (1, 0), (1, 47)), block_size=8)
    expected = batch.expected()[0]
    batch.block_table.clamp_(max=batch.key_cache.shape[0] - 1)
    batch.seq_lens[1:] = torch.tensor([0, 4096])
    batch.query = torch.cat([batch.query, torch.full_like(batch.query, torch.nan)])
    batch.key_cache.nan_to_num_()
    batch.value_cache.nan_to_num_()
    output = split_attention(batch)
    torch.testing.assert_close(output[0].double(), expected, rtol=1e-5, atol=1e-5)
    assert output[1].eq(0).all()
    assert output[2].isfinite().all()
    assert output[3:].eq(0).all()


def test_offsets_beyond_32_bits() -> None:
    """Blocks that start past element 2^31 are read where they are (report 47); the pool is virtual memory."""
    batch = make_batch(((1, 270),), kv_heads=1, group=8, dim=128, block_size=16, dtype=torch.float16)
    pool = torch.empty(1_050_000, 1, 16, 128, dtype=torch.float16).transpose(1, 2)
    expected = batch.expected()
    used = batch.key_cache.shape[0]
    pool[-used:] = batch.key_cache
    batch.block_table = torch.where(
        batch.block_table == IMPOSSIBLE_BLOCK, IMPOSSIBLE_BLOCK, batch.block_table + len(pool) - used
    )
    values = torch.empty_like(pool)
    values[-used:] = batch.value_cache
    batch.key_cache, batch.value_cache = pool, values
    torch.testing.assert_close(split_attention(batch).double(), expected, rtol=2e-3, atol=2e-3)


# ---------------------------------------------------------------- merging


def merge(acc: Tensor, largest: Tensor, weights: Tensor, *, seq_len: int) -> Tensor:
    """Merges partial results of one row: acc [heads, splits, dim], the others [heads, splits]; [heads, dim]."""
    heads, splits, dim = acc.shape
    cache = torch.empty(1, SMALL_SPLIT, 1, dim)
    call = AttentionCall(
        query=torch.empty(1, heads, dim),
        key_cache=cache,
        value_cache=cache,
        block_table=torch.zeros(1, splits, dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        scale=1.0,
    )
    output = torch.full_like(call.query, torch.nan)
    partials = triton_split_kv.Partials(acc[None], largest[None], weights[None])
    triton_split_kv.plan_merge(output, partials, call).run()
    return output[0]


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("seq_len", [1, 5])
def test_merge_reads_only_the_splits_of_the_row(seq_len: int) -> None:
    """A row of length 1 or 5 with room for 8 splits has one, and gets it exactly (report 50)."""
    acc, largest, weights = torch.randn(2, 8, 16), torch.randn(2, 8), torch.rand(2, 8)
    for part in (acc, largest, weights):
        part[:, 1:] = torch.nan
    expected = acc[:, 0] / weights[:, :1]
    assert torch.equal(merge(acc, largest, weights, seq_len=seq_len), expected)


@pytest.mark.usefixtures("small_splits")
def test_merging_empty_splits() -> None:
    """Empty and empty is empty, empty and x is x exactly; minus infinity never meets itself (report 50)."""
    splits = 20
    acc, weights = torch.zeros(2, splits, 16), torch.zeros(2, splits)
    largest = torch.full((2, splits), -torch.inf)
    acc[1, 18], largest[1, 18], weights[1, 18] = torch.arange(16), -300.0, 3.0
    output = merge(acc, largest, weights, seq_len=splits * SMALL_SPLIT)
    assert output[0].eq(0).all()
    assert torch.equal(output[1], torch.arange(16) / 3.0)


@pytest.mark.usefixtures("small_splits")
def test_merge_of_many_splits() -> None:
    """128 splits of 128 dims, the shape that a GPU compiler got wrong (lmdeploy #4920), with scores far apart."""
    rng = torch.Generator().manual_seed(0)
    acc, largest = torch.randn(3, 128, 128, generator=rng), torch.randn(3, 128, generator=rng) * 20
    weights = torch.rand(3, 128, generator=rng) + 1
    share = torch.exp2(largest.double() - largest.double().amax(1, keepdim=True))
    expected = torch.einsum("hs,hsd->hd", share, acc.double()) / (share * weights).sum(1, keepdim=True)
    output = merge(acc, largest, weights, seq_len=128 * SMALL_SPLIT)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- the rule


def meta_call(
    *,
    tokens: int,
    reqs: int,
    kv_heads: int = 8,
    group: int = 4,
    dim: int = 128,
    table_tokens: int = 8192,
    sliding_window: int | None = None,
) -> AttentionCall:
    """A call without data: whatever is decided from it is decided from shapes."""
    cache = torch.empty(64, 16, kv_heads, dim, dtype=torch.bfloat16, device="meta")

    def index(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    return AttentionCall(
        query=torch.empty(tokens, kv_heads * group, dim, dtype=torch.bfloat16, device="meta"),
        key_cache=cache,
        value_cache=cache,
        block_table=index(reqs, table_tokens // 16),
        seq_lens=index(reqs),
        query_start_loc=index(reqs + 1),
        scale=0.1,
        sliding_window=sliding_window,
    )


@pytest.mark.parametrize(
    ("splits", "case"),
    [
        pytest.param(True, {"tokens": 1, "reqs": 1}, id="one row"),
        pytest.param(True, {"tokens": 32, "reqs": 32}, id="a batch below the card"),
        pytest.param(False, {"tokens": 64, "reqs": 64}, id="a batch that fills the card"),
        pytest.param(
            True, {"tokens": 64, "reqs": 64, "kv_heads": 1}, id="the same, 1 of 8 kv heads here (#54191)"
        ),
        pytest.param(True, {"tokens": 32, "reqs": 4}, id="8 rows a request (#51995)"),
        pytest.param(False, {"tokens": 33, "reqs": 4}, id="9 rows a request"),
        pytest.param(False, {"tokens": 2, "reqs": 2, "table_tokens": 256}, id="a table of one split"),
        pytest.param(True, {"tokens": 2, "reqs": 2, "table_tokens": 272}, id="a table of more"),
        pytest.param(False, {"tokens": 2, "reqs": 2, "sliding_window": 256}, id="a window of one split"),
        pytest.param(True, {"tokens": 2, "reqs": 2, "sliding_window": 257}, id="a window of more"),
        pytest.param(
            False, {"tokens": 32, "reqs": 32, "table_tokens": 1 << 20}, id="partial results of 2 GiB"
        ),
    ],
)
def test_when_contexts_are_split(splits: bool, case: dict[str, int]) -> None:
    """The rule that `use_split_kv` states, from shapes alone."""
    assert triton_split_kv.use_split_kv(meta_call(**case)) is splits


@pytest.mark.parametrize("table_tokens", [512, 8192, 131_072])
@pytest.mark.parametrize("reqs", [1, 7, 32])
def test_number_of_programs_is_bounded(reqs: int, table_tokens: int) -> None:
    """A wide table gives a program more splits, not the card more programs."""
    call = meta_call(tokens=reqs, reqs=reqs, table_tokens=table_tokens)
    q_blocks, kv_heads, walkers = triton_split_kv.plan_decode(triton_split_kv.new_partials(call), call).grid
    assert q_blocks * kv_heads * walkers <= triton_split_kv.MAX_PROGRAMS
    assert 1 <= walkers <= table_tokens // triton_split_kv.SPLIT_SIZE


@pytest.mark.parametrize("group", [1, 3, 5, 7, 16, 48])
@pytest.mark.parametrize("queries", [1, 2, 8, 100])
@pytest.mark.parametrize("dim", [16, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_hold_at_least_one_query(group: int, queries: int, dim: int, dtype: torch.dtype) -> None:
    """Rows of a tile are a power of two, and never fewer than a group (vLLM #18100, #23424)."""
    shape = triton_attention_plan.choose_tile_shape(
        queries=queries, group=group, head_dim=dim, dtype=dtype, arch=90
    )
    assert shape.block_m >= max(16, group)
    assert shape.block_m & (shape.block_m - 1) == 0
