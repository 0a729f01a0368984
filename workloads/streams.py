"""Random numbers: one root seed, and from it one independent stream per named use.

The name is part of the stream's key, so drawing more or less for one use never moves the draws of another.
"""

from __future__ import annotations

import numpy as np

from servetwin.workloads.checks import check_count


def stream(seed: int, name: str) -> np.random.Generator:
    """The generator of the use `name` under the root `seed` (0 or more). Equal arguments give equal draws."""
    check_count("seed", seed, at_least=0)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=tuple(name.encode())))


def arrival_stream(seed: int | None, rng: np.random.Generator | None) -> np.random.Generator:
    """What an arrival process draws from: its own `seed` if it has one, else `rng`, else the root seed 0."""
    if seed is not None or rng is None:
        return stream(seed or 0, "arrivals")
    return rng
