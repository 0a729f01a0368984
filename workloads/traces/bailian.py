"""Qwen-Bailian traces: JSON lines with chat_id, parent_chat_id, timestamp, input_length, output_length, hash_ids.

Times are fractions of seconds since a start. `parent_chat_id` is the chat that this one goes on from, -1 where it is
the first; a session is named after its first chat. The parents of the first rows may lie before the file: what such
chats begin with is the missing chat, and they are one session. Every row is a whole prompt, not what was added to it.
One id stands for 16 tokens. Turns are counted as they stand in the file, since a chat may have two successors.
Source: alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

from collections import Counter

from servetwin.workloads.traces.json_rows import each_object
from servetwin.workloads.traces.mooncake import check_ids
from servetwin.workloads.traces.source import Head
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import Fields

BLOCK_TOKENS = 16
KEYS = frozenset({"chat_id", "parent_chat_id", "input_length"})
ROOT = "-1"
MOST_TYPES = 20
"""Types of requests that are named with their counts."""


def _read(reading: Reading) -> None:
    unit = reading.options.time_unit or "s"
    block = reading.options.block_size or BLOCK_TOKENS
    chats = _Chats()
    turns: Counter[str] = Counter()
    types: Counter[str] = Counter()

    def read(number: int, row: Fields) -> None:
        session = chats.session(row.text("chat_id"), row.text_or_none("parent_chat_id"))
        type_ = row.text_or_none("type")
        prompt = row.count("input_length")
        ids = row.ids("hash_ids") if row.has("hash_ids") else None
        if ids is not None and prompt:
            check_ids(ids, prompt, block, partial_has_id=None)
        reading.rows.add(
            number,
            arrival_ns=row.time_ns("timestamp", unit=unit),
            prompt_tokens=prompt,
            output_tokens=row.count("output_length"),
            prefix_ids=ids,
            prefix_block_tokens=None if ids is None else block,
            session_id=session,
            turn=turns[session],
        )
        turns[session] += 1
        if type_ is not None:
            types[type_] += 1

    each_object(reading.source, reading.rows, read)
    reading.about |= {"time_unit": unit, "block_size": block, "types": dict(types.most_common(MOST_TYPES))}
    if chats.missing:
        reading.notes.append(
            f"{len(chats.missing)} sessions began before the file: their first chats are not in it"
        )


class _Chats:
    """Which session a chat belongs to."""

    def __init__(self) -> None:
        self._session_of: dict[str, str] = {}
        self.missing: set[str] = set()
        """Parents that no row before their children has."""

    def session(self, chat: str, parent: str | None) -> str:
        if parent is None or parent == ROOT:
            session = chat
        elif parent in self._session_of:
            session = self._session_of[parent]
        else:
            session = self._session_of[parent] = parent
            self.missing.add(parent)
        self._session_of[chat] = session
        return session


def _matches(head: Head) -> bool:
    return head.keys >= KEYS


FORMAT = TraceFormat(
    name="bailian",
    looks_like="JSON lines with chat_id, parent_chat_id, timestamp, input_length, output_length, hash_ids",
    matches=_matches,
    read=_read,
    uses=frozenset({"time_unit", "block_size"}),
)
