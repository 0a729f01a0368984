"""Times of the operators of a layer, fitted to one folder of kernel tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servetwin.sim.steptime.attention_times import AttentionTimes
from servetwin.sim.steptime.kernel_tables import KernelTables
from servetwin.sim.steptime.skew import SkewTimes
from servetwin.sim.steptime.staircase import Staircase

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class KernelTimes:
    """What `fit_tables` gives. All times are microseconds of one call on the measured card."""

    attention: AttentionTimes
    dense: Mapping[str, Staircase]
    per_sequence: Mapping[str, Staircase]
    skew: SkewTimes | None
    """None: unequal lengths of decode rows were not measured."""
    floor_us: float
    """The shortest attention call: what launching one takes."""
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tables: KernelTables) -> KernelTimes:
        """Raises TableError."""
        return cls(
            attention=AttentionTimes(tables.attention),
            dense={name: Staircase(rows["tokens"], rows["time_us"]) for name, rows in tables.dense.items()},
            per_sequence={
                name: Staircase(rows["sequences"], rows["time_us"])
                for name, rows in tables.per_sequence.items()
            },
            skew=None if tables.skew is None else SkewTimes(tables.skew),
            floor_us=float(tables.attention["time_us"].min()),
            about=dict(tables.about),
        )

    def attention_us(
        self, prefill_chunk: ArrayLike, kv_prefill: ArrayLike, n_decode: ArrayLike, kv_decode: ArrayLike
    ) -> Any:
        """One layer's attention call: a chunk of new tokens behind `kv_prefill` cached ones beside `n_decode` rows that
        read `kv_decode` tokens each. A float for scalars, else an array of their common shape.
        """
        times = self.attention(prefill_chunk, kv_prefill, n_decode, kv_decode)
        return float(times) if times.ndim == 0 else times

    def dense_us(self, layer: str, tokens: ArrayLike) -> Any:
        """One call of operator `layer` (qkv_proj, ...) on `tokens`. Raises KeyError with the known ones."""
        return self._operator(self.dense, layer, tokens)

    def sequence_us(self, layer: str, sequences: ArrayLike) -> Any:
        """One call of an operator on sequences (lm_head, sampler). Raises KeyError with the known ones."""
        return self._operator(self.per_sequence, layer, sequences)

    @staticmethod
    def _operator(operators: Mapping[str, Staircase], layer: str, count: ArrayLike) -> Any:
        if layer not in operators:
            raise KeyError(f"operator {layer!r}: must be one of {', '.join(operators)}")
        times = operators[layer](count)
        return float(times) if times.ndim == 0 else times
