"""Faults that other engines' attention kernels had, each as a small case (row numbers of the bug list, 1 to 39).

Expected values come from plain attention over dense keys and values in float64, so that the reference is under test
as well. Batches are built hostile: every cache slot that no row may see holds NaN. Tests whose name also says
`report_NN` cover that field report (47 to 52).
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from packed_engine import BLOCK_SIZE, PackedEngine, poison, prompt
from torch import Tensor
from torch.nn.functional import pad

from servetwin.executor.cuda_graphs import ReplayedCall
from servetwin.executor.testing import torch_threads
from servetwin.kernels import cpu_native, ops

if TYPE_CHECKING:
    from servetwin.kernels.triton_attention_plan import AttentionCall

CANNOT_OCCUR = {
    31: "no ALiBi: no supported model has it, and no kernel adds a bias that depends on the position",
    32: "no ALiBi, hence no slopes per head",
}
"""Row of the bug list -> why there is nothing to test."""

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
FP8 = torch.float8_e4m3fn
NULL_BLOCK = 0
IMPOSSIBLE_BLOCK = 2**30
SENTINEL = -7.0
HOST_BACKENDS: tuple[ops.Backend, ...] = ("cpu", "reference")
"""They read lengths and slots on the host, and refuse impossible ones."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def use_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> ops.Backend:
    """`torch` and `native` are the two implementations behind the backend cpu; skips where one is not there."""
    if name == "reference":
        return "reference"
    if name == "triton":
        return triton_or_skip()
    if name == "torch":
        monkeypatch.setattr(cpu_native, "available", lambda: False)
    elif not cpu_native.available():
        pytest.skip(cpu_native.status())
    return "cpu"


def triton_or_skip() -> ops.Backend:
    pytest.importorskip("triton")
    return "triton"


@pytest.fixture(params=["reference", "torch", "native", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ops.Backend:
    return use_backend(request.param, monkeypatch)


@pytest.fixture(params=["torch", "native"])
def cpu_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ops.Backend:
    return use_backend(request.param, monkeypatch)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN: whatever a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------- one call and what it must give


def dense_attention(
    query: Tensor, keys: Tensor, values: Tensor, *, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """The last rows of a sequence over all of it: query [rows, heads, dim], keys and values [n, kv_heads, dim]."""
    group = query.shape[1] // keys.shape[1]
    q, k, v = query.double(), keys.double(), values.double()
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(len(keys))
    distance = position[len(keys) - len(query) :, None] - position
    hidden = (distance < 0) | (distance >= (window or len(keys)))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))


@dataclass
class Call:
    """One call of `ops.paged_attention`, and the keys and values behind its cache."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    keys: list[Tensor]
    """Per request [seq_len, kv_heads, dim], as stored; values alike."""
    values: list[Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> tuple[Tensor, ...]:
        caches = self.key_cache, self.value_cache
        return self.query, *caches, self.block_table, self.seq_lens, self.query_start_loc

    def attend(self, backend: ops.Backend) -> Tensor:
        scale = self.query.shape[-1] ** -0.5
        return ops.paged_attention(*self.tensors(), scale=scale, backend=backend, **self.options)

    def expected(self) -> Tensor:
        """Rows of no request, and of requests of length 0, are 0."""
        output = torch.zeros(self.query.shape, dtype=torch.float64)
        window, softcap = self.options.get("sliding_window"), self.options.get("softcap")
        bounds = itertools.pairwise(self.query_start_loc.tolist())
        for (start, end), keys, values in zip(bounds, self.keys, self.values, strict=True):
            if end > start and len(keys):
                rows = self.query[start:end]
                output[start:end] = dense_attention(rows, keys, values, window=window, softcap=softcap)
        return output

    def check(self, backend: ops.Backend, tolerance: float | None = None) -> None:
        limit = tolerance or TOLERANCE[self.query.dtype]
        torch.testing.assert_close(self.attend(backend).double(), self.expected(), rtol=limit, atol=limit)


MIXED = ((5, 10), (1, 20), (1, 0), (3, 0))
DECODE = ((1, 20), (1, 0), (1, 11))
SPLIT = ((1, 259), (1, 0), (1, 11))
"""(query_len, context_len) of each request; tables as wide as that of SPLIT let Triton cut contexts into splits."""
Requests = tuple[tuple[int, int], ...]
Caches = tuple[Tensor, Tensor]
"""Keys and values, [blocks, block_size, kv_heads, dim] each."""


def make_call(
    requests: Requests = MIXED,
    *,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    query_factor: float = 1.0,
    **options: Any,
) -> Call:
    """Random keys and values in blocks scattered over the cache; NaN wherever no row may look."""
    rng = torch.Generator().manual_seed(1)
    seq_lens = [q + c for q, c in requests]
    width = max(-(-n // block_size) for n in seq_lens) + 1
    scattered = 1 + torch.randperm(len(requests) * width, generator=rng).view(-1, width).int()
    block_table = torch.full_like(scattered, NULL_BLOCK)
    caches = torch.full((2, scattered.numel() + 1, block_size, kv_heads, dim), torch.nan, dtype=dtype)
    dense = [torch.randn(2, n, kv_heads, dim, generator=rng).to(dtype) for n in seq_lens]
    for row, (query_len, context_len) in enumerate(requests):
        window = options.get("sliding_window") or context_len + 1
        position = torch.arange(max(0, context_len - window + 1), context_len + query_len)
        column = position // block_size
        block_table[row, column] = scattered[row, column]
        caches[:, scattered[row, column].long(), position % block_size] = dense[row][:, position]
    query_lens = [q for q, _ in requests]
    query = torch.randn(sum(query_lens), kv_heads * group, dim, generator=rng) * query_factor
    return Call(
        query.to(dtype),
        caches[0],
        caches[1],
        block_table,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        query_start_loc=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
        keys=[keys for keys, _ in dense],
        values=[values for _, values in dense],
        options=options,
    )


def far_caches(num_blocks: int, block_shape: tuple[int, ...] = (16, 8, 128)) -> tuple[Caches, int]:
    """Interleaved caches, and a block from which on `num_blocks` blocks lie past element 2^32.

    The memory is virtual. An offset of 32 bits wraps round into it: wrong numbers instead of a crash.
    """
    first = 2**32 // (2 * math.prod(block_shape))
    pool = torch.empty(first + num_blocks, 2, *block_shape, dtype=torch.bfloat16)
    return (pool[:, 0], pool[:, 1]), first


def at_far_addresses(call: Call) -> None:
    """Moves the cache to blocks past element 2^32."""
    (key_cache, value_cache), first = far_caches(len(call.key_cache), call.key_cache.shape[1:])
    key_cache[first:], value_cache[first:] = call.key_cache, call.value_cache
    call.key_cache, call.value_cache = key_cache, value_cache
    call.block_table = call.block_table + first


def seen_positions(backend: ops.Backend, requests: Requests, sliding_window: int) -> list[list[int]]:
    """The positions that each row attends, read off the output: equal weights, and values that name their position."""
    call = make_call(requests, kv_heads=1, group=1, dim=32, sliding_window=sliding_window)
    call.query.zero_()
    call.key_cache.nan_to_num_()
    call.value_cache.zero_()
    for blocks, keys in zip(call.block_table.long(), call.keys, strict=True):
        position = torch.arange(len(keys))
        call.value_cache[blocks[position // 4], position % 4, 0, position] = 1.0
    return [row.nonzero().flatten().tolist() for row in call.attend(backend)[:, 0]]


every_path = pytest.mark.parametrize("requests", [MIXED, DECODE, SPLIT], ids=["mixed", "decode", "split"])
decode_paths = pytest.mark.parametrize("requests", [DECODE, SPLIT], ids=["decode", "split"])


# ---------------------------------------------------------------- one write and what it must leave


@pytest.fixture(params=["reshape_and_cache", "rotary_and_cache"])
def writer(request: pytest.FixtureRequest) -> str:
    """The kernels that write K/V by slot."""
    name: str = request.param
    return name


def write(
    writer: str,
    backend: ops.Backend,
    key: Tensor,
    value: Tensor,
    caches: Caches,
    slots: list[int],
) -> None:
    """Writes tokens [tokens, kv_heads, dim]; the rotation, where there is one, is by an angle of 0."""
    slot_mapping = torch.tensor(slots, dtype=torch.int64)
    if writer == "reshape_and_cache":
        ops.reshape_and_cache(key, value, *caches, slot_mapping, backend=backend)
        return
    cos = torch.ones(key.shape[0], key.shape[2], dtype=key.dtype)
    ops.rotary_and_cache(key, key, value, cos, 0 * cos, *caches, slot_mapping, backend=backend)


def make_tokens(
    count: int, kv_heads: int = 3, dim: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Keys and values [count, kv_heads, dim]."""
    rng = torch.Generator().manual_seed(count)
    key, value = torch.randn(2, count, kv_heads, dim, generator=rng).to(dtype)
    return key, value


def make_caches(blocks: int = 4, block_size: int = 5, kv_heads: int = 3, dim: int = 16) -> Caches:
    shape = blocks, block_size, kv_heads, dim
    return torch.full(shape, SENTINEL), torch.full(shape, SENTINEL)


def changed_slots(cache: Tensor) -> list[int]:
    return (cache.flatten(0, 1) != SENTINEL).flatten(1).any(1).nonzero().flatten().tolist()


def token_stride_beyond_32_bits(tokens: Tensor) -> Tensor:
    """The same 3 tokens, the last of them near element 2^32 of a buffer, which is virtual memory.

    An offset of 32 bits wraps round to a few elements before the first token, which are there too.
    """
    stride, before = 2**31 - 64, 128
    buffer = torch.empty(before + 2 * stride + tokens[0].numel(), dtype=tokens.dtype)
    return buffer.as_strided(tokens.shape, (stride, *tokens.stride()[1:]), before).copy_(tokens)


# ---------------------------------------------------------------- 1 to 4: offsets


def test_bug_01_report_47_blocks_beyond_32_bits(backend: ops.Backend) -> None:
    """vllm #50427, #50483: chunks and decode rows read blocks past element 2^31 where they are."""
    call = make_call(((3, 15), (1, 30)), kv_heads=8, group=1, dim=128, block_size=16, dtype=torch.bfloat16)
    at_far_addresses(call)
    call.check(backend)


def test_bug_02_report_47_decode_beyond_32_bits(backend: ops.Backend) -> None:
    """vllm #47671: so does a batch of decode rows, split or not."""
    call = make_call(((1, 300), (1, 15)), kv_heads=1, dim=128, block_size=128, dtype=torch.bfloat16)
    at_far_addresses(call)
    call.check(backend)


def test_bug_03_query_rows_beyond_32_bits(backend: ops.Backend) -> None:
    """sglang #20389: the row of a token times its stride passes 2^31 as well."""
    call = make_call(((2, 5), (1, 3)), dtype=torch.bfloat16)
    call.query = token_stride_beyond_32_bits(call.query)
    call.check(backend)


def test_bug_03_new_keys_beyond_32_bits(backend: ops.Backend, writer: str) -> None:
    """sglang #20389, for the keys and values that are written."""
    key, value = make_tokens(3, dtype=torch.bfloat16)
    caches = torch.zeros(1, 4, 3, 16, dtype=torch.bfloat16), torch.zeros(1, 4, 3, 16, dtype=torch.bfloat16)
    write(writer, backend, token_stride_beyond_32_bits(key), value, caches, [0, 1, 2])
    assert torch.equal(caches[0][0, :3], key)


def test_bug_04_report_47_writes_beyond_32_bits(backend: ops.Backend, writer: str) -> None:
    """fla #1080: a slot past element 2^31 is written where it is, without a sign of corruption elsewhere."""
    caches, first = far_caches(2)
    key, value = make_tokens(2, kv_heads=8, dim=128, dtype=torch.bfloat16)
    write(writer, backend, key, value, caches, [(first + 1) * 16 + 15, first * 16])
    for cache, tokens in zip(caches, (key, value), strict=True):
        assert torch.equal(cache[first + 1, 15], tokens[0])
        assert torch.equal(cache[first, 0], tokens[1])


def test_bug_04_report_47_block_copies_beyond_32_bits(backend: ops.Backend) -> None:
    """fla #1080, for whole blocks: copied and cleared where they are."""
    caches, first = far_caches(2)
    for cache in caches:
        cache[first], cache[first + 1] = 3.0, 1.0
    ops.copy_blocks(*caches, torch.tensor([[first, first + 1]]), backend=backend)
    ops.zero_blocks(*caches, torch.tensor([first]), backend=backend)
    for cache in caches:
        assert cache[first].eq(0.0).all()
        assert cache[first + 1].eq(3.0).all()


# ---------------------------------------------------------------- 5 to 7: sliding window


def test_bug_05_report_49_nan_outside_the_window(backend: ops.Backend) -> None:
    """vllm #30887: V of blocks outside the window is left out too, not only K; there it is NaN."""
    make_call(((1, 19), (6, 14)), sliding_window=4).check(backend)


@pytest.mark.parametrize("window", [1, 3, 4, 5])
def test_bug_06_window_of_decode_rows(backend: ops.Backend, window: int) -> None:
    """sglang #32087: a decode row sees W positions, its own included."""
    expected = [list(range(max(0, context + 1 - window), context + 1)) for context in (19, 3, 8)]
    assert seen_positions(backend, ((1, 19), (1, 3), (1, 8)), window) == expected


def test_bug_06_window_of_decode_rows_over_splits(backend: ops.Backend) -> None:
    """sglang #32087, for a window that begins and ends within splits; NaN before it."""
    make_call(((1, 599), (1, 3)), kv_heads=1, sliding_window=270).check(backend)


@pytest.mark.parametrize("window", [1, 3])
def test_bug_07_window_of_chunks(backend: ops.Backend, window: int) -> None:
    """zml #763, openvino #30714: every row of a chunk sees p - W + 1 to p, neither more nor less."""
    positions = [*range(14, 20), *range(3)]
    expected = [list(range(max(0, p + 1 - window), p + 1)) for p in positions]
    assert seen_positions(backend, ((6, 14), (3, 0)), window) == expected


# ---------------------------------------------------------------- 9 to 14: shapes


def test_bug_09_group_no_power_of_two(backend: ops.Backend) -> None:
    """vllm #18100: 5 query heads per kv head do not fill a tile evenly; the rest of the tile writes nothing."""
    make_call(((9, 6), (1, 20)), group=5).check(backend)


@pytest.mark.parametrize("dim", [72, 80, 96, 112])
def test_bug_10_report_48_head_size_no_power_of_two(backend: ops.Backend, dim: int) -> None:
    """vllm #4127: the lanes beyond the head size are neither read nor written."""
    make_call(((4, 3), (1, 9)), dim=dim).check(backend)


@pytest.mark.parametrize("group", [1, 3, 5, 7, 16, 48])
def test_bug_11_report_51_many_query_heads(backend: ops.Backend, group: int) -> None:
    """vllm #23424: more query heads per kv head than a tile has rows make a larger tile, not 0 queries."""
    make_call(((3, 4), (1, 9)), kv_heads=1, group=group).check(backend)


def test_bug_12_block_size_is_not_the_tile(backend: ops.Backend) -> None:
    """aiter #2190: blocks of 544 tokens, no power of two and larger than any tile."""
    make_call(((2, 542), (1, 30)), kv_heads=1, block_size=544).check(backend)


@pytest.mark.parametrize("block_size", [1, 4, 8, 12])
def test_bug_13_blocks_smaller_than_a_tile(backend: ops.Backend, block_size: int) -> None:
    """vllm #41339: blocks of fewer than 16 tokens work; a tile spans several."""
    make_call(block_size=block_size).check(backend)


def test_bug_14_head_count_no_power_of_two(backend: ops.Backend) -> None:
    """vllm #49157: 7 kv heads and 21 query heads are read as what they are."""
    make_call(((3, 4), (1, 9)), kv_heads=7, group=3).check(backend)


def test_bug_14_head_count_no_power_of_two_written(backend: ops.Backend, writer: str) -> None:
    """vllm #49157: 7 heads of 24 are written, and the token behind them is not touched."""
    caches = make_caches(kv_heads=7, dim=24)
    key, value = make_tokens(1, kv_heads=7, dim=24)
    write(writer, backend, key, value, caches, [8])
    assert torch.equal(caches[0][1, 3], key[0])
    assert torch.equal(caches[1][1, 3], value[0])
    assert changed_slots(caches[0]) == changed_slots(caches[1]) == [8]


# ---------------------------------------------------------------- 15 and 16: softcap


def test_bug_15_scores_far_above_the_cap(backend: ops.Backend) -> None:
    """vllm #56578, #56579: scores of 88 times the cap and more, where exp overflows, are capped."""
    call = make_call(softcap=0.5, query_factor=300.0)
    # What may differ is the rounding of scores of this size before they are capped.
    call.check(backend, tolerance=2e-4)


@every_path
@pytest.mark.parametrize("window", [None, 7])
def test_bug_16_softcap_on_every_path(backend: ops.Backend, requests: Requests, window: int | None) -> None:
    """vllm-metal #666, imp #688: chunks, decode rows and split decode rows are capped, with and without a window."""
    call = make_call(requests, softcap=1.0, query_factor=4.0, sliding_window=window)
    call.check(backend, tolerance=1e-5)
    capped = call.expected()
    call.options["softcap"] = None
    assert not torch.allclose(call.expected(), capped, atol=1e-2)


# ---------------------------------------------------------------- 17 to 23: padding and graphs


@pytest.mark.parametrize("seq_len", [12, 260], ids=["decode", "split"])
def test_bug_17_lengths_beyond_the_table(seq_len: int) -> None:
    """vllm #53658: a dummy length beyond the table's row, as in graph capture, is cut: nothing beyond is read."""
    call = make_call(((1, seq_len - 1), (1, 7)))
    # Behind the row, where a wrong kernel would look, the buffer leads to a block of NaN.
    call.block_table = pad(call.block_table, (0, 8), value=NULL_BLOCK)[:, : seq_len // 4]
    expected = call.expected()[0]
    call.seq_lens[0] += 8
    torch.testing.assert_close(call.attend(triton_or_skip())[0].double(), expected, rtol=2e-6, atol=2e-6)
    message = f"seq_lens: got {seq_len + 8} for request 0, expected 0 to {seq_len}"
    for host_backend in HOST_BACKENDS:
        with pytest.raises(ValueError, match=message):
            call.attend(host_backend)


def padded(call: Call, reqs: int) -> Call:
    """The decode batch padded for a graph: more rows full of NaN, of requests with length 0 and no table."""
    rows = torch.full((reqs, *call.query.shape[1:]), torch.nan, dtype=call.query.dtype)
    nowhere = torch.full((reqs, call.block_table.shape[1]), IMPOSSIBLE_BLOCK, dtype=torch.int32)
    num_rows = len(call.query)
    none = call.keys[0][:0]
    return dataclasses.replace(
        call,
        query=torch.cat([call.query, rows]),
        block_table=torch.cat([call.block_table, nowhere]),
        seq_lens=torch.cat([call.seq_lens, torch.zeros(reqs, dtype=torch.int32)]),
        query_start_loc=torch.arange(num_rows + reqs + 1, dtype=torch.int32),
        keys=[*call.keys, *[none] * reqs],
        values=[*call.values, *[none] * reqs],
    )


@decode_paths
def test_bug_18_rows_of_length_zero(backend: ops.Backend, poisoned_memory: None, requests: Requests) -> None:
    """vllm #57094: a padded row gives 0, not 0 / 0; what is taken over the whole batch stays finite."""
    output = padded(make_call(requests), 3).attend(backend)
    assert torch.equal(output[len(requests) :], torch.zeros(3, *output.shape[1:]))
    assert output.abs().max().isfinite()


@decode_paths
def test_bug_19_table_of_padding_is_not_read(backend: ops.Backend, requests: Requests) -> None:
    """sglang #1782: the table rows of padding hold anything, and the rows of requests come out as ever."""
    padded(make_call(requests), 3).check(backend)


@every_path
def test_bug_20_rest_of_the_last_block(backend: ops.Backend, requests: Requests) -> None:
    """vllm #47305: the slots behind the last token hold NaN; a weight of 0 does not make them harmless."""
    call = make_call(requests, block_size=16)
    last_block = call.value_cache[call.block_table[-1, 0]]
    assert last_block[call.seq_lens[-1] :].isnan().all()
    call.check(backend)


def test_bug_21_padding_writes_nothing(backend: ops.Backend, writer: str) -> None:
    """sglang #32477, #36207: tokens of padding (slot -1) are NaN, and neither slot 0 nor the last one takes them."""
    caches = make_caches()
    key, value = make_tokens(4)
    key[1:], value[1:] = torch.nan, torch.nan
    write(writer, backend, key, value, caches, [7, -1, -1, -1])
    assert changed_slots(caches[0]) == changed_slots(caches[1]) == [7]
    assert not caches[0].isnan().any()


def test_bug_21_padding_clears_nothing(backend: ops.Backend) -> None:
    """sglang #32477, #36207: block ids of padding (below 0) clear no block."""
    caches = make_caches()
    ops.zero_blocks(*caches, torch.tensor([2, -1]), backend=backend)
    assert changed_slots(caches[0]) == changed_slots(caches[1]) == [10, 11, 12, 13, 14]


def test_bug_22_fewer_slots_than_tokens(backend: ops.Backend, writer: str) -> None:
    """vllm #13922: padded keys with a slot mapping that is not padded are refused, not read past its end."""
    caches = make_caches()
    with pytest.raises(ValueError, match=r"slot_mapping: got \[3\] int64, expected \[5\] int64"):
        write(writer, backend, *make_tokens(5), caches, [0, 1, 2])
    assert changed_slots(caches[0]) == []


def test_bug_23_slots_beyond_the_cache(backend: ops.Backend, writer: str) -> None:
    """flashinfer #3647: refused where the host looks at the slots, else left out; memory behind the cache stays."""
    pools = make_caches(blocks=5)
    caches = pools[0][:4], pools[1][:4]
    if backend == "triton":
        write(writer, backend, *make_tokens(2), caches, [0, 20])
    else:
        with pytest.raises(ValueError, match="slot_mapping: got slot 20, expected at most 19"):
            write(writer, backend, *make_tokens(2), caches, [0, 20])
    assert changed_slots(pools[0]) == changed_slots(pools[1]) == ([0] if backend == "triton" else [])


# ---------------------------------------------------------------- 24 to 28: memory layout


@every_path
def test_bug_24_interleaved_keys_and_values(backend: ops.Backend, requests: Requests) -> None:
    """aiter #3498: [blocks, 2, block_size, kv_heads, dim], so that the stride of a block is not its size."""
    call = make_call(requests)
    call.key_cache, call.value_cache = torch.stack([call.key_cache, call.value_cache], dim=1).unbind(1)
    call.check(backend)


def test_bug_25_writing_into_a_strided_cache(backend: ops.Backend, writer: str) -> None:
    """flashinfer #527: interleaved, and heads before slots; each token lands in its slot and nowhere else."""
    pool = torch.full((4, 2, 3, 5, 16), SENTINEL)
    caches = pool[:, 0].transpose(1, 2), pool[:, 1].transpose(1, 2)
    key, value = make_tokens(2)
    write(writer, backend, key, value, caches, [11, 4])
    assert torch.equal(caches[0][2, 1], key[0])
    assert torch.equal(caches[1][0, 4], value[1])
    assert int((pool != SENTINEL).sum()) == 2 * key.numel()


def test_bug_26_scattered_blocks(backend: ops.Backend, writer: str) -> None:
    """flashinfer #3219: tokens written to blocks in no order, one at a time, are those that are read."""
    call = make_call(((1, 10),))
    blocks = torch.tensor([[61, 3, 40, 0]], dtype=torch.int32)
    caches = torch.full((64, 4, 2, 16), torch.nan), torch.full((64, 4, 2, 16), torch.nan)
    for i, (key, value) in enumerate(zip(call.keys[0], call.values[0], strict=True)):
        write(writer, backend, key[None], value[None], caches, [int(blocks[0, i // 4]) * 4 + i % 4])
    (call.key_cache, call.value_cache), call.block_table = caches, blocks
    call.check(backend)


@every_path
def test_bug_27_transposed_inputs(backend: ops.Backend, requests: Requests) -> None:
    """flash-attention #2666: a query laid out [heads, tokens, dim], and a table that is part of a wider one."""
    call = make_call(requests)
    call.query = call.query.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.cat([call.block_table, torch.full_like(call.block_table, IMPOSSIBLE_BLOCK)], dim=1)
    call.block_table = wide[:, : call.block_table.shape[1]]
    call.check(backend)


def test_bug_27_transposed_keys_written(backend: ops.Backend, writer: str) -> None:
    """flash-attention #2666: keys laid out [heads, tokens, dim], values that are part of a fused projection."""
    caches, (key, value) = make_caches(), make_tokens(3)
    fused = torch.cat([torch.full_like(value, torch.nan), value], dim=1)
    write(writer, backend, key.transpose(0, 1).contiguous().transpose(0, 1), fused[:, 3:], caches, [2, 3, 4])
    assert torch.equal(caches[0][0, 2:], key)
    assert torch.equal(caches[1][0, 2:], value)


@pytest.mark.parametrize("block_size", [16, 64, 128, 256])
def test_bug_28_any_page_size(backend: ops.Backend, block_size: int) -> None:
    """flash-attention #2368: pages of 128 tokens are nothing special."""
    make_call(((3, 300), (1, 130)), kv_heads=1, block_size=block_size).check(backend)


def test_bug_28_unequal_head_sizes_are_refused(backend: ops.Backend) -> None:
    """flash-attention #2368: values of another head size than keys are not supported, and refused by name."""
    call = make_call()
    call.value_cache = call.value_cache[..., :8]
    with pytest.raises(ValueError, match=r"value_cache: got .* expected the shape and dtype of key_cache"):
        call.attend(backend)


# ---------------------------------------------------------------- 29 and 30: fp8 storage


def stored_in_fp8(call: Call, key_scale: float = 0.5, value_scale: float = 4.0) -> Call:
    """The call on a cache of 8 bits; what is expected follows from what is stored."""
    scales = {"key_scale": torch.tensor([key_scale]), "value_scale": torch.tensor([value_scale])}

    def quantized(x: Tensor, scale: float) -> Tensor:
        return (x / scale).clamp(-448, 448).to(FP8)

    return dataclasses.replace(
        call,
        key_cache=quantized(call.key_cache, key_scale),
        value_cache=quantized(call.value_cache, value_scale),
        keys=[quantized(keys, key_scale).double() * key_scale for keys in call.keys],
        values=[quantized(values, value_scale).double() * value_scale for values in call.values],
        options={**call.options, **scales},
    )


@every_path
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_bug_29_fp8_scales_on_every_path(
    backend: ops.Backend, requests: Requests, softcap: float | None
) -> None:
    """vllm #42580, #36914: both scales count, the keys' before the cap."""
    stored_in_fp8(make_call(requests, softcap=softcap)).check(backend, tolerance=1e-5)


def test_bug_29_fp8_query_is_refused(backend: ops.Backend) -> None:
    """vllm #42580: the path that lost the scale was that of 8-bit queries, which there is not."""
    call = stored_in_fp8(make_call())
    call.query = call.query.to(FP8)
    with pytest.raises(ValueError, match=r"query: got .* float8_e4m3fn, expected"):
        call.attend(backend)


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_bug_30_a_missing_scale_is_refused(backend: ops.Backend, name: str) -> None:
    """sglang #18882, #20705: no scale is ever taken to be 1, when reading or when writing."""
    call = stored_in_fp8(make_call())
    del call.options[name]
    with pytest.raises(ValueError, match=f"{name}: got None, expected"):
        call.attend(backend)
    with pytest.raises(ValueError, match=f"{name}: got None, expected"):
        ops.reshape_and_cache(
            *make_tokens(1, kv_heads=2),
            call.key_cache,
            call.value_cache,
            torch.tensor([0]),
            **call.options,
            backend=backend,
        )


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_bug_30_a_scale_of_no_use_is_refused(backend: ops.Backend, name: str) -> None:
    """sglang #18882, #20705: a scale for a cache that is not in 8 bits would do nothing."""
    call = make_call()
    call.options[name] = torch.ones(1)
    with pytest.raises(ValueError, match=f"{name}: got .*, expected None"):
        call.attend(backend)


# ---------------------------------------------------------------- 33: no query rows


@pytest.mark.parametrize("requests", [((0, 8), (3, 5), (0, 0), (1, 12), (0, 4)), ((1, 299), (0, 8), (1, 12))])
def test_bug_33_a_request_without_query_rows(backend: ops.Backend, requests: Requests) -> None:
    """nano-vllm #144: a request with context and no row of its own leaves the rows of the others alone."""
    make_call(requests).check(backend)


def test_bug_33_a_resumed_request_is_no_decode_row() -> None:
    """nano-vllm #144: after a preemption all tokens are computed again, outputs too, beside a row that decodes."""
    engine = PackedEngine()
    engine.plans.add("a", prompt(9))
    engine.plans.add("b", prompt(6, start=11))
    engine.step({"a": 9, "b": 6})
    engine.step({"a": 1, "b": 1})
    engine.plans.preempt("a")
    engine.step({"b": 1})
    engine.step({"b": 1, "a": 11})
    engine.step({"b": 1, "a": 1})
    engine.check("a")
    engine.check("b")


# ---------------------------------------------------------------- 8, 34, 35, 37: splits and their merge


@pytest.fixture
def split_size(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many positions Triton's kernels take per split."""
    pytest.importorskip("triton")
    split_kv = importlib.import_module("servetwin.kernels.triton_split_kv")
    return lambda size: monkeypatch.setattr(split_kv, "SPLIT_SIZE", size)


def triton_call(call: Call) -> AttentionCall:
    """The call as the Triton kernels take it."""
    plan = pytest.importorskip("servetwin.kernels.triton_attention_plan")
    tensors = dict(zip(list(Call.__dataclass_fields__), call.tensors(), strict=False))
    attention_call: AttentionCall = plan.AttentionCall(**tensors, scale=call.query.shape[-1] ** -0.5)
    return attention_call


def merge(maxima: list[float], sums: list[float], acc: Tensor) -> Tensor:
    """One row's partial results, one per split: maxima and sums [splits], acc [splits, dim]; gives [dim]."""
    split_kv = pytest.importorskip("servetwin.kernels.triton_split_kv")
    num_splits, dim = acc.shape
    size = split_kv.SPLIT_SIZE
    call = Call(
        query=torch.zeros(1, 1, dim),
        key_cache=torch.zeros(1, size, 1, dim),
        value_cache=torch.zeros(1, size, 1, dim),
        block_table=torch.zeros(1, num_splits, dtype=torch.int32),
        seq_lens=torch.tensor([num_splits * size], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        keys=[],
        values=[],
    )
    partials = split_kv.Partials(acc[None, None], torch.tensor([[maxima]]), torch.tensor([[sums]]))
    output = torch.full((1, 1, dim), torch.nan)
    split_kv.plan_merge(output, partials, triton_call(call)).run()
    return output[0, 0]


def test_bug_08_merge_of_many_splits() -> None:
    """lmdeploy #4920: 128 splits of 128 dims, the size that Triton 3.5 and 3.6 compiled wrongly for H200.

    Here the arithmetic; the compiled code is what benchmarks/gpu_check.py checks.
    """
    rng = torch.Generator().manual_seed(8)
    maxima, sums = 20 * torch.randn(128, generator=rng), 1 + torch.rand(128, generator=rng)
    acc = torch.randn(128, 128, generator=rng)
    weights = torch.exp2(maxima.double() - maxima.double().max())
    expected = (weights @ acc.double()) / (weights @ sums.double())
    merged = merge(maxima.tolist(), sums.tolist(), acc)
    torch.testing.assert_close(merged.double(), expected, rtol=2e-6, atol=2e-6)


def test_bug_34_report_50_merging_empty_splits() -> None:
    """pegainfer #21: empty and empty is empty, empty and x is exactly x, and -inf minus -inf is nowhere."""
    empty, x = torch.zeros(16), torch.randn(16, generator=torch.Generator().manual_seed(34))
    inf = float("inf")
    assert torch.equal(merge([-inf, -inf], [0.0, 0.0], torch.stack([empty, empty])), empty)
    assert torch.equal(merge([-inf, 3.0], [0.0, 1.0], torch.stack([empty, x])), x)
    assert torch.equal(merge([3.0, -inf], [1.0, 0.0], torch.stack([x, empty])), x)


def test_bug_34_report_50_short_rows_under_many_splits(
    backend: ops.Backend, poisoned_memory: None, split_size: Callable[[int], None]
) -> None:
    """pegainfer #21: contexts of 1 and 5 where the table has room for 8 splits; nobody reads the other 7."""
    split_size(16)
    make_call(((1, 0), (1, 4), (1, 127))).check(backend)


@pytest.mark.parametrize(
    ("requests", "window"), [(((3, 30), (1, 60)), 17), (((3, 510),), 1), (((3, 510),), None)]
)
def test_bug_34_report_50_rows_that_see_nothing_of_a_split(
    backend: ops.Backend,
    poisoned_memory: None,
    split_size: Callable[[int], None],
    requests: Requests,
    window: int | None,
) -> None:
    """pegainfer #21: of three rows, one sees nothing of the first split, or one nothing of the last."""
    split_size(16)
    make_call(requests, kv_heads=1, sliding_window=window).check(backend)


@pytest.mark.parametrize("size", [32, 128])
def test_bug_35_any_number_of_splits(split_size: Callable[[int], None], size: int) -> None:
    """sglang #2465: 10 and 3 splits give what one pass gives, for rows of one and of several tokens."""
    split_size(size)
    make_call(((1, 299), (4, 150), (1, 11)), kv_heads=1).check(triton_or_skip())


@pytest.mark.parametrize("threads", [1, 2])
def test_bug_35_any_number_of_threads(cpu_backend: ops.Backend, threads: int) -> None:
    """sglang #2465, on a CPU: one long row that several threads share."""
    with torch_threads(threads):
        make_call(((1, 5000),), kv_heads=1, block_size=16).check(cpu_backend)


def test_bug_35_bits_do_not_depend_on_the_batch(split_size: Callable[[int], None]) -> None:
    """sglang #2465: a row has the same bits alone as beside others, and under a wider table."""
    split_size(64)
    call = make_call(((1, 199), (1, 299)), kv_heads=1)
    together = call.attend(triton_or_skip())[0]
    call.query, call.seq_lens, call.query_start_loc = (
        call.query[:1],
        call.seq_lens[:1],
        call.query_start_loc[:2],
    )
    call.block_table = call.block_table[:1, :50]
    assert torch.equal(call.attend("triton")[0], together)


def test_bug_37_the_rule_counts_the_kv_heads_of_the_call() -> None:
    """vllm #54191: one of 8 ranks, with one of 8 kv heads, splits where the whole model would not need to."""
    split_kv = pytest.importorskip("servetwin.kernels.triton_split_kv")

    def splits(kv_heads: int) -> bool:
        chosen: bool = split_kv.use_split_kv(
            triton_call(make_call(((1, 299),) * 128, kv_heads=kv_heads, group=8))
        )
        return chosen

    assert splits(kv_heads=1)
    assert not splits(kv_heads=8)


# ---------------------------------------------------------------- 36 and 39: a captured launch, run again


def captured(call: Call, output: Tensor, *, split: bool, tile: int | None = None) -> Callable[[], None]:
    """The launches for these buffers, as a graph holds them: fixed, whatever the buffers hold later."""
    split_kv = pytest.importorskip("servetwin.kernels.triton_split_kv")
    paged = pytest.importorskip("servetwin.kernels.triton_paged_attention")
    attention_call = triton_call(call)
    if split:
        partials = split_kv.new_partials(attention_call)
        decode = split_kv.plan_decode(partials, attention_call)
        launches = [decode, split_kv.plan_merge(output, partials, attention_call)]
    else:
        launches = [paged.plan_launch(output, attention_call)]
    if tile is not None:
        constants = launches[0].constants | {"TILE": tile}
        launches[0] = dataclasses.replace(launches[0], constants=constants)

    def replay() -> None:
        for launch in launches:
            launch.run()

    return replay


def check_replay(later: Call, *, split: bool, tile: int | None = None) -> None:
    """Captures on buffers that hold padding, fills them with a batch, and replays."""
    buffers = dataclasses.replace(
        later,
        query=torch.zeros_like(later.query),
        block_table=torch.zeros_like(later.block_table),
        seq_lens=torch.zeros_like(later.seq_lens),
    )
    output = torch.full_like(later.query, torch.nan)
    replay = captured(buffers, output, split=split, tile=tile)
    replay()
    assert torch.equal(output, torch.zeros_like(output))
    buffers.query.copy_(later.query)
    buffers.block_table.copy_(later.block_table)
    buffers.seq_lens.copy_(later.seq_lens)
    replay()
    torch.testing.assert_close(output.double(), later.expected(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
def test_bug_36_a_replay_reads_the_lengths_anew(split: bool) -> None:
    """imp #986: nothing of a captured launch remembers the lengths, the tables or the queries of its capture."""
    check_replay(make_call(SPLIT), split=split)


@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
def test_bug_39_replay_over_a_long_context(split_size: Callable[[int], None], split: bool) -> None:
    """flashinfer #1968: a graph captured at length 0 is right for a context above 128 k."""
    split_size(2**14)
    check_replay(make_call(((1, 140_000),), kv_heads=1, block_size=16), split=split, tile=1024)


def test_bug_39_long_context(cpu_backend: ops.Backend) -> None:
    """flashinfer #1968: a context above 128 k on a CPU."""
    make_call(((1, 140_000),), kv_heads=1, block_size=16).check(cpu_backend)


def engine_with_graphs(sizes: tuple[int, ...], prompt_lens: dict[str, int]) -> PackedEngine:
    """Requests past their prompts, whose decode steps run at these sizes, by calls in place of graphs."""
    engine = PackedEngine()
    engine.runner.capture_decode_graphs(sizes, ReplayedCall())
    for name, length in prompt_lens.items():
        engine.plans.add(name, prompt(length, start=length))
        engine.step({name: length})
    return engine


def test_bug_36_decode_steps_after_capture() -> None:
    """imp #986: steps replayed at the same size see contexts that grow, and batches whose rows change."""
    engine = engine_with_graphs((2, 4), {"a": 3, "b": 17, "c": 8})
    for names in ("abc", "abc", "ac", "abc", "c", "bc"):
        engine.step(dict.fromkeys(names, 1))
    for name in "abc":
        engine.check(name)


@pytest.mark.parametrize("names", ["abc", "a"])
def test_bug_21_graph_padding_writes_nothing(names: str) -> None:
    """sglang #32477, #36207: a padded step writes one slot per request, none of the null block's, none of old rows'."""
    engine = engine_with_graphs((8,), {"a": 5, "b": 5, "c": 5})
    engine.step({"a": 1, "b": 1, "c": 1})
    poison(engine.runner)
    engine.step(dict.fromkeys(names, 1))
    # Keys of the first layer do not depend on the context, which is gone.
    written = ~engine.runner.kv_caches[0].key.flatten(0, 1).isnan().flatten(1).any(1)
    assert int(written.sum()) == len(names)
    assert not written[:BLOCK_SIZE].any()


# ---------------------------------------------------------------- 38: bfloat16 in the interpreter


@every_path
def test_bug_38_bfloat16_products(backend: ops.Backend, requests: Requests) -> None:
    """triton #11584: products of bfloat16 in the interpreter are garbage unless the kernel widens them first."""
    make_call(requests, dtype=torch.bfloat16).check(backend)


# ---------------------------------------------------------------- the rest of the reports


@pytest.mark.parametrize("dim", [16, 32])
def test_report_52_small_heads(backend: ops.Backend, poisoned_memory: None, dim: int) -> None:
    """A loop over parts of a head runs at least once: all of the output is written."""
    make_call(dim=dim).check(backend)


# ---------------------------------------------------------------- the list is whole


def test_every_row_is_tested_or_cannot_occur() -> None:
    """Rows 1 to 39 and reports 47 to 52, each by number."""
    names = " ".join(name for name in globals() if name.startswith("test_"))
    tested = {int(number) for number in re.findall(r"bug_(\d\d)", names)}
    assert tested.isdisjoint(CANNOT_OCCUR)
    assert tested | set(CANNOT_OCCUR) == set(range(1, 40))
    assert {int(number) for number in re.findall(r"report_(\d\d)", names)} == set(range(47, 53))
