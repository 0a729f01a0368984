"""ShareGPT: a JSON list of conversations, whose messages a tokenizer counts. There are no times.

Read as `sharegpt`, a row is a conversation, and its first message is the prompt, its second one the answer, as in
vLLM's benchmark. Read as `sharegpt sessions`, a row is a question and its answer: a conversation is a session, each
prompt of which is the one before, its answer, and the next question.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from servetwin.workloads.traces.json_rows import document_rows
from servetwin.workloads.traces.nested import NestedRows, fields_of, list_of
from servetwin.workloads.traces.source import Head
from servetwin.workloads.traces.texts import text_of, tokenizer
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import Damage, Useless

MESSAGES = "conversations"
TEXT = ("value", "content")
TOO_SHORT = "fewer than two messages"


def _read_first_turns(reading: Reading) -> None:
    tokenize = tokenizer(reading)
    for number, conversation in enumerate(document_rows(reading.source), start=1):
        with reading.rows.row(number):
            messages = list_of(fields_of("conversation", conversation), MESSAGES)
            if len(messages) < 2:
                raise Useless(TOO_SHORT)
            prompt = tokenize(_text(messages[0]))
            answer = tokenize(_text(messages[1]))
            reading.rows.add(
                number, arrival_ns=0, prompt_token_ids=prompt, **_answer(reading, prompt, answer)
            )
    reading.arrivals = "none"
    reading.notes.append(
        "only the first two messages of a conversation are used, as in vLLM, which also leaves out those with fewer "
        "than 4 or more than 1024 tokens of prompt; --trace-format 'sharegpt sessions' uses all of them"
    )


def _answer(reading: Reading, prompt: list[int], answer: list[int]) -> dict[str, Any]:
    """Lengths, and the tokens of the answer where it is used as long as it is."""
    asked = reading.options.output_tokens
    return {
        "prompt_tokens": len(prompt),
        "output_tokens": len(answer) if asked is None else asked,
        "output_token_ids": answer if asked is None else None,
    }


def _read_sessions(reading: Reading) -> None:
    tokenize = tokenizer(reading)
    rows = NestedRows(reading.rows, "conversation")
    for number, conversation in enumerate(document_rows(reading.source), start=1):
        try:
            messages = list_of(fields_of("conversation", conversation), MESSAGES)
        except Damage as e:
            rows.damaged(number, e)
            continue
        if len(messages) < 2:
            rows.skip(number, TOO_SHORT)
        history, context, turn = 0, 0, 0
        for question, reply in _pairs(messages):
            with rows.row(number) as row:
                prompt = history + len(tokenize(_text(question)))
                history = prompt
                answer = reading.options.output_tokens or len(tokenize(_text(reply)))
                history += answer
                reading.rows.add(
                    row,
                    arrival_ns=0,
                    prompt_tokens=prompt,
                    output_tokens=answer,
                    session_id=f"conversation-{number}",
                    turn=turn,
                    context_tokens=context if turn else None,
                )
                context, turn = history, turn + 1
    reading.arrivals = "none"


def _pairs(messages: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Questions and their answers; a question behind the last answer has none."""
    return zip(messages[::2], messages[1::2], strict=False)


def _text(message: object) -> str:
    return text_of(fields_of(MESSAGES, message), *TEXT)


def _matches(head: Head) -> bool:
    return head.text.startswith("[") and MESSAGES in head.keys


FORMAT = TraceFormat(
    name="sharegpt",
    looks_like="a JSON list of conversations",
    matches=_matches,
    read=_read_first_turns,
    uses=frozenset({"tokenize", "output_tokens"}),
)
SESSIONS_FORMAT = TraceFormat(
    name="sharegpt sessions",
    looks_like="the same, every question a turn of a session; only where it is asked for",
    matches=lambda head: False,
    read=_read_sessions,
    uses=frozenset({"tokenize", "output_tokens"}),
)
