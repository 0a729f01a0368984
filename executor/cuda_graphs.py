"""Decode steps replayed from graphs that were captured at padded sizes.

A decode step launches hundreds of short kernels, and the host needs longer for that than the device for the work. A
graph launches them all at once, but always the same ones over the same memory. So there is one graph per size; all of
them read the same static tensors, and a step copies its batch there and replays the smallest graph that holds it. The
rows behind the batch are padding: they write no K/V (slot -1), attend to nothing (length 0), and nobody reads their
logits.

Only batches of one token a request, all of which sample, without drafts, are replayed; the others run eagerly. A graph
holds for contexts of every length because the kernels' grids follow from shapes alone, and the block table has its full
width in every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from servetwin.executor.attention_metadata import AttentionMetadata
from servetwin.executor.forward_context import ForwardContext
from servetwin.executor.input_batch import PADDING_SLOT, InputBatch
from servetwin.executor.kv_cache import KVCache
from servetwin.executor.packed_model import PackedModel
from servetwin.sim.cuda_graph_sizes import cuda_graph_sizes

Call = Callable[[], Tensor]


class GraphCaptureError(ValueError):
    """A model whose forward pass cannot be captured; the message says why, and what to do."""


class GraphCapture(Protocol):
    """Turns a call over static tensors into one that repeats it."""

    def capture(self, call: Call) -> Call:
        """Runs `call` once or more, then gives what repeats it. What that returns is good until the next repetition."""
        ...


class CudaGraphCapture:
    """CUDA graphs that share one memory pool: capture the largest first, and the others fit into its memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: libraries keep a workspace for every stream that they have seen.
        new_stream: Any = torch.cuda.Stream
        self._side = new_stream()

    def capture(self, call: Call) -> Call:
        """As `GraphCapture.capture`."""
        # Kernels are compiled and libraries set themselves up at the first call, which a graph cannot hold.
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            call()
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side):
            output = call()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


class ReplayedCall:
    """Stands in for graphs where there are none: runs the call anew, over the same static tensors."""

    def capture(self, call: Call) -> Call:
        """As `GraphCapture.capture`."""
        call()
        return call


def capture_sizes(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    sizes: Sequence[int] | None = None,
    max_size: int | None = None,
) -> tuple[int, ...]:
    """The sizes to capture, ascending: those of vLLM (`cuda_graph_sizes`, same arguments) as far as decode batches go.

    Unlike there, sizes above the first one that holds `max_num_seqs` are left out: only decode batches are replayed, so
    nothing would use them.
    """
    ascending = cuda_graph_sizes(max_num_seqs, max_num_batched_tokens, sizes, max_size)
    return tuple(size for i, size in enumerate(ascending) if i == 0 or ascending[i - 1] < max_num_seqs)


class StaticBatch:
    """The tensors that every graph reads, for up to `max_size` requests with one token each.

    Behind the rows of the last batch everything is padding, and so are the columns behind its block table.
    """

    def __init__(self, max_size: int, max_blocks: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.input_ids = zeros(max_size, dtype=torch.int64)
        self.positions = zeros(max_size, dtype=torch.int64)
        self.slot_mapping = torch.full_like(self.positions, PADDING_SLOT)
        self.seq_lens = zeros(max_size, dtype=torch.int32)
        self.block_table = zeros(max_size, max_blocks, dtype=torch.int32)
        self.query_start_loc = torch.arange(max_size + 1, dtype=torch.int32, device=device)
        self.logits_indices = torch.arange(max_size, device=device)
        self._rows, self._columns = 0, 0

    def load(self, batch: InputBatch) -> None:
        """Copies a decode batch in, and turns what the batch before left behind it into padding."""
        rows, columns = batch.block_table.shape
        for mine, theirs, padding in (
            (self.input_ids, batch.input_ids, 0),
            (self.positions, batch.positions, 0),
            (self.slot_mapping, batch.slot_mapping, PADDING_SLOT),
            (self.seq_lens, batch.seq_lens, 0),
            (self.block_table[:, :columns], batch.block_table, 0),
        ):
            mine[:rows] = theirs
            if rows < self._rows:
                mine[rows : self._rows] = padding
        if columns < self._columns:
            self.block_table[: self._rows, columns : self._columns] = 0
        self._rows, self._columns = rows, columns

    def metadata(self, size: int) -> AttentionMetadata:
        """Of the first `size` rows (views)."""
        return AttentionMetadata(
            query_start_loc=self.query_start_loc[: size + 1],
            seq_lens=self.seq_lens[:size],
            block_table=self.block_table[:size],
            slot_mapping=self.slot_mapping[:size],
        )


class DecodeGraphs:
    """One captured forward pass per size; capturing takes place here, on padding alone, and leaves the cache as it is.

    `sizes`: ascending, not empty. `max_blocks`: width of the block table, enough for the longest request. Raises
    GraphCaptureError.
    """

    def __init__(
        self,
        model: PackedModel,
        kv_caches: list[KVCache],
        sizes: Sequence[int],
        max_blocks: int,
        capture: GraphCapture,
    ) -> None:
        self.sizes = tuple(sizes)
        self.static = StaticBatch(self.sizes[-1], max_blocks, kv_caches[0].key.device)
        self._model, self._kv_caches = model, kv_caches
        self._logits: Tensor | None = None
        try:
            self._replays = {size: capture.capture(self._call(size)) for size in reversed(self.sizes)}
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            reason = str(e).strip().partition("\n")[0]
            raise GraphCaptureError(
                f"the forward pass cannot be captured as a CUDA graph: {reason}; use --enforce-eager"
            ) from e

    def size_for(self, batch: InputBatch) -> int | None:
        """The smallest size that holds the batch; None for one that is to run eagerly."""
        num_reqs = len(batch.req_ids)
        one_token_each = len(batch.input_ids) == num_reqs
        all_sample = len(batch.logits_indices) == num_reqs
        if batch.next_draft_ids is not None or not one_token_each or not all_sample:
            return None
        return next((size for size in self.sizes if size >= num_reqs), None)

    @torch.inference_mode()
    def forward(self, batch: InputBatch, size: int) -> Tensor:
        """Logits `[num_reqs, vocab_size]` of a batch of that size, good until the next call."""
        self.static.load(batch)
        return self._replays[size]()[: len(batch.req_ids)]

    def _call(self, size: int) -> Call:
        static = self.static
        context = ForwardContext(static.metadata(size), self._kv_caches)
        inputs = static.input_ids[:size], static.positions[:size], static.logits_indices[:size]
        return lambda: self._keep(self._model.forward(*inputs, context))

    def _keep(self, logits: Tensor) -> Tensor:
        """Into one buffer for all sizes, made at the first (largest) call: each graph would hold on to its own."""
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        return self._logits[: len(logits)].copy_(logits)
