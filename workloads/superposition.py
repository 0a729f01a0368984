"""Several arrival processes at once: clients that send independently of each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from servetwin.workloads.arrivals import Arrivals, FloatArray
from servetwin.workloads.checks import check_count, check_seed
from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.streams import arrival_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Superposition:
    """All requests of several processes, in order of time. Rates add up.

    Each part draws from a stream of its own, spawned from the one root, so equal parts do not send in step. The
    first n times of a longer draw are those of a shorter one where that holds for every part.
    """

    parts: tuple[Arrivals, ...]
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.parts:
            raise WorkloadError("parts (): must hold at least one arrival process")
        check_seed(self.seed)
        seeds = Counter(getattr(part, "seed", None) for part in self.parts)
        for seed, count in seeds.items():
            if seed is not None and count > 1:
                raise WorkloadError(
                    f"parts: {count} have the seed {seed} and would draw alike; must differ or be left out"
                )

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Send times of `n` requests in seconds, ascending, shape [n]."""
        check_count("n", n, at_least=0)
        rngs = arrival_stream(self.seed, rng).spawn(len(self.parts))
        times_s = np.concatenate([part.times_s(n, own) for part, own in zip(self.parts, rngs, strict=True)])
        times_s.sort(kind="stable")
        return times_s[:n]
