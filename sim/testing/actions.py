"""What can happen in a story: plain values, so that a story can be told again, whole or in part."""

from __future__ import annotations

from dataclasses import dataclass

from servetwin.sim.testing.arrival import Arrival


@dataclass(frozen=True)
class Arrive:
    """A request arrives, `gap_ns` after what happened before."""

    arrival: Arrival
    gap_ns: int


@dataclass(frozen=True)
class Step:
    """One turn of a driver's loop: a step is begun; unless another may follow at once, the oldest is completed."""


@dataclass(frozen=True)
class Stall:
    """A step is begun and its output is late: it stays in flight while time passes."""

    length_ns: int


@dataclass(frozen=True)
class Wait:
    """Nothing happens for a while."""

    length_ns: int


@dataclass(frozen=True)
class Abort:
    """A client gives up. `place` counts through the unfinished requests, round and round."""

    place: int


Action = Arrive | Step | Stall | Wait | Abort
