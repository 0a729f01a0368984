"""What the front door has sent to one replica, which takes it in when it comes to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from servetwin.sim.arrivals import Feed
from servetwin.sim.events import OpenRequest
from servetwin.workloads.spec import RequestSpec


class Mail(NamedTuple):
    """A request on its way to a replica."""

    spec: RequestSpec
    sent_ns: int
    """When the client sent it."""
    again: bool = False
    """It was taken in before, by a replica that is gone."""
    begun: OpenRequest | None = None
    """What is known of a request whose prompt another replica has computed."""


class Inbox(Feed):
    """The Feed of one replica. `ended`: told of every request that ends there, and of when it does."""

    def __init__(self, ended: Callable[[str, int], None]) -> None:
        self._mail: deque[Mail] = deque()
        self._ended = ended
        self.last: Mail | None = None
        """The one that was taken out last."""

    def deliver(self, mail: Mail, now_ns: int) -> None:
        """It is here from now on."""
        self._mail.append(mail)
        if self.due_ns is None:
            self.due_ns = now_ns

    def pop(self) -> tuple[RequestSpec, int]:
        self.last = mail = self._mail.popleft()
        if not self._mail:
            self.due_ns = None
        return mail.spec, mail.sent_ns

    def finished(self, request_id: str, now_ns: int) -> None:
        self._ended(request_id, now_ns)

    def empty(self) -> list[Mail]:
        """Takes out all that nobody has taken in."""
        mail = [*self._mail]
        self._mail.clear()
        self.due_ns = None
        return mail

    def __len__(self) -> int:
        return len(self._mail)
