"""The built-in routers but for `sim/cluster/prefix_affinity.py`. `choose`: as in `sim/cluster/router.py`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from servetwin.sim.cluster.router import ReplicaView
from servetwin.workloads.spec import RequestSpec


class Random:
    """Any replica, all alike."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, spec: RequestSpec, replicas: Sequence[ReplicaView], now_ns: int) -> int:
        return replicas[int(self._random.random() * len(replicas))].index


class RoundRobin:
    """Each in turn, in order of their index."""

    def __init__(self, seed: int = 0) -> None:
        self._last = -1

    def choose(self, spec: RequestSpec, replicas: Sequence[ReplicaView], now_ns: int) -> int:
        following = (view.index for view in replicas if view.index > self._last)
        self._last = next(following, replicas[0].index)
        return self._last


class Least:
    """The replica with the least of something in flight; among equals each in turn."""

    def __init__(self, load: Callable[[ReplicaView], int]) -> None:
        self._load = load
        self._last = -1

    def choose(self, spec: RequestSpec, replicas: Sequence[ReplicaView], now_ns: int) -> int:
        load = self._load
        least = min(map(load, replicas))
        equals = [view.index for view in replicas if load(view) == least]
        self._last = next((index for index in equals if index > self._last), equals[0])
        return self._last


class LeastRequests(Least):
    """The fewest requests in flight."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(requests_of)


class LeastTokens(Least):
    """The fewest tokens in flight, prompts and what requests may still be answered."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(lambda view: view.tokens)


class PowerOfTwo:
    """Of two replicas at random the one with fewer requests in flight, the first drawn among equals."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, spec: RequestSpec, replicas: Sequence[ReplicaView], now_ns: int) -> int:
        if len(replicas) == 1:
            return replicas[0].index
        one, other = self._random.sample(replicas, 2)
        return one.index if one.requests <= other.requests else other.index


class Session:
    """The turns of a session stay where its first one went, by the fewest requests, while that replica is there."""

    def __init__(self, seed: int = 0) -> None:
        self._fewest = LeastRequests(seed)
        self._home: dict[str, int] = {}

    def choose(self, spec: RequestSpec, replicas: Sequence[ReplicaView], now_ns: int) -> int:
        session = spec.session_id
        home = None if session is None else self._home.get(session)
        if home is not None and any(view.index == home for view in replicas):
            return home
        index = self._fewest.choose(spec, replicas, now_ns)
        if session is not None:
            self._home[session] = index
        return index


def requests_of(view: ReplicaView) -> int:
    return view.requests
