"""Text of tokens that come one by one, and the strings that end it.

Rules are those of vLLM 0.22.0 (`v1/engine/detokenizer.py`), taken token by token: when a step brings several tokens,
the request ends with the one that completes a stop string, as it would have if they had come singly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from servetwin.sim.contract import SamplingParams

NUM_CONTEXT_TOKENS = 8
"""Last prompt tokens that the text is a continuation of: more than the bytes of a character, each a token."""
LOST_PREFIX = "Invalid prefix encountered"


class DetokenizationError(RuntimeError):
    """The tokenizer could not decode a token of this request."""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found."""

    stop_string: str
    end: int
    """In characters of the text: where it ends."""

    @property
    def start(self) -> int:
        return self.end - len(self.stop_string)


def find_stop_string(text: str, num_new_chars: int, stop_strings: Sequence[str]) -> StopMatch | None:
    """The stop string that ends first among those that end within the last `num_new_chars` of `text`.

    Of several that end at the same place it is the first in the list.
    """
    if num_new_chars == 0:
        return None
    found = []
    for stop_string in stop_strings:
        start = text.find(stop_string, max(len(text) - num_new_chars - len(stop_string) + 1, 0))
        if start >= 0:
            found.append(StopMatch(stop_string, start + len(stop_string)))
    return min(found, key=lambda match: match.end, default=None)


class Stopped(NamedTuple):
    """How a stop string ended a request."""

    stop_string: str
    num_tokens: int
    """Of the tokens just given: how many belong to the output."""


class IncrementalDetokenizer:
    """The text of one request. Bytes that are no whole character yet are held back (and left out at the end)."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises DetokenizationError when the end of the prompt cannot be decoded."""
        self.text = ""
        self._tokenizer = tokenizer
        self._skip_special_tokens = params.skip_special_tokens
        self._stop_strings = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._num_held_chars = 0
        if self._stop_strings and not self._keep_stop:
            self._num_held_chars = max(map(len, self._stop_strings)) - 1
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        for token_id in prompt_token_ids[-NUM_CONTEXT_TOKENS:]:
            self._decode(token_id)

    def update(self, new_token_ids: Sequence[int], *, stopped: bool) -> Stopped | None:
        """Takes in tokens; gives the stop string that they completed, if any, and cuts the text there.

        `stopped`: the last one is an end-of-sequence or stop token, whose text is left out unless stop strings are
        kept. Raises DetokenizationError.
        """
        hidden = len(new_token_ids) - 1 if stopped and not self._keep_stop else None
        for position, token_id in enumerate(new_token_ids):
            self._num_tokens += 1
            if position == hidden:
                break
            num_chars = len(self.text)
            self.text += self._decode(token_id)
            if match := self._find_stop(len(self.text) - num_chars):
                self.text = self.text[: match.end if self._keep_stop else match.start]
                return Stopped(match.stop_string, position + 1)
        return None

    def settled_text(self, *, finished: bool) -> str:
        """The text without what may still become part of a stop string; all of it when the request has ended."""
        if finished or not self._num_held_chars:
            return self.text
        return self.text[: -self._num_held_chars]

    def _find_stop(self, num_new_chars: int) -> StopMatch | None:
        if self._num_tokens <= self._min_tokens:
            return None
        return find_stop_string(self.text, num_new_chars, self._stop_strings)

    def _decode(self, token_id: int) -> str:
        try:
            return self._step(token_id)
        except DetokenizationError as e:
            if LOST_PREFIX not in str(e):
                raise
        # Some decoders rewrite text that they gave already; go on from here, as vLLM does.
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        return self._step(token_id)

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as e:  # `tokenizers` raises nothing narrower
            raise DetokenizationError(f"token {token_id} cannot be decoded: {e}") from e
