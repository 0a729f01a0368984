"""Conversations as prompts, by a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from jinja2 import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages, each with `role` and `content`."""


def chat_prompts(
    tokenizer: PreTrainedTokenizerBase,
    messages: Conversation | Sequence[Conversation],
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
) -> list[dict[str, Any]]:
    """A prompt for each conversation: text and token ids (the template holds the special tokens, none is added).

    `add_generation_prompt`: end with what begins an answer. Raises ValueError where there is no template, and for
    messages that it cannot take.
    """
    if chat_template is None and tokenizer.chat_template is None:
        raise ValueError(
            f"tokenizer {type(tokenizer).__name__} of {tokenizer.name_or_path!r} has no chat template: give "
            "chat_template, or use generate"
        )
    prompts = []
    for conversation in _conversations(messages):
        text = _apply(tokenizer, conversation, chat_template, add_generation_prompt)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        prompts.append({"prompt": text, "prompt_token_ids": token_ids})
    return prompts


def _conversations(messages: Any) -> list[list[dict[str, Any]]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f"messages must be a list of messages, or of such lists, got {messages!r}")
    listed: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
    for number, conversation in enumerate(listed):
        for index, message in enumerate(conversation):
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise ValueError(
                    f"messages: number {index} of conversation {number} must be a dict with role and content, "
                    f"got {message!r}"
                )
    return [
        [{**message, "content": _text_of(message["content"])} for message in conversation]
        for conversation in listed
    ]


def _text_of(content: object) -> str:
    """A text, or a list of parts of type `text`, which are joined. Raises ValueError for other content."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "\n".join(part["text"] for part in content)
    raise ValueError(
        f"messages: content must be a text or a list of parts of type text, got {content!r} (images, audio and tool "
        "calls are not supported)"
    )


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    conversation: list[dict[str, Any]],
    chat_template: str | None,
    add_generation_prompt: bool,
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            conversation,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    except (TemplateError, TypeError) as e:
        raise ValueError(f"the chat template does not take these messages: {e}") from e
    assert isinstance(text, str)
    return text
