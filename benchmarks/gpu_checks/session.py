"""What a part of the check works with: its device, its deadline, and the report that its rows go to."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_checks.report import Report, Row

__all__ = ["DeviceLostError", "Row", "Session"]


class DeviceLostError(RuntimeError):
    """The device answers no more in this process: what is left of the part cannot be measured."""


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
    arch: int | None = None
    """Compute capability, times ten; None on a CPU."""

    @classmethod
    def start(cls, report: Report, part: str, toy: bool, deadline_s: float) -> Session:
        """On the current GPU where there is one, else on the CPU."""
        seed = report.content["seed"]
        if not torch.cuda.is_available():
            return cls(report, part, torch.device("cpu"), toy, seed, deadline_s)
        major, minor = torch.cuda.get_device_capability()
        return cls(report, part, torch.device("cuda"), toy, seed, deadline_s, arch=10 * major + minor)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def announce(self, names: Sequence[str]) -> None:
        """Names the checks that this part is about to make, so that one which never ran is missed in the end."""
        checks = self.report.content["checks"]
        self.report.update(checks=checks | {self.part: list(names)})

    def measure(
        self, name: str, function: Callable[[], Row], *, at: Row | None = None, needs_s: float = 3.0
    ) -> Row | None:
        """Runs `function` and reports its row; an exception becomes a row, and no time left a line in `left_out`.

        `at`: what tells the row from others of its part, whatever becomes of it. Gives what `function` found, None
        without. Raises DeviceLostError when the device is not usable any more.
        """
        at = at or {}
        if time.time() + needs_s > self.deadline_s:
            self.leave_out(name, "no time left", **at)
            return None
        start_s = time.perf_counter()
        try:
            found = function()
        except Exception as e:  # whatever a kernel or a peer raises is a result, and the rest goes on
            self._report(name, at | {"error": _one_line(e)}, start_s)
            self._check_device(e)
            return None
        self._report(name, at | found, start_s)
        return found

    def leave_out(self, name: str, reason: str, **at: object) -> None:
        """Notes what was not measured, and why; `at` as in `measure`."""
        self.report.append("left_out", {"part": self.part, "name": name, "reason": reason, **at})

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
