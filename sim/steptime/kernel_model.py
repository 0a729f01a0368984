"""A step as the sum of its kernels: layers x (dense operators + attention) + embedding, head and sampler.

Several cards exchange hidden states on top of that. What is not in the tables is in no time either: launches between
kernels and the host (see `sim/host_model.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.steptime.all_reduce import AllReduces
from servetwin.sim.steptime.features import Bools, Ints, StepFeatures
from servetwin.sim.steptime.graph_sizes import graph_tokens, padded_tokens
from servetwin.sim.steptime.kernel_times import KernelTimes

Floats = NDArray[np.float64]
ONCE = frozenset({"embedding", "final_layernorm"})
"""Dense operators that run once a step, not once a layer."""
TIMES_A_LAYER = {"layernorm": 2}
"""Operators that run more than once a layer: before attention and before the MLP."""


@dataclass(frozen=True)
class StepParts:
    """Microseconds of n steps, each of shape [n]."""

    dense: Floats
    attention: Floats
    """Of decode rows taken as equally long."""
    skew: Floats
    """What unequal ones add to it."""
    head: Floats
    """LM head and sampler."""
    all_reduce: Floats
    """What several cards exchange."""


@dataclass(frozen=True)
class KernelStepModel:
    """A StepModel for a model of `num_layers` layers whose operators are those of the tables."""

    times: KernelTimes
    num_layers: int
    dense_scale: float = 1.0
    """Factor of the dense operators: the one number that may be calibrated (`servetwin validate --calibrate`)."""
    capture_sizes: tuple[int, ...] = ()
    """Sizes of CUDA graphs, ascending, that steps are padded to; none: no step is."""
    all_reduces: AllReduces | None = None
    """Of several cards, whose `times` are those of one of them; None: one card."""

    def durations_ns(self, features: StepFeatures) -> Ints:
        parts = self.parts(features)
        total_us = (
            self.dense_scale * parts.dense + parts.attention + parts.skew + parts.head + parts.all_reduce
        )
        return np.where(features.new_tokens > 0, np.rint(total_us * 1e3), 0).astype(np.int64)

    def parts(self, features: StepFeatures) -> StepParts:
        """Where the time of each step goes, before `dense_scale`."""
        tokens = padded_tokens(features, self.capture_sizes)
        attention, skew = self._attention_us(features)
        return StepParts(
            dense=_tabulated(self._dense_table, tokens, self._dense_us),
            attention=self.num_layers * attention,
            skew=self.num_layers * skew,
            head=_tabulated(self._head_table, features.logits_rows, self._head_us),
            all_reduce=self._all_reduce_us(tokens),
        )

    def graph_tokens(self, features: StepFeatures) -> Ints:
        """The padded size of each step [n] that runs as a CUDA graph, else 0."""
        return graph_tokens(features, self.capture_sizes)

    def outside(self, features: StepFeatures) -> Bools:
        """Which steps [n] go beyond what was measured: their times are extrapolated; those of several cards all do."""
        if self.all_reduces is not None:
            return np.ones(len(features), dtype=bool)
        mean, _ = _decode_lengths(features)
        call = _largest_call(features, mean)
        beyond: Bools = self.times.attention.outside(call)
        beyond |= padded_tokens(features, self.capture_sizes) > self._most_tokens
        if self.times.per_sequence:
            beyond |= features.logits_rows > self._most_rows
        return beyond

    def scaled(self, dense_scale: float) -> KernelStepModel:
        """The same with another factor of the dense operators."""
        return replace(self, dense_scale=dense_scale)

    def _dense_us(self, tokens: Ints) -> Floats:
        total = np.zeros(len(tokens))
        for name, operator in self.times.dense.items():
            calls = 1 if name in ONCE else self.num_layers * TIMES_A_LAYER.get(name, 1)
            total += calls * operator(tokens)
        return total

    def _head_us(self, logits_rows: Ints) -> Floats:
        heads = self.times.per_sequence.values()
        return sum((head(logits_rows) for head in heads), start=np.zeros(len(logits_rows)))

    def _all_reduce_us(self, tokens: Ints) -> Floats:
        if self.all_reduces is None:
            return np.zeros(len(tokens))
        return 1e6 * self.all_reduces.seconds(tokens.astype(np.float64))

    # Counts are small whole numbers, and steps are asked for one by one.

    @cached_property
    def _dense_table(self) -> Floats:
        return self._dense_us(np.arange(int(self._most_tokens) + 1))

    @cached_property
    def _head_table(self) -> Floats:
        return self._head_us(np.arange(int(self._most_rows) + 1))

    @property
    def _most_tokens(self) -> float:
        return min(operator.highest for operator in self.times.dense.values())

    @property
    def _most_rows(self) -> float:
        return min((head.highest for head in self.times.per_sequence.values()), default=0)

    def _attention_us(self, features: StepFeatures) -> tuple[Floats, Floats]:
        """(with decode rows of their mean length, what their unequal lengths add) for one layer."""
        mean, longest = _decode_lengths(features)
        call = _largest_call(features, mean)
        uneven = call.copy()
        uneven[:, 3] = longest
        further, count = _further_chunks(features)
        equal, of_longest, alone = self.times.attention(*np.concatenate([call, uneven, further]).T).reshape(
            3, -1
        )
        skew = np.zeros(len(equal))
        if self.times.skew is not None:
            alpha = self.times.skew.alpha(call[:, 2], features.prefill_rows > 0)
            skew = alpha * np.maximum(of_longest - equal, 0)
        # Calls of one step share their launch.
        return equal + count * np.maximum(alone - self.times.floor_us, 0), skew


def _tabulated(table: Floats, counts: Ints, exact: Callable[[Ints], Floats]) -> Floats:
    """`exact(counts)`, from its values for all whole numbers as far as there are some."""
    if len(counts) and counts.max() >= len(table):
        return exact(counts)
    return table[counts]


def _decode_lengths(features: StepFeatures) -> tuple[Floats, Floats]:
    """(mean, longest) tokens that decode rows read."""
    mean = features.decode_context_tokens / np.maximum(features.decode_rows, 1)
    return mean, features.decode_context_max_tokens.astype(np.float64)


def _largest_call(features: StepFeatures, decode_length: Floats) -> Floats:
    """[n, 4] as ATTENTION_AXES: all decode rows, and the largest chunk."""
    chunk = features.largest_chunk_tokens
    history = features.largest_chunk_context_tokens - chunk
    return np.stack([chunk, history, features.decode_rows, decode_length], axis=1).astype(np.float64)


def _further_chunks(features: StepFeatures) -> tuple[Floats, Ints]:
    """(lone calls [n, 4], how many of each): chunks beside the largest one, taken as equal ones."""
    largest, context = features.largest_chunk_tokens, features.largest_chunk_context_tokens
    count = np.maximum(features.prefill_rows - 1, 0)
    tokens = np.maximum(features.prefill_tokens - largest, 0)
    chunk = tokens / np.maximum(count, 1)
    pairs = features.prefill_pairs - largest * context
    history = np.maximum(pairs / np.maximum(tokens, 1) - chunk, 0)
    none = np.zeros(len(features))
    return np.stack([chunk, history, none, none], axis=1), count
