"""Step times from published peaks: no measurement of the card is needed, and every figure is an estimate.

A step is the sum of its parts. Each takes the longer of its arithmetic and its memory traffic, at a stated fraction
of the card's peaks (S. Williams et al., "Roofline", CACM 2009).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from servetwin.sim.cards import Card
from servetwin.sim.contract import StepShape
from servetwin.sim.kv_bytes import check_division, kv_bytes
from servetwin.sim.model_shape import DTYPE_BYTES, ModelShape
from servetwin.sim.steptime.all_reduce import LATENCY_S, LINK_EFFICIENCY, AllReduces
from servetwin.sim.steptime.features import Ints, StepFeatures


def _larger(a: Any, b: Any) -> Any:
    """Of arrays element by element, of numbers as `max`: the same bits."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return a if a >= b else b


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """What is reached of the peaks, and what no peak tells; the same for all cards and models.

    Round figures within what kernels are known to reach, chosen with an eye on vLLM's TPOT on H100
    (`benchmarks/roofline_h100.py`); no other card was looked at.
    """

    matmul: float = 0.70
    """Of dense FLOP/s, in large bf16 matrix products: clocks fall under load, and tiles do not fill the card."""
    fp8_matmul: float = 0.65
    """The same in fp8: inputs are quantized first, and scaled afterwards."""
    attention: float = 0.60
    """Of bf16 FLOP/s, in the attention of prefill chunks: softmax stands between its two products."""
    memory: float = 0.80
    """Of the memory's bandwidth, for weights and activations: what streaming kernels reach."""
    kv_memory: float = 0.70
    """The same for K and V in blocks: many short reads, rows of unequal length, a second pass to join the parts."""
    link: float = LINK_EFFICIENCY
    """Of the link's bandwidth in one direction, in an all-reduce."""
    kernel_s: float = 2.5e-6
    """Start and drain of one kernel, also inside a CUDA graph."""
    kernels_per_layer: int = 10
    all_reduce_s: float = LATENCY_S
    """Latency of an all-reduce among two cards; another one for every doubling."""
    host_s: float = 1.0e-3
    """Per step: preparing inputs, launching, and what the engine does between steps."""
    host_row_s: float = 20e-6
    """Per row of a step, on the host: scheduling, its sampled token, its output."""


class RooflineStepModel:
    """A StepModel for one engine of `tensor_parallel_size` cards; all ranks take the same time.

    Raises ValueError where heads cannot be divided among the cards.
    """

    def __init__(
        self,
        shape: ModelShape,
        card: Card,
        *,
        dtype: str = "bfloat16",
        kv_cache_dtype: str = "auto",
        tensor_parallel_size: int = 1,
        efficiencies: Efficiencies | None = None,
    ) -> None:
        check_division(shape, tensor_parallel_size)
        self._shape, self._card, self._cards = shape, card, tensor_parallel_size
        self._efficiency = efficiencies or Efficiencies()
        self._value_bytes = DTYPE_BYTES[dtype]
        self._dtype = dtype
        self._bandwidth = card.bandwidth_bytes_per_s * self._efficiency.memory
        self._active_parameters = shape.dense_parameters + shape.active_expert_parameters
        self._dense_bytes = (
            shape.dense_parameters * shape.bytes_per_dense_parameter(dtype) / tensor_parallel_size
        )
        kv = kv_bytes(shape, dtype, kv_cache_dtype, tensor_parallel_size)
        self._of_decodes: dict[int, float] = {}
        """All but attention, by rows: remembered, since most steps are of decodes."""
        self._kv_layer_s = kv.per_layer() / (card.bandwidth_bytes_per_s * self._efficiency.kv_memory)
        self._all_reduces = AllReduces(
            cards=tensor_parallel_size,
            num_layers=shape.num_layers,
            hidden_bytes=shape.hidden_size * self._value_bytes,
            link_bytes_per_s=card.link_bytes_per_s,
            efficiency=self._efficiency.link,
            latency_s=self._efficiency.all_reduce_s,
        )

    def durations_ns(self, features: StepFeatures) -> Ints:
        """Integer nanoseconds, shape [n]; 0 exactly for steps without tokens."""
        seconds = self._seconds(features, features.new_tokens.astype(np.float64))
        return np.where(features.new_tokens > 0, np.rint(seconds * 1e9), 0).astype(np.int64)

    def duration_ns(self, shape: StepShape) -> int:
        """The same for one step with tokens."""
        if shape.new_tokens == shape.rows == shape.decode_rows == shape.logits_rows:
            context_s = self._seen(shape.decode_context_tokens, shape.rows) * self._kv_layer_s
            seconds = context_s + self._rest_of_decodes(shape)
        elif self._shape.experts is not None:
            # A power of an array may end in another bit than that of a number.
            return int(self.durations_ns(StepFeatures.of([shape]))[0])
        else:
            seconds = self._seconds(shape, float(shape.new_tokens))
        ns: int = round(seconds * 1e9)
        return ns

    def decode_durations_ns(self, shape: StepShape, num_steps: int) -> Ints:
        """The same, shape [num_steps], of a step of decode rows alone and of those that follow with the same rows."""
        rows, context = shape.rows, shape.decode_context_tokens
        seconds = self._seen(np.arange(context, context + rows * num_steps, rows, dtype=np.float64), rows)
        seconds *= self._kv_layer_s
        seconds += self._rest_of_decodes(shape)
        seconds *= 1e9
        ns: Ints = np.rint(seconds).astype(np.int64)
        return ns

    def _rest_of_decodes(self, shape: StepShape) -> float:
        """What so many decode rows take whatever their contexts."""
        rest = self._of_decodes.get(shape.rows)
        if rest is None:
            # A power of an array may end in another bit than that of a number.
            rest = float(self._rest_s(StepFeatures.of([shape]), np.array([float(shape.new_tokens)]))[0])
            self._of_decodes[shape.rows] = rest
        return rest

    def _seconds(self, f: StepFeatures | StepShape, tokens: Any) -> Any:
        """Of steps as arrays or of one as numbers; the order of the sum is the same, so its last bit is."""
        return self._attention_s(f) + self._rest_s(f, tokens)

    def _rest_s(self, f: StepFeatures | StepShape, tokens: Any) -> Any:
        """All but attention: the same whatever the contexts are."""
        return (
            self._linear_s(tokens)
            + self._activations_s(tokens)
            + self._head_s(f.logits_rows * 1.0)
            + self._all_reduces.seconds(tokens)
            + self._host_s(f.rows * 1.0)
        )

    def _linear_s(self, tokens: Any) -> Any:
        """The linear layers: their weights are read once a step, of the experts those that some token chose."""
        shape = self._shape
        flops = 2 * tokens * self._active_parameters / self._cards
        read = self._dense_bytes
        if (experts := shape.experts) is not None:
            # A token misses a given expert with probability 1 - k / E; routing is taken to be even and independent.
            hit = 1 - (1 - experts.per_token / experts.count) ** tokens
            stored = shape.expert_parameters * shape.bytes_per_expert_parameter(self._dtype)
            read = read + hit * stored / self._cards
        return _larger(flops / self._matmul_rate(), read / self._bandwidth)

    def _matmul_rate(self) -> float:
        quantization = self._shape.quantization
        if quantization is not None and quantization.fp8_matmul:
            return self._card.fp8_flops * self._efficiency.fp8_matmul
        return self._card.bf16_flops * self._efficiency.matmul

    def _attention_s(self, f: StepFeatures | StepShape) -> Any:
        """K and V are read once by each decode row and each chunk; chunks also multiply, causally."""
        # Query x key pairs of a chunk of q tokens after c others: q (c + q), less half of q squared; the sum of squares
        # is not a feature, so chunks are taken to be equal.
        pairs = f.prefill_pairs - f.prefill_tokens**2 / (2 * _larger(f.prefill_rows, 1))
        rate = self._card.bf16_flops * self._efficiency.attention
        prefill = _larger(
            self._seen(pairs, f.prefill_tokens) * self._flops_per_pair() / rate,
            self._seen(f.prefill_context_tokens, f.prefill_rows) * self._kv_layer_s,
        )
        decode = self._seen(f.decode_context_tokens, f.decode_rows) * self._kv_layer_s
        return prefill + decode

    def _seen(self, total: Any, queries: Any) -> Any:
        """Sum over layers of `total` tokens that `queries` rows see, cut to the window in the mean."""
        shape = self._shape
        if shape.window_tokens is None:
            return total * float(shape.num_layers)
        seen = total * 1.0
        cut = -_larger(-seen, -(queries * float(shape.window_tokens)))
        return seen * (shape.num_layers - shape.num_windowed_layers) + cut * shape.num_windowed_layers

    def _flops_per_pair(self) -> float:
        """In one layer, on one card: the products of query and key, and of weight and value."""
        shape = self._shape
        heads = shape.num_heads / self._cards
        if (latent := shape.latent) is not None:
            return 2 * heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim)
        return 4 * heads * shape.head_dim

    def _activations_s(self, tokens: Any) -> Any:
        """What norms, rotary embedding, residuals and activation functions read and write."""
        shape = self._shape
        active = (
            shape.experts.per_token * shape.experts.intermediate_size
            if shape.experts
            else shape.intermediate_size
        )
        values = 8 * shape.hidden_size + 3 * active / self._cards
        return tokens * shape.num_layers * values * self._value_bytes / self._bandwidth

    def _head_s(self, rows: Any) -> Any:
        """Logits, and their float32 copies in the sampler (written and read twice); none without rows."""
        weights = self._shape.head_parameters / self._cards
        product = _larger(
            2 * rows * weights / (self._card.bf16_flops * self._efficiency.matmul),
            weights * self._value_bytes / self._bandwidth,
        )
        sampler = rows * self._shape.vocab_size * 4 * 4 / self._bandwidth
        return (product + sampler) * (rows > 0)

    def _host_s(self, rows: Any) -> Any:
        """The host's part, and the starts of all kernels."""
        e = self._efficiency
        return e.host_s + e.host_row_s * rows + self._shape.num_layers * e.kernels_per_layer * e.kernel_s
