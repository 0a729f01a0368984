"""What a workload is: a stream of requests, as pure data.

`RequestSpec` is one request as the sender knows it. Times are seconds since the start of the workload
(files and screens use seconds; the simulator turns them into integer nanoseconds at its door).
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

MAX_TIME_S = 4e9
"""More than a century, and less than what 64-bit nanoseconds can count."""
MAX_REQUESTS = 1_000_000_000
"""Of a made-up workload."""
MAX_TOKENS = 1_000_000_000
MAX_TOKEN_ID = 2**31 - 1
MAX_PRIORITY = 2**62


class WorkloadError(ValueError):
    """Input that cannot be used; the message names file, row, field, value and what is allowed."""


class ArgumentError(WorkloadError):
    """An argument that cannot be used. A command line says the name of its flag in the place of `name`."""

    def __init__(self, name: str, problem: str) -> None:
        """`name`: the parameter; `problem`: what the message says after it: its value, and what is allowed."""
        super().__init__(name, problem)
        self.name, self.problem = name, problem

    def __str__(self) -> str:
        return f"{self.name} {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request of a workload.

    The prompt is given either by its tokens (`prompt_token_ids`) or by its length (`prompt_tokens`),
    optionally with the identity of its leading part (`prefix_ids`).
    """

    request_id: str
    arrival_s: float
    """Send time in seconds since the start of the workload, >= 0."""
    prompt_tokens: int
    """Number of prompt tokens, >= 1."""
    output_tokens: int
    """Number of tokens to generate, >= 1: the request's max_tokens."""
    prompt_token_ids: tuple[int, ...] | None = None
    """The prompt itself; its length equals `prompt_tokens`."""
    output_token_ids: tuple[int, ...] | None = None
    """What the recorded engine answered, at most `output_tokens` ids; only modelled step times replay it."""
    priority: int = 0
    """Lower is more urgent, as in vLLM."""
    session_id: str | None = None
    """Not empty, like all names."""
    turn: int | None = None
    """0-based place in its session."""
    think_time_s: float | None = None
    """Seconds between the end of the previous turn and the sending of this one."""
    context_tokens: int | None = None
    """Leading tokens of the prompt that are those of the previous turn of its session: its prompt, then its answer.
    None: not known to be any."""
    prefix_ids: tuple[int, ...] | None = None
    """Identity of the leading blocks of `prefix_block_tokens` tokens: equal ids are equal runs of tokens."""
    prefix_block_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    """None: as the run says (`--ignore-eos`, on for traces)."""
    abort_s: float | None = None
    """When the client gives up, seconds since the start of the workload."""
    client_id: str | None = None
    """Who sent it; fair scheduling shares between clients."""
    cache_salt: str | None = None
    """Prompts share KV blocks only with the same salt (None: with others that have none), as in vLLM."""
    predicted_output_tokens: int | None = None
    """What a length predictor says, >= 1; a scheduling policy may use it, the engine never does."""
    source_row: int | None = None
    """1-based data row in the file it came from, for messages."""

    def __post_init__(self) -> None:
        if self._is_simple():
            return
        for name, problem in self._problems():
            raise WorkloadError(
                f"request {self.request_id!r}: {name} {reprlib.repr(getattr(self, name))} {problem}"
            )

    def _is_simple(self) -> bool:
        """Nearly all requests: lengths in range, and nothing else said that could be wrong."""
        return (
            0 <= self.arrival_s <= MAX_TIME_S
            and 1 <= self.prompt_tokens <= MAX_TOKENS
            and 1 <= self.output_tokens <= MAX_TOKENS
            and self.request_id != ""
            and self.prompt_token_ids is None
            and self.output_token_ids is None
            and self.priority == 0
            and self.session_id is None
            and self.turn is None
            and self.think_time_s is None
            and self.context_tokens is None
            and self.prefix_ids is None
            and self.min_tokens == 0
            and not self.stop_token_ids
            and self.abort_s is None
            and self.client_id is None
            and self.cache_salt is None
            and self.predicted_output_tokens is None
        )

    def _problems(self) -> Iterator[tuple[str, str]]:
        for name in ("arrival_s", "abort_s", "think_time_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds <= MAX_TIME_S:
                yield name, f"must be a number of seconds between 0 and {MAX_TIME_S:g}"
        for name in ("prompt_tokens", "output_tokens"):
            if not 1 <= getattr(self, name) <= MAX_TOKENS:
                yield name, f"must be between 1 and {MAX_TOKENS:,}"
        if self.predicted_output_tokens is not None and not 1 <= self.predicted_output_tokens <= MAX_TOKENS:
            yield "predicted_output_tokens", f"must be between 1 and {MAX_TOKENS:,}"
        for name in ("request_id", "session_id", "client_id", "cache_salt"):
            if getattr(self, name) == "":
                yield name, "must be a text, not empty"
        if abs(self.priority) > MAX_PRIORITY:
            yield "priority", f"must be between -{MAX_PRIORITY} and {MAX_PRIORITY}"
        if not 0 <= self.min_tokens <= self.output_tokens:
            yield "min_tokens", f"must be between 0 and output_tokens ({self.output_tokens})"
        yield from self._token_problems()
        yield from self._prefix_problems()
        yield from self._session_problems()

    def _token_problems(self) -> Iterator[tuple[str, str]]:
        for name in ("prompt_token_ids", "output_token_ids", "stop_token_ids"):
            ids = getattr(self, name)
            if ids and not 0 <= min(ids) <= max(ids) <= MAX_TOKEN_ID:
                yield name, f"must hold ids between 0 and {MAX_TOKEN_ID}"
        if self.prompt_token_ids is not None and len(self.prompt_token_ids) != self.prompt_tokens:
            yield "prompt_tokens", f"differs from the {len(self.prompt_token_ids)} prompt_token_ids"
        answer = len(self.output_token_ids or ())
        if answer > self.output_tokens:
            yield (
                "output_token_ids",
                f"must be at most output_tokens ({self.output_tokens}) ids, not {answer}",
            )

    def _session_problems(self) -> Iterator[tuple[str, str]]:
        if self.turn is not None and not 0 <= self.turn <= MAX_TOKENS:
            yield "turn", f"must be between 0 and {MAX_TOKENS:,}"
        if self.context_tokens is None:
            return
        if self.session_id is None:
            yield "context_tokens", "must be left out where there is no session_id"
        if self.prompt_token_ids is not None:
            yield "context_tokens", "cannot stand beside prompt_token_ids, which say the same"
        if not 0 <= self.context_tokens <= self.prompt_tokens:
            yield "context_tokens", f"must be between 0 and prompt_tokens ({self.prompt_tokens})"

    def _prefix_problems(self) -> Iterator[tuple[str, str]]:
        if self.prefix_ids is None:
            return
        if self.prompt_token_ids is not None:
            yield "prefix_ids", "cannot stand beside prompt_token_ids, which say the same"
        if self.prefix_block_tokens is None or self.prefix_block_tokens < 1:
            yield "prefix_block_tokens", "must be 1 or more where prefix_ids are given"
        elif (len(self.prefix_ids) - 1) * self.prefix_block_tokens >= self.prompt_tokens:
            yield (
                "prefix_ids",
                f"names {len(self.prefix_ids)} blocks of {self.prefix_block_tokens} tokens, "
                f"more than a prompt of {self.prompt_tokens} tokens has",
            )


@runtime_checkable
class Workload(Protocol):
    """A source of requests, open or closed loop.

    A workload that never reacts to `finished` may say so with a class attribute `open_loop = True`; the
    driver then reads one request ahead and no more.
    """

    def next(self) -> RequestSpec | None:
        """The next request to send, or None: nothing more is known (for now, in a closed loop).

        Requests of an open loop come in order of `arrival_s`.
        """
        ...

    def finished(self, request_id: str, now_ns: int) -> None:
        """A request has ended (finished, aborted or refused) at `now_ns` nanoseconds of simulated time."""
        ...


@runtime_checkable
class Sorted(Protocol):
    """Requests that know how to sort themselves without being made one by one."""

    def in_order_of_arrival(self) -> Sequence[RequestSpec]: ...


@dataclass
class ListWorkload:
    """An open-loop workload held in memory, sent in order of arrival (ties keep their order)."""

    requests: Sequence[RequestSpec]
    about: dict[str, Any] = field(default_factory=dict)
    """Where it came from: format, rows read, emitted, dropped by reason; copied into `run.json`."""

    open_loop = True

    def __post_init__(self) -> None:
        if isinstance(self.requests, Sorted):
            self.requests = self.requests.in_order_of_arrival()
        else:
            self.requests = sorted(self.requests, key=lambda r: r.arrival_s)
        self._rest: Iterator[RequestSpec] = iter(self.requests)

    def next(self) -> RequestSpec | None:
        return next(self._rest, None)

    def finished(self, request_id: str, now_ns: int) -> None:
        """Nothing depends on it: the arrivals are fixed."""

    def __len__(self) -> int:
        return len(self.requests)
