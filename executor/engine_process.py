"""The engine core in a process of its own: `python -m servetwin.executor.engine_process FOLDER PARENT_PID`.

Started by `executor/core_process.py` as a fresh interpreter, which is multiprocessing's start method "spawn" without
its import of the caller's `__main__`: a script without an `if __name__ == "__main__"` guard, a notebook or `python -c`
work as well. Instead of that module the child gets the parent's `sys.path`.

Threads: the main one schedules; the worker (`executor/step_worker.py`) owns torch; one reads requests into the inbox,
so that the main thread sleeps on that alone when there is no work; one watches the parent. Outputs need no thread:
sending only hands bytes to zmq, whose own I/O thread writes them, and the queue towards the parent has no limit, so a
parent that does not read holds up no step.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from servetwin.executor.core_listener import SendingListener
from servetwin.executor.engine_log import log_to_stderr, logger
from servetwin.executor.inbox import Inbox
from servetwin.executor.messages import (
    AbortRequests,
    AddRequest,
    Died,
    Outputs,
    PrefixCacheReset,
    Ready,
    Reply,
    Request,
    ResetPrefixCache,
    Setup,
    Shutdown,
    Stalled,
    StartFailed,
    decode_request,
    decode_setup,
    encode,
)
from servetwin.sim.policy_errors import PolicyFailedError, policy_errors_told
from servetwin.sim.progress_guard import StalledError

if TYPE_CHECKING:
    from servetwin.executor.core_loop import CoreLoop

REQUESTS_SOCKET, OUTPUTS_SOCKET = "requests", "outputs"
"""Names of the two sockets in the folder; whoever sends connects, so that sending never waits for the other side."""
WATCH_S = 0.2
"""How often the child looks whether its parent is still there."""
LAST_WORDS_MS = 1_000
"""How long the end of the process may wait for its last messages to be read."""
ORPHANED = 3
"""Exit code of a child whose parent has gone."""


def main() -> int:
    """Returns the exit code: 0 after a shutdown, 1 when the engine could not start or failed.

    SIGTERM ends the process as it is: what would have to be tidied up is the parent's.
    """
    folder, parent_pid = Path(sys.argv[1]), int(sys.argv[2])
    # Ctrl-C reaches the whole process group; what it means here is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent_pid, folder), daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    requests, outputs = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (requests, outputs):
        socket.set_hwm(0)
    requests.bind(f"ipc://{folder / REQUESTS_SOCKET}")
    outputs.connect(f"ipc://{folder / OUTPUTS_SOCKET}")
    code = _EngineCoreProc(requests, outputs).run()
    outputs.close(linger=LAST_WORDS_MS if code else 0)
    # Ends the reading thread, which closes its socket, and waits for that and for the last words.
    context.term()
    return code


def _end_with(parent_pid: int, folder: Path) -> None:
    """Ends this process, in the middle of a step if need be, and takes its sockets away, once its parent has died."""
    while os.getppid() == parent_pid:
        time.sleep(WATCH_S)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(ORPHANED)


class _EngineCoreProc:
    """The busy loop between the two sockets."""

    def __init__(self, requests: zmq.Socket[bytes], outputs: zmq.Socket[bytes]) -> None:
        self._requests = requests
        self._outputs = outputs
        self._inbox = Inbox()
        self._num_requests = 0

    def run(self) -> int:
        setup = decode_setup(self._requests.recv())
        threading.Thread(target=self._read_requests, daemon=True).start()
        try:
            loop = self._start(setup)
        except (ValueError, OSError) as e:
            self._send(StartFailed(str(e)))
            return 1
        except MemoryError as e:
            self._send(StartFailed(f"the engine does not fit into memory {e}".rstrip()))
            return 1
        except Exception as e:
            return self._die(e)
        try:
            with policy_errors_told(loop.config.scheduler.policy):
                self._serve(loop)
            loop.close()
        except (PolicyFailedError, StalledError) as e:
            # Its message says all there is to say.
            self._send(Died(str(e)))
            return 1
        except Exception as e:
            return self._die(e)
        return 0

    def _die(self, error: Exception) -> int:
        """Whatever it was, the parent is told: it must not take this for a process that vanished."""
        logger.error("Engine core failed", exc_info=error)
        self._send(Died(f"{type(error).__name__}: {error}"))
        return 1

    def _start(self, setup: Setup) -> CoreLoop:
        sys.path[:] = setup.sys_path
        log_to_stderr(f"(EngineCore pid={os.getpid()}) ")
        # Imported behind the watch over the parent: what follows takes seconds.
        from servetwin.executor.core_loop import CoreLoop
        from servetwin.executor.engine_args import EngineArgs

        listener = SendingListener(self._send) if setup.listen else None
        loop = CoreLoop(EngineArgs(**setup.args), listener=listener)
        self._send(Ready(loop.config.model_dump_json(), loop.described))
        return loop

    def _serve(self, loop: CoreLoop) -> None:
        """Takes in what has come, runs steps, gives out what came of them; until a shutdown."""
        while True:
            for message in self._inbox.take(wait=not loop.has_work()):
                if isinstance(message, Shutdown):
                    return
                self._num_requests += 1
                self._handle(message, loop)
            if loop.has_work() and (outputs := loop.step(self._inbox.peek_aborts)):
                self._send(Outputs(outputs))
            if loop.stalled is not None:
                self._send(Stalled(self._num_requests, loop.stalled))

    def _handle(self, message: AddRequest | AbortRequests | ResetPrefixCache, loop: CoreLoop) -> None:
        if isinstance(message, AddRequest):
            if (refused := loop.add_request(message.request)) is not None:
                self._send(Outputs([refused]))
        elif isinstance(message, AbortRequests):
            loop.abort_requests(message.request_ids)
        else:
            self._send(PrefixCacheReset(loop.reset_prefix_cache()))

    def _send(self, reply: Reply) -> None:
        self._outputs.send(encode(reply))

    def _read_requests(self) -> None:
        """Thread: decodes what comes, beside the step that runs, until the last message or the end of the process."""
        with self._requests as socket:
            try:
                message: Request | None = None
                while not isinstance(message, Shutdown):
                    message = decode_request(socket.recv())
                    self._inbox.put(message)
            except msgspec.MsgspecError as e:
                self._inbox.put(e)
            except zmq.ContextTerminated:
                pass


if __name__ == "__main__":
    sys.exit(main())
