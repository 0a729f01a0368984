"""Random scenarios for the scheduler: few requests, small pools, and ties made on purpose.

Only what a front end accepts is drawn: prompts shorter than the model length, a pool that holds any single request,
a budget of at least one token per row, and no min_tokens beyond the room left. So whatever does not end is the
scheduler's own doing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]
Draw = st.DrawFn

BOOLEANS = st.booleans()
ONE_IN_THREE = st.sampled_from([False, False, True])
STREAMS = st.sampled_from(["a", "b", "c"])
STOP_TOKENS = st.lists(st.integers(0, 9), max_size=2)
INSTANTS = st.integers(0, 3) | st.integers(0, 24)
"""In steps; many at the start, so that requests compete and arrive together."""
OFFSETS_NS = st.sampled_from([0, 0, 0, 1, -1])

MODELS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1000),
        "vocab_size": st.sampled_from([2, 12, 40, 1000]),
        "eos_token_id": st.none() | st.integers(0, 9),
    }
)
"""Small vocabularies make an end of sequence likely, and equal blocks of different prompts too."""

STEP_TIMES = st.fixed_dictionaries(
    {
        "base_ns": st.sampled_from([4, 10]),
        "per_token_ns": st.sampled_from([0, 0, 1]),
        "per_req_ns": st.sampled_from([0, 0, 2]),
        "empty_ns": st.sampled_from([0, 4]),
    }
)
"""Without a part per token or request, steps end on multiples of the base, where the arrivals are."""


@st.composite
def scenarios(draw: Draw, extended: bool = False) -> Json:
    """A scenario of 1 to 14 requests.

    `extended` also draws speculative decoding, asynchronous scheduling and the reports of the V2 model runner.
    No recorded scenario has asynchronous scheduling with a clock or with drafts of varying length: there the naive
    model is one reading of the rules, and the two can only agree on it.
    """
    config = _config(draw)
    if draw(ONE_IN_THREE):
        config |= _pressure(draw, config["max_num_seqs"])
    if extended:
        config |= _extension(draw)
    scenario: Json = {"config": config, "model": draw(MODELS)}
    clock = draw(st.none() | STEP_TIMES)
    if clock is not None:
        scenario |= {"time_mode": "clock", "step_time": clock}
    times = _Times(clock)
    requests: list[Json] = []
    for i in range(draw(st.integers(1, 14))):
        requests.append(_request(draw, f"r{i}", config["max_model_len"], requests, times))
    return scenario | {"requests": requests}


def _config(draw: Draw) -> Json:
    block_size = draw(st.sampled_from([2, 3, 4, 8, 16]))
    max_model_len = draw(st.integers(8, 64))
    max_num_seqs = draw(st.integers(2, 8) | st.integers(5, 8))
    chunked = draw(st.sampled_from([True, True, True, False]))
    least = max_num_seqs if chunked else max(max_num_seqs, max_model_len)
    budget = least + draw(st.integers(0, 12) | st.integers(0, 2 * max_model_len))
    least_usable = -(-max_model_len // block_size)
    return {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "max_num_scheduled_tokens": draw(
            st.sampled_from([None, None, 0]) | st.integers(1 if chunked else least, budget)
        ),
        "block_size": block_size,
        "num_gpu_blocks": 1 + least_usable + draw(st.integers(0, least_usable)),
        "max_model_len": max_model_len,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "long_prefill_token_threshold": draw(st.just(0) | st.integers(1, 12)),
        "scheduler_reserve_full_isl": draw(st.sampled_from([True, True, False])),
    }


def _pressure(draw: Draw, max_num_seqs: int) -> Json:
    """Several prefills at once share a tight budget under priority: tokens given back then go to others."""
    return {
        "max_num_batched_tokens": max_num_seqs + draw(st.integers(0, 8)),
        "max_num_scheduled_tokens": None,
        "enable_chunked_prefill": True,
        "policy": "priority",
        "long_prefill_token_threshold": draw(st.integers(2, 6)),
        "scheduler_reserve_full_isl": False,
    }


def _extension(draw: Draw) -> Json:
    asynchronous = draw(BOOLEANS)
    methods = ["eagle", "draft_model"] if asynchronous else ["ngram", "eagle", "draft_model"]
    spec = st.fixed_dictionaries(
        {
            "method": st.sampled_from(methods),
            "num_speculative_tokens": st.integers(1, 4),
            "accept_percent": st.sampled_from([0, 50, 80, 100]),
            "variable_length": st.booleans(),
        }
    )
    return {
        "async_scheduling": asynchronous,
        "use_v2_model_runner": draw(BOOLEANS),
        "spec": draw(st.none() | spec),
    }


@dataclass(frozen=True)
class _Times:
    """Instants of a scenario: step numbers, or multiples of the base step time and their neighbours."""

    step_time: Json | None

    @property
    def unit(self) -> str:
        return "step" if self.step_time is None else "ns"

    def instant(self, draw: Draw) -> int:
        step = draw(INSTANTS)
        if self.step_time is None:
            return step
        base: int = self.step_time["base_ns"]
        return max(step * base + draw(OFFSETS_NS), 0)


def _request(draw: Draw, name: str, max_model_len: int, earlier: list[Json], times: _Times) -> Json:
    prompt = _prompt(draw, max_model_len, earlier)
    room = max_model_len - sum(length for *_, length in prompt)
    max_tokens = draw(st.integers(1, max_model_len) | st.integers(max_model_len // 2, max_model_len))
    request: Json = {
        "id": name,
        "prompt_segments": prompt,
        "max_tokens": max_tokens,
        "min_tokens": draw(st.just(0) | st.integers(0, min(max_tokens, room))),
        "priority": draw(st.integers(-1, 1)),
        "ignore_eos": draw(BOOLEANS),
        "stop_token_ids": draw(STOP_TOKENS),
        f"arrival_{times.unit}": times.instant(draw),
    }
    shares_outputs = draw(ONE_IN_THREE)
    if earlier and shares_outputs:
        request["out_key"] = draw(st.sampled_from(earlier))["id"]
    if draw(ONE_IN_THREE):
        request[f"abort_{times.unit}"] = times.instant(draw)
        request["abort_phase"] = draw(st.sampled_from(["before", "during"]))
    return request


def _prompt(draw: Draw, max_model_len: int, earlier: list[Json]) -> list[list[Any]]:
    """Segments of together 1 to max_model_len - 1 tokens; a later turn begins with an earlier one and its outputs.

    Many are short: several requests run before their outputs fill the pool.
    """
    length = draw(st.integers(1, max_model_len - 1) | st.integers(1, max_model_len // 4))
    segments: list[list[Any]] = []
    continues = draw(BOOLEANS)
    if earlier and continues:
        before = draw(st.sampled_from(earlier))
        key = before.get("out_key", before["id"])
        segments = [*before["prompt_segments"], ["o", key, 0, draw(st.integers(1, before["max_tokens"]))]]
    shared = draw(st.integers(0, max_model_len))
    segments = [*segments, ["p", draw(STREAMS), 0, shared], ["p", "tail", 0, max_model_len]]
    return _cut(segments, length)


def _cut(segments: list[list[Any]], length: int) -> list[list[Any]]:
    """The segments up to a length in all, empty ones left out."""
    kept = []
    for kind, key, start, size in segments:
        size = min(size, length)
        length -= size
        if size:
            kept.append([kind, key, start, size])
    return kept
