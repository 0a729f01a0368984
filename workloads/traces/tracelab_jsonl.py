"""TraceLab's sanitized rounds of coding agents: a model call a line, with the times of what happened around it.

A prompt is `prefix_tokens`, found in the provider's cache, and `newly_append_tokens` behind them. A round is sent at
the last event of its input (a user's message or the result of a tool) and ends with the last event of its answer; the
pause between the end of a round and the next one is what the tools and the user took. The prefix of a session's first
round was left by other sessions and is not known to be shared. Source: uw-syfi/TraceLab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from servetwin.workloads.traces.csv_rows import DATE
from servetwin.workloads.traces.json_rows import each_object
from servetwin.workloads.traces.models import Models
from servetwin.workloads.traces.source import Head
from servetwin.workloads.traces.texts import text_of
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import Damage, Fields

KEYS = frozenset({"session_id", "round_index", "timing_events"})
INPUT_EVENTS = frozenset({"user_message", "tool_result"})


def _read(reading: Reading) -> None:
    sessions: dict[str, _Session] = {}
    models = Models(reading)

    def read(number: int, row: Fields) -> None:
        if not models.wants(number, row):
            return
        name = row.text("session_id")
        session = sessions.setdefault(name, _Session())
        session.begin_round(row.count("round_index"))
        sent_ns, ended_ns = _times_ns(row)
        prompt, prefix = _prompt(row)
        output = row.count("output_tokens")
        pause_s = session.pause_s(sent_ns)
        session.ended_ns = ended_ns
        reading.rows.add(
            number,
            arrival_ns=sent_ns,
            prompt_tokens=prompt,
            output_tokens=output,
            session_id=name,
            turn=session.turns,
            think_time_s=pause_s,
            context_tokens=session.context(prefix),
        )
        session.turns += 1
        session.tokens = prompt + output

    each_object(reading.source, reading.rows, read)
    models.check()


@dataclass(slots=True)
class _Session:
    """What is known of a session when its next round is read."""

    turns: int = 0
    round_index: int = -1
    ended_ns: int | None = None
    tokens: int = 0
    """Prompt and answer of the last round emitted."""

    def begin_round(self, index: int) -> None:
        if index <= self.round_index:
            raise Damage("round_index", index, f"more than {self.round_index}, the session's round before")
        self.round_index = index

    def pause_s(self, sent_ns: int) -> float | None:
        if self.ended_ns is None or not self.turns:
            return None
        return max(0, sent_ns - self.ended_ns) / 1e9

    def context(self, prefix: int | None) -> int | None:
        """No more of the prefix than the round before has left there."""
        return None if prefix is None or not self.turns else min(prefix, self.tokens)


def _prompt(row: Fields) -> tuple[int, int | None]:
    """Tokens of the prompt, and those of them that were found in the cache."""
    if not row.has("prefix_tokens"):
        return row.count("input_tokens_total"), None
    prefix = row.count("prefix_tokens")
    prompt = prefix + row.count("newly_append_tokens")
    if row.has("input_tokens_total") and row.count("input_tokens_total") != prompt:
        total = row.row["input_tokens_total"]
        raise Damage("input_tokens_total", total, f"prefix_tokens + newly_append_tokens, which is {prompt}")
    return prompt, prefix


def _times_ns(row: Fields) -> tuple[int, int | None]:
    """When a round is sent and when its answer ends (None: not recorded). Raises Damage."""
    events = [_event(event) for event in row.objects("timing_events")]
    if not events:
        raise Damage("timing_events", [], "a list of events, not empty")
    answer_ns = [ns for is_input, ns in events if not is_input]
    begin_ns = min(answer_ns, default=None)
    # What a user writes while the answer is coming belongs to the next round.
    input_ns = [ns for is_input, ns in events if is_input and (begin_ns is None or ns <= begin_ns)]
    sent_ns = max(input_ns, default=min(ns for _, ns in events))
    return sent_ns, max(answer_ns, default=None)


def _event(event: Fields) -> tuple[bool, int]:
    """Whether an event belongs to the input, and its time in ns since 1970."""
    ns: Any = DATE.one("timestamp", text_of(event, "timestamp"))
    return event.text("event_type") in INPUT_EVENTS, int(ns)


def _matches(head: Head) -> bool:
    return head.keys >= KEYS


FORMAT = TraceFormat(
    name="tracelab jsonl",
    looks_like="JSON lines with session_id, round_index, prefix_tokens, newly_append_tokens, timing_events",
    matches=_matches,
    read=_read,
    uses=frozenset({"model"}),
)
