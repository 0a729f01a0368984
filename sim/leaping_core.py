"""An engine core over a scheduler whose plain decodes sleep: steps without plans, for modelled step times."""

from __future__ import annotations

from servetwin.sim.config import EngineConfig
from servetwin.sim.engine_core import Core
from servetwin.sim.light_frames import Leap, LightFrame, LightOutputs
from servetwin.sim.plain_scheduler import PlainAsyncScheduler, PlainScheduler
from servetwin.sim.policy import SchedulingPolicy
from servetwin.sim.records import ScheduleRecord
from servetwin.sim.token_source import TokenSource

_UNSEEN = ScheduleRecord()


class LeapingCore(Core[LightFrame]):
    """One engine. Arguments as for `PlainScheduler`."""

    def __init__(
        self,
        config: EngineConfig,
        policy: SchedulingPolicy | None = None,
        *,
        tokens: TokenSource,
        journal: bool = False,
    ) -> None:
        kind = PlainAsyncScheduler if config.scheduler.async_scheduling else PlainScheduler
        self.leaping: PlainScheduler = kind(config, policy, tokens=tokens, journal=journal)
        super().__init__(config, self.leaping)
        self.in_flight = self.leaping.in_flight

    def complete(self, frame: LightFrame) -> LightOutputs:
        """Takes in the tokens of the oldest step in flight."""
        assert self.in_flight and self.in_flight[0] is frame, (
            "steps complete in the order in which they began"
        )
        return self.leaping.take_in(frame)

    def _schedule(self, number: int, now: int) -> LightFrame:
        return self.leaping.light(number, now)

    def skip(self, num_steps: int) -> None:
        """So many steps were begun and completed without this."""
        self._next_step += num_steps

    def leapt_over(self, leap: Leap, start_ns: int) -> LightFrame:
        """The last step of a leap, in flight since `start_ns`; its rows get their tokens when it is complete."""
        self._next_step += leap.num_steps
        frame = self.leaping.last_of(leap, start_ns)
        self.in_flight.append(frame)
        return frame

    def leapt(self, leap: Leap, start_ns: int) -> LightFrame:
        """The same where nothing else happens until then, so that nobody asks what was decided in it."""
        self._next_step += leap.num_steps
        rows, number = leap.shape.rows, self._next_step - 1
        frame = LightFrame(number, start_ns, _UNSEEN, [], rows, leap.shape, 0, [], reports=False)
        self.in_flight.append(frame)
        return frame
