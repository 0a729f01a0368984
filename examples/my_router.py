"""A router of one's own: long prompts to one replica, so that nobody's first token waits behind them elsewhere.

    servetwin run TRACE --executor constant --step-time-s 0.02 --replicas 4 --router my_router:LongPromptsApart

Run it from this folder, or put the folder on PYTHONPATH.
"""

from __future__ import annotations

from collections.abc import Sequence

from servetwin.sim.cluster.router import ReplicaView
from servetwin.workloads import RequestSpec

LONG_TOKENS = 2_000


class LongPromptsApart:
    """The last replica gets the long prompts, the others the rest, each time the one with the fewest in flight."""

    def __init__(self, seed: int) -> None:
        """Nothing here is random."""

    def choose(self, spec: RequestSpec, replicas: Sequence[ReplicaView], now_ns: int) -> int:
        """The index of one of `replicas`: those that take requests now."""
        if spec.prompt_tokens >= LONG_TOKENS or len(replicas) == 1:
            return replicas[-1].index
        return min(replicas[:-1], key=lambda replica: (replica.requests, replica.index)).index
