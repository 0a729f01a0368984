"""The C++ kernels compute what they must on every instruction set, whatever the shape and the number of threads."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from attention_batches import MIXED, TOLERANCE, Batch, make_batch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from servetwin.kernels import cpu_native, cpu_native_build, reference, reference_layers

DTYPES = tuple(cpu_native.DTYPES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=cpu_native.DTYPES.get)


def has_compiler() -> bool:
    try:
        cpu_native_build.find_compiler(os.environ)
    except cpu_native_build.NativeBuildError:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")


@pytest.fixture(autouse=True)
def own_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Each test chooses the library anew, and leaves no choice behind."""
    monkeypatch.delenv(cpu_native.SWITCH, raising=False)
    cpu_native._native.cache_clear()
    yield monkeypatch
    cpu_native._native.cache_clear()


@pytest.fixture(params=[candidate.name for candidate in cpu_native_build.instruction_sets()])
def instructions(request: pytest.FixtureRequest, own_choice: pytest.MonkeyPatch) -> str:
    """Each instruction set of this processor in turn."""
    own_choice.setenv(cpu_native.SWITCH, request.param)
    assert cpu_native.status().startswith(request.param)
    name: str = request.param
    return name


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def attend(batch: Batch) -> Tensor:
    return cpu_native.paged_attention(
        *(batch.query, batch.key_cache, batch.value_cache),
        *(batch.block_table, batch.seq_lens, batch.query_start_loc),
        scale=batch.query.shape[-1] ** -0.5,
        sliding_window=batch.sliding_window,
        softcap=batch.softcap,
    )


def check(batch: Batch) -> None:
    limit = TOLERANCE[batch.query.dtype]
    torch.testing.assert_close(attend(batch).double(), batch.expected(), rtol=limit, atol=limit)


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


# ---------------------------------------------------------------- attention

SHAPES = [
    # block size, head dim, group, kv heads
    (12, 16, 1, 2),
    (16, 32, 3, 2),
    (4, 64, 5, 1),
    (16, 80, 7, 3),
    (8, 96, 16, 1),
    (32, 112, 48, 1),
    (544, 72, 2, 5),
    (5, 256, 4, 2),
    (1, 10, 1, 7),
]


@every_dtype
@pytest.mark.parametrize(("block_size", "dim", "group", "kv_heads"), SHAPES)
def test_attention_of_any_shape(
    instructions: str, dtype: torch.dtype, block_size: int, dim: int, group: int, kv_heads: int
) -> None:
    """Chunks, decode rows and requests without rows, for sizes that are no powers of two, amid NaN."""
    check(make_batch(block_size=block_size, dim=dim, group=group, kv_heads=kv_heads, dtype=dtype))


@every_dtype
@pytest.mark.parametrize("group", range(1, 10))
def test_few_queries_read_keys_and_values_where_they_lie(
    instructions: str, dtype: torch.dtype, group: int
) -> None:
    """Each number of queries up to the largest has code of its own; 20 is no multiple of a vector's length."""
    check(make_batch(((1, 130), (1, 1), (1, 33)), kv_heads=3, group=group, dim=20, dtype=dtype))


@pytest.mark.parametrize("sliding_window", [1, 4, 20, 600])
def test_window(instructions: str, sliding_window: int) -> None:
    """What lies outside the window is not read, in decode rows, chunks and contexts of several splits."""
    check(make_batch((*MIXED, (1, 1300), (40, 700)), sliding_window=sliding_window))


@every_dtype
def test_softcap(instructions: str, dtype: torch.dtype) -> None:
    """Scores far beyond the cap, where the exponential of the plain formula overflows."""
    check(make_batch((*MIXED, (1, 1300)), softcap=30.0, query_factor=300.0, dtype=dtype))


@every_dtype
@pytest.mark.parametrize("rows", [1, 5, 16, 17])
def test_long_contexts_are_merged_from_splits(instructions: str, dtype: torch.dtype, rows: int) -> None:
    """One to three splits, and lengths on both sides of their bounds."""
    requests = tuple((rows, length - rows) for length in (511, 512, 513, 1024, 1537))
    check(make_batch(requests, dim=24, block_size=16, dtype=dtype))


def test_a_long_chunk(instructions: str) -> None:
    """More rows than one item holds, over more positions than one tile."""
    check(make_batch(((200, 150), (130, 0)), group=3, dim=40))


def test_padding_gives_zeros(instructions: str) -> None:
    """Requests of length 0, rows of none, and rows before the first position."""
    batch = make_batch(((1, 4), (2, 0)))
    batch.seq_lens = torch.tensor([0, 1], dtype=torch.int32)
    batch.query = torch.cat([batch.query, torch.full_like(batch.query, torch.nan)])
    output = attend(batch)
    assert output[[0, 1, 3, 4, 5]].eq(0).all()
    assert output[2].ne(0).any()


def test_nothing_to_attend(instructions: str) -> None:
    """No request, and no row in any."""
    assert attend(make_batch(())).shape == (0, 4, 32)
    assert attend(make_batch(((0, 3), (0, 0)))).shape == (0, 4, 32)


def test_results_do_not_depend_on_threads_or_neighbours(instructions: str) -> None:
    """Bit for bit: items are cut by the request alone, and merged in order."""
    batch = make_batch(((1, 1700), (1, 3), (300, 40), (4, 900)), kv_heads=6)
    with threads(1):
        expected = attend(batch)
    for count in (2, 3, 8):
        with threads(count):
            assert torch.equal(attend(batch), expected)
    for request, (start, end) in enumerate(itertools.pairwise(batch.query_start_loc.tolist())):
        assert torch.equal(attend(batch.alone(request)), expected[start:end])


def test_any_strides(instructions: str) -> None:
    """Keys and values interleaved, heads before slots, a query that is part of a fused projection."""
    batch = make_batch(MIXED, kv_heads=3)
    expected = attend(batch)
    both = torch.stack([batch.key_cache, batch.value_cache], dim=1)
    batch.key_cache, batch.value_cache = both.unbind(1)
    assert torch.equal(attend(batch), expected)
    heads_first = [
        c.transpose(1, 2).contiguous().transpose(1, 2) for c in (batch.key_cache, batch.value_cache)
    ]
    batch.key_cache, batch.value_cache = heads_first
    batch.query = torch.cat([batch.query, batch.query], dim=1)[:, : batch.query.shape[1]]
    batch.block_table = torch.cat([batch.block_table, batch.block_table], dim=1)[
        :, : batch.block_table.shape[1]
    ]
    assert torch.equal(attend(batch), expected)


def test_values_whose_elements_lie_apart_take_the_torch_path() -> None:
    """Only the key cache decides who is called, so the C++ path hands on what it does not cover."""
    batch = make_batch(MIXED)
    expected = attend(batch)
    batch.value_cache = batch.value_cache.transpose(2, 3).contiguous().transpose(2, 3)
    torch.testing.assert_close(attend(batch), expected)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seq_lens", [10_000], "seq_lens: got 10000 for request 0"),
        ("seq_lens", [-1], "seq_lens: got -1 for request 0"),
        ("query_start_loc", [0, 9], "query_start_loc: got rows 0 to 9 for request 0"),
        ("query_start_loc", [2, 1], "query_start_loc: got rows 2 to 1 for request 0"),
        ("block_table", [[0, 99]], "block_table: got block 99 for request 0, expected 0 to"),
    ],
)
def test_wrong_metadata_is_refused(field: str, value: list[int], message: str) -> None:
    """What would read outside the tensors raises, naming argument, value and request."""
    batch = make_batch(((2, 18),))
    setattr(batch, field, torch.tensor(value, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        attend(batch)


@given(
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 80)), max_size=4).map(tuple),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    dim=st.integers(1, 40),
    block_size=st.integers(1, 33),
    dtype=st.sampled_from(DTYPES),
    sliding_window=st.none() | st.integers(1, 100),
    softcap=st.none() | st.floats(1, 50),
)
def test_attention_property(
    requests: tuple[tuple[int, int], ...],
    kv_heads: int,
    group: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    sliding_window: int | None,
    softcap: float | None,
) -> None:
    """Any batch equals dense attention in float64."""
    with threads(1):
        check(
            make_batch(
                requests,
                kv_heads=kv_heads,
                group=group,
                dim=dim,
                block_size=block_size,
                dtype=dtype,
                sliding_window=sliding_window,
                softcap=softcap,
            )
        )


# ---------------------------------------------------------------- writes and layers


@every_dtype
def test_write(instructions: str, dtype: torch.dtype) -> None:
    """Bit for bit, from views of a fused projection; padding writes nothing; enough tokens for several threads."""
    tokens, kv_heads, dim = 500, 3, 20
    key, value = randn(tokens, 2 * kv_heads, dim, dtype=dtype).split(kv_heads, dim=1)
    slots = torch.randperm(600, generator=torch.Generator().manual_seed(0))[:tokens]
    slots[::7] = -1
    ours, theirs = torch.zeros(2, 2, 50, 12, kv_heads, dim, dtype=dtype)
    cpu_native.reshape_and_cache(key, value, ours[0], ours[1], slots)
    reference.reshape_and_cache(key, value, theirs[0], theirs[1], slots)
    assert torch.equal(ours, theirs)


def test_slot_beyond_the_cache_is_refused() -> None:
    """Before anything is written."""
    cache = torch.zeros(2, 2, 4, 1, 8)
    key = torch.ones(2, 1, 8)
    with pytest.raises(ValueError, match="slot_mapping: got slot 8, expected at most 7"):
        cpu_native.reshape_and_cache(key, key, cache[0], cache[1], torch.tensor([0, 8]))
    assert cache.eq(0).all()


@every_dtype
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (80, 32), (10, 6)])
def test_rotary_and_write(instructions: str, dtype: torch.dtype, dim: int, rotary_dim: int) -> None:
    """As the reference, which rounds products and sums; the query result is contiguous."""
    query, key, value = randn(40, 12, dim, dtype=dtype).split([6, 3, 3], dim=1)
    angles = randn(40, rotary_dim // 2, dtype=torch.float32).repeat(1, 2)
    arguments = query, key, value, angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.arange(40) - 1
    ours, theirs = torch.zeros(2, 2, 5, 8, 3, dim, dtype=dtype)
    rotated = cpu_native.rotary_and_cache(*arguments, ours[0], ours[1], slots)
    expected = reference_layers.rotary_and_cache(*arguments, theirs[0], theirs[1], slots)
    assert rotated.is_contiguous()
    torch.testing.assert_close(rotated, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@every_dtype
@pytest.mark.parametrize("width", [1, 80, 3000])
def test_layers_around_the_matmuls(instructions: str, dtype: torch.dtype, width: int) -> None:
    """Norms with residual and gated activation, also of values where the exponential overflows."""
    x, residual = randn(2, 7, width, dtype=dtype) * 40
    weight = randn(width, dtype=dtype)
    limit = {"rtol": 1e-2, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 2e-6, "atol": 1e-6}
    for offset in (0.0, 1.0):
        expected = reference_layers.rms_norm(x, weight, eps=1e-5, residual=residual, weight_offset=offset)
        actual = cpu_native.rms_norm(x, weight, eps=1e-5, residual=residual, weight_offset=offset)
        torch.testing.assert_close(actual, expected, **limit)
    gate_up = torch.cat([x, residual], dim=-1)
    torch.testing.assert_close(
        cpu_native.silu_and_mul(gate_up), reference_layers.silu_and_mul(gate_up), **limit
    )


def test_bfloat16_rounds_as_torch(instructions: str) -> None:
    """To nearest even; infinities and NaN stay. Seen through a norm that only adds."""
    x = torch.tensor([1.0, 1 + 2**-7, 3e38, float("inf"), float("nan"), -0.0, 1e-40]).bfloat16()
    residual = torch.tensor([2**-8, 2**-8, 3e38, 1.0, 1.0, -0.0, 1e-40]).bfloat16()
    total = cpu_native.rms_norm(x, torch.ones_like(x), eps=1e-5, residual=residual)[1]
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0, equal_nan=True)


def test_what_it_covers() -> None:
    """float32 and bfloat16 on the CPU, last dimension contiguous; the rest is left to torch."""
    x = torch.zeros(4, 6)
    assert cpu_native.covers("silu_and_mul", x)
    assert cpu_native.covers("paged_attention", x.bfloat16())
    assert not cpu_native.covers("paged_attention", x.half())
    assert not cpu_native.covers("reshape_and_cache", x.to(torch.float8_e4m3fn))
    assert not cpu_native.covers("rms_norm", x.T)
    assert not cpu_native.covers("copy_blocks", x)


def test_one_openmp_runtime() -> None:
    """Ours uses the one that torch has loaded: two would compete for the processors."""
    code = """if True:
        import torch
        from servetwin.kernels import cpu_native
        assert cpu_native.available(), cpu_native.status()
        with open("/proc/self/maps") as maps:
            print(len({line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}))
    """
    environment = {k: v for k, v in os.environ.items() if k != cpu_native.SWITCH}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "1"
