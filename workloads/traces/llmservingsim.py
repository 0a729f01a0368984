"""LLMServingSim workloads and its measured runs: JSON lines with input_toks and output_toks.

Flat: a request a line, at `arrival_time_ns`, optionally with `input_tok_ids`, `output_tok_ids`, or `hash_ids` for
blocks of 16 tokens. Agentic: a session a line, whose `sub_requests` are whole prompts that follow one another;
`tool_duration_ns` is the pause between the end of a request and the next one. Both may stand in one file. Requests
are counted as rows; the number of a row is that of its line. Measured runs (a folder with `requests.jsonl` and
`meta.json`, or that file) say when a request came in `arrival_time`, seconds since 1970; their other times are of
another clock and are not read.
Source: casys-kaist/LLMServingSim.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from servetwin.workloads.traces.json_rows import numbered_lines
from servetwin.workloads.traces.mooncake import check_ids
from servetwin.workloads.traces.nested import NO_REQUESTS, each_holder, fields_of, list_of
from servetwin.workloads.traces.request_ids import RequestIds, id_in_row
from servetwin.workloads.traces.source import Head, Source
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import Damage, Fields

BLOCK_TOKENS = 16
KEYS = frozenset({"input_toks", "output_toks"})
REQUESTS, META = "requests.jsonl", "meta.json"


def _read(reading: Reading) -> None:
    source = reading.source
    if source.file.is_dir():
        source = Source(source.file / REQUESTS)
    lines = _Lines(reading)
    each_holder(numbered_lines(source), reading.rows, lines.read)


class _Lines:
    """Reads the lines of one file."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._ids = RequestIds()
        self._sessions: set[str] = set()

    def read(self, line: int, fields: Fields) -> None:
        if fields.has("sub_requests"):
            self._read_session(line, fields)
        else:
            with self._reading.rows.row(line):
                self._add(line, 1, fields, arrival_ns=_arrival_ns(fields))

    def _read_session(self, line: int, fields: Fields) -> None:
        session = fields.text("session_id")
        if session in self._sessions:
            raise Damage("session_id", session, "unique")
        self._sessions.add(session)
        arrival_ns = _arrival_ns(fields)
        entries = list_of(fields, "sub_requests")
        if not entries:
            self._reading.rows.skip(line, NO_REQUESTS)
        turn, pause_ns = 0, 0
        for place, entry in enumerate(entries, start=1):
            with self._reading.rows.row(line):
                request = fields_of("sub_requests", entry)
                tool_ns = (
                    request.time_ns("tool_duration_ns", unit="ns") if request.has("tool_duration_ns") else 0
                )
                columns = {
                    "arrival_ns": arrival_ns,
                    "session_id": session,
                    "turn": turn,
                    "think_time_s": pause_ns / 1e9 if turn else None,
                }
                # What was waited for behind a request that is dropped is waited for all the same.
                pause_ns += tool_ns
                self._add(line, place, request, **columns)
                turn, pause_ns = turn + 1, tool_ns
        if turn > 1:
            self._reading.arrivals = "first turns"

    def _add(self, row: int, place: int, request: Fields, **columns: Any) -> None:
        prompt, output = request.count("input_toks"), request.count("output_toks")
        if prompt and output:
            columns |= self._identity(request, prompt)
            columns["output_token_ids"] = _token_ids(request, "output_tok_ids", "output_toks", output)
            given = request.text_or_none("request_id")
            columns["request_id"] = self._ids.take(given or id_in_row(row, place), row)
        self._reading.rows.add(row, prompt_tokens=prompt, output_tokens=output, **columns)

    def _identity(self, request: Fields, prompt: int) -> dict[str, Any]:
        """What is known of the tokens of a prompt."""
        tokens = _token_ids(request, "input_tok_ids", "input_toks", prompt)
        if tokens is not None:
            return {"prompt_token_ids": tokens}
        if not request.has("hash_ids"):
            return {}
        block = self._reading.options.block_size or BLOCK_TOKENS
        self._reading.about["block_size"] = block
        ids = request.ids("hash_ids")
        check_ids(ids, prompt, block)
        return {"prefix_ids": ids, "prefix_block_tokens": block}


def _arrival_ns(fields: Fields) -> int:
    if fields.has("arrival_time") and not fields.has("arrival_time_ns"):
        return fields.time_ns("arrival_time", unit="s")
    return fields.time_ns("arrival_time_ns", unit="ns")


def _token_ids(request: Fields, name: str, length_name: str, length: int) -> list[int] | None:
    if not request.has(name):
        return None
    ids = request.token_ids(name)
    if len(ids) != length:
        raise Damage(name, f"{len(ids)} ids", f"as many as {length_name} ({length})")
    return ids


def is_measured_run(folder: Path) -> bool:
    """Whether a folder is a measured run."""
    return (folder / REQUESTS).is_file() and (folder / META).is_file()


def _matches(head: Head) -> bool:
    if head.folder is not None:
        return is_measured_run(head.folder)
    return head.keys >= KEYS or "sub_requests" in head.keys


FORMAT = TraceFormat(
    name="llmservingsim",
    looks_like="JSON lines with input_toks, output_toks, arrival_time_ns, or sessions with sub_requests",
    matches=_matches,
    read=_read,
    uses=frozenset({"block_size"}),
)
