"""Where the like steps of a leap lie in time when each is scheduled before the one in front of it is over."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, repeat

from servetwin.sim.host_model import LinearHostModel
from servetwin.sim.steptime.modelled import LeapCosts
from servetwin.sim.timeline import StepTimes, Timeline


class Overlap:
    """Asynchronous scheduling with one step in flight at every schedule call, in integer ns.

    Step i is scheduled at `starts[i]`; then the step before it comes back, which is over at `ends[i]`, when the next
    one is scheduled. `timeline`: of the engine before these steps, which does not know of them until `settle`.
    """

    def __init__(self, timeline: Timeline, host: LinearHostModel, rows: int, costs: LeapCosts) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.prepare_starts: list[int] = []
        self.device_starts: list[int] = []
        self.device_ns: list[int] = []
        self._timeline, self._costs = timeline, costs
        self._schedule_ns, self._update_ns = host.schedule_of(rows, 0), host.update_of(rows)

    def run(self, now: int, in_flight: StepTimes, event_ns: int | None, abort_ns: int | None) -> int:
        """Submits steps until one ends at or after the event, or before one that would end at or after the abort."""
        around_ns = self._schedule_ns + self._update_ns + in_flight.update_ns + self._costs.first.prepare_ns
        worker_waits = not self._timeline.overlaps_preparation or self._timeline.prepare_start(now) > now
        if not around_ns and not worker_waits and now <= in_flight.device_end_ns:
            return self._run_on_the_device(now, in_flight.device_end_ns, event_ns, abort_ns)
        timeline, before, update_ns = self._timeline.copy(), in_flight, in_flight.update_ns
        for i in range(self._costs.num_steps):
            submitted = now + self._schedule_ns
            end = max(submitted, before.device_end_ns) + update_ns
            if abort_ns is not None and end >= abort_ns:
                break
            device_ns = self._costs.device_ns(i)
            before = timeline.submit(submitted, self._schedule_ns, self._costs.first.prepare_ns, device_ns)
            update_ns = self._update_ns
            self.starts.append(now)
            self.prepare_starts.append(before.prepare_start_ns)
            self.device_starts.append(before.device_start_ns)
            self.device_ns.append(device_ns)
            self.ends.append(end)
            now = end
            if event_ns is not None and end >= event_ns:
                break
        return len(self.starts)

    def _run_on_the_device(
        self, now: int, device_free_ns: int, event_ns: int | None, abort_ns: int | None
    ) -> int:
        """The same where only the device takes time: step by step it does what it did before."""
        most, device_ns = self._costs.num_steps, self._device_times()
        ends = [*accumulate(device_ns[: most - 1], initial=device_free_ns)]
        steps = most if event_ns is None else min(bisect_left(ends, event_ns) + 1, most)
        if abort_ns is not None:
            steps = min(steps, bisect_left(ends, abort_ns))
        self.ends = self.device_starts = ends[:steps]
        self.starts = self.prepare_starts = [now, *ends[: steps - 1]] if steps else []
        self.device_ns = device_ns[:steps]
        return steps

    def _device_times(self) -> list[int]:
        costs, steps = self._costs, self._costs.num_steps
        if costs.each_ns:
            return [*costs.each_ns[:steps]]
        first_ns, growth_ns = costs.first.device_ns, costs.growth_ns
        if not growth_ns:
            return [*repeat(first_ns, steps)]
        return [*range(first_ns, first_ns + growth_ns * steps, growth_ns)]

    def times_of(self, step: int) -> StepTimes:
        """Of one of them."""
        device_start_ns = self.device_starts[step]
        return StepTimes(
            self._schedule_ns,
            self.prepare_starts[step],
            device_start_ns,
            device_start_ns + self.device_ns[step],
            self._update_ns,
        )

    def settle(self, num_steps: int) -> None:
        """The first steps have been taken, and no more; the engine's timeline knows them now."""
        kept = slice(num_steps)
        self.starts, self.ends = self.starts[kept], self.ends[kept]
        self.prepare_starts, self.device_starts = self.prepare_starts[kept], self.device_starts[kept]
        self.device_ns = self.device_ns[kept]
        last = self.times_of(num_steps - 1)
        self._timeline.go_on_after(last, self._costs.first.prepare_ns)
