"""Formats that hold texts: numbers of tokens need a tokenizer."""

from __future__ import annotations

from typing import Any

from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.traces.options import Tokenize
from servetwin.workloads.traces.trace import Reading
from servetwin.workloads.traces.values import Damage, Fields


def tokenizer(reading: Reading) -> Tokenize:
    """The tokenizer that the user gave. Raises WorkloadError where there is none."""
    if reading.options.tokenize is None:
        raise WorkloadError(
            f"{reading.source.path}: holds texts, whose numbers of tokens depend on the model: "
            f"say which tokenizer counts them with --tokenizer"
        )
    return reading.options.tokenize


def text_of(row: Fields, *names: str) -> str:
    """A text, which may be empty. Raises Damage."""
    name, value = row.get(*names)
    if not isinstance(value, str):
        raise Damage(name, value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise Damage(name, value, "a text of whole characters") from e
    return value


def message_text(message: Fields) -> str:
    """The text of a chat message: its content, or the text parts of it, below one another. Raises Damage."""
    name, content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = message.objects(name)
    return "\n".join(text_of(part, "text") for part in parts if part.has("text"))


def is_token_list(value: Any) -> bool:
    """Whether a prompt is given by its token ids."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], int)
