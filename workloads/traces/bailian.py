"""Qwen-Bailian traces: JSON lines with chat_id, parent_chat_id, timestamp, input_length, output_length, hash_ids.

Times are fractions of seconds since a start. `parent_chat_id` is the chat that this one goes on from, -1 where it is
the first; a session is named after its first chat. Rows may stand in any order, so the parents of all chats are read
before the requests. Parents may lie before the file: what such chats begin with is the missing chat, and they are one
session. Every row is a whole prompt, not what was added to it. One id stands for 16 tokens. Turns are counted in order
of time, since a chat may have two successors.
Source: alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

from servetwin.workloads.columns import RequestColumns
from servetwin.workloads.traces.json_rows import each_object, numbered_lines, parse_object
from servetwin.workloads.traces.mooncake import check_ids
from servetwin.workloads.traces.source import Head, Source
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import Damage, Fields

BLOCK_TOKENS = 16
KEYS = frozenset({"chat_id", "parent_chat_id", "input_length"})
ROOT = "-1"
MOST_TYPES = 20
"""Types of requests that are named with their counts."""


def _read(reading: Reading) -> None:
    unit = reading.options.time_unit or "s"
    block = reading.options.block_size or BLOCK_TOKENS
    chats = _Chats(reading.source)
    turns = _Turns()
    types: Counter[str] = Counter()

    def read(number: int, row: Fields) -> None:
        session, depth = chats.place(row)
        type_ = row.text_or_none("type")
        prompt = row.count("input_length")
        ids = row.ids("hash_ids") if row.has("hash_ids") else None
        if ids is not None and prompt:
            check_ids(ids, prompt, block, partial_has_id=None)
        arrival_ns = row.time_ns("timestamp", unit=unit)
        reading.rows.add(
            number,
            arrival_ns=arrival_ns,
            prompt_tokens=prompt,
            output_tokens=row.count("output_length"),
            prefix_ids=ids,
            prefix_block_tokens=None if ids is None else block,
            session_id=session,
        )
        turns.add(number, session, (arrival_ns, depth, row.text("chat_id")))
        chats.emitted(session)
        if type_ is not None:
            types[type_] += 1

    each_object(reading.source, reading.rows, read)
    reading.afterwards = turns.numbered
    reading.about |= {"time_unit": unit, "block_size": block, "types": dict(types.most_common(MOST_TYPES))}
    if chats.missing:
        reading.notes.append(
            f"{len(chats.missing)} sessions began before the file: their first chats are not in it"
        )


class _Chats:
    """Which session each chat of a file belongs to, wherever in it the rows stand."""

    def __init__(self, source: Source) -> None:
        self._parent: dict[str, str | None] = {}
        self._twice: set[str] = set()
        self._place: dict[str, tuple[str, int] | None] = {}
        self._emitted: set[str] = set()
        for chat, parent in _links(source):
            if chat in self._parent:
                self._twice.add(chat)
            self._parent[chat] = parent

    def place(self, row: Fields) -> tuple[str, int]:
        """The session of a row's chat, and how many parents lie between it and the session's beginning.

        Raises Damage for a chat that is there twice, and for one whose parents lead round in a circle.
        """
        chat, parent = row.text("chat_id"), row.text_or_none("parent_chat_id")
        if chat in self._twice:
            raise Damage("chat_id", chat, "unique; another row has it, too")
        place = self._found(chat)
        if place is None:
            raise Damage("parent_chat_id", parent, "a chat before this one; its parents go round in a circle")
        return place

    def emitted(self, session: str) -> None:
        """A request of this session was not dropped."""
        self._emitted.add(session)

    @property
    def missing(self) -> set[str]:
        """Sessions with requests whose first chat no row has."""
        return self._emitted - self._parent.keys()

    def _found(self, chat: str) -> tuple[str, int] | None:
        """None for a circle. What has been found of the chats on the way is kept: a chain may be as long as a file."""
        way: dict[str, None] = {}
        here = chat
        while here not in self._place and here not in way:
            parent = self._parent.get(here)
            # A chat that is there twice has no one parent: what goes on from it begins with it.
            if here in self._twice or parent is None or parent == ROOT:
                self._place[here] = here, 0
            else:
                way[here] = None
                here = parent
        place = self._place.get(here)
        for child in reversed(way):
            place = None if place is None else (place[0], place[1] + 1)
            self._place[child] = place
        return self._place[chat]


def _links(source: Source) -> Iterator[tuple[str, str | None]]:
    """Each chat and its parent; rows that do not say them are told when the requests are read."""
    for _, line in numbered_lines(source):
        with suppress(Damage):
            row = Fields(parse_object(line))
            yield row.text("chat_id"), row.text_or_none("parent_chat_id")


class _Turns:
    """Numbers the turns of each session when all requests are known."""

    def __init__(self) -> None:
        self._sessions: dict[str, list[tuple[tuple[int, int, str], int]]] = {}
        """Session -> its requests: what they are ordered by, and their rows."""

    def add(self, number: int, session: str, order: tuple[int, int, str]) -> None:
        self._sessions.setdefault(session, []).append((order, number))

    def numbered(self, requests: RequestColumns) -> RequestColumns:
        """The same requests with the places in their sessions."""
        turn_of_row = {
            row: turn for rows in self._sessions.values() for turn, (_, row) in enumerate(sorted(rows))
        }
        return requests.with_column("turn", [turn_of_row[row] for row in requests.values("source_row")])


def _matches(head: Head) -> bool:
    return head.keys >= KEYS


FORMAT = TraceFormat(
    name="bailian",
    looks_like="JSON lines with chat_id, parent_chat_id, timestamp, input_length, output_length, hash_ids",
    matches=_matches,
    read=_read,
    uses=frozenset({"time_unit", "block_size"}),
)
