"""WEKA traces of agents: requests with t, in, out and hash_ids, one id per 64 tokens.

Either a JSON object for each conversation (`id`, `block_size`, `hash_id_scope`, `requests`), one a line or pretty
printed, or a JSON line for each request. A row is a request. Times are in seconds. `in` is the length of the prompt and
never computed from the ids: some versions round it, and some give no id to a block that is filled in part.

Conversations count their times from their own start, so the times of several say nothing about when each was begun:
they have no arrival times. A later request follows the one before after its `think_time`, or else after what the gap
between them leaves beyond `api_time`. What a sub-agent does (an entry of type subagent with `requests`) is a session of
its own, its rows behind those of the main agent. With the scope "local", equal ids are equal only within their
conversation. Source: callanjfox/agentic-coding-analysis, TRACE_FORMAT.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from servetwin.workloads.traces.json_rows import each_object
from servetwin.workloads.traces.models import Models
from servetwin.workloads.traces.mooncake import check_ids
from servetwin.workloads.traces.nested import (
    NO_REQUESTS,
    NestedRows,
    documents,
    each_holder,
    fields_of,
    list_of,
)
from servetwin.workloads.traces.options import TimeUnit
from servetwin.workloads.traces.source import Head
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import Damage, Fields

BLOCK_TOKENS = 64
KEYS = frozenset({"t", "in", "out"})
CONVERSATION_KEYS = frozenset({"id", "requests"})
SUBAGENT = "subagent"


def _read(reading: Reading) -> None:
    unit = reading.options.time_unit or "s"
    if reading.source.head.keys >= CONVERSATION_KEYS:
        _Conversations(reading, unit).read()
    else:
        _read_rows(reading, unit)


def _read_rows(reading: Reading, unit: TimeUnit) -> None:
    block = reading.options.block_size or BLOCK_TOKENS
    models = Models(reading)

    def read(number: int, row: Fields) -> None:
        if models.wants(number, row):
            reading.rows.add(number, arrival_ns=row.time_ns("t", unit=unit), **_lengths(row, block))

    each_object(reading.source, reading.rows, read)
    models.check()
    reading.about |= {"time_unit": unit, "block_size": block}


def _lengths(row: Fields, block: int) -> dict[str, Any]:
    """How long a request is, and the ids of its prompt. Raises Damage."""
    prompt = row.count("in")
    ids = row.ids("hash_ids") if row.has("hash_ids") else None
    if ids is not None and prompt:
        check_ids(ids, prompt, block, partial_has_id=None)
    return {
        "prompt_tokens": prompt,
        "output_tokens": row.count("out"),
        "prefix_ids": ids,
        "prefix_block_tokens": None if ids is None else block,
    }


class _Conversations:
    """Reads a file of conversations."""

    def __init__(self, reading: Reading, unit: TimeUnit) -> None:
        self._reading = reading
        self._unit = unit
        self._rows = NestedRows(reading.rows, "conversation")
        self._models = Models(reading)
        self._names: set[str] = set()
        self._local_ids = 0
        self._has_subagents = False

    def read(self) -> None:
        reading = self._reading
        each_holder(documents(reading.source.lines()), self._rows, self._read_one)
        self._models.check()
        reading.arrivals = "none"
        reading.notes.append("times count from the start of each conversation: they give think times only")
        if self._has_subagents:
            reading.notes.append(
                "sub-agents are sessions of their own, which the main agent does not wait for"
            )

    def _read_one(self, number: int, conversation: Fields) -> None:
        name = conversation.text("id")
        if name in self._names:
            raise Damage("id", name, "unique")
        self._names.add(name)
        block = self._reading.options.block_size or _block(conversation)
        namespace = self._namespace(conversation)
        sessions = _sessions(name, conversation)
        self._has_subagents |= len(sessions) > 1
        if not any(entries for _, entries in sessions):
            self._rows.skip(number, NO_REQUESTS)
        for session, entries in sessions:
            self._read_session(number, entries, _Session(session, self._unit), block, namespace)
        if namespace is not None:
            self._local_ids = namespace.next

    def _read_session(
        self, number: int, entries: Iterable[Any], session: _Session, block: int, namespace: _Namespace | None
    ) -> None:
        for entry in entries:
            with self._rows.row(number) as row:
                request = fields_of("requests", entry)
                if not self._models.wants(row, request):
                    continue
                lengths = _lengths(request, block)
                if namespace is not None and lengths["prefix_ids"] is not None:
                    lengths["prefix_ids"] = namespace.own(lengths["prefix_ids"])
                self._reading.rows.add(row, **lengths, **session.columns(request))
                session.turns += 1

    def _namespace(self, conversation: Fields) -> _Namespace | None:
        scope = conversation.text_or_none("hash_id_scope")
        if scope not in (None, "global", "local"):
            raise Damage("hash_id_scope", scope, "global or local")
        return _Namespace(self._local_ids) if scope == "local" else None


def _block(conversation: Fields) -> int:
    return conversation.count("block_size", at_least=1) if conversation.has("block_size") else BLOCK_TOKENS


def _sessions(name: str, conversation: Fields) -> list[tuple[str, list[Any]]]:
    """The requests of the main agent and of each sub-agent, with the names of their sessions. Raises Damage."""
    sessions = []
    agents = [(name, list_of(conversation, "requests"))]
    for agent, entries in agents:
        own: list[Any] = []
        for place, entry in enumerate(entries):
            if isinstance(entry, dict) and entry.get("type") == SUBAGENT:
                agents.append((f"{agent}::{place}", list_of(Fields(entry), "requests")))
            else:
                own.append(entry)
        sessions.append((agent, own))
    return sessions


@dataclass
class _Session:
    """One agent, whose requests follow one another."""

    name: str
    unit: TimeUnit
    turns: int = 0
    """Requests emitted so far."""
    _ended_ns: int | None = None
    """When the request before had its answer; None: not known."""

    def columns(self, request: Fields) -> dict[str, Any]:
        """When the request is sent. Raises Damage."""
        sent_ns = request.time_ns("t", unit=self.unit)
        took_ns = request.time_ns("api_time", unit=self.unit) if request.has("api_time") else None
        pause_ns = None if self._ended_ns is None else max(0, sent_ns - self._ended_ns)
        if request.has("think_time"):
            pause_ns = request.time_ns("think_time", unit=self.unit)
        self._ended_ns = None if took_ns is None else sent_ns + took_ns
        return {
            "arrival_ns": 0,
            "session_id": self.name,
            "turn": self.turns,
            "think_time_s": None if pause_ns is None or not self.turns else pause_ns / 1e9,
        }


@dataclass
class _Namespace:
    """Gives ids that count within one conversation numbers of their own in the file: negative, as no global ids are."""

    next: int
    _own: dict[int, int] = field(default_factory=dict)

    def own(self, ids: list[int]) -> list[int]:
        for id_ in ids:
            if id_ not in self._own:
                self.next += 1
                self._own[id_] = -self.next
        return [self._own[id_] for id_ in ids]


def _matches(head: Head) -> bool:
    if head.keys >= CONVERSATION_KEYS:
        return not head.keys.isdisjoint({"block_size", "hash_id_scope"})
    return head.keys >= KEYS


FORMAT = TraceFormat(
    name="weka",
    looks_like="JSON conversations with id, block_size, requests, or JSON lines with t, in, out, hash_ids",
    matches=_matches,
    read=_read,
    uses=frozenset({"time_unit", "block_size", "model"}),
)
