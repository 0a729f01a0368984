"""From the replicas that compute prompts to those that compute answers: the KV of a prompt on its way.

As with vLLM's KV connectors between a prefill and a decode instance: the first serves the request with max_tokens 1,
and its token is thrown away; K/V of the prompt goes to the second, where it counts as tokens computed elsewhere: the
request waits in the ordinary queue, gets blocks for all of the prompt when it is admitted, and computes the last prompt
token again, which gives its first token. What the prefix cache there has already is hit, and sent all the same. A
preemption loses the K/V; it is computed again there.

Not modelled: vLLM admits the request before the transfer and holds blocks for it on both sides until it is over; here a
transfer holds no blocks, begins when the prompt is done, and shares its bandwidth with no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import simpy

from servetwin.sim.cluster.config import Disaggregation, OnFailure
from servetwin.sim.cluster.inbox import Mail
from servetwin.sim.cluster.instants import ROUTING, Moment
from servetwin.sim.cluster.replica import Replica, Role
from servetwin.sim.cluster.router import ReplicaView, Router, choice
from servetwin.sim.units import seconds_to_ns

if TYPE_CHECKING:
    from servetwin.sim.cluster.front_door import FrontDoor


class HandOver:
    """Sends prompts that are computed on to a replica of the router's choice, made when the prompt is done."""

    def __init__(
        self,
        env: simpy.Environment,
        door: FrontDoor,
        router: Router,
        split: Disaggregation,
        on_failure: OnFailure,
    ) -> None:
        self._env, self._door, self._router = env, door, router
        self._split, self._on_failure = split, on_failure
        self._views: list[ReplicaView] = []
        self._done: list[tuple[int, Mail]] = []
        """Computed at this instant, or held until somebody is there; with the replica that did it."""

    @property
    def is_busy(self) -> bool:
        """Requests wait for a replica to go to."""
        return bool(self._done)

    def replicas_changed(self, replicas: Sequence[Replica]) -> None:
        """Others take requests than before."""
        self._views = [r.view for r in replicas if r.takes_requests and r.role is Role.DECODE]
        if self._done:
            Moment(self._env, ROUTING, 0, self._send)

    def replica_gone(self, index: int) -> None:
        """It has lost its cache."""
        if (gone := getattr(self._router, "gone", None)) is not None:
            gone(index)

    def begin(self, mail: Mail, replica: int) -> None:
        """A prompt is computed."""
        if not self._done:
            Moment(self._env, ROUTING, 0, self._send)
        self._done.append((replica, mail))

    def transfer_ns(self, prompt_tokens: int) -> int:
        """How long the KV of a prompt is on its way."""
        latency_ns = seconds_to_ns(self._split.kv_transfer_latency_s)
        bandwidth, each = self._split.kv_transfer_bandwidth, self._split.kv_bytes_per_token
        if bandwidth is None or each is None:
            return latency_ns
        return latency_ns + seconds_to_ns(prompt_tokens * each / bandwidth)

    def _send(self) -> None:
        if not self._views:
            return
        now = int(self._env.now)
        done, self._done = sorted(self._done, key=lambda d: d[0]), []
        for _, mail in done:
            replica = self._door.replicas[choice(self._router, mail.spec, self._views, now)]
            self._door.register(mail, replica)
            self._transfer(mail, replica)

    def _transfer(self, mail: Mail, replica: Replica) -> None:
        boots, duration_ns = replica.num_boots, self.transfer_ns(mail.spec.prompt_tokens)

        def arrive() -> None:
            now = int(self._env.now)
            if replica.num_boots == boots and not replica.failed:
                replica.deliver(mail, now)
            elif self._on_failure == "lost":
                replica.log_untaken(mail, now)
                self._door.lost(replica.index, mail.spec, now)
            else:
                self._door.send_again(Mail(mail.spec, mail.sent_ns, again=True))

        if duration_ns:
            Moment(self._env, ROUTING, duration_ns, arrive)
        else:
            arrive()
