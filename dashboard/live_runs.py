"""Runs that the Live page has started: child processes that end with the dashboard's server."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from servetwin.sim.runs import RunFolderError

AT_ONCE = 4
"""Runs that may go on at the same time: each wants a core."""
SAID_BYTES = 4_000
"""Of what a run said on stderr, the last part that is shown."""


class LiveRun:
    """One run in a child process. Methods may be called at any time; on a run that has ended they have no effect."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        """`arguments`: the command line behind `servetwin`; `folder`: where it writes."""
        self.arguments, self.folder = tuple(arguments), folder
        self.started_s = time.time()
        self.paused = self.stopping = False
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this is
        # What keeps it: when this process ends, however it ends, so does its end of the pipe.
        self._leash = subprocess.Popen(
            [sys.executable, "-m", "servetwin.dashboard.leash", *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            bufsize=0,
            start_new_session=True,
        )

    @property
    def returncode(self) -> int | None:
        """Exit code of `servetwin run`; None while it goes on."""
        return self._leash.poll()

    @property
    def state(self) -> str:
        """going on, paused, stopping or ended."""
        if self.returncode is not None:
            return "ended"
        return "stopping" if self.stopping else "paused" if self.paused else "going on"

    def pause(self) -> None:
        """Stops its processes where they are."""
        self.paused = self._tell("pause") or self.paused

    def resume(self) -> None:
        self.paused = not self._tell("resume") and self.paused

    def stop(self) -> None:
        """Ends it as Ctrl-C does: its folder holds what had happened until then."""
        self.stopping = self._tell("stop") or self.stopping

    def close(self) -> None:
        """Stops it, waits for its end, and lets go of what it said."""
        self.stop()
        assert self._leash.stdin is not None
        self._leash.stdin.close()
        self._leash.wait()
        self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, timeout_s: float) -> int:
        """Until it has ended; raises subprocess.TimeoutExpired."""
        return self._leash.wait(timeout_s)

    def said(self) -> str:
        """The end of what it wrote on stderr."""
        # The run writes where the file's position is, so that must not be moved.
        file = self._said.fileno()
        return os.pread(file, SAID_BYTES, max(os.fstat(file).st_size - SAID_BYTES, 0)).decode(
            errors="replace"
        )

    def _tell(self, order: str) -> bool:
        """Whether it could be told."""
        assert self._leash.stdin is not None
        try:
            self._leash.stdin.write(f"{order}\n".encode())
        except (BrokenPipeError, ValueError):
            return False
        return True


class LiveRuns:
    """The runs of one server, latest first. Shared by all its sessions."""

    def __init__(self) -> None:
        self._runs: dict[Path, LiveRun] = {}
        self._lock = threading.Lock()

    def start(self, arguments: Sequence[str], folder: Path) -> LiveRun:
        """Raises RunFolderError when there is something in the folder, or when too many go on already."""
        with self._lock:
            if sum(run.returncode is None for run in self._runs.values()) >= AT_ONCE:
                raise RunFolderError(f"{AT_ONCE} runs are going on already; stop one, or wait for it")
            if folder.exists() and any(folder.iterdir()):
                raise RunFolderError(f"{folder} is not empty; choose another folder")
            self._runs[folder] = run = LiveRun(arguments, folder)
            return run

    def all(self) -> list[LiveRun]:
        """Latest first."""
        return [*self._runs.values()][::-1]

    def close(self) -> None:
        """Ends all of them."""
        for run in self.all():
            run.stop()
        for run in self.all():
            run.close()

    def get(self, folder: Path) -> LiveRun | None:
        return self._runs.get(folder)
