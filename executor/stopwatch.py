"""Marks in time around the phases of a step: on the host's clock, or on the device's own time line."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """`num_marks` marks on the host's clock."""

    def __init__(self, num_marks: int) -> None:
        self._marks_ns = [0] * num_marks

    def mark(self, index: int) -> None:
        self._marks_ns[index] = time.perf_counter_ns()

    def between_ns(self, first: int, second: int) -> int:
        """Nanoseconds from one mark to a later one."""
        return self._marks_ns[second] - self._marks_ns[first]


class CudaStopwatch(Stopwatch):
    """Marks on the device's own time line, by events on the current stream."""

    def __init__(self, num_marks: int) -> None:
        super().__init__(num_marks)
        new_event: Any = torch.cuda.Event
        self._events = [new_event(enable_timing=True) for _ in range(num_marks)]

    def mark(self, index: int) -> None:
        self._events[index].record()

    def between_ns(self, first: int, second: int) -> int:
        """As above; waits for the later mark."""
        self._events[second].synchronize()
        elapsed_ms: float = self._events[first].elapsed_time(self._events[second])
        return round(elapsed_ms * 1e6)


def stopwatch_for(device: torch.device, num_marks: int) -> Stopwatch:
    """The one whose marks show when the device was busy."""
    return CudaStopwatch(num_marks) if device.type == "cuda" else Stopwatch(num_marks)
