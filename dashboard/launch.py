"""`servetwin dash`: the Streamlit server as a child process, bound to the loopback, ended with its parent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from servetwin.dashboard.capacity import results_of
from servetwin.dashboard.folders import HEADER, runs_of
from servetwin.sim.runs import RunFolderError, read_run

if find_spec("streamlit") is None:
    raise ModuleNotFoundError("No module named 'streamlit'", name="streamlit")

HOST = "127.0.0.1"
APP = Path(__file__).with_name("entry") / "streamlit_app.py"
GRACE_S = 4.0
"""How long the server may take to end before it is killed."""
POLL_S = 0.1
ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_MMAP_THRESHOLD_": "1048576"}
"""Of the server, unless set: columns of long runs go back to the system once nobody needs them (glibc would keep arrays
of up to 32 MB for later, Arrow's own pool whatever it has read). A quarter of a gigabyte for a million requests.
"""
STREAMLIT_OPTIONS = {
    "server.address": HOST,
    "server.headless": "true",
    "logger.level": "error",
    "server.fileWatcherType": "none",
    "browser.gatherUsageStats": "false",
    "client.toolbarMode": "minimal",
}


class PortError(ValueError):
    """The port cannot be served on; the message says why."""


def serve(runs: Sequence[str | Path], port: int) -> int:
    """Serves the dashboard of the given folders (runs, or folders with runs below them) at 127.0.0.1:port.

    Ends with SIGTERM or SIGINT. Prints the address on stderr once it answers. Returns the exit code: 0 when told to
    end, else the server's. Raises RunFolderError where no folder has a run that can be read, and PortError for a
    port that cannot be had. Must be called from the main thread, whose signal handlers it borrows.
    """
    paths = [Path(run).resolve() for run in runs]
    if not paths:
        raise ValueError("dash needs at least one folder")
    _check_runs(paths)
    _check_port(port)
    with _noted_signals() as told_to_end:
        server = subprocess.Popen(
            _command(paths, port),
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=ENVIRONMENT | os.environ,
        )
        announced = False
        while server.poll() is None and not told_to_end:
            if not announced and _answers(port):
                announced = True
                print(f"dashboard: http://{HOST}:{port} (Ctrl-C ends it)", file=sys.stderr, flush=True)  # noqa: T201
            time.sleep(POLL_S)
        _end(server)
    return 0 if told_to_end else server.returncode


def _check_runs(paths: Sequence[Path]) -> None:
    """One run that can be read, or a result of sweep or plan, is enough: what is wrong with others stands on a page."""
    wrong: list[RunFolderError] = []
    for path in runs_of(paths):
        try:
            read_run(path)
            return
        except RunFolderError as e:
            wrong.append(e)
    if results_of(paths):
        return
    folders = [path for path in paths if path.is_dir() and not (path / HEADER).exists()]
    below = ", and no run is below it" if folders else ""
    raise RunFolderError(f"{wrong[0]}{below}")


def _command(paths: Sequence[Path], port: int) -> list[str]:
    options = [f"--{name}={value}" for name, value in STREAMLIT_OPTIONS.items()]
    return [
        *(sys.executable, "-m", "streamlit", "run", str(APP)),
        *options,
        f"--server.port={port}",
        "--",
        *map(str, paths),
    ]


def _check_port(port: int) -> None:
    if not 1 <= port <= 65_535:
        raise PortError(f"port {port} is not between 1 and 65535")
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((HOST, port))
        except OSError as e:
            raise PortError(
                f"port {port} of {HOST} cannot be had: {e.strerror}; choose another --port"
            ) from e


def _answers(port: int) -> bool:
    """Somebody listens there: the server takes a few seconds to come up."""
    try:
        socket.create_connection((HOST, port), timeout=POLL_S).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """SIGTERM and SIGINT go into a list instead of ending this process, which has a child to end first."""
    told: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        told.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
