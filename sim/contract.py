"""The types that cross between the scheduler and whatever runs its steps.

Names, fields and container types are those of vLLM 0.22.0 V1 (`v1/core/sched/output.py`, `v1/outputs.py`,
`sampling_params.py`); fields that vLLM keeps for features outside this product are left out, and the few
that we add say so. All survive pickle; `to_json` / `from_json` are a loss-free pair.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Protocol

from servetwin.sim import sampling_values as values

SAMPLING_EPS = 1e-5
"""A temperature below this is greedy (vLLM `_SAMPLING_EPS`)."""
MIN_TEMPERATURE = 1e-2
"""Smaller positive temperatures are raised to this one, with a warning (vLLM `_MAX_TEMP`)."""


MAX_N = 16_384
"""Most outputs for one prompt, as in vLLM."""


class RequestOutputKind(Enum):
    """What each `RequestOutput` of a request holds (vLLM's names and values)."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """What came since the last one."""
    FINAL_ONLY = 2
    """Everything, once, when the request has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Ranges are vLLM's; others raise ValueError.

    An argument that is not here raises TypeError with its name.
    """

    n: int = 1
    """Outputs for one prompt; the front end makes a request of each."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that is among the outputs, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for every time it is among the outputs, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides (multiplies, below 0) the logit of every token of prompt and outputs; above 0, 1 is off."""
    temperature: float = 1.0
    """0 is greedy; larger is flatter."""
    top_p: float = 1.0
    """Smallest set of most likely tokens with at least this probability, in (0, 1]; 1 is off."""
    top_k: int = 0
    """Number of most likely tokens to draw from; 0 or -1 is off, above the vocabulary is all."""
    min_p: float = 0.0
    """Least probability of a token as a fraction of that of the most likely one, in [0, 1]; 0 is off."""
    seed: int | None = None
    """Own random stream of this request; None: one that its id and the engine's seed name."""
    stop: str | list[str] | None = None
    """Strings that end the text; the front end looks for them, also across tokens."""
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    """Do not stop at the end-of-sequence token (stop_token_ids still stop)."""
    max_tokens: int | None = 16
    """Number of tokens to generate at most; None: as many as `max_model_len` allows."""
    min_tokens: int = 0
    """No end-of-sequence or stop token is produced, and no stop string looked for, before this many tokens."""
    logprobs: int | None = None
    """Give the log probabilities of this many most likely tokens, and of the one taken, for every output; 0: of that
    one only; -1: of the whole vocabulary. They are raw: of the logits before penalties, temperature and masks."""
    detokenize: bool = True
    """Make text of the tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids, before everything else but `logprobs`."""
    allowed_token_ids: list[int] | None = None
    """No other token is produced."""
    bad_words: list[str] = field(default_factory=list)
    """Words that are not produced; the front end turns them into `bad_words_token_ids`. By vLLM's rule a word is banned
    as it is written at the start of a text and, if it has as many tokens there, behind a space."""
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    """Ours (derived in vLLM): sequences of tokens whose last one is not produced behind the others."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        # Made for every request of a simulation: what is left at its default is not looked at twice.
        self._settle_types()
        if 0 < self.temperature < MIN_TEMPERATURE:
            warnings.warn(
                f"temperature {self.temperature} is raised to {MIN_TEMPERATURE}: smaller values overflow",
                stacklevel=3,
            )
            object.__setattr__(self, "temperature", MIN_TEMPERATURE)
        self._check_lengths()
        self._check_shape_of_distribution()
        if self.stop or self.logit_bias or self.allowed_token_ids is not None:
            self._check_token_lists()
        if self.bad_words or self.bad_words_token_ids:
            self._check_bad_words()

    def _settle_types(self) -> None:
        """Numbers, lists and dicts of any kind become those declared. ValueError for what cannot."""
        for value, (name, settled, convert) in zip(_VALUES(self), _CONVERTERS, strict=True):
            if type(value) not in settled and not (type(value) is list and not value):
                object.__setattr__(self, name, convert(name, value))

    def _check_lengths(self) -> None:
        if not 1 <= self.n <= MAX_N:
            raise ValueError(f"n must be 1 to {MAX_N}, got {self.n}")
        if self.n > 1 and self.greedy:
            raise ValueError(f"n must be 1 with greedy sampling (temperature 0), got {self.n}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be 0 or more, got {self.min_tokens}")
        if self.max_tokens is not None:
            if self.max_tokens < 1:
                raise ValueError(f"max_tokens must be 1 or more, got {self.max_tokens}")
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.logprobs is not None and self.logprobs < -1:
            raise ValueError(f"logprobs must be None, -1 (all) or 0 or more, got {self.logprobs}")

    def _check_shape_of_distribution(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a finite number, 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be 0 or -1 (off) or at least 1, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not -2 <= self.presence_penalty <= 2:
            raise ValueError(f"presence_penalty must be in [-2, 2], got {self.presence_penalty}")
        if not -2 <= self.frequency_penalty <= 2:
            raise ValueError(f"frequency_penalty must be in [-2, 2], got {self.frequency_penalty}")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")

    def _check_token_lists(self) -> None:
        if any(not text for text in self.stop_strings):
            raise ValueError("stop must not hold an empty string")
        if self.stop_strings and not self.detokenize:
            raise ValueError("stop strings are looked for in the text: they need detokenize")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must not be empty")
        for token_id, bias in (self.logit_bias or {}).items():
            if not math.isfinite(bias):
                raise ValueError(f"logit_bias must hold finite numbers, got {bias} for token {token_id}")

    def _check_bad_words(self) -> None:
        if any(not words for words in self.bad_words) or any(not ids for ids in self.bad_words_token_ids):
            raise ValueError("bad_words must not hold an empty word")

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        # One text, or another kind of list, became a list when this was made.
        return self.stop if isinstance(self.stop, list) else []

    @property
    def greedy(self) -> bool:
        return self.temperature < SAMPLING_EPS


def _output_kind(name: str, value: object) -> RequestOutputKind:
    try:
        return RequestOutputKind(value)
    except ValueError:
        allowed = ", ".join(f"{kind.name} ({kind.value})" for kind in RequestOutputKind)
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}") from None


_NONE = frozenset([type(None)])
_LIST: frozenset[type] = frozenset()
"""Lists are gone through whatever they are, unless empty."""
_CONVERTERS: tuple[tuple[str, frozenset[type], Callable[[str, object], Any]], ...] = (
    *((name, frozenset([int]), values.integer) for name in ("n", "top_k", "min_tokens")),
    *(
        (name, _NONE | {int}, values.or_none(values.integer))
        for name in ("seed", "max_tokens", "logprobs")
    ),
    *(
        (name, frozenset([float]), values.number)
        for name in (
            "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p",
        )
    ),
    *(
        (name, frozenset([bool]), values.boolean)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
    ),
    ("stop", _NONE, values.or_none(values.stop_strings)),
    ("stop_token_ids", _LIST, values.or_empty(values.integers)),
    ("allowed_token_ids", _NONE, values.or_none(values.integers)),
    ("logit_bias", _NONE, values.or_none(values.biases)),
    ("bad_words", _LIST, values.or_empty(values.texts)),
    ("bad_words_token_ids", _LIST, values.or_empty(values.lists_of_integers)),
    ("output_kind", frozenset([RequestOutputKind]), _output_kind),
)  # fmt: skip
"""Per field: the types that need no second look, and what makes the others fit."""
_VALUES = attrgetter(*(name for name, _, _ in _CONVERTERS))


@dataclass(slots=True)
class EngineCoreRequest:
    """A request on its way from the front end to the engine core."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_ns: int
    """When the front end took it, on the clock of the engine's steps."""
    priority: int = 0
    """Lower is more urgent."""
    cache_salt: str | None = None
    """Shares KV blocks only with requests of the same salt."""
    client_id: str | None = None
    predicted_output_tokens: int | None = None
    """For policies that go by length."""


@dataclass(slots=True)
class NewRequestData:
    """A request that the worker sees for the first time."""

    req_id: str
    prompt_token_ids: list[int] | None
    """None in simulations that never need the tokens themselves; `num_prompt_tokens` then stands alone."""
    sampling_params: SamplingParams
    block_ids: tuple[list[int], ...]
    """The whole block table, one list per KV-cache group (always one group here)."""
    num_computed_tokens: int
    """Tokens whose K/V is already in the cache (prefix hits)."""
    num_prompt_tokens: int
    """Ours: vLLM reads it off prompt_token_ids, which may be None here."""
    num_output_tokens: int = 0
    """Ours: outputs known already; above 0 only for a request resumed under the V2 model runner."""
    prefill_token_ids: list[int] | None = None
    """V2 model runner: every known token, prompt and outputs."""


@dataclass(slots=True)
class CachedRequestData:
    """Requests that the worker already knows: parallel lists, running ones first, then resumed ones."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_token_ids: list[list[int]] = field(default_factory=list)
    """Pipeline parallelism only in vLLM; empty here."""
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """Every known token of each listed request that was not scheduled in the previous step."""
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    """Running: blocks to append (None: none). Resumed: the whole table, replacing the old one."""
    num_computed_tokens: list[int] = field(default_factory=list)
    """Before this step."""
    num_output_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """One step's plan: what the scheduler decided and everything a worker needs to run it."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    """Tokens to compute per request; insertion order = running order, then admission order."""
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    """Drafts to verify in this step; -1 where only the worker knows them (asynchronous scheduling)."""
    num_common_prefix_blocks: list[int]
    """Leading blocks shared by every running request, one number per KV-cache group."""
    finished_req_ids: set[str]
    """Requests that ended since the previous plan; the worker drops their state."""
    preempted_req_ids: set[str] | None = None
    new_block_ids_to_zero: list[int] | None = None
    """Blocks to clear before this step, each once; None unless the engine zeroes fresh blocks (in vLLM: only for
    models with Mamba layers)."""


@dataclass(slots=True)
class LogprobsLists:
    """Log probabilities of one request's new tokens, one entry a token (vLLM's names; there, of a whole batch)."""

    logprob_token_ids: list[list[int]] = field(default_factory=list)
    """The token taken, then the most likely ones, likeliest first."""
    logprobs: list[list[float]] = field(default_factory=list)
    """Natural logarithms, in the order of `logprob_token_ids`."""
    sampled_token_ranks: list[int] = field(default_factory=list)
    """Rank of the token taken in the whole vocabulary, 1 = most likely."""

    def first(self, count: int) -> LogprobsLists:
        """Those of the first `count` tokens."""
        return LogprobsLists(
            self.logprob_token_ids[:count], self.logprobs[:count], self.sampled_token_ranks[:count]
        )


@dataclass(slots=True)
class ModelRunnerOutput:
    """What one step produced."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]
    """Per request in `req_ids` order; [] for a prefill chunk that does not reach the last known token."""
    logprobs: dict[str, LogprobsLists] | None = None
    """Of the requests that asked for them and got tokens, as many entries as tokens."""


@dataclass(slots=True)
class EngineCoreEvent:
    """Something that happened to a request inside the engine core."""

    type: Literal["queued", "scheduled", "preempted"]
    timestamp_ns: int
    """On the clock of `EngineCoreRequest.arrival_ns`."""


@dataclass(slots=True)
class EngineCoreOutput:
    """What one request got out of one step."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    """"length", "stop" or "error" when it ended with this step; an aborted request has no output."""
    stop_reason: int | None = None
    """The stop token that ended it, if one did."""
    logprobs: LogprobsLists | None = None
    """As many entries as new tokens, where it asked for them."""
    events: list[EngineCoreEvent] = field(default_factory=list)
    """What happened to it since its last output."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when it was first scheduled."""
    error: str | None = None
    """Why the engine could not serve it (finish_reason "error")."""


@dataclass(slots=True)
class DraftTokenIds:
    """What a drafter proposes for the next step, after the outputs of this one."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]


class StepShape(NamedTuple):
    """What the duration of a step depends on. A row is prefill until only its last known token is left to compute."""

    new_tokens: int
    """Tokens computed."""
    rows: int
    """Scheduled requests."""
    logits_rows: int
    """Requests that sample a token."""
    decode_rows: int
    decode_context_tokens: int
    """Sum over decode rows of the tokens their attention reads, the new ones included."""
    decode_context_max_tokens: int
    """Largest of these (0 without decode rows)."""
    prefill_tokens: int
    prefill_rows: int
    prefill_pairs: int
    """Sum over prefill rows of new tokens x tokens read: the attention work of chunks."""
    prefill_context_tokens: int
    """Sum over prefill rows of the tokens their attention reads, the new ones included."""
    largest_chunk_tokens: int
    """New tokens of the prefill row that has most (0 without one) ..."""
    largest_chunk_context_tokens: int
    """... and the tokens its attention reads, the new ones included."""
    new_requests: int
    """Requests of which the plan says everything: those that were admitted."""


@dataclass(slots=True)
class StepResult:
    """A step's output and how long it took, in integer nanoseconds."""

    prepare_ns: int
    """Host work on the worker before the device can start (building the batch)."""
    device_ns: int
    """Device busy time (wall time of forward and sampling on a CPU)."""
    output: ModelRunnerOutput
    source: str
    """Where the duration comes from: "measured", "constant", ..."""
    graph_tokens: int | None = None
    """Padded number of tokens where a captured graph ran, else None."""
    draft_token_ids: DraftTokenIds | None = None
    """Speculative decoding with synchronous scheduling: drafts for the next step."""
    parts: dict[str, int] = field(default_factory=dict)
    """Split of device_ns where known, e.g. {"forward_ns": ..., "sample_ns": ...}."""
    shape: StepShape | None = None
    """What the duration was computed from; None where it was not computed."""
    outside: bool = False
    """The duration is extrapolated: the step lies outside the region that was measured."""


class StepTimer(Protocol):
    """Runs (or models) one step. The only seam between scheduling and execution.

    Optional: `overlaps_preparation = False` for a worker that prepares no step before the one in front is through, and
    then `turnaround_ns`, what it takes between two steps.
    """

    def run(self, plan: SchedulerOutput) -> StepResult:
        """Called once per plan, in order. An empty plan (0 tokens) only drops finished requests and takes 0 ns."""
        ...


class EngineDeadError(RuntimeError):
    """The engine core failed, its process died, or it was shut down; nothing more will come of it."""


# ---------------------------------------------------------------- JSON


def to_json(plan: SchedulerOutput) -> dict[str, Any]:
    """A plan as plain JSON values (sets sorted, tuples as lists); `from_json` gives back an equal plan."""
    data = dataclasses.asdict(plan)
    data["finished_req_ids"] = sorted(plan.finished_req_ids)
    data["preempted_req_ids"] = None if plan.preempted_req_ids is None else sorted(plan.preempted_req_ids)
    data["scheduled_cached_reqs"]["resumed_req_ids"] = sorted(plan.scheduled_cached_reqs.resumed_req_ids)
    for new in data["scheduled_new_reqs"]:
        new["sampling_params"] = _sampling_params_to(new["sampling_params"])
    return data


def _sampling_params_to(data: dict[str, Any]) -> dict[str, Any]:
    """Keys of JSON objects are strings, and enumerations their values."""
    bias = data["logit_bias"]
    return data | {
        "output_kind": data["output_kind"].value,
        "logit_bias": None if bias is None else {str(token_id): value for token_id, value in bias.items()},
    }


def _sampling_params_from(data: dict[str, Any]) -> SamplingParams:
    bias, kind = data.get("logit_bias"), data.get("output_kind", 0)
    return SamplingParams(
        **{
            **data,
            "output_kind": RequestOutputKind(kind),
            "logit_bias": None if bias is None else {int(t): value for t, value in bias.items()},
        }
    )


def from_json(data: dict[str, Any]) -> SchedulerOutput:
    """The plan that `to_json` wrote. A missing or unknown field raises ValueError naming it."""
    try:
        return _plan_from(data)
    except (KeyError, TypeError) as e:
        raise ValueError(f"not a scheduler plan: {e}") from e


def _plan_from(data: dict[str, Any]) -> SchedulerOutput:
    cached = dict(data["scheduled_cached_reqs"])
    cached["resumed_req_ids"] = set(cached["resumed_req_ids"])
    cached["new_block_ids"] = [None if b is None else tuple(b) for b in cached["new_block_ids"]]
    preempted = data["preempted_req_ids"]
    return SchedulerOutput(
        **{
            **data,
            "scheduled_new_reqs": [_new_request_from(r) for r in data["scheduled_new_reqs"]],
            "scheduled_cached_reqs": CachedRequestData(**cached),
            "finished_req_ids": set(data["finished_req_ids"]),
            "preempted_req_ids": None if preempted is None else set(preempted),
        }
    )


def _new_request_from(data: dict[str, Any]) -> NewRequestData:
    return NewRequestData(
        **{
            **data,
            "sampling_params": _sampling_params_from(data["sampling_params"]),
            "block_ids": tuple(data["block_ids"]),
        }
    )
