"""Where the like steps of a leap lie in time when each is scheduled before the one in front of it is over."""

from __future__ import annotations

from servetwin.sim.host_model import LinearHostModel
from servetwin.sim.steptime.modelled import LeapCosts
from servetwin.sim.timeline import StepTimes, Timeline


class Overlap:
    """Asynchronous scheduling with one step in flight at every schedule call, in integer ns.

    Step i is scheduled at `starts[i]`; then the step before it comes back, which is over at `ends[i]`, when the next
    one is scheduled.
    """

    def __init__(self, timeline: Timeline, host: LinearHostModel, rows: int, costs: LeapCosts) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.times: list[StepTimes] = []
        self.device_ns: list[int] = []
        self.timeline = timeline
        """Of the engine, after the steps."""
        self._costs = costs
        self._schedule_ns, self._update_ns = host.schedule_of(rows, 0), host.update_of(rows)

    def run(self, now: int, in_flight: StepTimes, event_ns: int | None, abort_ns: int | None) -> int:
        """Submits steps until one ends at or after the event, or before one that would end at or after the abort."""
        before, update_ns = in_flight, in_flight.update_ns
        for i in range(self._costs.num_steps):
            submitted = now + self._schedule_ns
            end = max(submitted, before.device_end_ns) + update_ns
            if abort_ns is not None and end >= abort_ns:
                break
            device_ns = self._costs.device_ns(i)
            before = self.timeline.submit(
                submitted, self._schedule_ns, self._costs.first.prepare_ns, device_ns
            )
            before.update_ns = update_ns = self._update_ns
            self.starts.append(now)
            self.times.append(before)
            self.device_ns.append(device_ns)
            self.ends.append(end)
            now = end
            if event_ns is not None and end >= event_ns:
                break
        return len(self.starts)

    def cut(self, timeline: Timeline, num_steps: int) -> None:
        """Keeps the first steps only; `timeline`: of the engine before any of them, which now knows these."""
        for kept in (self.starts, self.ends, self.times, self.device_ns):
            del kept[num_steps:]
        self.timeline = timeline
        for start, device_ns in zip(self.starts, self.device_ns, strict=True):
            submitted = start + self._schedule_ns
            timeline.submit(submitted, self._schedule_ns, self._costs.first.prepare_ns, device_ns)
