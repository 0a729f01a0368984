"""Time the engine's own host work takes, in simulated time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from servetwin.sim.contract import SchedulerOutput


class HostModel(Protocol):
    """Host time around a step."""

    def schedule_ns(self, plan: SchedulerOutput) -> int:
        """From the schedule call to the submission of its plan."""
        ...

    def update_ns(self, plan: SchedulerOutput) -> int:
        """From the device's end to the tokens being out."""
        ...


@dataclass(frozen=True, slots=True)
class LinearHostModel:
    """A constant, a cost per row and a cost per new request, all in ns; nothing at all by default."""

    schedule_base_ns: int = 0
    schedule_per_row_ns: int = 0
    schedule_per_new_ns: int = 0
    update_base_ns: int = 0
    update_per_row_ns: int = 0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")

    def schedule_ns(self, plan: SchedulerOutput) -> int:
        return self.schedule_of(len(plan.num_scheduled_tokens), len(plan.scheduled_new_reqs))

    def update_ns(self, plan: SchedulerOutput) -> int:
        return self.update_of(len(plan.num_scheduled_tokens))

    def schedule_of(self, rows: int, num_new: int) -> int:
        """From the schedule call to the submission of a plan of so many rows, of which `num_new` are new."""
        if not rows:
            return 0
        return self.schedule_base_ns + self.schedule_per_row_ns * rows + self.schedule_per_new_ns * num_new

    def update_of(self, rows: int) -> int:
        """From the device's end to the tokens of so many rows being out."""
        return self.update_base_ns + self.update_per_row_ns * rows if rows else 0
