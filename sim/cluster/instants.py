"""What happens first where several things happen at one instant of simulated time.

Failures and scaling, then step ends (SimPy's own timeouts), then the front door, which sends requests to replicas that
know all ends of that instant, then the replicas in their order, each of which takes in what it was sent and schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simpy
from simpy.events import NORMAL, EventPriority

CHANGES = EventPriority(0)
"""Replicas come and go."""
ENDS = NORMAL
"""Of steps: the priority of every SimPy timeout."""
ROUTING = EventPriority(2)
"""The front door."""


def turn_of(replica: int) -> EventPriority:
    """When a replica takes in requests and schedules."""
    return EventPriority(3 + replica)


class Moment(simpy.Event):
    """An event `delay_ns` from now, at its place among those of its instant."""

    def __init__(
        self,
        env: simpy.Environment,
        priority: EventPriority,
        delay_ns: int = 0,
        then: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(env)
        if then is not None:
            call = then
            self.callbacks.append(lambda _: call())
        # As simpy.Timeout does, which knows one priority only.
        self._ok, self._value = True, None
        env.schedule(self, priority, delay_ns)


class Runner:
    """Runs the generator of one replica as a SimPy process would, which may be sent on to another event, or stopped."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._target: simpy.Event | None = None

    def start(self) -> None:
        """Runs to its first event."""
        self._resume(None)

    def redirect(self, event: simpy.Event) -> None:
        """What it waited for need not come any more: this goes on with it."""
        self._leave()
        self._wait_for(event)

    def stop(self) -> None:
        """It never goes on."""
        self._leave()
        self._generator.close()

    def _resume(self, _: simpy.Event | None) -> None:
        self._target = None
        event = next(self._generator, None)
        if event is not None:
            self._wait_for(event)

    def _wait_for(self, event: simpy.Event) -> None:
        self._target = event
        event.callbacks.append(self._resume)

    def _leave(self) -> None:
        if self._target is not None and self._target.callbacks is not None:
            self._target.callbacks.remove(self._resume)
        self._target = None
