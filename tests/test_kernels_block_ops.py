"""Copying and clearing blocks of the cache: exactly the blocks that are named, whatever they hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from servetwin.kernels import ops

SHAPE = (6, 5, 3, 10)
"""Blocks, block_size, kv_heads, dim; nothing a power of two."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


@pytest.fixture(params=["reference", "cpu", "triton"])
def backend(request: pytest.FixtureRequest) -> ops.Backend:
    if request.param == "triton":
        pytest.importorskip("triton")
    backend: ops.Backend = request.param
    return backend


def caches(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A key and a value cache of random numbers; block 1 is all NaN, as memory never written may be."""
    rng = torch.Generator().manual_seed(5)
    pool = torch.randn(2, *SHAPE, generator=rng)
    pool[:, 1] = torch.nan
    key_cache, value_cache = pool.to(dtype)
    return key_cache, value_cache


def bits(cache: Tensor) -> Tensor:
    """The bytes of each block, so that NaN compares equal to itself: [blocks, bytes]."""
    return cache.contiguous().view(torch.uint8).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_blocks_bit_for_bit(backend: ops.Backend, dtype: torch.dtype) -> None:
    """NaN survives a copy, one source may have several destinations, padding and all else stay as they were."""
    for cache, before in _copied(backend, dtype, [[1, 4], [0, 2], [0, 5], [-1, 3], [2, -1]]):
        assert torch.equal(bits(cache), bits(before)[[0, 1, 0, 3, 1, 0]])


def _copied(
    backend: ops.Backend, dtype: torch.dtype, mapping: list[list[int]]
) -> list[tuple[Tensor, Tensor]]:
    after, before = caches(dtype), caches(dtype)
    ops.copy_blocks(*after, torch.tensor(mapping).view(-1, 2), backend=backend)
    return list(zip(after, before, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_clears_blocks_whatever_they_hold(backend: ops.Backend, dtype: torch.dtype) -> None:
    """NaN vanishes, an id may come twice, padding and all else stay as they were (report 19)."""
    after, before = caches(dtype), caches(dtype)
    ops.zero_blocks(*after, torch.tensor([1, -1, 3, 3, -5]), backend=backend)
    for cache, old in zip(after, before, strict=True):
        assert bits(cache)[[1, 3]].eq(0).all()
        assert torch.equal(bits(cache)[[0, 2, 4, 5]], bits(old)[[0, 2, 4, 5]])


@pytest.mark.parametrize("ids", [[], [-1, -1]])
def test_nothing_to_do(backend: ops.Backend, ids: list[int]) -> None:
    """No blocks, or padding alone, leave the cache as it was."""
    after, before = caches(), caches()
    ops.zero_blocks(*after, torch.tensor(ids, dtype=torch.int64), backend=backend)
    ops.copy_blocks(*after, torch.tensor([ids, ids], dtype=torch.int64).T.contiguous(), backend=backend)
    for cache, old in zip(after, before, strict=True):
        assert torch.equal(bits(cache), bits(old))


def test_any_strides(backend: ops.Backend) -> None:
    """Keys and values of a block side by side, heads before slots; the memory between stays as it was."""
    pool = torch.full((6, 2, 3, 5, 12), 7.0)
    key_cache, value_cache = pool.transpose(2, 3)[..., :10].unbind(1)
    key_cache[0], value_cache[0] = 1.0, 2.0
    ops.copy_blocks(key_cache, value_cache, torch.tensor([[0, 4]]), backend=backend)
    ops.zero_blocks(key_cache, value_cache, torch.tensor([2]), backend=backend)
    assert pool[4, 0, ..., :10].eq(1).all()
    assert pool[4, 1, ..., :10].eq(2).all()
    assert pool[2, ..., :10].eq(0).all()
    assert pool[..., 10:].eq(7).all()
    assert pool[[1, 3, 5]].eq(7).all()


def test_blocks_larger_than_a_program(backend: ops.Backend) -> None:
    """A block of more elements than one program takes, and not a multiple of them."""
    key_cache, value_cache = torch.ones(2, 3, 16, 33, 9)
    ops.zero_blocks(key_cache, value_cache, torch.tensor([1]), backend=backend)
    ops.copy_blocks(key_cache, value_cache, torch.tensor([[1, 2]]), backend=backend)
    for cache in (key_cache, value_cache):
        assert cache[0].eq(1).all()
        assert cache[1:].eq(0).all()


def test_offsets_beyond_32_bits(backend: ops.Backend) -> None:
    """Blocks past element 2^31 are found where they are (report 47); the pool is virtual memory."""
    key_cache, value_cache = torch.empty(70_000, 2, 16, 8, 128, dtype=torch.float16).unbind(1)
    key_cache[69_999], value_cache[69_999] = 1.0, 2.0
    ops.copy_blocks(key_cache, value_cache, torch.tensor([[69_999, 66_000]]), backend=backend)
    ops.zero_blocks(key_cache, value_cache, torch.tensor([69_999]), backend=backend)
    assert key_cache[66_000].eq(1).all()
    assert value_cache[66_000].eq(2).all()
    assert key_cache[69_999].eq(0).all()


@pytest.mark.parametrize("torch_backend", ["reference", "cpu"])
def test_block_beyond_the_cache_is_refused(torch_backend: ops.Backend) -> None:
    """The torch backends name the block and the largest there is, and change nothing."""
    after, before = caches(), caches()
    with pytest.raises(ValueError, match="block_ids: got block 6, expected at most 5"):
        ops.zero_blocks(*after, torch.tensor([0, 6]), backend=torch_backend)
    with pytest.raises(ValueError, match="block_mapping: got block 9, expected at most 5"):
        ops.copy_blocks(*after, torch.tensor([[0, 1], [0, 9]]), backend=torch_backend)
    for cache, old in zip(after, before, strict=True):
        assert torch.equal(bits(cache), bits(old))


def test_triton_never_writes_outside_the_cache() -> None:
    """A block beyond the cache is left out: memory after it belongs to something else."""
    pytest.importorskip("triton")
    key_pool, value_pool = torch.full((2, *SHAPE), -7.0)
    inside = key_pool[:5], value_pool[:5]
    ops.zero_blocks(*inside, torch.tensor([5]), backend="triton")
    ops.copy_blocks(*inside, torch.tensor([[5, 0], [0, 5]]), backend="triton")
    assert key_pool.eq(-7).all()
    assert value_pool.eq(-7).all()


@given(blocks=st.permutations(range(6)), copies=st.integers(0, 3), data=st.data())
def test_cpu_equals_reference(blocks: list[int], copies: int, data: st.DataObject) -> None:
    """The two torch backends agree for any disjoint sources and destinations, and any blocks to clear."""
    sources = data.draw(st.lists(st.sampled_from(blocks[3:]), min_size=copies, max_size=copies))
    mapping = torch.tensor([sources, blocks[:copies]], dtype=torch.int64).T
    cleared = torch.tensor(data.draw(st.lists(st.integers(-1, 5), max_size=4)), dtype=torch.int64)
    results = []
    for backend in ("cpu", "reference"):
        pair = caches()
        ops.copy_blocks(*pair, mapping, backend=backend)
        ops.zero_blocks(*pair, cleared, backend=backend)
        results.append(bits(torch.cat(pair)))
    assert torch.equal(*results)
