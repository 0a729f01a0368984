"""Writing K/V into the paged cache: every backend writes the slots it is given and no other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from servetwin.kernels import ops

SENTINEL = -7.0


@pytest.fixture(params=["reference", "cpu", "triton"])
def backend(request: pytest.FixtureRequest) -> ops.Backend:
    if request.param == "triton":
        pytest.importorskip("triton")
    backend: ops.Backend = request.param
    return backend


def caches(
    blocks: int = 4, block_size: int = 5, kv_heads: int = 3, dim: int = 10, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """A key and a value cache full of sentinels."""
    shape = (blocks, block_size, kv_heads, dim)
    return torch.full(shape, SENTINEL, dtype=dtype), torch.full(shape, SENTINEL, dtype=dtype)


def tokens(
    count: int, kv_heads: int = 3, dim: int = 10, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(count)
    key, value = torch.randn(2, count, kv_heads, dim, generator=rng).to(dtype)
    return key, value


def write(
    backend: ops.Backend, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: list[int]
) -> None:
    mapping = torch.tensor(slots, dtype=torch.int64)
    ops.reshape_and_cache(key, value, key_cache, value_cache, mapping, backend=backend)


def changed_slots(cache: Tensor) -> list[int]:
    return (cache.flatten(0, 1) != SENTINEL).flatten(1).any(1).nonzero().flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_token_lands_in_its_slot(backend: ops.Backend, dtype: torch.dtype) -> None:
    """slot = block * block_size + offset, bit for bit, and nothing else changes."""
    key_cache, value_cache = caches(dtype=dtype)
    key, value = tokens(3, dtype=dtype)
    write(backend, key, value, key_cache, value_cache, [13, 0, 19])
    for token, (block, offset) in enumerate([(2, 3), (0, 0), (3, 4)]):
        assert torch.equal(key_cache[block, offset], key[token])
        assert torch.equal(value_cache[block, offset], value[token])
    assert changed_slots(key_cache) == changed_slots(value_cache) == [0, 13, 19]


def test_padding_slots_write_nothing(backend: ops.Backend) -> None:
    """3 tokens padded to 8 with slot -1: no slot of the cache or beside it loses its sentinel (report 25)."""
    key_pool, value_pool = caches(blocks=6)
    write(backend, *tokens(8), key_pool[1:5], value_pool[1:5], [6, 7, 8, -1, -1, -1, -1, -1])
    assert changed_slots(key_pool) == changed_slots(value_pool) == [11, 12, 13]


@pytest.mark.parametrize("slots", [[], [-1, -1]])
def test_nothing_to_write(backend: ops.Backend, slots: list[int]) -> None:
    """No tokens, or padding alone, leave the cache as it was."""
    key_cache, value_cache = caches()
    write(backend, *tokens(len(slots)), key_cache, value_cache, slots)
    assert changed_slots(key_cache) == changed_slots(value_cache) == []


def test_any_strides(backend: ops.Backend) -> None:
    """K and V interleaved in one cache, and tokens that are slices of a fused projection."""
    pool = torch.full((4, 2, 3, 5, 10), SENTINEL).transpose(2, 3)
    key_cache, value_cache = pool.unbind(1)
    key, value = torch.randn(2, 10, 6).transpose(1, 2).tensor_split(2, dim=1)
    write(backend, key, value, key_cache, value_cache, [11, 4])
    assert torch.equal(key_cache[2, 1], key[0])
    assert torch.equal(value_cache[0, 4], value[1])
    assert int((pool != SENTINEL).sum()) == 2 * key.numel()


def test_more_elements_than_one_program_takes(backend: ops.Backend) -> None:
    """kv_heads * dim above the size of a program's tile, and not a multiple of it."""
    key_cache, value_cache = caches(kv_heads=33, dim=72)
    key, value = tokens(1, kv_heads=33, dim=72)
    write(backend, key, value, key_cache, value_cache, [9])
    assert torch.equal(key_cache[1, 4], key[0])
    assert torch.equal(value_cache[1, 4], value[0])


def test_offsets_beyond_32_bits(backend: ops.Backend) -> None:
    """Slots past element 2^31 are written where they are (report 47); the pool is virtual memory."""
    pool = torch.empty(70_000, 2, 16, 8, 128, dtype=torch.float16)
    key_cache, value_cache = pool.unbind(1)
    key, value = tokens(2, kv_heads=8, dim=128, dtype=torch.float16)
    write(backend, key, value, key_cache, value_cache, [69_999 * 16 + 15, 66_000 * 16])
    assert torch.equal(key_cache[69_999, 15], key[0])
    assert torch.equal(value_cache[66_000, 0], value[1])


@pytest.mark.parametrize("torch_backend", ["reference", "cpu"])
def test_slot_beyond_the_cache_is_refused(torch_backend: ops.Backend) -> None:
    """The torch backends name the slot and the largest there is, and write nothing."""
    key_cache, value_cache = caches()
    with pytest.raises(ValueError, match="slot_mapping: got slot 20, expected at most 19"):
        write(torch_backend, *tokens(2), key_cache, value_cache, [0, 20])
    assert changed_slots(key_cache) == []


def test_triton_never_writes_outside_the_cache() -> None:
    """A slot beyond the cache is left out: memory after it belongs to something else."""
    pytest.importorskip("triton")
    pool, value_cache = torch.full((5, 5, 3, 10), SENTINEL), caches()[1]
    write("triton", *tokens(2), pool[:4], value_cache, [0, 20])
    assert changed_slots(pool) == changed_slots(value_cache) == [0]
