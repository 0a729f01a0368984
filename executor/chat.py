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


def _conversations(messages: Conversation | Sequence[Conversation]) -> list[list[dict[str, Any]]]:
    listed: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
    for number, conversation in enumerate(listed):
        for index, message in enumerate(conversation):
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise ValueError(
                    f"messages: number {index} of conversation {number} must be a dict with role and content, "
                    f"got {message!r}"
                )
    return [[dict(message) for message in conversation] for conversation in listed]


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
    except TemplateError as e:
        raise ValueError(f"the chat template does not take these messages: {e}") from e
    assert isinstance(text, str)
    return text
