"""Runs of a sweep on a Ray cluster. Ray is found by its name; nothing of the product needs it otherwise."""

from __future__ import annotations

import logging
import socket
from collections.abc import Generator, Iterable
from importlib import import_module
from itertools import islice
from typing import Any

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.planning.backends import AHEAD, WAIT_S, OnWait
from servetwin.sim.planning.worker import Task, carry_out, lost

AUTO = "auto"
"""The cluster that runs on this machine, or that RAY_ADDRESS names."""
ANSWERS_WITHIN_S = 10.0


class RayCluster:
    """An existing cluster, of which every run takes one processor.

    Its machines need the product and the files that runs name, under the same paths.
    """

    def __init__(self, address: str | None, jobs: int | None, on_wait: OnWait) -> None:
        """`jobs`: runs at one time (None: as many as there are processors). Raises UsageError, ConnectionError."""
        try:
            self._ray: Any = import_module("ray")
        except ModuleNotFoundError as e:
            raise UsageError("--backend ray needs the package ray: pip install 'servetwin[ray]'") from e
        try:
            if address is not None:
                _check_answer(address)
            self._ray.init(address or AUTO, logging_level=logging.ERROR, log_to_driver=False)
        except OSError as e:
            where = "--backend ray" if address is None else f"--ray-address {address}"
            raise ConnectionError(
                f"{where}: no Ray cluster answers; `ray start --head` starts one, --ray-address HOST:PORT names one"
            ) from e
        self._on_wait = on_wait
        self._jobs = jobs or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        self._remote = self._ray.remote(num_cpus=1)(carry_out)
        self._at_once = self._jobs if jobs else AHEAD * self._jobs

    def run(self, tasks: Iterable[Task]) -> Generator[bytes, None, None]:
        rest = iter(tasks)
        running: dict[Any, Task] = {}
        try:
            while True:
                for task in islice(rest, self._at_once - len(running)):
                    running[self._remote.remote(task)] = task
                if not running:
                    return
                done, _ = self._ray.wait([*running], num_returns=1, timeout=WAIT_S)
                self._on_wait()
                for reference in done:
                    yield self._record(reference, running.pop(reference))
        finally:
            for reference in running:
                self._ray.cancel(reference, force=True)

    def _record(self, reference: Any, task: Task) -> bytes:
        try:
            content: bytes = self._ray.get(reference)
        except self._ray.exceptions.RayError as e:
            return lost(task, f"{type(e).__name__}: {' '.join(str(e).split())}")
        return content

    def close(self) -> None:
        self._ray.shutdown()


def _check_answer(address: str) -> None:
    """Ray itself would try for minutes. Raises UsageError, OSError."""
    host, colon, port = address.rpartition("//")[2].rpartition(":")
    if not (host and colon and port.isdigit()):
        raise UsageError(f"--ray-address {address!r} must be HOST:PORT")
    socket.create_connection((host, int(port)), timeout=ANSWERS_WITHIN_S).close()
