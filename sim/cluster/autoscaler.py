"""As many replicas as a signal asks for: one more above a threshold, one less below another."""

from __future__ import annotations

import simpy

from servetwin.sim.cluster.config import Autoscale
from servetwin.sim.cluster.failures import Failures
from servetwin.sim.cluster.front_door import FrontDoor
from servetwin.sim.cluster.instants import CHANGES, Moment
from servetwin.sim.cluster.replica import Replica, State
from servetwin.sim.units import seconds_to_ns


class Autoscaler:
    """Looks at its signal every `interval_s`, as it is before anything else happens at that instant.

    One more: a replica that is draining stays, else the first that is off starts, and takes requests after
    `startup_delay_s`. One less: the last that is ready gets no more requests (drains), and is off when its last has
    ended. No decision within `cooldown_s` after one, and none for less while one is starting.
    """

    def __init__(
        self, env: simpy.Environment, door: FrontDoor, failures: Failures, config: Autoscale
    ) -> None:
        self._env, self._door, self._failures, self._config = env, door, failures, config
        self._interval_ns = seconds_to_ns(config.interval_s)
        self._quiet_until_ns = 0
        self._sent_before = 0
        Moment(env, CHANGES, self._interval_ns, self._look)

    def signal(self) -> float:
        """What the thresholds are for."""
        ready = [r for r in self._door.replicas if r.takes_requests]
        serving = [r.driver for r in ready if r.driver is not None]
        if self._config.signal == "rate":
            sent = self._door.num_sent - self._sent_before
            return sent / self._config.interval_s / max(len(ready), 1)
        if not serving:
            return 0.0
        if self._config.signal == "queue":
            return sum(driver.num_waiting for driver in serving) / len(serving)
        usable = serving[0].core.config.cache.usable_blocks
        return sum(driver.used_blocks() for driver in serving) / usable / len(serving)

    def _look(self) -> None:
        if self._door.is_over or self._env.peek() == float("inf"):
            # All requests have ended, or nothing will ever happen again: the run says so.
            return
        now, value = int(self._env.now), self.signal()
        self._sent_before = self._door.num_sent
        if now >= self._quiet_until_ns and self._decide(value, now):
            self._quiet_until_ns = now + seconds_to_ns(self._config.cooldown_s)
        Moment(self._env, CHANGES, self._interval_ns, self._look)

    def _decide(self, value: float, now: int) -> bool:
        config, replicas = self._config, self._door.replicas
        ready = [r for r in replicas if r.state is State.READY]
        starting = [r for r in replicas if r.state is State.STARTING]
        if value > config.scale_up_at and len(ready) + len(starting) < config.max_replicas:
            self._one_more(f"{config.signal} {value:.6g} > {config.scale_up_at:g}", now)
            return True
        if value < config.scale_down_at and len(ready) > config.min_replicas and not starting:
            self._one_less(ready[-1], f"{config.signal} {value:.6g} < {config.scale_down_at:g}", now)
            return True
        return False

    def _one_more(self, reason: str, now: int) -> None:
        draining = [r for r in self._door.replicas if r.state is State.DRAINING]
        if draining:
            draining[0].state = State.READY
            draining[0].log.replica_changed("replica_ready", now, reason)
            self._door.replicas_changed()
            return
        replica = next(r for r in self._door.replicas if r.state is State.OFF)
        replica.state = State.STARTING
        replica.log.replica_changed("replica_starting", now, reason)
        delay_ns = seconds_to_ns(self._config.startup_delay_s)
        Moment(self._env, CHANGES, delay_ns, lambda: self._ready(replica))

    def _ready(self, replica: Replica) -> None:
        if self._door.is_over:
            return
        now = int(self._env.now)
        replica.state = State.READY
        replica.log.replica_changed("replica_ready", now)
        if not replica.failed:
            replica.boot(self._failures.next_of(replica.index))
        self._door.replicas_changed()

    def _one_less(self, replica: Replica, reason: str, now: int) -> None:
        replica.state = State.DRAINING
        replica.log.replica_changed("replica_draining", now, reason)
        replica.when_empty = lambda: self._off(replica)
        self._door.replicas_changed()
        if not replica.view.requests:
            self._off(replica)

    def _off(self, replica: Replica) -> None:
        """Its last request has ended, as far as the front door knows."""
        Moment(self._env, CHANGES, 0, lambda: self._switch_off(replica))

    def _switch_off(self, replica: Replica) -> None:
        if replica.state is not State.DRAINING or replica.view.requests:
            return
        now = int(self._env.now)
        replica.state = State.OFF
        replica.shut_down(now)
        self._door.replica_gone(replica.index)
        replica.log.replica_changed("replica_stopped", now)
