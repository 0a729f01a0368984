"""Shared prefixes: prompts that begin with one of a few system prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.checks import check_count
from servetwin.workloads.lengths import IntArray
from servetwin.workloads.prompts import Columns
from servetwin.workloads.spec import WorkloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemPrompts:
    """Several system prompts of one length; each request begins with one of them, its own input follows.

    The prompt length of a request is `tokens` plus its own input. Only the system prompt is named by ids:
    what follows is unique to the request.
    """

    tokens: int
    """Length of every system prompt, a multiple of `block_tokens`."""
    weights: tuple[float, ...]
    """Popularity of each system prompt, above 0; they need not add up to 1."""
    block_tokens: int = 16
    """Tokens per id. An id stands for its tokens whatever the block size of the engine is."""

    def __post_init__(self) -> None:
        check_count("block_tokens", self.block_tokens)
        check_count("tokens", self.tokens)
        if self.tokens % self.block_tokens:
            raise WorkloadError(
                f"tokens {self.tokens}: must be a multiple of block_tokens ({self.block_tokens})"
            )
        if not self.weights or not all(0 < w < math.inf for w in self.weights):
            raise WorkloadError(f"weights {self.weights!r}: must be finite numbers above 0, at least one")

    @classmethod
    def zipf(cls, count: int, *, tokens: int, exponent: float = 1.0, block_tokens: int = 16) -> Self:
        """`count` system prompts, the i-th with weight 1/i^exponent (exponent 0: all alike)."""
        check_count("count", count)
        if not 0 <= exponent < math.inf:
            raise WorkloadError(f"exponent {exponent!r}: must be a finite number, 0 or more")
        weights = tuple(i**-exponent for i in range(1, count + 1))
        return cls(tokens=tokens, weights=weights, block_tokens=block_tokens)

    def sample(self, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """The system prompt of each of `n` requests: its index into `weights`, shape [n]."""
        shares = np.asarray(self.weights) / math.fsum(self.weights)
        return rng.choice(len(self.weights), n, p=shares).astype(np.int64)

    def attach(self, input_tokens: IntArray, rng: np.random.Generator) -> Columns:
        """Columns of requests with these input tokens of their own, which come after a system prompt, shape [n]."""
        ids = [self.prefix_ids(prompt) for prompt in range(len(self.weights))]
        return {
            "prompt_tokens": self.tokens + input_tokens,
            "prefix_ids": [ids[prompt] for prompt in self.sample(len(input_tokens), rng).tolist()],
            "prefix_block_tokens": np.full(len(input_tokens), self.block_tokens),
        }

    def prefix_ids(self, prompt: int) -> tuple[int, ...]:
        """The ids of system prompt `prompt`, one per `block_tokens` tokens, shared with no other prompt."""
        blocks = self.tokens // self.block_tokens
        return tuple(range(prompt * blocks, (prompt + 1) * blocks))
