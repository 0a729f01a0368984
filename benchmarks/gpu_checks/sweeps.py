"""Parts `decode` and `prefill`: rates of attention and of the cache write, beside those of torch's own kernels.

Every rate stands beside what the device did in the same process: `percent_of_copy` of the bytes per second at which it
copies a large tensor (read and written), `percent_of_matmul` of the operations per second of a large product.
torch's kernels read keys and values that lie contiguous for each request, which a paged cache does not offer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from gpu_checks.batches import LLAMA_8B, QWEN3_06B, LayerShape, PagedBatch, packed_batch, random_cache
from gpu_checks.session import Row, Session
from gpu_checks.timing import copy_rate, matmul_rate, seconds_per_call
from servetwin.kernels import ops

BLOCK_SIZE = 16
BATCHES = (1, 4, 16, 32, 64, 128, 256)
CONTEXTS = (128, 1024, 4096, 8192, 32_768)
PEERS_AT = ((1, 16), (1, 8192), (32, 1024), (32, 4096), (128, 4096))
"""Batch and context of the decode steps at which torch's kernels are measured, too."""
PEERS = ("SDPA", "flex_attention")
PREFILLS = ((512, 0), (2048, 0), (4096, 0), (8192, 0), (2048, 6144), (512, 8192), (2048, 30_720))
"""Chunk and cached context."""
WRITE_TOKENS = (256, 4096, 65_536)
COLD_BYTES = 2**28
"""Between two uses of the same keys and values so many others are read: more than caches hold."""
MAX_CALLS = 8
CACHE_SHARE = 0.4
"""Of the free memory, for keys and values."""
TOY_BATCHES, TOY_CONTEXTS, TOY_PREFILLS, TOY_WRITES = (1, 4), (16, 70), ((16, 0), (8, 20)), (16,)
TOY_SHAPES = (LayerShape("toy", heads=4, kv_heads=2, head_dim=32, dtype=torch.float32),)


def run_decode(session: Session) -> None:
    """One token of every request, over batch and context."""
    rate = copy_rate(session.device, toy=session.toy)
    session.measure("copy", lambda: {"gb_per_s": round(rate / 1e9, 3)})
    batches = TOY_BATCHES if session.toy else BATCHES
    contexts = TOY_CONTEXTS if session.toy else CONTEXTS
    points = [(batch, context) for context in contexts for batch in batches]
    for shape in TOY_SHAPES if session.toy else (LLAMA_8B, QWEN3_06B):
        _decode_sweep(session, shape, rate, points)


def _decode_sweep(session: Session, shape: LayerShape, rate: float, points: list[tuple[int, int]]) -> None:
    """All points of one shape; its cache is gone when this returns."""
    sweep = DecodeSweep(session, shape, rate, max(batch * context for batch, context in points))
    for batch, context in points:
        sweep.measure(batch, context)


class DecodeSweep:
    """Decode steps of one shape, all over one cache."""

    def __init__(self, session: Session, shape: LayerShape, copy_rate: float, most_tokens: int) -> None:
        self.session, self.shape, self.copy_rate = session, shape, copy_rate
        affordable = int(session.free_bytes() * CACHE_SHARE) // shape.kv_bytes_per_token
        wanted = max(most_tokens, 2 * COLD_BYTES // shape.kv_bytes_per_token)
        self.cache = random_cache(shape, min(affordable, wanted) // BLOCK_SIZE, BLOCK_SIZE, session.device)

    def measure(self, batch: int, context: int) -> None:
        """Our kernel, and torch's at some points."""
        name = f"{self.shape.name} batch {batch} context {context}"
        at = {"shape": self.shape.name, "batch": batch, "context": context}
        if batch * -(-context // BLOCK_SIZE) > len(self.cache[0]):
            self.session.leave_out(name, "its keys and values do not fit into memory", **at)
            return
        self.session.measure(name, partial(self._ours, batch, context), at=at)
        if (batch, context) in PEERS_AT:
            for peer in PEERS:
                call = partial(self._peer, batch, context, peer)
                self.session.measure(f"{name} ({peer})", call, at={"peer": peer, **at})

    def _ours(self, batch: int, context: int) -> Row:
        steps = [self._step(batch, context, i) for i in range(self._num_calls(batch, context))]
        calls = [partial(ops.paged_attention, *step.operands, scale=self.shape.scale) for step in steps]
        return self._row(batch, context, calls)

    def _num_calls(self, batch: int, context: int) -> int:
        """So many different places of the cache that none is still in a cache of the device when it comes again."""
        used = batch * -(-context // BLOCK_SIZE)
        cold = -(-COLD_BYTES // (batch * context * self.shape.kv_bytes_per_token))
        return max(1, min(cold, len(self.cache[0]) // used, 2 if self.session.toy else MAX_CALLS * 8))

    def _step(self, batch: int, context: int, index: int) -> PagedBatch:
        used = batch * -(-context // BLOCK_SIZE)
        generator = self.session.generator(index)
        rows = (1,) * batch, (context - 1,) * batch
        return packed_batch(self.shape, self.cache, *rows, generator, first_block=index * used)

    def _peer(self, batch: int, context: int, peer: str) -> Row:
        attend = _peer_attention(self.session, peer)
        shape, device = self.shape, self.session.device
        query = torch.randn(batch, shape.heads, 1, shape.head_dim, device=device).to(shape.dtype)
        size = batch, shape.kv_heads, context, shape.head_dim
        count = min(self._num_calls(batch, context), MAX_CALLS)
        pairs = [
            tuple(torch.empty(size, dtype=shape.dtype, device=device).normal_() for _ in range(2))
            for _ in range(count)
        ]
        calls = [partial(attend, query, *pair, enable_gqa=True, scale=shape.scale) for pair in pairs]
        return self._row(batch, context, calls)

    def _row(self, batch: int, context: int, calls: Sequence[Callable[[], object]]) -> Row:
        seconds = seconds_per_call(calls, self.session.device, toy=self.session.toy)
        rate = batch * context * self.shape.kv_bytes_per_token / seconds
        return {
            "us": round(seconds * 1e6, 2),
            "gb_per_s": round(rate / 1e9, 3),
            "percent_of_copy": round(100 * rate / self.copy_rate, 1),
        }


def _peer_attention(session: Session, peer: str) -> Callable[..., Tensor]:
    """torch's attention of that name. The flexible one is compiled on a GPU, where it is nothing without."""
    if peer == "SDPA":
        return scaled_dot_product_attention
    flexible: Any = torch.compile(flex_attention, dynamic=False) if session.is_gpu else flex_attention
    attend: Callable[..., Tensor] = flexible
    return attend


# ---------------------------------------------------------------- prefill and cache write


def run_prefill(session: Session) -> None:
    """Chunks of one prompt over cached context, then writes of keys and values."""
    shapes = TOY_SHAPES if session.toy else (LLAMA_8B, QWEN3_06B)
    products = matmul_rate(session.device, shapes[0].dtype, toy=session.toy)
    copies = copy_rate(session.device, toy=session.toy)
    session.measure("matmul", lambda: {"tflop_per_s": round(products / 1e12, 4)})
    for shape in shapes:
        for chunk, context in TOY_PREFILLS if session.toy else PREFILLS:
            _prefill(session, shape, products, chunk, context)
    for tokens in TOY_WRITES if session.toy else WRITE_TOKENS:
        session.measure(
            f"cache write {shapes[0].name} {tokens} tokens",
            partial(_cache_write, session, shapes[0], copies, tokens),
            at={"shape": shapes[0].name, "tokens": tokens},
        )


def _prefill(session: Session, shape: LayerShape, matmul: float, chunk: int, context: int) -> None:
    name = f"{shape.name} chunk {chunk} context {context}"
    at = {"shape": shape.name, "chunk": chunk, "context": context}
    # Two products, each of two operations, over the keys that each row sees.
    flop = 4 * shape.heads * shape.head_dim * (chunk * context + chunk * (chunk + 1) // 2)

    def row(call: Callable[[], object]) -> Row:
        seconds = seconds_per_call([call] * 3, session.device, toy=session.toy)
        rate = flop / seconds
        return {
            "us": round(seconds * 1e6, 2),
            "tflop_per_s": round(rate / 1e12, 4),
            "percent_of_matmul": round(100 * rate / matmul, 1),
        }

    def ours() -> Row:
        num_blocks = -(-(chunk + context) // BLOCK_SIZE)
        cache = random_cache(shape, num_blocks, BLOCK_SIZE, session.device)
        step = packed_batch(shape, cache, (chunk,), (context,), session.generator(1))
        return row(partial(ops.paged_attention, *step.operands, scale=shape.scale))

    def sdpa() -> Row:
        query, key, value = (
            torch.randn(1, heads, chunk, shape.head_dim, device=session.device).to(shape.dtype)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        attend = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True, scale=shape.scale)
        return row(partial(attend, query, key, value))

    session.measure(name, ours, at=at)
    if not context:
        session.measure(f"{name} (SDPA)", sdpa, at={"peer": "SDPA", **at})


def _cache_write(session: Session, shape: LayerShape, copies: float, tokens: int) -> Row:
    num_blocks = 2 * -(-tokens // BLOCK_SIZE)
    cache = random_cache(shape, num_blocks, BLOCK_SIZE, session.device)
    size = (tokens, shape.kv_heads, shape.head_dim)
    key, value = (torch.randn(size, device=session.device).to(shape.dtype) for _ in range(2))
    slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=session.generator(2), device=session.device)
    calls = [
        partial(ops.reshape_and_cache, key, value, *cache, slots[start : start + tokens])
        for start in (0, tokens)
    ]
    seconds = seconds_per_call(calls, session.device, toy=session.toy)
    rate = 2 * tokens * shape.kv_bytes_per_token / seconds
    return {
        "us": round(seconds * 1e6, 2),
        "gb_per_s": round(rate / 1e9, 3),
        "percent_of_copy": round(100 * rate / copies, 1),
    }
