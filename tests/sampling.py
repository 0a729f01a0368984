"""Rows of logits to sample, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from servetwin.executor.sampler import Sampler, SamplerOutput, SamplingRow
from servetwin.sim.contract import SamplingParams

EOS = 2
INF = float("inf")


def row(
    *, stream: int = 0, prompt: Sequence[int] = (), outputs: Sequence[int] = (), **params: Any
) -> SamplingRow:
    """A row at temperature 1 unless `params` says otherwise."""
    return SamplingRow(
        SamplingParams(**{"temperature": 1.0, **params}),
        stream,
        np.array(prompt, dtype=np.int32),
        np.array(outputs, dtype=np.int32),
    )


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
    return Sampler([EOS]).sample(logits, rows)


def tokens(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    return sample(logits, rows).token_ids.tolist()


def draws(logits: torch.Tensor, times: int = 300, **params: Any) -> list[int]:
    """What different streams draw from one row of logits."""
    return tokens(logits.expand(times, -1), [row(stream=stream, **params) for stream in range(times)])
