"""The SimPy driver of one engine whose steps somebody runs: it owns the waiting, `EngineCore` owns the deciding.

A step is run (or its duration computed) when it is submitted, while simulated time stands still; `sim/timeline.py` says
when its worker and its device are done with it. With asynchronous scheduling the next step is submitted before that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

import simpy

from servetwin.sim.arrivals import Feed
from servetwin.sim.contract import StepResult, StepTimer
from servetwin.sim.driver import Driver, SamplingOf
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.events import EventLog
from servetwin.sim.host_model import HostModel, LinearHostModel
from servetwin.sim.records import Frame, StepObserver
from servetwin.sim.step_check import check_result
from servetwin.sim.timeline import StepTimes
from servetwin.sim.token_source import TokenSource
from servetwin.workloads.spec import RequestSpec, Workload


class Submitted(NamedTuple):
    """A step in flight."""

    frame: Frame
    result: StepResult
    times: StepTimes


class EngineProcess(Driver[Frame]):
    """Arguments as for `Driver`; `host`: the engine's own time around a step, `on_step`: called after every step."""

    def __init__(
        self,
        env: simpy.Environment,
        core: EngineCore,
        timer: StepTimer,
        workload: Workload | Feed,
        log: EventLog,
        *,
        tokens: TokenSource,
        sampling: SamplingOf,
        host: HostModel | None = None,
        on_request: Callable[[RequestSpec], None] | None = None,
        on_step: StepObserver | None = None,
        vocab_size: int | None = None,
        cache_resets_ns: Iterable[int] = (),
        max_concurrency: int | None = None,
    ) -> None:
        super().__init__(
            env,
            core,
            timer,
            workload,
            log,
            tokens=tokens,
            sampling=sampling,
            on_request=on_request,
            vocab_size=vocab_size,
            cache_resets_ns=cache_resets_ns,
            max_concurrency=max_concurrency,
        )
        self.timer = timer
        self._engine = core
        self._host = host or LinearHostModel()
        self._on_step = on_step
        self._submitted: deque[Submitted] = deque()

    def _submit(self, frame: Frame) -> Generator[simpy.Event, Any, None]:
        """The plan goes to the worker, which runs it."""
        self.log.scheduled(frame)
        self._log_blocks()
        schedule_ns = self._host.schedule_ns(frame.plan)
        if schedule_ns:
            yield self.env.timeout(schedule_ns)
        result = self.timer.run(frame.plan)
        check_result(frame.plan, result)
        times = self._timeline.submit(self.now, schedule_ns, result.prepare_ns, result.device_ns)
        self._submitted.append(Submitted(frame, result, times))

    def _complete(self) -> Generator[simpy.Event, Any, None]:
        frame, result, times = self._submitted.popleft()
        times.update_ns = self._host.update_ns(frame.plan)
        delay = max(times.device_end_ns - self.now, 0) + times.update_ns
        if delay:
            yield self.env.timeout(delay)
        self._abort_due()
        outputs = self._engine.complete(frame, result.output)
        if result.draft_token_ids is not None:
            self._engine.update_draft_tokens(result.draft_token_ids)
        self.log.stepped(frame, result, times, self.now, outputs)
        self._log_blocks()
        for request_id in outputs.finished:
            self._ended(request_id, self.now)
        self._guard.step(frame, outputs, self.core.scheduler.requests.values())
        if self._on_step is not None:
            self._on_step(frame, result, outputs)
