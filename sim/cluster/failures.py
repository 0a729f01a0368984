"""Replicas that fail and come back, and what becomes of their requests."""

from __future__ import annotations

from collections.abc import Sequence

import simpy

from servetwin.sim.cluster.config import Failure, OnFailure
from servetwin.sim.cluster.front_door import FrontDoor
from servetwin.sim.cluster.instants import CHANGES, Moment
from servetwin.sim.cluster.replica import Replica, State
from servetwin.sim.units import seconds_to_ns


class Failures:
    """Makes replicas fail at their times, all known ahead.

    Everything a failing replica has is gone: KV, tokens so far, the step in flight, which no log knows. Its requests
    are lost; or begin anew there when it is back (retry), or at another replica at once (reroute). Latencies count from
    the first sending. A step that ends at the instant of a failure comes too late; whoever arrives then goes elsewhere.
    """

    def __init__(
        self, env: simpy.Environment, door: FrontDoor, failures: Sequence[Failure], on_failure: OnFailure
    ) -> None:
        self._env, self._door, self._on_failure = env, door, on_failure
        self._begins: dict[int, list[int]] = {}
        for failure in sorted(failures, key=lambda f: (f.from_s, f.replica)):
            begin_ns, end_ns = seconds_to_ns(failure.from_s), seconds_to_ns(failure.to_s)
            self._begins.setdefault(failure.replica, []).append(begin_ns)
            self._expect(failure.replica, begin_ns, end_ns)

    def next_of(self, replica: int) -> int | None:
        """When it fails next."""
        now = int(self._env.now)
        return next((ns for ns in self._begins.get(replica, ()) if ns > now), None)

    def _expect(self, index: int, begin_ns: int, end_ns: int) -> None:
        Moment(self._env, CHANGES, begin_ns, lambda: self._fail(index, end_ns))

    def _fail(self, index: int, end_ns: int) -> None:
        replica, now = self._door.replicas[index], int(self._env.now)
        if self._door.is_over or replica.state is State.OFF:
            return
        replica.failed = True
        Moment(self._env, CHANGES, end_ns - now, lambda: self._recover(replica))
        replica.log.replica_changed("replica_failed", now)
        self._door.replica_gone(index)
        if replica.driver is not None:
            self._fate_of_requests(replica, now)
        self._door.replicas_changed()

    def _fate_of_requests(self, replica: Replica, now: int) -> None:
        lost = self._on_failure == "lost"
        held = replica.fail(now, lost=lost, sent_of=self._door.sent_ns)
        for mail in held:
            if lost:
                self._door.lost(replica.index, mail.spec, now)
            elif self._on_failure == "retry":
                replica.held.append(mail)
            else:
                self._door.send_again(mail)

    def _recover(self, replica: Replica) -> None:
        now = int(self._env.now)
        replica.failed = False
        if self._door.is_over:
            return
        replica.log.replica_changed("replica_recovered", now)
        if replica.state in (State.READY, State.DRAINING):
            replica.boot(self.next_of(replica.index))
            held, replica.held = replica.held, []
            for mail in held:
                replica.deliver(mail, now)
        self._door.replicas_changed()
