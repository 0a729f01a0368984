"""Turns what a user gives (a prompt, sampling parameters) into a request for the engine, or refuses it by name.

Nothing that is queued can be refused later: what the engine could never run to its end is refused here too.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

from servetwin.executor.parallel_sampling import ParentRequest
from servetwin.sim import sampling_values as values
from servetwin.sim.config import EngineConfig, ModelConfig
from servetwin.sim.contract import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PromptType: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a dict with `prompt` (text) or `prompt_token_ids`, and `cache_salt` if wanted. With both, the
ids are what the model gets and the text is only given back."""
MAX_ARRIVAL_TIME = 9e9
"""Seconds since the epoch, in nanoseconds as a 64-bit number: until the year 2255."""
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class RequestOptions(TypedDict, total=False):
    """What may be said of a request besides; the engine's scheduling policy may go by it."""

    priority: int
    """Lower is more urgent (default 0)."""
    client_id: str | None
    """Ours: who sends it."""
    predicted_output_tokens: int | None
    """Ours: what a predictor says of its length."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str | None
    token_ids: list[int]
    cache_salt: str | None


class InputProcessor:
    """Checks and translates for one engine. Every refusal is a ValueError with field, value and what is allowed."""

    def __init__(
        self, config: EngineConfig, tokenizer: PreTrainedTokenizerBase | None, *, max_logprobs: int
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._max_logprobs = max_logprobs

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> ParentRequest:
        """The request; it has arrived now unless `arrival_time` (seconds since the epoch) says when."""
        _check_text("request_id", request_id)
        if not isinstance(params, SamplingParams):
            raise ValueError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}: {params!r}"
            )
        checked = _checked_options(options)
        read = self._read_prompt(prompt)
        settled = self._settle(params, len(read.token_ids))
        now = time.time()
        arrived = now if arrival_time is None else _checked_arrival(arrival_time)
        return ParentRequest(
            request_id=request_id,
            prompt=read.text,
            prompt_token_ids=read.token_ids,
            params=settled,
            arrival_time=arrived,
            arrival_ns=time.monotonic_ns() - round((now - arrived) * 1e9),
            cache_salt=read.cache_salt,
            **checked,
        )

    # ---------------------------------------------------------------- prompt

    def _read_prompt(self, prompt: PromptType) -> _Prompt:
        if isinstance(prompt, Mapping):
            return self._read_dict(prompt)
        if isinstance(prompt, str):
            return _Prompt(prompt, self._encode(prompt), None)
        return _Prompt(None, self._read_ids(prompt), None)

    def _read_dict(self, prompt: Mapping[str, Any]) -> _Prompt:
        for key in prompt:
            if key not in PROMPT_KEYS:
                raise ValueError(f"prompt has an unknown key {key!r}; allowed: {', '.join(PROMPT_KEYS)}")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise ValueError(f"prompt must be a text, got {type(text).__name__}: {text!r}")
        if token_ids is not None:
            ids = self._read_ids(token_ids)
        elif text is not None:
            ids = self._encode(text)
        else:
            raise ValueError("prompt needs one of the keys prompt and prompt_token_ids")
        return _Prompt(text, ids, _checked_salt(prompt.get("cache_salt")))

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise ValueError(
                f"prompt {_short(text)} is a text, and there is no tokenizer: give prompt_token_ids, or a tokenizer"
            )
        if text:
            _check_text("prompt", text)
        token_ids: list[int] = self._tokenizer.encode(text)
        if not token_ids:
            raise ValueError(f"prompt {_short(text)} is empty: it has no tokens")
        self._check_vocabulary("prompt", token_ids)
        return token_ids

    def _read_ids(self, given: object) -> list[int]:
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            raise ValueError(f"prompt_token_ids must be a list of token ids, got {given!r}")
        token_ids = []
        for index, token_id in enumerate(given):
            try:
                token_ids.append(operator.index(token_id))
            except TypeError as e:
                raise ValueError(f"prompt_token_ids[{index}] must be an integer, got {token_id!r}") from e
        if not token_ids:
            raise ValueError("prompt_token_ids is empty: a prompt needs at least one token")
        self._check_vocabulary("prompt_token_ids", token_ids)
        return token_ids

    def _check_vocabulary(self, field: str, token_ids: Iterable[int]) -> None:
        vocab_size = self._config.model.vocab_size
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"{field}[{index}] is {token_id}: outside the vocabulary, 0 to {vocab_size - 1}"
                )

    # ---------------------------------------------------------------- sampling parameters

    def _settle(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """The parameters as the engine takes them."""
        for name in ("seed", "max_tokens", "top_k"):
            if (value := getattr(params, name)) is not None:
                values.integer(name, value)
        for index, text in enumerate(params.stop_strings):
            _check_text(f"stop[{index}]", text)
        for index, text in enumerate(params.bad_words):
            _check_text(f"bad_words[{index}]", text)
        if params.stop_strings and self._tokenizer is None:
            raise ValueError(f"stop {params.stop_strings!r} is looked for in the text: it needs a tokenizer")
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        self._check_biased_tokens(params.logit_bias or {})
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_logprobs(params.logprobs)
        room = self._config.model.max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if refusal := self._config.refusal(num_prompt_tokens, max_tokens, params.min_tokens):
            raise ValueError(refusal)
        settled = replace(
            params,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids(params, self._config.model),
            bad_words_token_ids=[*params.bad_words_token_ids, *self._bad_words_token_ids(params.bad_words)],
        )
        for index, token_ids in enumerate(settled.bad_words_token_ids):
            self._check_vocabulary(f"bad_words_token_ids[{index}]", token_ids)
        self._check_something_is_left(settled)
        return settled

    def _check_biased_tokens(self, logit_bias: Mapping[int, float]) -> None:
        vocab_size = self._config.model.vocab_size
        for token_id in logit_bias:
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"logit_bias has token id {token_id}: outside the vocabulary, 0 to {vocab_size - 1}"
                )

    def _check_logprobs(self, logprobs: int | None) -> None:
        if logprobs is None:
            return
        vocab_size = self._config.model.vocab_size
        limit = vocab_size if self._max_logprobs == -1 else self._max_logprobs
        if (vocab_size if logprobs == -1 else logprobs) > limit:
            raise ValueError(
                f"logprobs {logprobs} asks for more than the engine's max_logprobs {self._max_logprobs} "
                f"(-1: the whole vocabulary of {vocab_size})"
            )

    def _bad_words_token_ids(self, bad_words: list[str]) -> list[list[int]]:
        """Each word as it stands at the beginning of a text and, where that is another token, behind a space."""
        if bad_words and self._tokenizer is None:
            raise ValueError(
                f"bad_words {bad_words!r} are texts: they need a tokenizer, or give bad_words_token_ids"
            )
        sequences = []
        for word in bad_words:
            # A word of nothing but spaces is that.
            bare = word.lstrip() or word
            alone, spaced = (self._encode_word(prefix + bare) for prefix in ("", " "))
            if not alone:
                raise ValueError(f"bad_words: {word!r} has no tokens")
            sequences.append(alone)
            if len(spaced) == len(alone) and spaced[0] != alone[0]:
                sequences.append(spaced)
        return sequences

    def _encode_word(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def _check_something_is_left(self, params: SamplingParams) -> None:
        """Refuses parameters under which the first token could be none at all."""
        model = self._config.model
        banned = {token_ids[0] for token_ids in params.bad_words_token_ids if len(token_ids) == 1}
        because = ["bad_words"] if banned else []
        if params.min_tokens:
            banned |= end_token_ids(params, model)
            because.append(f"min_tokens {params.min_tokens} (no end-of-sequence or stop token before)")
        allowed = params.allowed_token_ids
        if banned.issuperset(range(model.vocab_size) if allowed is None else allowed):
            what = "the whole vocabulary" if allowed is None else f"all of allowed_token_ids {allowed}"
            raise ValueError(f"{' and '.join(because)} ban {what}: no token is left to produce")


def stop_token_ids(params: SamplingParams, model: ModelConfig) -> list[int]:
    """The request's stop tokens, with the model's further end-of-sequence tokens unless it ignores those."""
    if params.ignore_eos:
        return params.stop_token_ids
    return sorted({*params.stop_token_ids, *model.extra_eos_token_ids})


def end_token_ids(params: SamplingParams, model: ModelConfig) -> set[int]:
    """Every token that `min_tokens` holds back: vLLM counts end-of-sequence tokens among them in any case."""
    eos = set() if model.eos_token_id is None else {model.eos_token_id}
    return eos | {*model.extra_eos_token_ids, *params.stop_token_ids}


def _checked_options(options: RequestOptions) -> RequestOptions:
    """Of the right types, since they go to the engine, where a wrong one would end it."""
    allowed = RequestOptions.__annotations__
    if unknown := options.keys() - allowed.keys():
        raise TypeError(f"a request has no option {min(unknown)!r}; allowed: {', '.join(allowed)}")
    checked = options.copy()
    if "priority" in options:
        checked["priority"] = values.integer("priority", options["priority"])
    if (client_id := options.get("client_id")) is not None:
        _check_text("client_id", client_id)
    if (given := options.get("predicted_output_tokens")) is not None:
        predicted = checked["predicted_output_tokens"] = values.integer("predicted_output_tokens", given)
        if predicted < 1:
            raise ValueError(f"predicted_output_tokens must be 1 or more, got {predicted}")
    return checked


def _checked_salt(cache_salt: object) -> str | None:
    return None if cache_salt is None else _check_text("cache_salt", cache_salt)


def _check_text(field: str, text: object) -> str:
    """A text that is not empty and can be sent: half a surrogate pair cannot."""
    if not isinstance(text, str) or not text:
        raise ValueError(f"{field} must be a text that is not empty, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"{field} {text!r} is not valid Unicode: {e.reason}") from e
    return text


def _checked_arrival(arrival_time: object) -> float:
    seconds = values.number("arrival_time", arrival_time)
    if not 0 <= seconds <= MAX_ARRIVAL_TIME:
        raise ValueError(f"arrival_time must be seconds since the epoch, got {arrival_time!r}")
    return seconds


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
