"""What `servetwin run --live` wants of an engine on the wall clock (the real one is found by name)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from servetwin.sim.config import EngineConfig
from servetwin.sim.contract import SamplingParams
from servetwin.sim.events import EventLog
from servetwin.sim.records import StepObserver
from servetwin.sim.token_source import TokenSource
from servetwin.workloads.spec import RequestSpec, Workload


@dataclass(frozen=True)
class Served:
    """What came of a run on the wall clock besides its log."""

    end_ns: int
    """Since the start of the run."""
    send_delays_ns: Sequence[int]
    """Per request: how much later than due it was sent."""


class LiveServer(Protocol):
    """An engine on the wall clock. Built by calling its class with EngineOptions; `serve` is called once."""

    config: EngineConfig
    described: Mapping[str, Any]

    def serve(
        self,
        workload: Workload,
        log: EventLog,
        *,
        tokens: TokenSource,
        sampling: Callable[[RequestSpec], SamplingParams],
        log_blocks: bool,
        on_request: Callable[[RequestSpec], None],
        on_step: StepObserver,
        on_tick: Callable[[], None],
        max_concurrency: int | None = None,
    ) -> Served:
        """Sends the workload at its own times and closes the log, also when it ends early.

        `on_tick` is called several times a second; what it raises ends the run. `max_concurrency`: requests that may
        be in flight; the others are sent late.
        """
        ...

    def close(self) -> None: ...
