"""The engine core's process as its parent holds it: the child, the two sockets and their private folder."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import zmq

from servetwin.executor.engine_process import OUTPUTS_SOCKET, REQUESTS_SOCKET
from servetwin.executor.messages import Reply, Request, Setup, Shutdown, decode_reply, encode

SHUTDOWN_S = 5.0
"""How long the child may take to end by itself; then it gets SIGTERM ..."""
TERMINATE_S = 2.0
"""... and so long after that SIGKILL."""
LIVENESS_S = 0.1
"""How often the child is looked at where the kernel has no pidfd to wait for."""
LAST_WORDS_S = 0.1
"""What a dead child has sent is complete when nothing came for so long."""
FOLDER_PREFIX = "servetwin-"
SHORT_TEMPORARY_FOLDER = "/tmp"
"""For the sockets where the folder for temporary files has too long a name."""


class CoreProcess:
    """Starts the child and holds everything that has to be given back; `close` does that, once."""

    def __init__(self) -> None:
        self.started = False
        """It reads requests, among them the one to end."""
        self.owner_pid = os.getpid()
        """The process whose child it is; one that was forked off that has no part in it."""
        with ExitStack() as resources:
            self._folder = make_private_folder()
            resources.callback(self.hide)
            self._open_sockets(resources)
            with _ctrl_c_held_back():
                self._process = _start(self._folder)
                resources.callback(self._end_child)
            self._pidfd = _open_pidfd(self._process.pid)
            self._poller = zmq.Poller()
            self._poller.register(self._outputs, zmq.POLLIN)
            if self._pidfd is not None:
                resources.callback(os.close, self._pidfd)
                self._poller.register(self._pidfd, zmq.POLLIN)
            self._resources = resources.pop_all()

    def _open_sockets(self, resources: ExitStack) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        resources.callback(context.destroy, linger=0)
        self._requests, self._outputs = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket in (self._requests, self._outputs):
            # No limit: neither side ever waits for the other to read.
            socket.set_hwm(0)
        self._outputs.bind(f"ipc://{self._folder / OUTPUTS_SOCKET}")
        self._requests.connect(f"ipc://{self._folder / REQUESTS_SOCKET}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def hide(self) -> None:
        """Takes the folder away: connected sockets need no name, and so nothing is left, whoever is killed later."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, message: Setup | Request) -> None:
        self._requests.send(encode(message))

    def receive(self) -> Reply | None:
        """The next message; None when none is there."""
        try:
            return decode_reply(self._outputs.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def receive_last(self) -> Reply | None:
        """As `receive`, for a child that has ended: what it sent may still be on its way."""
        return self.receive() if self._outputs.poll(int(LAST_WORDS_S * 1e3)) else None

    def wait(self, timeout_s: float | None) -> None:
        """Returns when a message is there, when the child has ended, or after `timeout_s`."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0)
            if self._pidfd is None:
                left_s = LIVENESS_S if left_s is None else min(left_s, LIVENESS_S)
            came = self._poller.poll(None if left_s is None else math.ceil(left_s * 1e3))
            over = deadline_s is not None and time.monotonic() >= deadline_s
            if came or over or self.ended() is not None:
                return

    def ended(self) -> str | None:
        """How the child ended, in words; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return f"the engine core process (pid {self.pid}) {how}"

    def close(self) -> None:
        """Ends the child and gives everything back. A fork of the parent, which only inherited it, touches nothing."""
        if os.getpid() == self.owner_pid:
            self._resources.close()

    def _end_child(self) -> None:
        """Asks it to end if it listens; insists where that takes too long."""
        process = self._process
        if process.poll() is None and self.started:
            self.send(Shutdown())
            if _ends_within(process, SHUTDOWN_S):
                return
        process.terminate()
        if not _ends_within(process, TERMINATE_S):
            process.kill()
            process.wait()


def _ends_within(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _start(folder: Path) -> subprocess.Popen[bytes]:
    """A fresh interpreter (see `executor/engine_process.py`); -P: its modules are not looked for in the caller's folder
    before its `sys.path` has come from the parent."""
    command = [sys.executable, "-P", "-m", "servetwin.executor.engine_process", str(folder), str(os.getpid())]
    # OpenMP's workers wait by spinning unless told otherwise, and parent and child want the same cores.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """For the birth of the child: it inherits this until it can say that it ignores Ctrl-C, and here Ctrl-C must not
    come between its start and whoever will end it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def make_private_folder() -> Path:
    """A new folder for the sockets, whose paths may have about a hundred bytes. Raises OSError with what to do."""
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    if _has_room_for_sockets(folder):
        return folder
    folder.rmdir()
    try:
        return Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=SHORT_TEMPORARY_FOLDER))
    except OSError as e:
        raise OSError(
            f"the engine's sockets need a folder with a short name: {tempfile.gettempdir()} is too long (a socket's "
            f"path may have {zmq.IPC_PATH_MAX_LEN} bytes), and {SHORT_TEMPORARY_FOLDER} cannot be used "
            f"({e.strerror}); set TMPDIR to a shorter one"
        ) from e


def _has_room_for_sockets(folder: Path) -> bool:
    sockets = (folder / REQUESTS_SOCKET, folder / OUTPUTS_SOCKET)
    return max(len(os.fsencode(path)) for path in sockets) <= zmq.IPC_PATH_MAX_LEN


def _open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where the system has no such thing."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
