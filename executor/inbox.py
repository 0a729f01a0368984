"""What has come for the engine core while it was busy: requests in their order, aborts ahead of it."""

from __future__ import annotations

from collections import deque
from queue import Empty, SimpleQueue

from servetwin.executor.messages import AbortRequests, AddRequest, Request


class Inbox:
    """Filled by one thread (`put`) and emptied by another."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Request | Exception] = SimpleQueue()
        self._collected: deque[Request] = deque()

    def put(self, message: Request | Exception) -> None:
        """An exception is raised where the next message is taken."""
        self._queue.put(message)

    def take(self, *, wait: bool) -> list[Request]:
        """Everything that is there, oldest first; with `wait` at least one message."""
        if wait and not self._collected:
            self._collect(self._queue.get())
        self._collect_all()
        taken = list(self._collected)
        self._collected.clear()
        return taken

    def peek_aborts(self) -> list[str]:
        """The requests whose aborts are there, which may be ended before their turn.

        The messages stay: taken in turn they find nothing left to end. An abort behind the request itself, or behind
        a new one of its name, has to wait for that.
        """
        self._collect_all()
        added: set[str] = set()
        aborted: list[str] = []
        for message in self._collected:
            if isinstance(message, AddRequest):
                added.add(message.request.request_id)
            elif isinstance(message, AbortRequests):
                aborted += [i for i in message.request_ids if i not in added]
        return aborted

    def _collect_all(self) -> None:
        while True:
            try:
                message = self._queue.get_nowait()
            except Empty:
                return
            self._collect(message)

    def _collect(self, message: Request | Exception) -> None:
        if isinstance(message, Exception):
            raise message
        self._collected.append(message)
