"""Request ids of foreign files, each used once."""

from __future__ import annotations

from servetwin.workloads.columns import ROW_ID


class RequestIds:
    """Keeps the ids that a file gives; one that comes again gets its row number behind it."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, given: str | None, number: int) -> str:
        """The id of the request of row `number`."""
        chosen = ROW_ID.format(number) if given is None else given
        while chosen in self._taken:
            chosen = f"{chosen}@{number}"
        self._taken.add(chosen)
        return chosen
