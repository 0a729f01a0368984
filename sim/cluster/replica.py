"""One replica: its driver while it is there, its log, and what the front door knows of it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from servetwin.sim.cluster.inbox import Inbox, Mail
from servetwin.sim.cluster.replica_driver import ReplicaDriver
from servetwin.sim.cluster.router import ReplicaView
from servetwin.sim.columns import NEVER
from servetwin.sim.events import EventLog


class State(Enum):
    """What a replica does about requests."""

    OFF = "off"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Role(Enum):
    """Which part of a request a replica computes."""

    ALL = "all"
    PREFILL = "prefill"
    DECODE = "decode"


BuildDriver = Callable[[Inbox, EventLog], ReplicaDriver]
"""A new engine, empty, that goes on writing the log."""


class Replica:
    """A replica, on or off. Its events are those of its log."""

    def __init__(
        self,
        index: int,
        kv_tokens: int,
        build: BuildDriver,
        log: EventLog,
        ended: Callable[[int, str, int], None],
        is_over: Callable[[], bool],
        role: Role = Role.ALL,
    ) -> None:
        self.index, self.role = index, role
        self.view = ReplicaView(index, kv_tokens)
        self.log = log
        self.state = State.OFF
        self.failed = False
        self.driver: ReplicaDriver | None = None
        self.num_boots = 0
        self.when_empty: Callable[[], None] | None = None
        """To be called when its last request ends while it drains."""
        self.held: list[Mail] = []
        """Requests that wait for it to come back."""
        self._inbox = Inbox(lambda request_id, now_ns: ended(index, request_id, now_ns))
        self._build = build
        self._is_over = is_over

    @property
    def takes_requests(self) -> bool:
        return self.state is State.READY and not self.failed

    def boot(self, dies_ns: int | None) -> None:
        """An empty engine runs; `dies_ns`: when it will fail next."""
        self.num_boots += 1
        self.driver = self._build(self._inbox, self.log)
        self.driver.dies_ns = dies_ns
        self.driver.join(self._inbox, self.index, self._is_over, computes_prompts=self.role is Role.PREFILL)
        self.driver.start()

    def deliver(self, mail: Mail, now_ns: int) -> None:
        """Sends it a request."""
        assert self.driver is not None, "it takes requests"
        self._inbox.deliver(mail, now_ns)
        self.driver.notice()

    def emptied(self) -> None:
        """Nothing is in flight here."""
        if self.state is State.DRAINING and self.when_empty is not None:
            self.when_empty()

    def shut_down(self, now_ns: int) -> None:
        """It is empty, and gone."""
        if self.driver is not None:
            self.driver.stop()
            self.driver = None
            self.log.contents_lost(now_ns)

    def fail(self, now_ns: int, *, lost: bool, sent_of: Callable[[str], int]) -> list[Mail]:
        """It is gone with all it held; returns that in order of arrival there. `lost`: nobody tries again."""
        driver = self.driver
        assert driver is not None, "what is off cannot fail"
        driver.stop()
        self.driver = None
        held = [
            Mail(spec, sent_of(request_id), again=True)
            for request_id, (spec, _) in driver.requests_in_flight().items()
        ]
        for request_id, (_, request) in driver.requests_in_flight().items():
            blocks = driver.core.scheduler.kv.num_blocks(request)
            computed = request.num_computed_tokens
            self.log.lost(request_id, now_ns, computed_tokens=computed, blocks=blocks, final=lost)
        for mail in self._inbox.empty():
            held.append(mail if lost else self._untouched(mail))
            if lost:
                self.log_untaken(mail, now_ns)
        self.log.contents_lost(now_ns)
        return held

    def _untouched(self, mail: Mail) -> Mail:
        """Nobody has taken it in yet, so that its first taking in is still to come, unless its KV was here."""
        return Mail(mail.spec, mail.sent_ns, again=True) if mail.begun is not None else mail

    def log_untaken(self, mail: Mail, now_ns: int) -> None:
        """A request that was sent here is lost before it was taken in."""
        if mail.begun is not None:
            self.log.taken_over(mail.begun, now_ns)
        else:
            self.log.arrived(mail.spec, NEVER, sent_ns=mail.sent_ns, again=mail.again)
        self.log.lost(mail.spec.request_id, now_ns, final=True)
