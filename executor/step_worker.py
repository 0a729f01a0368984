"""The worker: the one thread in which the executor lives, so that scheduling goes on while a step runs.

torch keeps state per thread (threads of OpenMP, the current device and stream, inference mode): the executor is
built, run and closed in the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from servetwin.sim.contract import SchedulerOutput, StepResult
from servetwin.sim.plugins import Executor
from servetwin.sim.step_check import check_result


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """What a step brought, and when the worker began with it (monotonic ns)."""

    start_ns: int
    result: StepResult


class StepWorker:
    """Runs steps in the order of submission. The constructor waits for `build` and raises what it raises."""

    def __init__(self, build: Callable[[], Executor]) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="servetwin-worker")
        with ExitStack() as undo:
            # Without waiting: Ctrl-C must not hang until a large model is loaded.
            undo.callback(self._pool.shutdown, wait=False, cancel_futures=True)
            self.executor = self._pool.submit(build).result()
            undo.pop_all()

    def submit(self, plan: SchedulerOutput) -> Future[WorkerStep]:
        """The step's result is checked (StepResultError) before anybody sees it."""
        return self._pool.submit(self._run, plan)

    def _run(self, plan: SchedulerOutput) -> WorkerStep:
        start_ns = time.monotonic_ns()
        result = self.executor.run(plan)
        check_result(plan, result)
        return WorkerStep(start_ns, result)

    def close(self) -> None:
        """Waits for the steps in flight, closes the executor and ends the thread."""
        self._pool.submit(self.executor.close)
        self._pool.shutdown()
