"""Request ids of foreign files, each used once."""

from __future__ import annotations

from servetwin.workloads.columns import ROW_ID


def id_in_row(number: int, place: int) -> str:
    """The id of request `place` (from 1) of row `number`, where a row holds several and names none."""
    return ROW_ID.format(number) if place == 1 else f"{ROW_ID.format(number)}.{place}"


class RequestIds:
    """Keeps the ids that a file gives; one that comes again gets its row number behind it."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, given: str, number: int) -> str:
        """The id of a request of row `number`."""
        chosen = given
        while chosen in self._taken:
            chosen = f"{chosen}@{number}"
        self._taken.add(chosen)
        return chosen
