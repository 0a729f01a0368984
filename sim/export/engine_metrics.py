"""One engine's metrics over time, computed from the log: what vLLM's own would have shown at any simulated instant.

What a schedule call decides (queues, blocks, look-ups, preemptions) counts from the start of its step, what a step
brings (tokens, latencies, ends) from its end. Requests that ended by length or stop are the finished ones of the
histograms of requests; those that their client gave up are counted by their reason only. A refused request never was in
the engine. With several replicas a request and its tokens count at the one that it ended at: attempts that were lost
with a replica, and the token that a replica for prompts throws away, are in the figures of steps alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from servetwin.sim.columns import COMPLETED
from servetwin.sim.definitions import ENGINE_INTERVALS, SERVER_E2E, TPOT_OR_ZERO, TTFT
from servetwin.sim.export import vllm_metrics as vllm
from servetwin.sim.export.lost_attempts import LostAttempts
from servetwin.sim.export.series import Counted, Held, Int64s, Sampled
from servetwin.sim.metrics import timestamps
from servetwin.sim.step_rows import expanded, regular_gaps
from servetwin.sim.tables import Tables, ns_array, replica_of
from servetwin.sim.token_times import long_gaps
from servetwin.sim.units import NS_PER_S

if TYPE_CHECKING:
    import pandas as pd

STEP_COLUMNS = (
    "running",
    "waiting",
    "used_blocks",
    "cached_free_blocks",
    "free_blocks",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "preemptions",
    "draft_rows",
    "draft_tokens",
    "accepted_draft_tokens",
)


class Steps(NamedTuple):
    """The steps of one engine in order, arrays [steps]."""

    start_ns: Int64s
    end_ns: Int64s
    regular: Int64s
    """Outputs whose request had one in the step before, too."""
    columns: Mapping[str, Int64s]
    """STEP_COLUMNS."""


class Options(NamedTuple):
    """How histograms are cut, and what is asked for beyond the usual."""

    max_model_len: int
    low_latency: bool = False
    speculation: bool = False
    block_lifetime: bool = False


class EngineMetrics(NamedTuple):
    """By name of the metric, and by the value of its label where it has one ("" where not)."""

    gauges: dict[str, dict[str, Held]]
    counters: dict[str, dict[str, Counted]]
    histograms: dict[str, Sampled]
    generation_tokens: int
    """Of all requests, which the counter ends at: drafts may bring more than a request takes."""


def steps_by_replica(log: Tables) -> dict[int, Steps]:
    """What the metrics need of the steps of each engine, of which there is at least one."""
    import pyarrow as pa

    parts: dict[int, list[tuple[Int64s, Int64s, Int64s, pa.Table]]] = {}
    for part in log.iter_parts("steps"):
        ends, regular = regular_gaps(part)
        table = expanded(part, ["start_s", *STEP_COLUMNS])
        starts = np.rint(table["start_s"].to_numpy() * NS_PER_S).astype(np.int64)
        parts.setdefault(replica_of(part), []).append((starts, ends, regular, table.select(STEP_COLUMNS)))
    nothing = np.zeros(0, dtype=np.int64)
    if not parts:
        return {0: Steps(nothing, nothing, nothing, dict.fromkeys(STEP_COLUMNS, nothing))}
    return {replica: _joined(found) for replica, found in sorted(parts.items())}


def _joined(parts: Sequence[tuple[Int64s, Int64s, Int64s, object]]) -> Steps:
    import pyarrow as pa

    starts, ends, regular = (np.concatenate([part[place] for part in parts]) for place in range(3))
    table = pa.concat_tables([part[3] for part in parts])
    columns = {name: table[name].to_numpy().astype(np.int64) for name in STEP_COLUMNS}
    return Steps(starts, ends, regular, columns)


def engine_metrics(
    log: Tables, replica: int, steps: Steps, asked_tokens: Mapping[str, int], options: Options
) -> EngineMetrics:
    """Of one replica. `asked_tokens`: max_tokens of each request. Raises LogTooOldError."""
    requests = log.requests[log.requests.replica.fillna(0) == replica]
    requests = requests[requests.finish_reason != "refused"]
    outputs = _outputs(log, replica, steps, requests)
    generated = Counted(outputs.time_ns, outputs.tokens)
    counters = _scheduler_counters(steps, options) | _request_counters(requests)
    counters["vllm:generation_tokens"] = {"": generated}
    histograms = _token_histograms(requests, steps, outputs, options)
    histograms |= _request_histograms(requests, asked_tokens, options)
    if options.block_lifetime:
        histograms[vllm.BLOCK_LIFETIME.name] = _block_lifetimes(
            log.blocks[log.blocks.replica.fillna(0) == replica]
        )
    return EngineMetrics(_gauges(steps), counters, histograms, int(requests.num_output_tokens.sum()))


def _gauges(steps: Steps) -> dict[str, dict[str, Held]]:
    used = steps.columns["used_blocks"]
    usable = used + steps.columns["cached_free_blocks"] + steps.columns["free_blocks"]
    waiting = Held(steps.start_ns, steps.columns["waiting"])
    nobody = Held(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    always = np.zeros(1, dtype=np.int64)
    return {
        "vllm:num_requests_running": {"": Held(steps.start_ns, steps.columns["running"])},
        "vllm:num_requests_waiting": {"": waiting},
        # What vLLM defers waits for something outside the engine, which there is none of here.
        "vllm:num_requests_waiting_by_reason": {"capacity": waiting, "deferred": nobody},
        "vllm:engine_sleep_state": {
            state: Held(always - (1 << 62), always + on) for state, on in vllm.SLEEP_STATES.items()
        },
        "vllm:kv_cache_usage_perc": {"": Held(steps.start_ns, used / np.maximum(usable, 1))},
    }


def _scheduler_counters(steps: Steps, options: Options) -> dict[str, dict[str, Counted]]:
    def counted(name: str, times: Int64s = steps.start_ns) -> dict[str, Counted]:
        return {"": Counted(times, steps.columns[name])}

    counters = {
        "vllm:prefix_cache_queries": counted("prefix_query_tokens"),
        "vllm:prefix_cache_hits": counted("prefix_hit_tokens"),
        "vllm:num_preemptions": counted("preemptions"),
    }
    if options.speculation:
        counters |= {
            "vllm:spec_decode_num_drafts": counted("draft_rows", steps.end_ns),
            "vllm:spec_decode_num_draft_tokens": counted("draft_tokens", steps.end_ns),
            "vllm:spec_decode_num_accepted_tokens": counted("accepted_draft_tokens", steps.end_ns),
        }
    return counters


def _request_counters(requests: pd.DataFrame) -> dict[str, dict[str, Counted]]:
    begun = requests[requests.first_token_s.notna()]
    times = ns_array(begun.first_token_s).astype(np.int64)
    prompt, cached = (begun[name].to_numpy(dtype=np.int64) for name in ("num_prompt_tokens", "cached_tokens"))
    ends = {reason: requests[requests.finish_reason == reason].finish_s for reason in vllm.FINISHED_REASONS}
    return {
        "vllm:prompt_tokens": {"": Counted(times, prompt)},
        "vllm:prompt_tokens_by_source": {
            "local_compute": Counted(times, prompt - cached),
            "local_cache_hit": Counted(times, cached),
            "external_kv_transfer": Counted(times, np.zeros_like(cached)),
        },
        "vllm:prompt_tokens_cached": {"": Counted(times, cached)},
        "vllm:request_success": {
            reason: Counted(ns_array(finish_s).astype(np.int64)) for reason, finish_s in ends.items()
        },
    }


# ---------------------------------------------------------------- outputs of steps


class Outputs(NamedTuple):
    """Of the steps that had some, arrays [n]; and the gaps that they ended, arrays [m]."""

    time_ns: Int64s
    tokens: Int64s
    prompt_tokens: Int64s
    """Of requests whose first output this was."""
    gap_end_ns: Int64s
    gap_ns: Int64s
    gaps: Int64s
    """How many there are of each."""


def _outputs(log: Tables, replica: int, steps: Steps, requests: pd.DataFrame) -> Outputs:
    begun = requests[requests.first_token_s.notna()]
    long, lost = long_gaps(log), LostAttempts(log, replica)
    own, regular = long.replica == replica, steps.regular
    if len(lost):
        own, regular = own & ~lost.long_gaps(long), regular - lost.regular_outputs(steps.end_ns)
    odd_end_ns, odd_ns = long.end_ns[own], long.length_ns[own]
    first = _steps_that_end(steps, ns_array(begun.first_token_s).astype(np.int64))
    count = len(steps.end_ns)
    tokens = regular + steps.columns["accepted_draft_tokens"]
    tokens = tokens + np.bincount(first, minlength=count)
    tokens = tokens + np.bincount(_steps_that_end(steps, odd_end_ns), minlength=count)
    prompts = np.bincount(first, begun.num_prompt_tokens.to_numpy(dtype=np.int64), minlength=count)
    some, gaps = tokens > 0, regular > 0
    lengths = np.diff(steps.end_ns, prepend=0)
    return Outputs(
        steps.end_ns[some],
        tokens[some],
        prompts.astype(np.int64)[some],
        np.concatenate([steps.end_ns[gaps], odd_end_ns]),
        np.concatenate([lengths[gaps], odd_ns]),
        np.concatenate([regular[gaps], np.ones(len(odd_ns), dtype=np.int64)]),
    )


def _steps_that_end(steps: Steps, times_ns: Int64s) -> Int64s:
    """The place of the step that ends at each instant; of several the first, for empty ones come after."""
    return np.minimum(np.searchsorted(steps.end_ns, times_ns), max(len(steps.end_ns) - 1, 0))


def _token_histograms(
    requests: pd.DataFrame, steps: Steps, outputs: Outputs, options: Options
) -> dict[str, Sampled]:
    begun = requests[requests.first_token_s.notna()]
    times = timestamps(begun)
    gap_bounds = vllm.with_low_latency(vllm.TOKEN_GAP_S) if options.low_latency else vllm.TOKEN_GAP_S
    return {
        "vllm:time_to_first_token_seconds": Sampled(
            times.first_token.astype(np.int64), TTFT.of(times).astype(np.int64), vllm.TTFT_S, scale=NS_PER_S
        ),
        "vllm:inter_token_latency_seconds": Sampled(
            outputs.gap_end_ns, outputs.gap_ns, gap_bounds, scale=NS_PER_S, weights=outputs.gaps
        ),
        "vllm:iteration_tokens_total": Sampled(
            outputs.time_ns, outputs.tokens + outputs.prompt_tokens, vllm.ITERATION_TOKENS
        ),
    }


# ---------------------------------------------------------------- finished requests


def _request_histograms(
    requests: pd.DataFrame, asked_tokens: Mapping[str, int], options: Options
) -> dict[str, Sampled]:
    done = requests[requests.finish_reason.isin(COMPLETED)]
    times = timestamps(done)
    ends = times.finish.astype(np.int64)
    tokens_bounds = vllm.one_two_five(options.max_model_len)
    prompt, output, cached = (
        done[name].to_numpy(dtype=np.int64)
        for name in ("num_prompt_tokens", "num_output_tokens", "cached_tokens")
    )
    asked = np.array([asked_tokens.get(request_id, 0) for request_id in done.request_id], dtype=np.int64)
    counts = {
        "vllm:request_prompt_tokens": prompt,
        "vllm:request_generation_tokens": output,
        "vllm:request_max_num_generation_tokens": output,
        "vllm:request_prefill_kv_computed_tokens": prompt - cached,
    }
    gap_bounds, request_bounds = vllm.TOKEN_GAP_S, vllm.REQUEST_S
    if options.low_latency:
        gap_bounds, request_bounds = vllm.with_low_latency(gap_bounds), vllm.with_low_latency(request_bounds)
    durations = {
        "vllm:e2e_request_latency_seconds": SERVER_E2E,
        "vllm:request_queue_time_seconds": ENGINE_INTERVALS["queue"],
        "vllm:request_inference_time_seconds": ENGINE_INTERVALS["inference"],
        "vllm:request_prefill_time_seconds": ENGINE_INTERVALS["prefill"],
        "vllm:request_decode_time_seconds": ENGINE_INTERVALS["decode"],
    }
    found = {name: Sampled(ends, values, tokens_bounds) for name, values in counts.items()}
    found |= {
        name: Sampled(ends, metric.of(times).astype(np.int64), request_bounds, scale=NS_PER_S)
        for name, metric in durations.items()
    }
    per_token = np.rint(TPOT_OR_ZERO.of(times)).astype(np.int64)
    found["vllm:request_time_per_output_token_seconds"] = Sampled(ends, per_token, gap_bounds, scale=NS_PER_S)
    found["vllm:request_params_n"] = Sampled(ends, np.ones_like(ends), vllm.PARAMS_N)
    known = asked > 0
    found["vllm:request_params_max_tokens"] = Sampled(ends[known], asked[known], tokens_bounds)
    return found


def _block_lifetimes(blocks: pd.DataFrame) -> Sampled:
    """From an allocation to the next one of the same block; a reuse of its content is no allocation."""
    rows = blocks.sort_values(["block_id", "from_s"], kind="stable")
    reused = (rows.ended.shift() == "reused") & (rows.block_id == rows.block_id.shift())
    allocated = rows[~reused]
    begins = ns_array(allocated.from_s).astype(np.int64)
    again = allocated.block_id.to_numpy()[1:] == allocated.block_id.to_numpy()[:-1]
    lifetimes, ends = np.diff(begins)[again], begins[1:][again]
    return Sampled(ends, lifetimes, vllm.BLOCK_S, scale=NS_PER_S)
