"""The metrics of vLLM 0.22.0 by name: what they are, what they were called before, and which ones are not modelled.

Sources: vLLM 0.22.0 `v1/metrics/loggers.py` and `v1/spec_decode/metrics.py`. Counters get `_total` behind their name.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["gauge", "counter", "histogram"]


class Family(NamedTuple):
    """One metric. `label`: beside model_name and engine."""

    name: str
    kind: Kind
    text: str
    label: str | None = None


FAMILIES = (
    Family("vllm:num_requests_running", "gauge", "Requests in the running batch."),
    Family(
        "vllm:num_requests_waiting", "gauge", "Requests that wait to be scheduled, preempted ones among them."
    ),
    Family("vllm:num_requests_waiting_by_reason", "gauge", "Requests that wait, by the reason.", "reason"),
    Family(
        "vllm:engine_sleep_state",
        "gauge",
        "1 for the state that the engine is in: always awake.",
        "sleep_state",
    ),
    Family(
        "vllm:kv_cache_usage_perc", "gauge", "Share of the KV blocks that requests hold; 1 is all of them."
    ),
    Family("vllm:prefix_cache_queries", "counter", "Tokens looked up in the prefix cache."),
    Family("vllm:prefix_cache_hits", "counter", "Tokens found in the prefix cache."),
    Family("vllm:num_preemptions", "counter", "Preemptions."),
    Family("vllm:prompt_tokens", "counter", "Prompt tokens, each prompt once at its first output token."),
    Family("vllm:prompt_tokens_by_source", "counter", "Prompt tokens by where their KV came from.", "source"),
    Family("vllm:prompt_tokens_cached", "counter", "Prompt tokens that were found in a cache."),
    Family("vllm:generation_tokens", "counter", "Output tokens."),
    Family("vllm:request_success", "counter", "Requests that ended, by the reason.", "finished_reason"),
    Family("vllm:request_prompt_tokens", "histogram", "Prompt tokens of a finished request."),
    Family("vllm:request_generation_tokens", "histogram", "Output tokens of a finished request."),
    Family(
        "vllm:iteration_tokens_total", "histogram", "Prompt and output tokens of an engine step with outputs."
    ),
    Family(
        "vllm:request_max_num_generation_tokens", "histogram", "Most output tokens of a request's samples."
    ),
    Family("vllm:request_params_n", "histogram", "Parameter n of a finished request."),
    Family("vllm:request_params_max_tokens", "histogram", "Parameter max_tokens of a finished request."),
    Family("vllm:time_to_first_token_seconds", "histogram", "Time from sending to the first output token."),
    Family("vllm:inter_token_latency_seconds", "histogram", "Time between successive outputs of a request."),
    Family(
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        "Time per output token after the first of a finished request; 0 for one token.",
    ),
    Family(
        "vllm:e2e_request_latency_seconds", "histogram", "Time from sending to the end of a finished request."
    ),
    Family("vllm:request_queue_time_seconds", "histogram", "Time from queued to first scheduled."),
    Family(
        "vllm:request_inference_time_seconds", "histogram", "Time from first scheduled to the last token."
    ),
    Family("vllm:request_prefill_time_seconds", "histogram", "Time from first scheduled to the first token."),
    Family("vllm:request_decode_time_seconds", "histogram", "Time from the first to the last token."),
    Family(
        "vllm:request_prefill_kv_computed_tokens",
        "histogram",
        "Prompt tokens of a finished request that were computed, not found in the prefix cache.",
    ),
)
"""In vLLM's order. All are there for every run."""

CACHE_CONFIG = Family(
    "vllm:cache_config_info", "gauge", "Configuration of the KV cache, as labels; always 1."
)

SPECULATION = (
    Family("vllm:spec_decode_num_drafts", "counter", "Drafts that were verified."),
    Family("vllm:spec_decode_num_draft_tokens", "counter", "Tokens of those drafts."),
    Family("vllm:spec_decode_num_accepted_tokens", "counter", "Tokens of those drafts that were accepted."),
)
"""With speculative decoding only, as in vLLM."""

BLOCK_LIFETIME = Family(
    "vllm:kv_block_lifetime_seconds",
    "histogram",
    "Time from one allocation of a KV block to its next one (all blocks, none left out).",
)
"""Asked for, as in vLLM (--kv-cache-metrics)."""

LEGACY = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries": "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_hits": "vllm:prefix_cache_hits",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
}
"""Old name -> the one that it is a second name of."""
LEGACY_ZEROS = {
    "vllm:num_requests_swapped": "Requests swapped to the CPU: never, since V1.",
    "vllm:cpu_cache_usage_perc": "Share of the CPU's KV blocks in use: there are none, since V1.",
}
"""Old gauges that have no successor."""

NOT_MODELLED = (
    "vllm:external_prefix_cache_queries",
    "vllm:external_prefix_cache_hits",
    "vllm:mm_cache_queries",
    "vllm:mm_cache_hits",
    "vllm:lora_requests_info",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "vllm:kv_block_idle_before_evict_seconds",
    "vllm:kv_block_reuse_gap_seconds",
    "vllm:estimated_flops_per_gpu",
    "vllm:estimated_read_bytes_per_gpu",
    "vllm:estimated_write_bytes_per_gpu",
)
"""Of vLLM 0.22.0, and in no log of ours."""

SLEEP_STATES = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")

# ---------------------------------------------------------------- buckets

Bounds = tuple[float, ...]
TTFT_S: Bounds = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_S: Bounds = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    80.0,
)
REQUEST_S: Bounds = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
BLOCK_S: Bounds = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0),
    *(300.0, 600.0, 1200.0, 1800.0),
)
ITERATION_TOKENS = (1, *(2**power for power in range(3, 15)))
PARAMS_N = (1, 2, 5, 10, 20)
LOW_LATENCY_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.05, 0.1, 0.2)
"""Bounds below the first ones of vLLM, which make short times one bucket; for --low-latency-buckets."""


def with_low_latency(bounds: Bounds) -> Bounds:
    """vLLM's bounds, and those of LOW_LATENCY_S below the first of them."""
    return (*(bound for bound in LOW_LATENCY_S if bound < bounds[0]), *bounds)


def one_two_five(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `largest`."""
    bounds: list[int] = []
    power = 1
    while power <= largest:
        bounds += [digit * power for digit in (1, 2, 5) if digit * power <= largest]
        power *= 10
    return tuple(bounds)
