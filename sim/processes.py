"""Which process does a work, whether it still lives (what tells a running run from a killed one), and how long."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

STATE, START = 0, 19
"""Places in `/proc/PID/stat` after the command's closing bracket: state, start in clock ticks since boot."""
ENDED = ("Z", "X")
"""States of a process that runs no more (zombie, dead)."""


@dataclass(frozen=True)
class Measured:
    """What a call returned, and where and when."""

    value: Any
    wall_time_s: float
    host: str
    date: str
    """Of its end, in UTC."""


def measured(call: Callable[[], Any]) -> Measured:
    """Calls it. For records of work done, which tell by these names what differs between equal works."""
    start = perf_counter()
    value = call()
    return Measured(value, perf_counter() - start, platform.node(), datetime.now(UTC).isoformat())


def this_process() -> dict[str, Any]:
    """Identity of the calling process, as JSON values; its number alone would be used again some day."""
    pid = os.getpid()
    return {"host": platform.node(), "pid": pid, "started": _started(pid)}


def is_alive(process: Mapping[str, Any]) -> bool:
    """Whether the process that `this_process` described still runs; False when it ran on another machine."""
    if process["host"] != platform.node():
        return False
    if process["started"] is not None:
        return bool(_started(process["pid"]) == process["started"])
    return _exists(process["pid"])


def _started(pid: int) -> str | None:
    """Boot and instant at which a live process began; None when there is none, or no /proc to ask."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[STATE] in ENDED else f"{boot}/{fields[START]}"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
