"""OpenAI batch files: JSON lines with custom_id, method, url and body. There are no times and no answers.

A prompt is the contents of its messages below one another, or `prompt`, and a tokenizer counts it; what a chat
template adds is not counted. The answer is as long as `max_completion_tokens`, `max_tokens` or `max_output_tokens`
allows, or `output_tokens`. A custom_id that comes again gets its row number behind it.
"""

from __future__ import annotations

from servetwin.workloads.traces.json_rows import each_object
from servetwin.workloads.traces.models import Models
from servetwin.workloads.traces.nested import fields_of
from servetwin.workloads.traces.options import Tokenize
from servetwin.workloads.traces.output_lengths import OutputLengths
from servetwin.workloads.traces.request_ids import RequestIds
from servetwin.workloads.traces.source import Head
from servetwin.workloads.traces.texts import (
    is_token_list,
    message_text,
    text_of,
    tokenizer,
)
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import Damage, Fields, Useless

KEYS = frozenset({"custom_id", "body"})
URLS = ("/completions", "/responses")
"""What the addresses end with that generate tokens."""
OTHER_URL = "no generation"
MAX_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def _read(reading: Reading) -> None:
    tokenize = tokenizer(reading)
    ids = RequestIds()
    models = Models(reading)
    outputs = OutputLengths(reading, *MAX_TOKENS)

    def read(number: int, row: Fields) -> None:
        custom_id = row.text("custom_id")
        if row.has("url") and not row.text("url").endswith(URLS):
            raise Useless(OTHER_URL)
        body = fields_of("body", row.get("body")[1])
        if not models.wants(number, body):
            return
        if body.has("n") and body.count("n", at_least=1) != 1:
            raise Damage("n", body.row["n"], "1: several answers to one prompt are not modelled")
        prompt = _prompt(body, tokenize)
        reading.rows.add(
            number,
            arrival_ns=0,
            request_id=ids.take(custom_id, number),
            prompt_tokens=len(prompt),
            prompt_token_ids=prompt,
            output_tokens=outputs.of(body),
        )

    each_object(reading.source, reading.rows, read)
    models.check()
    outputs.check()
    reading.arrivals = "none"
    reading.notes.append("the tokens that a chat template adds to a prompt are not counted")


def _prompt(body: Fields, tokenize: Tokenize) -> list[int]:
    if body.has("messages"):
        return tokenize("\n".join(message_text(m) for m in body.objects("messages")))
    name, prompt = body.get("prompt", "input")
    if is_token_list(prompt):
        return body.token_ids(name)
    return tokenize(text_of(body, name))


def _matches(head: Head) -> bool:
    return head.keys >= KEYS


FORMAT = TraceFormat(
    name="openai batch",
    looks_like="JSON lines with custom_id, method, url, body",
    matches=_matches,
    read=_read,
    uses=frozenset({"tokenize", "output_tokens", "model"}),
)
