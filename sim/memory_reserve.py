"""What a card's memory holds besides the KV cache: an estimate, since vLLM measures it at start-up.

The rule was checked against start-up logs of vLLM with 8B models (weights 14.96 GiB, about 1.1 GiB besides on an
RTX 4090 with 256 seats: 2,588 blocks measured). Its own log is the truth.
"""

from __future__ import annotations

from dataclasses import dataclass

from servetwin.sim.cards import GIB, MIB
from servetwin.sim.model_shape import DTYPE_BYTES, ModelShape

OUTSIDE_TORCH_BYTES = GIB // 2
"""Driver context, libraries and their workspaces."""
TENSOR_PARALLEL_BYTES = GIB
"""Buffers of NCCL and of the custom all-reduce on every card of several."""
SAMPLER_BYTES_PER_LOGIT = 4 + 4 + 8 + 4
"""float32 logits, a sorted copy, its indices (64 bits) and probabilities: the sampler at its peak."""
GRAPH_BYTES_PER_LAYER = MIB // 4
"""Of one captured CUDA graph."""
LARGEST_GRAPH = 512


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bytes on one card that neither weights nor KV cache take."""

    activations: int
    """Peak of a forward pass of max_num_batched_tokens tokens, or of the sampler over max_num_seqs rows."""
    graphs: int
    """Captured CUDA graphs, which vLLM subtracts from 0.21 on."""
    outside_torch: int

    @property
    def total(self) -> int:
        return self.activations + self.graphs + self.outside_torch


def reserve(
    shape: ModelShape,
    dtype: str,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    tensor_parallel_size: int = 1,
    graphs: bool = True,
) -> Reserve:
    """The estimate for one of `tensor_parallel_size` cards; `graphs`: CUDA graphs are captured."""
    seats = min(max_num_seqs, max_num_batched_tokens)
    mlp = max(shape.intermediate_size, _expert_width(shape)) // tensor_parallel_size
    # Residual stream and its normed copy; gate, up and their product.
    forward = max_num_batched_tokens * (2 * shape.hidden_size + 3 * mlp) * DTYPE_BYTES[dtype]
    sampler = seats * shape.vocab_size * SAMPLER_BYTES_PER_LOGIT
    return Reserve(
        activations=max(forward, sampler),
        graphs=_num_graphs(seats) * shape.num_layers * GRAPH_BYTES_PER_LAYER if graphs else 0,
        outside_torch=OUTSIDE_TORCH_BYTES + (TENSOR_PARALLEL_BYTES if tensor_parallel_size > 1 else 0),
    )


def _expert_width(shape: ModelShape) -> int:
    """Values that the experts of a token hold at once."""
    e = shape.experts
    return 0 if e is None else e.per_token * e.intermediate_size + e.shared_intermediate_size


def _num_graphs(max_num_seqs: int) -> int:
    """vLLM's default sizes: 1, 2, 4, then steps of 8, from 256 on of 16, up to 2 x max_num_seqs and 512."""
    largest = min(2 * max_num_seqs, LARGEST_GRAPH)
    small = sum(size <= largest for size in (1, 2, 4))
    return small + min(largest, 256) // 8 + max(largest - 256, 0) // 16
