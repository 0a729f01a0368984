"""Resolved configuration: frozen models that check themselves and refuse unknown keys.

Defaults are those of `vllm serve` 0.22.0 on a card that its device rule does not know.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from servetwin.sim.cluster.config import ClusterConfig
from servetwin.sim.config_base import Config, NotNegative, Positive
from servetwin.sim.rules import Rules

MAX_THREADS = 1024
"""More than any machine has processors for."""

ASSUMED_MAX_MODEL_LEN = 131_072
ASSUMED_NUM_GPU_BLOCKS = 40_000
DEFAULT_PROMPT_LOOKUP = 5
NUM_RESERVED_BLOCKS = 1
"""Block 0 is the null block: never handed out, so a pool of N blocks serves N - 1."""


class ModelConfig(Config):
    """The served model, as far as scheduling and token identity need it."""

    name: str | None = None
    max_model_len: Positive = ASSUMED_MAX_MODEL_LEN
    """Longest prompt + output in tokens."""
    vocab_size: Positive = 32_000
    eos_token_id: int | None = None
    extra_eos_token_ids: tuple[int, ...] = ()
    """Further end-of-sequence tokens: they become stop tokens of every request that does not ignore EOS."""


class CacheConfig(Config):
    """The paged KV cache."""

    block_size: Positive = 16
    """Tokens per block."""
    num_gpu_blocks: Annotated[int, Field(ge=2)] = ASSUMED_NUM_GPU_BLOCKS
    """Blocks in the pool, the null block 0 included."""
    enable_prefix_caching: bool = True
    zero_fresh_blocks: bool = False
    """Have every block cleared before its first use."""

    @property
    def usable_blocks(self) -> int:
        return self.num_gpu_blocks - NUM_RESERVED_BLOCKS


class SchedulerConfig(Config):
    """The scheduler's limits and switches, named as in vLLM."""

    max_num_seqs: Positive = 256
    """Requests that may run at once (seats)."""
    max_num_batched_tokens: Positive = 2048
    """Tokens per step."""
    max_num_scheduled_tokens: NotNegative | None = None
    """A smaller budget per step than max_num_batched_tokens; None or 0: the same."""
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: NotNegative = 0
    """Longest piece of a prompt taken in one step, in tokens; 0 is off."""
    policy: str = "fcfs"
    """A built-in name, or module:Class."""
    scheduler_reserve_full_isl: bool = True
    """Admit a request only when its whole known sequence fits (the full-sequence gate)."""
    async_scheduling: bool = False
    """Schedule a step before the output of the previous one is known (two steps in flight)."""
    use_v2_model_runner: bool = False
    """Report resumed requests as new ones with all their tokens, as vLLM does for its second model runner."""

    @property
    def token_budget(self) -> int:
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens


class SpeculativeConfig(Config):
    """Speculative decoding, named as in vLLM: a drafter guesses tokens that the next step verifies."""

    method: Literal["ngram", "eagle", "draft_model"]
    """Who drafts: a look-up in the request's own tokens, a draft head on the model, or a small model."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=1_000)]
    prompt_lookup_max: Positive | None = None
    """ngram: longest run of last tokens that is looked up (default: as prompt_lookup_min, else 5)."""
    prompt_lookup_min: Positive | None = None
    """ngram: shortest one (default: as prompt_lookup_max, else 5)."""

    @property
    def lookup_range(self) -> tuple[int, int]:
        """(prompt_lookup_min, prompt_lookup_max) with vLLM's defaults."""
        either = self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_PROMPT_LOOKUP
        return self.prompt_lookup_min or either, self.prompt_lookup_max or either

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        lookup = {"prompt_lookup_min": self.prompt_lookup_min, "prompt_lookup_max": self.prompt_lookup_max}
        given = [name for name, value in lookup.items() if value is not None]
        if given and self.method != "ngram":
            raise ValueError(f"{given[0]} goes with method ngram only, got method {self.method}")
        shortest, longest = self.lookup_range
        if shortest > longest:
            raise ValueError(f"prompt_lookup_min {shortest} is above prompt_lookup_max {longest}")
        return self

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots to keep free for the drafter behind a running request's tokens (an n-gram look-up has no KV)."""
        return 0 if self.method == "ngram" else self.num_speculative_tokens

    @property
    def drops_last_hit(self) -> bool:
        """A draft head needs the hidden state before its first token: the last block of a prefix hit is computed."""
        return self.method == "eagle"

    @property
    def extra_slots_per_seq(self) -> int:
        """Tokens of the batch that the drafter takes up for every request (`max_num_new_slots_for_drafting`)."""
        return 1 if self.method == "draft_model" else 0

    @property
    def forbids_async_scheduling(self) -> bool:
        """This drafter needs the tokens themselves, which asynchronous scheduling leaves in the worker."""
        return self.method == "ngram"


class EngineConfig(Config):
    """One engine. Raises pydantic's ValidationError for a value out of range or a combination that cannot run."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculative: SpeculativeConfig | None = None
    rules: Rules = Rules()

    @property
    def num_lookahead_tokens(self) -> int:
        return self.speculative.num_lookahead_tokens if self.speculative else 0

    def refusal(self, num_prompt_tokens: int, max_tokens: int, min_tokens: int) -> str | None:
        """Why a request of this size could never run to its end, in words; None when it can.

        vLLM refuses the first kind in its front end; the others make 0.22.0 wait or spin for ever.
        """
        limit = self.model.max_model_len
        room = limit - num_prompt_tokens
        if room < 1:
            return f"prompt of {num_prompt_tokens} tokens leaves no room for output: max_model_len is {limit}"
        if min_tokens > room and not self.rules.length_outranks_min_tokens:
            return (
                f"min_tokens {min_tokens} cannot be reached: a prompt of {num_prompt_tokens} tokens leaves {room} of "
                f"max_model_len {limit}, and vLLM 0.22.0 would hold it for ever (the correction "
                "length_outranks_min_tokens ends it at the limit)"
            )
        # The last token that can be sampled is never computed, but a drafter wants its slots behind the others.
        lookahead = self.num_lookahead_tokens
        slots = min(min(num_prompt_tokens + max_tokens, limit) - 1 + lookahead, limit)
        most = -(-slots // self.cache.block_size)
        if most > self.cache.usable_blocks:
            drafts = f" and {lookahead} slots for the drafter" if lookahead else ""
            return (
                f"prompt of {num_prompt_tokens} and output of {min(max_tokens, room)} tokens{drafts} need {most} "
                f"blocks; the pool has {self.cache.usable_blocks} usable ones"
            )
        return None

    @model_validator(mode="after")
    def _can_run(self) -> Self:
        s, m = self.scheduler, self.model
        if s.max_num_batched_tokens < s.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {s.max_num_batched_tokens} is below max_num_seqs {s.max_num_seqs}: "
                "every running request needs a token of the budget"
            )
        if (s.max_num_scheduled_tokens or 0) > s.max_num_batched_tokens:
            raise ValueError(
                f"max_num_scheduled_tokens {s.max_num_scheduled_tokens} is above max_num_batched_tokens "
                f"{s.max_num_batched_tokens}, which it may only lower"
            )
        if not s.enable_chunked_prefill and s.token_budget < m.max_model_len:
            name = "max_num_scheduled_tokens" if s.max_num_scheduled_tokens else "max_num_batched_tokens"
            raise ValueError(
                f"{name} {s.token_budget} is below max_model_len {m.max_model_len}: without "
                "chunked prefill a longer prompt could never be scheduled"
            )
        self._check_pool()
        self._check_drafting()
        return self

    def _check_pool(self) -> None:
        """As in vLLM the reserved block counts as room (unless corrected); a request that needs it is refused later."""
        corrected = self.rules.null_block_is_no_room
        blocks = self.cache.usable_blocks if corrected else self.cache.num_gpu_blocks
        fits = blocks * self.cache.block_size
        if fits < self.model.max_model_len:
            without = " (one of which serves nobody: null_block_is_no_room)" if corrected else ""
            raise ValueError(
                f"num_gpu_blocks {self.cache.num_gpu_blocks}{without} of block_size {self.cache.block_size} hold "
                f"{fits} tokens, below max_model_len {self.model.max_model_len}: raise the number of blocks or lower "
                "max_model_len"
            )

    def _check_drafting(self) -> None:
        if self.speculative and self.speculative.forbids_async_scheduling and self.scheduler.async_scheduling:
            raise ValueError(
                f"async_scheduling does not go with speculative method {self.speculative.method!r}, which drafts "
                "from tokens that the scheduler does not have yet"
            )


class ExecutorOptions(Config):
    """What an executor (`--executor NAME|module:attribute`) is built from; None means: the executor decides."""

    model: Path | None = None
    """A local Hugging Face folder."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: the configuration alone, with random weights."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    block_size: Positive = 16
    num_gpu_blocks: Annotated[int, Field(ge=2)] | None = None
    kv_cache_memory_bytes: Positive | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Part of the device's memory that the engine may use, weights included."""
    max_model_len: Positive | None = None
    max_num_seqs: Positive = 256
    max_num_batched_tokens: Positive = 2048
    step_time_s: Annotated[float, Field(gt=0)] | None = None
    """The constant executor's step time."""
    speculative: SpeculativeConfig | None = None
    """Who drafts, where the executor does (method ngram)."""
    compile: bool = False
    """Compile the model with torch.compile."""
    threads: Annotated[int, Field(gt=0, le=MAX_THREADS, strict=True)] | None = None
    """Threads that the processor computes with."""
    enforce_eager: bool = False
    """Capture no CUDA graphs of decode batches."""
    cudagraph_capture_sizes: tuple[Positive, ...] | None = None
    """Sizes of decode batches to capture."""
    max_cudagraph_capture_size: Positive | None = None
    """Largest of the default sizes."""
    seed: int = 0

    @model_validator(mode="after")
    def _check_graph_sizes(self) -> Self:
        sizes, largest = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        if self.enforce_eager and (sizes is not None or largest is not None):
            raise ValueError("enforce_eager captures nothing: give no CUDA graph sizes with it")
        if sizes == ():
            raise ValueError("cudagraph_capture_sizes must not be empty; enforce_eager captures nothing")
        if sizes is not None and largest not in (None, max(sizes)):
            raise ValueError(
                f"max_cudagraph_capture_size {largest} is not the largest of cudagraph_capture_sizes, {max(sizes)}"
            )
        return self


class RunConfig(Config):
    """Everything that makes a run what it is; written to `run.json`."""

    engine: EngineConfig
    """Of every replica."""
    cluster: ClusterConfig = ClusterConfig()
    executor: str
    """torch | constant | roofline | module:attribute"""
    seed: int = 0
    ignore_eos: bool = True
    step_time_s: float | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    num_prompts: Positive | None = None
    live: bool = False
    """On the wall clock, not in simulated time."""
    max_concurrency: Positive | None = None
    """Requests that the client keeps in flight at most."""
    draft_acceptance_rate: float | None = None
    """Probability that a draft is right, where no model verifies drafts."""
    reset_prefix_cache_at: tuple[float, ...] = ()
    """Simulated seconds."""
    assumed: tuple[str, ...] = ()
    """Settings that nobody gave and no model implied, in words."""


def explain(error: ValidationError) -> str:
    """The first problem of a validation error as one line: field, value, what is allowed."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(x) for x in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] in ("value_error", "missing", "json_invalid"):
        line = f"{place}: {message}" if place else message
    else:
        line = f"{place} {first['input']!r}: {message}"
    more = error.error_count() - 1
    return f"{line} (and {more} more)" if more else line
