"""What `servetwin profile` wants of an executor that can be measured step by step (the real one is found by name)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from servetwin.sim.config import ModelConfig


class MeasuredPoint(Protocol):
    """One step to be measured, request by request."""

    @property
    def kind(self) -> str:
        """ "prefill", "decode" or "mixed"."""
        ...

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Tokens computed in the step."""
        ...

    @property
    def context_lens(self) -> tuple[int, ...]:
        """Tokens in the cache before it."""
        ...


class StepProfiler(Protocol):
    """Built by calling its class with ExecutorOptions."""

    model_config: ModelConfig

    @property
    def limits(self) -> Mapping[str, int]:
        """Of a step: max_num_seqs, max_num_batched_tokens, max_model_len, num_blocks, block_size."""
        ...

    def describe(self) -> dict[str, Any]:
        """Hardware, versions and model."""
        ...

    def design(self, count: int, seed: int) -> Sequence[MeasuredPoint]:
        """At most `count` steps; the same arguments give the same ones, any first part of which fills the space."""
        ...

    def measure(self, point: Any, repetitions: int, budget_s: float) -> dict[str, Any]:
        """A row of the profile: kind, query_lens, context_lens, graph_tokens, device_us, prepare_us and others.

        Repeats less often, but once, where the repetitions would take longer than `budget_s`.
        """
        ...

    def close(self) -> None: ...
