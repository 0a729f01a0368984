"""Where the runs of a sweep are done: in this process, in processes of this machine, or on a Ray cluster.

A backend takes tasks and gives their records as they end, in any order. Which one it is changes nothing in them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.connection import Connection
from typing import Protocol

from servetwin.sim.planning.worker import Task, carry_out, lost

WAIT_S = 0.2
"""So often somebody may ask for the end."""
AHEAD = 2
"""Tasks handed out for each process, so that none waits for the next."""

OnWait = Callable[[], None]


class Backend(Protocol):
    def run(self, tasks: Iterable[Task]) -> Generator[bytes, None, None]:
        """Records as they end. Closing the iterator early breaks off what still runs."""
        ...

    def close(self) -> None: ...


class InProcess:
    """One after the other, in this process."""

    def __init__(self, on_wait: OnWait) -> None:
        """`on_wait`: called between steps; it ends everything by raising."""
        self._on_wait = on_wait

    def run(self, tasks: Iterable[Task]) -> Generator[bytes, None, None]:
        for task in tasks:
            self._on_wait()
            yield carry_out(task, lambda steps, ended, now_ns: self._on_wait())

    def close(self) -> None:
        """Nothing stays."""


class Processes:
    """Processes of this machine, started afresh: nothing of this one is copied into them."""

    def __init__(self, jobs: int, on_wait: OnWait) -> None:
        """`on_wait`: called some times a second; it ends everything by raising."""
        self._jobs = jobs
        self._on_wait = on_wait
        server = "forkserver" in multiprocessing.get_all_start_methods()
        self._context = multiprocessing.get_context("forkserver" if server else "spawn")
        if server:
            self._context.set_forkserver_preload([carry_out.__module__])
        self._pool: _Pool | None = None

    def run(self, tasks: Iterable[Task]) -> Generator[bytes, None, None]:
        rest = iter(tasks)
        running: dict[Future[bytes], Task] = {}
        try:
            while True:
                for task in islice(rest, AHEAD * self._jobs - len(running)):
                    running[self._submitted(task)] = task
                if not running:
                    return
                done, _ = wait(running, timeout=WAIT_S, return_when=FIRST_COMPLETED)
                self._on_wait()
                lost_runs: list[Task] = []
                for future in done:
                    task = running.pop(future)
                    if isinstance(future.exception(), BrokenProcessPool):
                        lost_runs.append(task)
                    else:
                        yield future.result()
                if lost_runs:
                    # A broken pool gives up all that it was given.
                    lost_runs += running.values()
                    running = {}
                    yield from self._one_by_one(lost_runs)
        finally:
            if running:
                self._stop()

    def _submitted(self, task: Task) -> Future[bytes]:
        """A pool that broke since anybody looked takes nothing more, which its future then tells like the others'."""
        try:
            return self._started().executor.submit(carry_out, task)
        except BrokenProcessPool as e:
            refused: Future[bytes] = Future()
            refused.set_exception(e)
            return refused

    def _one_by_one(self, suspects: list[Task]) -> Iterator[bytes]:
        """A process was killed, and with it all that ran: each again by itself shows which run does that."""
        self._stop()
        for task in suspects:
            alone = _Pool(1, self._context)
            try:
                again = alone.executor.submit(carry_out, task)
                while not wait([again], timeout=WAIT_S).done:
                    self._on_wait()
                yield again.result()
            except BrokenProcessPool:
                yield lost(task, "its process was killed, twice (for want of memory?)")
            finally:
                alone.stop()

    def _started(self) -> _Pool:
        if self._pool is None:
            self._pool = _Pool(self._jobs, self._context)
        return self._pool

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool = None

    def close(self) -> None:
        self._stop()


class _Pool:
    """An executor whose processes end with this one, however it ends, and at once when they are told to."""

    def __init__(self, jobs: int, context: multiprocessing.context.BaseContext) -> None:
        reader, self._writer = context.Pipe(duplex=False)
        self.executor = ProcessPoolExecutor(
            jobs, mp_context=context, initializer=_end_with_parent, initargs=(reader,)
        )
        self._reader = reader

    def stop(self) -> None:
        """Breaks off what runs."""
        self._writer.close()
        self.executor.shutdown(wait=True, cancel_futures=True)
        self._reader.close()


def _end_with_parent(reader: Connection) -> None:
    """In a process of the pool: Ctrl-C is for the parent, whose end closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def watch() -> None:
        reader.poll(None)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def default_jobs() -> int:
    """One for each processor that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
