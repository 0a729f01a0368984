"""What requests ask, without when: the columns of RequestSpec that a model of prompts fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.joint_lengths import JointLengths
from servetwin.workloads.lengths import IntArray
from servetwin.workloads.streams import stream

Columns = Mapping[str, Sequence[Any] | NDArray[Any]]
"""Name of a field of RequestSpec -> one value per request."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts and lengths of answers in the order of sending; at least prompt_tokens and output_tokens."""

    columns: Columns
    notes: tuple[str, ...] = ()
    """What a user should know, such as requests that were asked for and are not there."""

    def __len__(self) -> int:
        return len(self.columns["prompt_tokens"])


class PromptModel(Protocol):
    """A distribution of prompts and lengths of answers."""

    def draw(self, n: int, seed: int) -> Prompts:
        """`n` requests (fewer only where `notes` says so), drawn from named streams under the root `seed`."""
        ...


class Prefixes(Protocol):
    """What prompts have in common."""

    def attach(self, input_tokens: IntArray, rng: np.random.Generator) -> Columns:
        """prompt_tokens, prefix_ids and prefix_block_tokens of requests with these input tokens, shape [n]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsAndPrefixes:
    """Lengths from one model, shared prefixes from another (None: every prompt is unique)."""

    lengths: JointLengths
    prefixes: Prefixes | None = None

    def draw(self, n: int, seed: int) -> Prompts:
        """`n` requests; the prefixes have a stream of their own (`prefixes`)."""
        inputs, outputs = self.lengths.sample_pairs(n, seed)
        columns: Columns = {"prompt_tokens": inputs}
        if self.prefixes is not None:
            columns = self.prefixes.attach(inputs, stream(seed, "prefixes"))
        return Prompts({**columns, "output_tokens": outputs})
