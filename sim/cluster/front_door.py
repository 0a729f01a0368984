"""Between the client and the replicas: sends every request to one of them, and knows what is in flight where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import simpy

from servetwin.sim.arrivals import Arrivals
from servetwin.sim.cluster.inbox import Mail
from servetwin.sim.cluster.instants import ROUTING, Moment
from servetwin.sim.cluster.prefill_log import PrefillLog
from servetwin.sim.cluster.replica import Replica, Role
from servetwin.sim.cluster.router import ReplicaView, Router, choice
from servetwin.sim.token_source import TokenSource
from servetwin.workloads.spec import RequestSpec

if TYPE_CHECKING:
    from servetwin.sim.cluster.hand_over import HandOver


@dataclass(slots=True)
class InFlight:
    """A request that was sent to a replica and has not ended."""

    spec: RequestSpec
    sent_ns: int
    replica: int
    tokens: int


class FrontDoor:
    """The client's requests in, each at its time, to one of `replicas`; their ends back to the client.

    What ends at an instant is told to the client in order of the replicas, before the requests of that instant are
    sent. `max_queued`: a replica with so many waiting refuses a new request.
    """

    def __init__(
        self,
        env: simpy.Environment,
        arrivals: Arrivals,
        router: Router,
        *,
        tokens: TokenSource,
        reacts: bool,
        max_queued: int | None,
        on_request: Callable[[RequestSpec], None] | None,
    ) -> None:
        """`reacts`: what the client sends next depends on what has ended."""
        self.replicas: Sequence[Replica] = ()
        self.in_flight: dict[str, InFlight] = {}
        self.num_sent = 0
        """Requests sent to replicas so far."""
        self._env, self._arrivals, self._router = env, arrivals, router
        self._tokens = tokens
        self._reacts = reacts
        self._max_queued = max_queued
        self._on_request = on_request
        self._ends: list[tuple[int, str]] = []
        self._again: list[Mail] = []
        self._views: list[ReplicaView] = []
        self._next_ns: int | None = None
        self.hand_over: HandOver | None = None
        """Where requests go whose prompt is computed, if that is elsewhere."""

    @property
    def is_over(self) -> bool:
        """Everything has ended, and nothing more will be sent."""
        moving = self.hand_over is not None and self.hand_over.is_busy
        return not (self.in_flight or self._ends or self._again or moving) and self._arrivals.due_ns is None

    # ------------------------------------------------------------ what others tell

    def opened(self) -> None:
        """The client begins."""
        self.replicas_changed()
        self._wait_for_the_next()

    def replicas_changed(self) -> None:
        """Others take requests than before."""
        self._views = [r.view for r in self.replicas if r.takes_requests and r.role is not Role.DECODE]
        if self.hand_over is not None:
            self.hand_over.replicas_changed(self.replicas)
        if self._again or self._arrivals.due_ns is not None:
            self._call_at(int(self._env.now))

    def replica_gone(self, index: int) -> None:
        """It has lost its cache."""
        if (gone := getattr(self._router, "gone", None)) is not None:
            gone(index)
        if self.hand_over is not None:
            self.hand_over.replica_gone(index)

    def ended(self, replica: int, request_id: str, now_ns: int) -> None:
        """A request has ended at a replica."""
        sent = self._forget(request_id)
        log = self.replicas[replica].log
        if isinstance(log, PrefillLog) and (begun := log.hand_over(request_id)) is not None:
            assert self.hand_over is not None, "who computes prompts only has somebody for the rest"
            self.hand_over.begin(Mail(sent.spec, sent.sent_ns, begun=begun), replica)
        elif self._reacts:
            self._ends.append((replica, request_id))
            self._call_at(now_ns)
        else:
            self._arrivals.finished(request_id, now_ns)

    def lost(self, replica: int, spec: RequestSpec, now_ns: int) -> None:
        """A request has ended with its replica."""
        self._tokens.ended(spec, ())
        self.ended(replica, spec.request_id, now_ns)

    def send_again(self, mail: Mail) -> None:
        """The replica that had it is gone; another gets it."""
        self._forget(mail.spec.request_id)
        self._again.append(mail)
        self._call_at(int(self._env.now))

    def sent_ns(self, request_id: str) -> int:
        """When the client sent a request that is in flight."""
        return self.in_flight[request_id].sent_ns

    # ------------------------------------------------------------ routing

    def _call_at(self, time_ns: int) -> None:
        if self._next_ns is None or time_ns < self._next_ns:
            self._next_ns = time_ns
            Moment(self._env, ROUTING, time_ns - int(self._env.now), self._route)

    def _wait_for_the_next(self) -> None:
        due_ns = self._arrivals.due_ns
        if due_ns is not None and self._views:
            self._call_at(max(due_ns, int(self._env.now)))

    def _route(self) -> None:
        now = int(self._env.now)
        if self._next_ns is None or self._next_ns > now:
            return
        self._next_ns = None
        arrivals = self._arrivals
        if self._ends:
            ends, self._ends = sorted(self._ends, key=_replica), []
            for _, request_id in ends:
                arrivals.finished(request_id, now)
        if self._views:
            again, self._again = self._again, []
            for mail in again:
                self.send(mail, now)
            while arrivals.due_ns is not None and arrivals.due_ns <= now:
                spec, sent_ns = arrivals.pop()
                if self._on_request is not None:
                    self._on_request(spec)
                self.send(Mail(spec, sent_ns), now)
            self._wait_for_the_next()

    def send(self, mail: Mail, now: int) -> None:
        """To the replica of the router's choice."""
        replica = self.replicas[choice(self._router, mail.spec, self._views, now)]
        if self._refuses(replica, mail):
            self._refuse(replica, mail, now)
            return
        self.register(mail, replica)
        replica.deliver(mail, now)

    def register(self, mail: Mail, replica: Replica) -> None:
        """It is in flight there."""
        spec, view = mail.spec, replica.view
        tokens = spec.prompt_tokens + (1 if replica.role is Role.PREFILL else spec.output_tokens)
        view.requests += 1
        view.tokens += tokens
        self.num_sent += 1
        self.in_flight[spec.request_id] = InFlight(spec, mail.sent_ns, replica.index, tokens)

    def _forget(self, request_id: str) -> InFlight:
        sent = self.in_flight.pop(request_id)
        replica = self.replicas[sent.replica]
        replica.view.requests -= 1
        replica.view.tokens -= sent.tokens
        if not replica.view.requests:
            replica.emptied()
        return sent

    def _refuses(self, replica: Replica, mail: Mail) -> bool:
        if self._max_queued is None or mail.again or mail.begun is not None:
            return False
        assert replica.driver is not None, "it takes requests"
        return replica.driver.num_waiting >= self._max_queued

    def _refuse(self, replica: Replica, mail: Mail, now: int) -> None:
        reason = f"queue full: {self._max_queued} requests wait at replica {replica.index}"
        replica.log.refused(mail.spec, now, reason, sent_ns=mail.sent_ns)
        if mail.spec.session_id is not None:
            # The next turn goes on from what was asked, as after any refusal.
            self._tokens.prompt(mail.spec)
            self._tokens.ended(mail.spec, ())
        self._arrivals.finished(mail.spec.request_id, now)


def _replica(end: tuple[int, str]) -> int:
    return end[0]
