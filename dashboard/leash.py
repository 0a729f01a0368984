"""Holds one `servetwin run` on a leash: `python -m servetwin.dashboard.leash run ...`, told what to do through stdin.

Lines of stdin: pause, resume, stop. When stdin ends, because the dashboard's server has gone in whatever way, the run
is stopped as by Ctrl-C, and killed if it does not end within GRACE_S: no run outlives the page that started it. Exits
with the exit code of the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from queue import Empty, SimpleQueue
from typing import TextIO

GRACE_S = 12.0
"""A run ends within 10 s of a Ctrl-C."""
POLL_S = 0.1
SERVETWIN = (sys.executable, "-c", "from servetwin.sim.cli import main; main()")
STOP = "stop"


def hold(arguments: list[str], stdin: TextIO) -> int:
    """Runs it until it ends or is to end; returns its exit code (128 + N: killed by signal N)."""
    orders: SimpleQueue[str] = SimpleQueue()
    listener = threading.Thread(target=_listen, args=(stdin, orders), daemon=True)
    listener.start()
    # A group of its own: a Ctrl-C in the server's terminal reaches the run once, through the end of stdin.
    run = subprocess.Popen(
        [*SERVETWIN, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )
    kill_at_s = None
    while run.poll() is None:
        order = _next(orders)
        if order is None and kill_at_s is None and not listener.is_alive():
            # However it came to its end: nobody could tell us to stop any more.
            order = STOP
        if order == STOP and kill_at_s is None:
            kill_at_s = time.monotonic() + GRACE_S
        _carry_out(order, run)
        if kill_at_s is not None and time.monotonic() > kill_at_s:
            _to_all(run, signal.SIGKILL)
    code = run.wait()
    return code if code >= 0 else 128 - code


def _listen(stdin: TextIO, orders: SimpleQueue[str]) -> None:
    """Its end is that of stdin."""
    for line in stdin:
        orders.put(line.strip())


def _next(orders: SimpleQueue[str]) -> str | None:
    try:
        return orders.get(timeout=POLL_S)
    except Empty:
        return None


def _carry_out(order: str | None, run: subprocess.Popen[bytes]) -> None:
    match order:
        case "pause":
            _to_all(run, signal.SIGSTOP)
        case "resume":
            _to_all(run, signal.SIGCONT)
        case "stop":
            # A stopped process would take no notice.
            _to_all(run, signal.SIGCONT)
            run.send_signal(signal.SIGINT)


def _to_all(run: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the run and to what it started (an engine process)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, number)


if __name__ == "__main__":
    sys.exit(hold(sys.argv[1:], sys.stdin))
