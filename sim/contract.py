"""The types that cross between the scheduler and whatever runs its steps.

Names, fields and container types are those of vLLM 0.22.0 V1 (`v1/core/sched/output.py`, `v1/outputs.py`,
`sampling_params.py`); fields that vLLM keeps for features outside this product are left out, and the few
that we add say so. All survive pickle; `to_json` / `from_json` are a loss-free pair.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass, field
from typing import Any, Protocol

SAMPLING_EPS = 1e-5
"""A temperature below this is greedy (vLLM `_SAMPLING_EPS`)."""
MIN_TEMPERATURE = 1e-2
"""Smaller positive temperatures are raised to this one, with a warning (vLLM `_MAX_TEMP`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Ranges are vLLM's; others raise ValueError."""

    temperature: float = 1.0
    """0 is greedy; larger is flatter."""
    top_p: float = 1.0
    """Smallest set of most likely tokens with at least this probability, in (0, 1]; 1 is off."""
    top_k: int = 0
    """Number of most likely tokens to draw from; 0 or -1 is off, above the vocabulary is all."""
    seed: int | None = None
    """Own random stream of this request; None draws from the engine's."""
    max_tokens: int | None = 16
    """Number of tokens to generate at most; None: as many as `max_model_len` allows."""
    min_tokens: int = 0
    """No end-of-sequence or stop token is produced before this many tokens."""
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    """Do not stop at the end-of-sequence token (stop_token_ids still stop)."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a finite number, 0 or more, got {self.temperature}")
        if 0 < self.temperature < MIN_TEMPERATURE:
            warnings.warn(
                f"temperature {self.temperature} is raised to {MIN_TEMPERATURE}: smaller values overflow",
                stacklevel=3,
            )
            object.__setattr__(self, "temperature", MIN_TEMPERATURE)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be 0 or -1 (off) or at least 1, got {self.top_k}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be 1 or more, got {self.max_tokens}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be 0 or more, got {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")

    @property
    def greedy(self) -> bool:
        return self.temperature < SAMPLING_EPS


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
    """Blocks to clear before use; only models with Mamba layers need it, so always None here."""


@dataclass(slots=True)
class ModelRunnerOutput:
    """What one step produced."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]
    """Per request in `req_ids` order; [] for a prefill chunk that does not reach the last known token."""


@dataclass(slots=True)
class DraftTokenIds:
    """What a drafter proposes for the next step, after the outputs of this one."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]


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


class StepTimer(Protocol):
    """Runs (or models) one step. The only seam between scheduling and execution."""

    def run(self, plan: SchedulerOutput) -> StepResult:
        """Called once per plan, in order. An empty plan (0 tokens) only drops finished requests and takes 0 ns."""
        ...


# ---------------------------------------------------------------- JSON


def to_json(plan: SchedulerOutput) -> dict[str, Any]:
    """A plan as plain JSON values (sets sorted, tuples as lists); `from_json` gives back an equal plan."""
    data = dataclasses.asdict(plan)
    data["finished_req_ids"] = sorted(plan.finished_req_ids)
    data["preempted_req_ids"] = None if plan.preempted_req_ids is None else sorted(plan.preempted_req_ids)
    data["scheduled_cached_reqs"]["resumed_req_ids"] = sorted(plan.scheduled_cached_reqs.resumed_req_ids)
    return data


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
            "sampling_params": SamplingParams(**data["sampling_params"]),
            "block_ids": tuple(data["block_ids"]),
        }
    )
