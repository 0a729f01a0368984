"""What the short ways of `sim/leaping_process.py` have in common (`sim/plain_steps.py`, `sim/plain_overlapped.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import simpy

from servetwin.sim.arrivals import Arrivals
from servetwin.sim.events import EventLog
from servetwin.sim.leaping_core import LeapingCore
from servetwin.sim.steptime.modelled import ModelledStepTimer


class Client(NamedTuple):
    """What goes on outside of the engine, as its process has it."""

    arrivals: Arrivals
    take_in: Callable[[int], object]
    """Takes in who has arrived at this instant."""
    ended: Callable[[str, int], object]
    """This request got its last token at this instant."""
    interrupts: Callable[[], bool]
    """Something is due that no step here knows of: aborts, resets."""
    on_progress: Callable[[int, int, int], object] | None
    """Steps, requests that ended with them, instant."""


class PlainWay(ABC):
    """Of one engine with a host that takes no time. `leaps`: many steps at once."""

    def __init__(
        self,
        env: simpy.Environment,
        core: LeapingCore,
        timer: ModelledStepTimer,
        log: EventLog,
        client: Client,
        *,
        leaps: bool,
    ) -> None:
        self._env, self._core, self._timer, self._log, self._client = env, core, timer, log, client
        self._scheduler, self._leaps = core.leaping, leaps

    @abstractmethod
    def run(self) -> Generator[simpy.Event, Any, int]:
        """Takes steps until one is anything else; the clock stands at its beginning then. Returns their number.

        SimPy need not be asked for every step: while nothing else is due there, nobody looks.
        """

    @abstractmethod
    def settle(self) -> None:
        """The run breaks off: what has begun is over."""

    def _is_kept_out(self, now: int) -> bool:
        """The head of the queue cannot come in before somebody ends."""
        reason = self._scheduler.try_head(now)
        if reason is None:
            return False
        self._log.kept_out(self._scheduler.waiting.peek(now).request_id, reason, now)
        return True
