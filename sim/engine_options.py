"""One engine as its user asks for it: vLLM's engine arguments, and how they become a configuration.

Shared by the command line (`sim/commands/engine.py`) and by the Python front end (`EngineArgs` in the executor).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from servetwin.sim.cards import UNKNOWN_CARD_LIMITS
from servetwin.sim.config import (
    CacheConfig,
    EngineConfig,
    ExecutorOptions,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    explain,
)
from servetwin.sim.rules import CORRECTIONS, Rules

DEFAULT_MAX_NUM_SEQS, SERVER_MAX_NUM_BATCHED_TOKENS = UNKNOWN_CARD_LIMITS
OFFLINE_MAX_NUM_BATCHED_TOKENS = 8192
"""Default of its class LLM there."""
LONG_PREFILL_FRACTION = 0.04
"""Of max_model_len: vLLM's long_prefill_token_threshold once several partial prefills are asked for."""
EAGLE_METHODS = ("eagle", "eagle3", "mtp")
"""Draft heads: they are accounted for in one way."""
DRAFTER_KEYS = (
    "model", "draft_tensor_parallel_size", "quantization", "revision", "rejection_sample_method", "draft_sample_method",
    "max_model_len", "disable_by_batch_size",
)  # fmt: skip
"""Keys of vLLM's speculative_config that choose or run a drafter of its own, which is not there."""


@dataclass(frozen=True, slots=True)
class ReadSpeculation:
    """A speculative_config, read."""

    config: SpeculativeConfig | None
    without_effect: tuple[str, ...] = ()
    """Its keys that change nothing here."""


def read_speculative_config(given: str | dict[str, Any] | None) -> ReadSpeculation:
    """vLLM's speculative_config (a JSON text or a dict). Raises ValueError; the message begins with what is wrong."""
    if given is None:
        return ReadSpeculation(None)
    try:
        data: Any = json.loads(given) if isinstance(given, str) else dict(given)
    except ValueError as e:
        raise ValueError(f"is no JSON ({e}): {given!r}") from e
    if not isinstance(data, dict):
        raise ValueError(f"must be a JSON object, got {given!r}")
    ignored = [key for key in DRAFTER_KEYS if data.pop(key, None) is not None]
    if data.get("method") in EAGLE_METHODS:
        data["method"] = "eagle"
    if data.pop("parallel_drafting", False) or data.pop("disable_padded_drafter_batch", False):
        raise ValueError("parallel_drafting and disable_padded_drafter_batch are not modelled")
    try:
        return ReadSpeculation(SpeculativeConfig.model_validate(data), tuple(ignored))
    except ValidationError as e:
        raise ValueError(explain(e)) from e


@checked_dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """One engine, as `vllm serve` would be told. None: the default applies.

    Raises pydantic's ValidationError (a ValueError) for a value of another type, or none of those allowed.
    """

    model: Path | str | None = None
    """A local Hugging Face folder."""
    load_format: Literal["auto", "dummy"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: int = 0
    usage_context: Literal["server", "llm_class"] = "server"
    """Whose defaults apply: those of `vllm serve`, or those of vLLM's class LLM."""
    max_model_len: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool = True
    zero_fresh_blocks: bool = False
    """Ours: clear every block before its first use."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_scheduled_tokens: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 1
    """Nothing in 0.22.0 reads it but the default of the threshold."""
    scheduling_policy: str = "fcfs"
    scheduler_reserve_full_isl: bool = True
    async_scheduling: bool | None = None
    performance_mode: Literal["balanced", "throughput"] = "balanced"
    use_v2_model_runner: bool = False
    """Ours: VLLM_USE_V2_MODEL_RUNNER of vLLM."""
    speculative_config: str | dict[str, Any] | None = None
    compile: bool = False
    """Ours: compile the model with torch.compile."""
    threads: int | None = None
    """Ours: threads that torch computes with on the CPU."""
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    max_cudagraph_capture_size: int | None = None
    vllm_compat: str = "0.22:exact"
    """Ours: whose decisions are taken, and whether its known defects are corrected (`sim/rules.py`)."""
    forget_uncomputed_blocks: bool | None = None
    keep_cursor: bool | None = None
    length_outranks_min_tokens: bool | None = None
    null_block_is_no_room: bool | None = None

    def rules(self) -> Rules:
        """The rules of the release and mode, with the switches that were given on their own. Raises ValueError."""
        given = {name: getattr(self, name) for name in CORRECTIONS if getattr(self, name) is not None}
        try:
            return Rules.named(self.vllm_compat).model_copy(update=given)
        except ValueError as e:
            raise ValueError(f"vllm_compat {e}") from e

    def limits(self, max_model_len: int, of_card: tuple[int, int] | None = None) -> tuple[int, int]:
        """(max_num_seqs, max_num_batched_tokens), with vLLM's defaults where they were not given.

        `of_card`: its defaults on the card, where that is known.
        """
        factor = 2 if self.performance_mode == "throughput" else 1
        tokens = self.max_num_batched_tokens
        if tokens is None:
            # Without chunked prefill a step must hold the longest prompt.
            offline = self.usage_context == "llm_class"
            unknown = OFFLINE_MAX_NUM_BATCHED_TOKENS if offline else SERVER_MAX_NUM_BATCHED_TOKENS
            tokens = (unknown if of_card is None else of_card[1]) * factor
            if not self.enable_chunked_prefill:
                tokens = max(tokens, max_model_len)
        seqs = self.max_num_seqs
        if seqs is None:
            seqs = min((DEFAULT_MAX_NUM_SEQS if of_card is None else of_card[0]) * factor, tokens)
        return seqs, tokens

    def executor_options(
        self, *, step_time_s: float | None = None, speculative: SpeculativeConfig | None = None
    ) -> ExecutorOptions:
        """What an executor is built from. Raises pydantic's ValidationError."""
        num_seqs, num_batched_tokens = self.limits(self.max_model_len or 0)
        return ExecutorOptions(
            model=None if self.model is None else Path(self.model),
            load_format=self.load_format,
            dtype=self.dtype,
            block_size=self.block_size,
            num_gpu_blocks=self.num_gpu_blocks_override,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_model_len=self.max_model_len,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_batched_tokens,
            step_time_s=step_time_s,
            speculative=speculative,
            compile=self.compile,
            threads=self.threads,
            enforce_eager=self.enforce_eager,
            cudagraph_capture_sizes=self.cudagraph_capture_sizes,
            max_cudagraph_capture_size=self.max_cudagraph_capture_size,
            seed=self.seed,
        )

    def engine_config(
        self,
        model: ModelConfig,
        num_gpu_blocks: int,
        speculative: SpeculativeConfig | None,
        *,
        asynchronous: bool,
    ) -> EngineConfig:
        """The engine, once its model and its memory are known. Raises ValueError."""
        num_seqs, num_batched_tokens = self.limits(model.max_model_len)
        return EngineConfig(
            model=model,
            cache=CacheConfig(
                block_size=self.block_size,
                num_gpu_blocks=num_gpu_blocks,
                enable_prefix_caching=self.enable_prefix_caching,
                zero_fresh_blocks=self.zero_fresh_blocks,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=num_seqs,
                max_num_batched_tokens=num_batched_tokens,
                max_num_scheduled_tokens=self._token_cap(speculative, num_seqs, num_batched_tokens),
                enable_chunked_prefill=self.enable_chunked_prefill,
                long_prefill_token_threshold=resolve_long_prefill_token_threshold(
                    self.long_prefill_token_threshold, self.max_num_partial_prefills, model.max_model_len
                ),
                policy=self.scheduling_policy,
                scheduler_reserve_full_isl=self.scheduler_reserve_full_isl,
                async_scheduling=asynchronous,
                use_v2_model_runner=self.use_v2_model_runner,
            ),
            speculative=speculative,
            rules=self.rules(),
        )

    def _token_cap(
        self, speculative: SpeculativeConfig | None, num_seqs: int, num_batched_tokens: int
    ) -> int | None:
        """max_num_scheduled_tokens; a drafter that adds tokens to the model's batch takes them off the budget."""
        if (
            self.max_num_scheduled_tokens is not None
            or speculative is None
            or not speculative.extra_slots_per_seq
        ):
            return self.max_num_scheduled_tokens
        left = num_batched_tokens - speculative.extra_slots_per_seq * num_seqs
        if left < 1:
            raise ValueError(
                f"max_num_batched_tokens {num_batched_tokens} leaves no room: method {speculative.method} takes "
                f"{speculative.extra_slots_per_seq} token of it for each of max_num_seqs {num_seqs} requests"
            )
        return left


def why_synchronous(speculative: SpeculativeConfig | None, executor: object = None) -> str | None:
    """What forbids asynchronous scheduling, in words; None when nothing does (vLLM 0.22.0 then turns it on)."""
    if speculative is not None and speculative.forbids_async_scheduling:
        return f"the {speculative.method} drafter needs the tokens that it leaves in the worker"
    if not getattr(executor, "supports_async_scheduling", True):
        return "the executor does not support it"
    return None


def resolve_async_scheduling(wanted: bool | None, reason: str | None) -> bool:
    """On by default; off where something forbids it. ValueError where that was asked for all the same."""
    if reason is not None and wanted:
        raise ValueError(f"async_scheduling: {reason}")
    return reason is None and wanted is not False


def resolve_long_prefill_token_threshold(
    threshold_tokens: int, max_num_partial_prefills: int, max_model_len: int
) -> int:
    """The threshold that vLLM 0.22.0 schedules with, in tokens."""
    if max_num_partial_prefills > 1 and threshold_tokens == 0:
        return int(max_model_len * LONG_PREFILL_FRACTION)
    return threshold_tokens
