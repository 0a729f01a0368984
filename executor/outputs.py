"""What the front end gives back, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of one token at one position."""

    logprob: float
    """Natural logarithm, of the raw logits (before penalties, temperature and masks)."""
    rank: int
    """In the whole vocabulary, 1 = most likely."""
    decoded_token: str | None
    """Its text; None without a tokenizer."""


@dataclass(slots=True)
class RequestStateStats:
    """When things happened to a request, in seconds. With n > 1: first and last over its outputs, counts added up.

    `arrival_time` is wall-clock time since the epoch; every `*_ts` is on the monotonic clock that the engine's events
    carry, so that differences of these, and only of these, are times spent. 0.0: it has not happened.
    """

    arrival_time: float
    queued_ts: float = 0.0
    """Taken in by the engine."""
    scheduled_ts: float = 0.0
    """First part of a step."""
    first_token_ts: float = 0.0
    """The front end had its first token."""
    last_token_ts: float = 0.0
    """The front end had its last token so far."""
    first_token_latency: float = 0.0
    """From `arrival_time` to the first token, both on the wall clock."""
    num_generation_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One of the n outputs of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    """Sum of the log probabilities of all its tokens so far; None unless `logprobs` were asked for."""
    logprobs: list[dict[int, Logprob]] | None
    """An entry for each of `token_ids`, which holds the token itself and the most likely ones."""
    finish_reason: str | None = None
    """"stop", "length", or "error" (see `RequestOutput.error`); None while it goes on."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for the end-of-sequence token."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """What is known of a request; with `RequestOutputKind.DELTA`, what came since the last one."""

    request_id: str
    prompt: str | None
    """As it was given, if it was a text."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """By index. DELTA: those that have something new."""
    finished: bool
    """All n outputs have ended."""
    metrics: RequestStateStats
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it was first scheduled; None before that."""
    error: str | None = field(default=None, kw_only=True)
    """Ours: why outputs ended with "error"."""
