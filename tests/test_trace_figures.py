"""Figures of traces: those published or measured of real files, definitions on small made ones, and warnings."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servetwin.workloads import RequestSpec, read_trace, trace_figures
from servetwin.workloads.columns import RequestColumns
from servetwin.workloads.statistics import TraceFigures
from servetwin.workloads.statistics.arrivals import arrival_figures
from servetwin.workloads.statistics.lengths import correlation, find_cap, find_usual
from servetwin.workloads.statistics.prefix_reuse import LRU_BLOCKS, PrefixFigures, prefix_figures
from servetwin.workloads.statistics.ticks import find_ticks
from servetwin.workloads.traces import ReadOptions, Tolerance, Trace


@pytest.fixture
def figures(shared_data):
    """Figures of a shared trace, damaged rows dropped."""

    def of(name: str) -> TraceFigures:
        return trace_figures(
            read_trace(shared_data / "traces" / name, ReadOptions(tolerance=Tolerance.LENIENT))
        )

    return of


def spec(i: int, **fields: object) -> RequestSpec:
    return RequestSpec(
        **{"request_id": f"r{i}", "arrival_s": float(i), "prompt_tokens": 10, "output_tokens": 5} | fields
    )


def trace_of(requests: list[RequestSpec], **fields: object) -> Trace:
    return Trace(
        requests=RequestColumns.of(requests), format="made up", path="x", rows_read=len(requests), **fields
    )


def reuse(prompts: list[tuple[list[int], int]], block: int = 4, **fields: object) -> PrefixFigures:
    """Of prompts given as their ids and their tokens."""
    requests = [
        spec(i, prefix_ids=tuple(ids), prefix_block_tokens=block, prompt_tokens=tokens, **fields)
        for i, (ids, tokens) in enumerate(prompts)
    ]
    found = prefix_figures(RequestColumns.of(requests))
    assert found is not None
    return found


# ---------------------------------------------------------------- real traces


def test_azure_code_has_the_published_figures(figures):
    """The whole file: the first row of the table of measured statistics."""
    found = figures("azure/AzureLLMInferenceTrace_code.csv")
    arrivals = found.arrivals
    assert found.trace.rows_emitted == 8819
    assert arrivals.rate_per_s == pytest.approx(2.567, abs=5e-4)
    assert arrivals.gap_cv == pytest.approx(13.15, abs=0.005)
    assert arrivals.dispersion_1s == pytest.approx(13.2, abs=0.05)
    assert arrivals.peak_to_mean_minute == pytest.approx(4.10, abs=0.005)
    prompt, output = found.prompt_tokens, found.output_tokens
    assert (prompt.p50, int(prompt.p90), prompt.p99) == (1469, 5187, 7436)
    assert (output.p50, output.p90, int(output.p99)) == (13, 55, 251)
    assert (prompt.mean, output.mean) == (pytest.approx(2047.8, abs=0.05), pytest.approx(27.9, abs=0.05))
    assert found.length_correlation == pytest.approx(0.001, abs=5e-4)


def test_the_cut_of_azures_code_service_is_seen(figures):
    warnings = figures("azure/AzureLLMInferenceTrace_code.csv").warnings
    assert any("322 requests" in w and "7,435 to 7,437 tokens" in w for w in warnings)


def test_azure_conv_cut_has_the_measured_figures(figures):
    found = figures("azure/AzureLLMInferenceTrace_conv_rows00001-10000.csv")
    assert found.arrivals.span_s == pytest.approx(1787.309, abs=5e-4)
    assert found.arrivals.rate_per_s == pytest.approx(5.595, abs=5e-4)
    assert found.arrivals.gap_cv == pytest.approx(1.073, abs=5e-4)
    assert found.prompt_tokens.mean == pytest.approx(1242.4, abs=0.05)
    assert found.output_tokens.mean == pytest.approx(218.4, abs=0.05)
    assert found.prefix is None
    assert found.to_json()["prefix"]["block_hit_percent_infinite"] is None
    assert not found.warnings


@pytest.mark.parametrize(
    ("name", "span_s", "blocks_percent", "tokens_percent"),
    [
        ("conversation_trace_rows00001-05000", 1593.0, 33.30, 33.92),
        ("synthetic_trace_rows0001-2000", 532.8, 32.74, 33.60),
    ],
)
def test_mooncake_cuts_have_the_measured_reuse(figures, name, span_s, blocks_percent, tokens_percent):
    found = figures(f"mooncake/{name}.jsonl.gz")
    assert found.arrivals.span_s == pytest.approx(span_s, abs=0.05)
    infinite = found.prefix.infinite
    assert infinite.block_hit_percent == pytest.approx(blocks_percent, abs=0.006)
    assert infinite.token_hit_percent == pytest.approx(tokens_percent, abs=0.006)
    lru = [found.prefix.lru[size].block_hit_percent for size in LRU_BLOCKS]
    assert infinite.block_hit_percent >= lru[0] > lru[1] > lru[2] > 0


def test_ids_of_mooncakes_conversations_seen_before(shared_data):
    """Counting every repeated id, partial blocks too, gives a little more: 33.33 %."""
    trace = read_trace(shared_data / "traces/mooncake/conversation_trace_rows00001-05000.jsonl.gz")
    ids = [id_ for row in trace.requests.values("prefix_ids") for id_ in row]
    assert 100 * (1 - len(set(ids)) / len(ids)) == pytest.approx(33.33, abs=0.005)


def test_mooncakes_ticks_are_told_and_its_poisson_trace_has_none(figures):
    """Arrivals quantised to 3 s; the synthetic trace has real milliseconds."""
    conversation = figures("mooncake/conversation_trace_rows00001-05000.jsonl.gz")
    assert conversation.ticks.tick_s == 3.0
    assert any("3 s apart" in w and "--jitter-ticks" in w for w in conversation.warnings)
    assert figures("mooncake/synthetic_trace_rows0001-2000.jsonl.gz").ticks is None


def test_a_trace_of_sessions_tells_turns_think_times_and_context(figures):
    found = figures("tracelab/multi_session_large.csv")
    sessions = found.sessions
    assert sessions.requests == 303
    assert found.to_json()["sessions"] == sessions.sessions == 48
    assert sessions.context_token_percent == pytest.approx(81.7, abs=0.05)
    assert sessions.think_time_s.p50 == pytest.approx(0.33)
    assert any("only first turns" in w for w in found.warnings)


def test_lengths_without_times_have_no_rate(figures):
    found = figures("vidur/arxiv_summarization_rows1-6000.csv").to_json()
    assert found["rate_per_s"] is found["span_s"] is found["gap_cv"] is None
    assert any("no arrival times" in w for w in found["warnings"])


def test_agents_reuse_most_of_their_prompts(figures):
    found = figures("lmcache_agent/miniswe.lengths.jsonl.gz")
    assert 93 <= found.prefix.infinite.block_hit_percent <= 94


# ---------------------------------------------------------------- arrivals


def test_a_constant_rate_has_no_variation():
    found = arrival_figures(np.arange(0, 600, 0.5))
    assert found.gap_cv == pytest.approx(0, abs=1e-9)
    assert found.dispersion_1s == pytest.approx(0, abs=1e-2)
    assert found.peak_to_mean_minute == pytest.approx(1, abs=0.01)


def test_poisson_arrivals_have_cv_and_dispersion_one():
    times_s = np.cumsum(np.random.default_rng(0).exponential(0.2, 100_000))
    found = arrival_figures(times_s)
    assert found.gap_cv == pytest.approx(1, abs=0.02)
    assert found.dispersion_1s == pytest.approx(1, abs=0.03)
    assert find_ticks(times_s) is None


@pytest.mark.parametrize("times_s", [[0.0], [3.0, 3.0]])
def test_arrivals_without_span_have_no_figures(times_s):
    assert arrival_figures(np.array(times_s)) is None


def test_decades_between_two_requests_take_no_memory():
    """Empty seconds are counted, not kept."""
    assert arrival_figures(np.array([0.0, 4e9])).dispersion_1s == pytest.approx(1.0)


def test_an_idle_head_and_tail_are_told():
    """A long ramp of next to nothing before the load, as in BurstGPT's first days, and a late straggler behind it."""
    busy = np.arange(1000) * 0.1
    head = [spec(i, arrival_s=t) for i, t in enumerate([0.0, 30.0, *(busy + 60)])]
    tail = [spec(i, arrival_s=t) for i, t in enumerate([*busy, 200.0])]
    assert any("idle head: the first" in w for w in trace_figures(trace_of(head)).warnings)
    assert any("idle tail: the last" in w for w in trace_figures(trace_of(tail)).warnings)


def test_turns_that_stand_at_the_start_of_their_session_are_no_ticks():
    requests = [
        spec(10 * s + t, arrival_s=s * 1.7, session_id=f"s{s}", turn=t) for s in range(20) for t in range(5)
    ]
    assert trace_figures(trace_of(requests)).ticks is None
    apart = [replace(r, session_id=None) for r in requests]
    assert trace_figures(trace_of(apart)).ticks is not None


# ---------------------------------------------------------------- lengths


def test_constant_lengths_have_no_correlation():
    assert correlation(np.array([5, 5, 5]), np.array([1, 2, 3])) is None


@pytest.mark.parametrize("tokens", [np.arange(1, 2001), np.full(500, 1024), np.arange(1, 20).repeat(30)])
def test_lengths_that_nobody_cut_have_no_cap(tokens):
    assert find_cap(tokens) is None


def test_a_common_length_is_told():
    tokens = np.concatenate([np.full(300, 3), np.arange(10, 710)])
    assert (find_usual(tokens).tokens, find_usual(tokens).requests) == (3, 300)
    assert find_usual(np.arange(1000)) is None


def test_equal_lengths_and_outputs_of_one_token_are_told():
    warnings = trace_figures(trace_of([spec(i, output_tokens=1) for i in range(200)])).warnings
    assert "all prompts have 10 tokens" in warnings
    assert any("200 outputs of one token" in w for w in warnings)


# ---------------------------------------------------------------- reuse of prefixes


def test_a_partial_last_block_and_the_last_token_are_never_hit():
    """The same prompt again: of 3 begun blocks of 4 the third is partial; of 8 tokens the second holds the last one."""
    assert reuse([([1, 2, 3], 10)] * 2).infinite.block_hit_percent == pytest.approx(100 * 2 / 6)
    assert reuse([([1, 2], 8)] * 2).infinite.block_hit_percent == pytest.approx(100 * 1 / 4)
    assert reuse([([1, 2], 8)] * 2).infinite.token_hit_percent == pytest.approx(100 * 4 / 16)


def test_a_block_behind_another_one_is_another_block():
    assert reuse([([1, 2, 9], 12), ([7, 2, 9], 12)]).infinite.block_hit_percent == 0


def test_a_block_that_was_partial_is_not_in_the_cache():
    assert reuse([([1], 3), ([1, 2], 8)]).infinite.block_hit_percent == 0


def test_salts_and_block_sizes_keep_prompts_apart():
    same = [spec(i, prefix_ids=(1,), prefix_block_tokens=4) for i in range(2)]
    salted = [same[0], replace(same[1], cache_salt="a")]
    sized = [same[0], replace(same[1], prefix_block_tokens=8)]
    found = [prefix_figures(RequestColumns.of(requests)) for requests in (same, salted, sized)]
    assert [figures.infinite.block_hit_percent for figures in found] == [50, 0, 0]


def test_prompts_given_by_their_tokens_are_known():
    """Blocks of 16 tokens: three whole ones shared of four begun."""
    tokens = tuple(range(50))
    requests = [spec(i, prompt_tokens=50, prompt_token_ids=(*tokens[:-1], i)) for i in range(2)]
    assert prefix_figures(RequestColumns.of(requests)).infinite.block_hit_percent == pytest.approx(
        100 * 3 / 8
    )


def test_tokens_and_ids_in_one_trace_are_counted_in_order_of_arrival():
    by_ids = [spec(i, prompt_tokens=20, prefix_ids=(1, 2), prefix_block_tokens=16) for i in (0, 2)]
    by_tokens = [spec(i, prompt_tokens=20, prompt_token_ids=tuple(range(20))) for i in (1, 3)]
    mixed = sorted([*by_ids, *by_tokens, spec(4)], key=lambda r: r.arrival_s)
    found = prefix_figures(RequestColumns.of(mixed))
    assert (found.requests, found.blocks, found.infinite.block_hit_percent) == (4, 8, 25)


def test_ids_beyond_64_bits_stay_apart():
    """Cut to 64 or 32 bits these two would be one."""
    assert reuse([([5], 8), ([5 + 2**64], 8)]).infinite.block_hit_percent == 0
    assert reuse([([5], 8), ([5 + 2**32], 8)]).infinite.block_hit_percent == 0


PROMPTS = st.lists(
    st.builds(
        lambda ids, in_last, block, salt: spec(
            0,
            prefix_ids=tuple(ids),
            prefix_block_tokens=block,
            # The last block may be full, in part, or followed by tokens that no id names.
            prompt_tokens=max(1, block * (len(ids) - 1) + in_last),
            cache_salt=salt,
        ),
        st.lists(st.integers(0, 2), min_size=0, max_size=8),
        st.integers(1, 9),
        st.sampled_from((4, 4, 4, 6)),
        st.sampled_from((None, None, None, "a")),
    ),
    min_size=1,
    max_size=40,
).filter(lambda requests: any(r.prefix_ids for r in requests))


@given(requests=PROMPTS, sizes=st.sets(st.integers(1, 30), min_size=1, max_size=3))
def test_reuse_is_what_a_cache_block_by_block_gives(requests, sizes):
    """The columns at once against a plain cache: infinite, and of a few blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("servetwin.workloads.statistics.prefix_reuse.LRU_BLOCKS", tuple(sizes))
        # A few ids at a time, so that batches end within a trace.
        patch.setattr("servetwin.workloads.statistics.block_hashes.BATCH_ITEMS", 7)
        figures = prefix_figures(RequestColumns.of(requests))
    begun = sum(len(r.prefix_ids) for r in requests)
    tokens = sum(r.prompt_tokens for r in requests)
    for rate, size in [(figures.infinite, 10**9), *((figures.lru[size], size) for size in sizes)]:
        hits = _plain_hits(requests, size)
        assert rate.block_hit_percent == 100 * sum(hits) / begun
        hit_tokens = sum(n * r.prefix_block_tokens for n, r in zip(hits, requests, strict=True))
        assert rate.token_hit_percent == 100 * hit_tokens / tokens


def _plain_hits(requests: list[RequestSpec], size: int) -> list[int]:
    """Blocks of each prompt that a cache of `size` blocks holds; a prompt's last block is the first of it to go."""
    cache: OrderedDict[tuple[object, ...], None] = OrderedDict()
    hits = []
    for r in requests:
        block = r.prefix_block_tokens
        whole = min(r.prompt_tokens // block, len(r.prefix_ids))
        chain = [(r.cache_salt, block, r.prefix_ids[: n + 1]) for n in range(whole)]
        usable = chain[: (r.prompt_tokens - 1) // block]
        hits.append(next((n for n, key in enumerate(usable) if key not in cache), len(usable)))
        for key in reversed(chain):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > size:
            cache.popitem(last=False)
    return hits
