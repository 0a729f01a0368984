"""Workloads and engines whose capacity is known, for tests of planning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def write_workload(
    path: Path, arrivals_s: Sequence[float], prompts: Sequence[int] | int, outputs: Sequence[int] | int
) -> Path:
    """Our JSONL."""
    n = len(arrivals_s)
    columns = [[value] * n if isinstance(value, int) else value for value in (prompts, outputs)]
    rows = [
        {"request_id": f"r{i}", "arrival_s": float(t), "prompt_tokens": int(p), "output_tokens": int(o)}
        for i, (t, p, o) in enumerate(zip(arrivals_s, *columns, strict=True))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evenly(n: int, rate: float = 1.0) -> list[float]:
    """Arrivals at equal distances."""
    return [i / rate for i in range(n)]


def poisson(n: int, seed: int = 0) -> list[float]:
    """Arrivals at random, one a second."""
    return [float(t) for t in np.cumsum(np.random.default_rng(seed).exponential(1.0, n))]


def lognormal(n: int, mean: float, sigma: float, seed: int = 1) -> list[int]:
    """Lengths of at least 1."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, n)
    return [max(round(x), 1) for x in drawn]


def constant_engine(seats: int, step_s: float, **more: Any) -> dict[str, Any]:
    """Fields of a spec: every step takes `step_s`; nothing but the seats is scarce.

    A request of one chunk and n output tokens holds its seat for n steps: seats / (n x step_s) are served per second.
    """
    return {
        "executor": "constant",
        "step_time_s": step_s,
        "max_num_seqs": seats,
        "max_num_batched_tokens": 8192,
        "async_scheduling": False,
        "enable_prefix_caching": False,
        **more,
    }
