"""When a step occupies the host, the worker and the device of one engine, in integer ns.

The host schedules and updates, the worker prepares a batch, the device runs it. Each does one thing at a time, in
order; with several steps in flight they overlap.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepTimes:
    """Where one step lies on the lanes."""

    schedule_ns: int
    """Host time from the schedule call to the submission."""
    prepare_start_ns: int
    device_start_ns: int
    device_end_ns: int
    update_ns: int = 0
    """Host time from then on until the tokens are out."""


class Timeline:
    """When the worker and the device of one engine are free.

    `overlaps_preparation`: the worker prepares a step while the device runs the one before, as vLLM's does. A worker
    that waits for its device does not, and begins `turnaround_ns` after that at the earliest.
    """

    def __init__(self, *, overlaps_preparation: bool = True, turnaround_ns: int = 0) -> None:
        self.overlaps_preparation = overlaps_preparation
        self._turnaround_ns = turnaround_ns
        self._worker_free_ns = 0
        self._device_free_ns = 0

    @property
    def device_free_ns(self) -> int:
        """When the device is through with all that was submitted."""
        return self._device_free_ns

    def copy(self) -> Timeline:
        """Another one that goes on from the same instant."""
        other = Timeline(overlaps_preparation=self.overlaps_preparation, turnaround_ns=self._turnaround_ns)
        other._worker_free_ns, other._device_free_ns = self._worker_free_ns, self._device_free_ns
        return other

    def submit(self, now_ns: int, schedule_ns: int, prepare_ns: int, device_ns: int) -> StepTimes:
        """A step is handed to the worker at `now_ns`, after everything submitted before."""
        prepare_start = self.prepare_start(now_ns)
        self._worker_free_ns = prepare_start + prepare_ns
        device_start = max(self._worker_free_ns, self._device_free_ns)
        self._device_ends(device_start + device_ns)
        return StepTimes(schedule_ns, prepare_start, device_start, self._device_free_ns)

    def go_on_after(self, times: StepTimes, prepare_ns: int) -> None:
        """This was the last step, after others that are not to be counted."""
        self._worker_free_ns = times.prepare_start_ns + prepare_ns
        self._device_ends(times.device_end_ns)

    def prepare_start(self, now_ns: int) -> int:
        """When the worker begins with a step that is handed to it at `now_ns`."""
        return max(now_ns, self._worker_free_ns)

    def between_steps_ns(self, schedule_ns: int, update_ns: int) -> int:
        """From one schedule call to the worker's beginning, where steps follow each other one at a time."""
        if self.overlaps_preparation:
            return schedule_ns
        return max(schedule_ns, self._turnaround_ns - update_ns)

    def skip_to(self, device_end_ns: int) -> None:
        """Steps like the last one followed it one at a time, and the device is through with them then."""
        self._worker_free_ns = self._device_free_ns = device_end_ns
        self._device_ends(device_end_ns)

    def _device_ends(self, device_end_ns: int) -> None:
        self._device_free_ns = device_end_ns
        if not self.overlaps_preparation:
            self._worker_free_ns = device_end_ns + self._turnaround_ns
