"""One run of the check: its device, its deadline, and the report that grows row by row in one JSON file."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


class DeviceLostError(RuntimeError):
    """The device answers no more in this process: what is left of the part cannot be measured."""


class Report:
    """The JSON file: `{"device": ..., "rows": [...], "left_out": [...], ...}`, whole at every moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def update(self, **values: Any) -> None:
        """Sets keys and writes."""
        self.content |= values
        self._write()

    def append(self, key: str, row: Row) -> None:
        """Adds a row to a list and writes."""
        self.content.setdefault(key, []).append(row)
        self._write()

    def _write(self) -> None:
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.write_text(json.dumps(self.content, indent=1))
        temporary.replace(self.path)


@dataclass(frozen=True)
class Session:
    """What a part of the check works with."""

    report: Report
    part: str
    device: torch.device
    toy: bool
    """Small sizes: to see that everything runs, not how fast."""
    seed: int
    deadline_s: float
    """On the clock of `time.time`, which the processes of all parts share."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def measure(self, name: str, function: Callable[[], Row], *, needs_s: float = 3.0) -> Row | None:
        """Runs `function` and reports its row; an exception becomes a row, and no time left a line in `left_out`.

        Gives the row, None without one. Raises DeviceLostError when the device is not usable any more.
        """
        if time.time() + needs_s > self.deadline_s:
            self.leave_out(name, "no time left")
            return None
        start_s = time.perf_counter()
        try:
            found = function()
        except Exception as e:  # whatever a kernel or a peer raises is a result, and the rest goes on
            self._report(name, {"error": _one_line(e)}, start_s)
            self._check_device(e)
            return None
        self._report(name, found, start_s)
        return found

    def leave_out(self, name: str, reason: str) -> None:
        """Notes what was not measured, and why."""
        self.report.append("left_out", {"part": self.part, "name": name, "reason": reason})

    def generator(self, stream: int) -> torch.Generator:
        """Random numbers on the device, from one of the streams of this run's seed."""
        return torch.Generator(self.device).manual_seed(self.seed * 2**20 + stream)

    def free_bytes(self) -> int:
        """Memory that can be used now; on a CPU a fixed small amount."""
        if not self.is_gpu:
            return 2**26
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def _report(self, name: str, found: Row, start_s: float) -> None:
        took_s = round(time.perf_counter() - start_s, 3)
        self.report.append("rows", {"part": self.part, "name": name, **found, "took_s": took_s})

    def _check_device(self, cause: Exception) -> None:
        if not self.is_gpu:
            return
        try:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        except RuntimeError as e:
            raise DeviceLostError(_one_line(e)) from cause


def _one_line(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in where)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"
