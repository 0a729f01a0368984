"""One story in the making: actions on an engine and its twin, with every invariant asked after each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from servetwin.sim.config import EngineConfig
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.policy import SchedulingPolicy
from servetwin.sim.records import Frame
from servetwin.sim.testing.actions import Abort, Action, Arrive, Stall, Step, Wait
from servetwin.sim.testing.arrival import Arrival
from servetwin.sim.testing.invariants import CONTRACT, NO_EXCEPTION, Invariant, first_broken
from servetwin.sim.testing.mirror import Mirror
from servetwin.sim.testing.scene import EngineFactory, Lane, Scene
from servetwin.sim.testing.story import (
    PolicyError,
    Story,
    frame_words,
    outputs_words,
    raised_words,
    time_words,
)
from servetwin.sim.testing.witness import MisconductError
from servetwin.sim.units import NS_PER_S

STEP_NS = NS_PER_S // 1000
"""How long every step takes."""


def plain_engine(config: EngineConfig, policy: SchedulingPolicy) -> EngineCore:
    """The engine as it is."""
    return EngineCore(config, policy)


class Trial:
    """An engine under a policy, told what to do. `perform` and `drain` raise PolicyError when an invariant breaks.

    `policy` builds a new policy object, `engine` an engine around one; each is called twice. `seen` counts what the
    story contains.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        policy: Callable[[], SchedulingPolicy],
        engine: EngineFactory = plain_engine,
        seen: Counter[str] | None = None,
    ) -> None:
        self.config = config
        self.actions: list[Action] = []
        """What was performed."""
        self.broken: Invariant | None = None
        """What ended the story, if anything did ..."""
        self.text = ""
        """... and the story that shows it."""
        self.seen: Counter[str] = Counter() if seen is None else seen
        self._story = Story(name, config)
        self._num_arrivals = 0
        with self._guarded():
            lane, twin = (Lane(config, policy(), engine) for _ in range(2))
            self.scene = Scene(config, lane, twin, Mirror(config.cache.block_size))

    # ------------------------------------------------------------ actions

    def perform(self, action: Action) -> None:
        """One action of the story."""
        self.actions.append(action)
        match action:
            case Arrive():
                self._arrive(action.arrival, action.gap_ns)
            case Step():
                self._step()
            case Stall():
                self._stall(action.length_ns)
            case Wait():
                self._wait(action.length_ns)
            case Abort():
                self._abort(action.place)

    def drain(self) -> None:
        """Steps until nothing is left to do; ends the story."""
        while self.scene.core.has_work() or self.scene.core.in_flight:
            self._step()
        self.scene.drained = True
        self._check()

    def _arrive(self, arrival: Arrival, gap_ns: int) -> None:
        """One that can never run is refused."""
        scene = self.scene
        scene.now += gap_ns
        request_id = f"r{self._num_arrivals}"
        self._num_arrivals += 1
        requests = [arrival.request(request_id, self.config, scene.now) for _ in range(2)]
        self._story.tell(f"request {request_id} arrives at {time_words(scene.now)} ({arrival})")
        refusal = scene.core.refusal(requests[0])
        if refusal is not None:
            self._story.add(f"it is refused: {refusal}")
            return
        scene.ledger.received(requests[0], arrival, scene.now)
        with self._guarded():
            for lane, request in zip((scene.engine, scene.twin), requests, strict=True):
                lane.core.add_request(request, scene.now)
        self._check()

    def _step(self) -> None:
        frame = self._begin()
        if frame is None or not frame.plan.num_scheduled_tokens or not self.scene.core.has_room:
            self._complete(on_same_line=frame is not None)

    def _stall(self, length_ns: int) -> None:
        if self._begin() is None:
            self._wait(length_ns)
        else:
            self.scene.now += length_ns
            self._story.add(f"its output is {time_words(length_ns)} late")

    def _wait(self, length_ns: int) -> None:
        self.scene.now += length_ns
        self._story.tell(f"{time_words(length_ns)} pass")

    def _abort(self, place: int) -> None:
        unfinished = self.scene.ledger.unfinished
        if not unfinished:
            return
        request_id = unfinished[place % len(unfinished)]
        self._story.tell(f"request {request_id} is aborted at {time_words(self.scene.now)}")
        self.seen["aborts"] += 1
        with self._guarded():
            for lane in (self.scene.engine, self.scene.twin):
                lane.core.abort_requests([request_id])
        self.scene.ledger.ended(request_id, "abort")
        self._check()

    # ------------------------------------------------------------ a step

    def _begin(self) -> Frame | None:
        """Begins a step in both lanes, if there is one to begin."""
        scene = self.scene
        with self._guarded(f"a step begins at {time_words(scene.now)}"):
            scene.frame = scene.core.begin(scene.now)
            scene.twin_frame = scene.twin.core.begin(scene.now)
            if scene.frame is not None:
                self._note_frame(scene.frame)
        frame = scene.frame
        self._check()
        return frame

    def _note_frame(self, frame: Frame) -> None:
        scene, record = self.scene, frame.record
        hits = {a.request_id: a.hit_tokens for a in record.admitted if a.hit_tokens}
        self._story.tell(frame_words(frame, hits))
        self.seen.update(
            {
                "steps": 1,
                "preemptions": len(record.preempted),
                "resumptions": sum(a.resumed for a in record.admitted),
                "prefix hits": len(hits),
            }
        )
        if any(p.unscheduled for p in record.preempted) and not self.config.rules.forget_uncomputed_blocks:
            scene.hits_are_written = False
        scene.ledger.scheduled(frame, alone=len(scene.core.in_flight) == 1)
        scene.samples.append((frame, scene.mirror.run(frame.plan, scene.ledger.arrivals)))

    def _complete(self, *, on_same_line: bool) -> None:
        """Completes the oldest step in flight, in both lanes; later by the time that a step takes."""
        scene = self.scene
        if not scene.core.in_flight:
            return
        frame, output = scene.samples.popleft()
        scene.now += STEP_NS
        with self._guarded():
            scene.outputs = scene.core.complete(scene.core.in_flight[0], output)
            scene.twin_outputs = scene.twin.core.complete(scene.twin.core.in_flight[0], output)
            words = outputs_words(frame, scene.outputs)
            if on_same_line:
                self._story.add(words)
            else:
                self._story.tell(words)
            scene.ledger.delivered(scene.outputs)
        self._check()

    # ------------------------------------------------------------ the verdict

    def _check(self) -> None:
        """Asks every invariant, then closes the action."""
        scene = self.scene
        with self._guarded():
            scene.balance()
            broken = first_broken(scene)
        if broken is not None:
            self._fail(*broken)
        scene.frame = scene.twin_frame = scene.outputs = scene.twin_outputs = None

    @contextmanager
    def _guarded(self, doing: str | None = None) -> Iterator[None]:
        """Whatever goes wrong while policy and engine work ends the story; `doing` is then its last line."""
        try:
            yield
        except MisconductError as error:
            self._fail(CONTRACT, str(error), doing)
        except Exception as error:  # an engine that is broken by its policy may raise anything
            self._fail(NO_EXCEPTION, raised_words(error), doing)

    def _fail(self, invariant: Invariant, found: str, doing: str | None = None) -> NoReturn:
        if doing is not None:
            self._story.tell(doing)
        self.broken = invariant
        self.text = self._story.ending(str(invariant), invariant.sentence, found)
        raise PolicyError(self.text) from None
