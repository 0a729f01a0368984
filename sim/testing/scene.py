"""Everything an invariant may look at: the engine, its twin, and what the kit noted itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest

from servetwin.sim.config import EngineConfig
from servetwin.sim.contract import ModelRunnerOutput
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.policy import SchedulingPolicy
from servetwin.sim.records import EngineCoreOutputs, Frame
from servetwin.sim.request import Request
from servetwin.sim.testing.books import BlockBooks, watch_allocations
from servetwin.sim.testing.ledger import Ledger
from servetwin.sim.testing.mirror import Mirror
from servetwin.sim.testing.witness import Witness

EngineFactory = Callable[[EngineConfig, SchedulingPolicy], EngineCore]


class Lane:
    """An engine and the witness of its policy."""

    def __init__(self, config: EngineConfig, policy: SchedulingPolicy, engine: EngineFactory) -> None:
        self.witness = Witness(policy)
        self.core = engine(config, policy)


@dataclass(slots=True)
class Scene:
    """The state after an action. `engine` and `twin` were given the same requests and the same outputs."""

    config: EngineConfig
    engine: Lane
    twin: Lane
    mirror: Mirror
    now: int = 0
    """Simulated time in ns."""
    ledger: Ledger = field(default_factory=Ledger)
    frame: Frame | None = None
    """The step that the last action began."""
    twin_frame: Frame | None = None
    outputs: EngineCoreOutputs | None = None
    """What the last action completed."""
    twin_outputs: EngineCoreOutputs | None = None
    samples: deque[tuple[Frame, ModelRunnerOutput]] = field(default_factory=deque)
    """Steps in flight, with what the model will have answered."""
    lane_difference: str | None = None
    """Where engine and twin went apart."""
    allocation_complaints: list[str] = field(default_factory=list)
    hits_are_written: bool = True
    """False from the moment on at which 0.22.0 itself may hand out hits on blocks that nobody computes."""
    drained: bool = False
    """The story is over: the engine has been stepped until it had nothing left to do."""
    books: BlockBooks = field(init=False)
    waiting: list[Request] = field(init=False)
    """In order of admission."""

    def __post_init__(self) -> None:
        watch_allocations(
            self.core.scheduler.kv, lambda: self.ledger.requests, self.allocation_complaints.append
        )
        self.balance()

    @property
    def core(self) -> EngineCore:
        return self.engine.core

    def balance(self) -> None:
        """Copies the books of the KV cache and the waiting queue, and looks whether engine and twin did the same."""
        self.books = BlockBooks.of(self.core.scheduler.kv, self.ledger.requests)
        self.lane_difference = self._lane_difference()
        if self.outputs is None or self.outputs.finished:
            self._look_at_queues()

    def _lane_difference(self) -> str | None:
        asked = zip_longest(self.engine.witness.take_decisions(), self.twin.witness.take_decisions())
        for mine, other in asked:
            if mine != other:
                return f"the first decided {mine}, the second {other}"
        plans = [f and f.plan for f in (self.frame, self.twin_frame)]
        if plans[0] != plans[1] or self.outputs != self.twin_outputs:
            return "the same answers led to different plans or outputs"
        return None

    def _look_at_queues(self) -> None:
        """A look may ask the policy for keys: both lanes are looked at in the same way."""
        self.waiting, twin_waiting = (list(lane.core.scheduler.waiting) for lane in (self.engine, self.twin))
        queues = [[r.request_id for r in waiting] for waiting in (self.waiting, twin_waiting)]
        if queues[0] != queues[1]:
            self.lane_difference = f"the first has the waiting queue {queues[0]}, the second {queues[1]}"

    def in_flight_tokens(self, request_id: str) -> int:
        """Tokens of steps that are not completed yet."""
        return sum(f.plan.num_scheduled_tokens.get(request_id, 0) for f in self.core.in_flight)

    def in_flight_samples(self, request_id: str) -> int:
        """Output tokens that the worker has and the scheduler does not know yet."""
        return sum(
            len(output.sampled_token_ids[output.req_id_to_index[request_id]])
            for _, output in self.samples
            if request_id in output.req_id_to_index
        )
