"""Readers of JSON and JSON-lines traces: what each makes of its format, and of damage."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import orjson
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from servetwin.workloads import RequestSpec, WorkloadError, write_jsonl
from servetwin.workloads.traces import FORMATS, ReadOptions, Tolerance, Trace, read_trace
from servetwin.workloads.traces.nested import documents
from servetwin.workloads.traces.source import Source

SECOND = 1_000_000_000


def words(text: str) -> list[int]:
    """A tokenizer whose tokens are words."""
    return [len(word) for word in text.split()]


@pytest.fixture
def written(tmp_path):
    """Writes rows (JSON values, or lines as they are) to a file; gives the path."""

    def write(*rows: object, name: str = "trace.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
        return path

    return write


@pytest.fixture
def read(written):
    """Reads a file of these rows with these options."""

    def read_rows(*rows: object, **options: object) -> Trace:
        return read_trace(written(*rows), ReadOptions(**options))

    return read_rows


def columns(trace: Trace, *names: str) -> list[tuple]:
    """The values of these fields of each request, in order of arrival."""
    return [tuple(getattr(request, name) for name in names) for request in trace]


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(WorkloadError) as error:
        call()
    return str(error.value)


# ---------------------------------------------------------------- real samples


@pytest.mark.parametrize(
    ("file", "format_", "read_", "emitted", "span_s"),
    [
        ("aibrix/8min_up_and_down.lengths.jsonl", "aibrix", 2026, 2024, 455.898),
        (
            "llmservingsim_vllm/sharegpt-llama-3.1-8b-300-sps10.lengths.jsonl",
            "llmservingsim",
            300,
            300,
            29.136836395,
        ),
        ("llmservingsim_vllm/workload_me2_01_mixed.jsonl", "llmservingsim", 608, 608, 60.898463),
        ("llmservingsim_vllm/rtx4090_llama-3.1-8b", "llmservingsim", 300, 300, 29.100521472),
        ("llmservingsim_vllm/rtxpro6000_llama-3.1-8b/requests.jsonl", "llmservingsim", 300, 300, 29.12119296),
        ("lmcache_agent/miniswe.lengths.jsonl.gz", "lmcache", 238, 238, 515.041791),
        ("lmcache_agent/taubench.lengths.jsonl.gz", "lmcache", 184, 94, 180.182571),
        ("mooncake/conversation_trace_rows00001-05000.jsonl.gz", "mooncake", 5000, 5000, 1593.0),
        ("mooncake/synthetic_trace_rows0001-2000.jsonl.gz", "mooncake", 2000, 2000, 532.806),
        ("mooncake/mixed_arxiv_trace_18_rows.jsonl", "mooncake", 18, 18, 9.159),
        ("tracelab/sanitized_round_trace_claude.jsonl", "tracelab jsonl", 10, 10, 190.855),
    ],
)
def test_every_shared_json_trace_is_known_by_its_content(shared_data, file, format_, read_, emitted, span_s):
    trace = read_trace(shared_data / "traces" / file)
    assert (trace.format, trace.rows_read, len(list(trace))) == (format_, read_, emitted)
    assert trace.requests.arrival_s[-1] == pytest.approx(span_s, abs=1e-9)


def seen_before(trace: Trace, *, whole: bool) -> tuple[int, int]:
    """Leading ids of prompts that earlier prompts had, and all ids.

    `whole`: only blocks that the prompt fills, and never the one with its last token, which must be computed.
    """
    known: set[int] = set()
    hits = total = 0
    for request in trace:
        ids = request.prefix_ids
        may_hit = (request.prompt_tokens - 1) // request.prefix_block_tokens if whole else len(ids)
        for id_ in ids[:may_hit]:
            if id_ not in known:
                break
            hits += 1
        known.update(ids)
        total += len(ids)
    return hits, total


@pytest.mark.parametrize(
    ("file", "any_hits", "whole_hits", "ids", "percents"),
    [
        ("conversation_trace_rows00001-05000", 43_319, 43_282, 129_968, (33.33, 33.30, 33.92)),
        ("synthetic_trace_rows0001-2000", 16_270, 16_230, 49_580, (32.82, 32.735, 33.60)),
    ],
)
def test_prefix_reuse_of_the_mooncake_cuts(shared_data, file, any_hits, whole_hits, ids, percents):
    """Of all ids: those seen before, those of whole blocks without the last token; of all tokens: the latter."""
    trace = read_trace(shared_data / "traces/mooncake" / f"{file}.jsonl.gz")
    assert seen_before(trace, whole=False) == (any_hits, ids)
    assert seen_before(trace, whole=True) == (whole_hits, ids)
    tokens = int(trace.requests.prompt_tokens.sum())
    found = (100 * any_hits / ids, 100 * whole_hits / ids, 100 * whole_hits * 512 / tokens)
    assert found == pytest.approx(percents, abs=0.005)


def test_the_measured_runs_were_sent_the_shared_workload(shared_data):
    """Row by row the lengths of the 300 ShareGPT requests."""
    folder = shared_data / "traces/llmservingsim_vllm"
    sent = read_trace(folder / "sharegpt-llama-3.1-8b-300-sps10.lengths.jsonl").requests
    for name in ("rtx4090_llama-3.1-8b", "rtxpro6000_llama-3.1-8b"):
        measured = read_trace(folder / name).requests
        assert (measured.prompt_tokens == sent.prompt_tokens).all()
        assert (measured.output_tokens == sent.output_tokens).all()
        assert np.abs(measured.arrival_s - sent.arrival_s).max() < 0.1


def test_tracelab_rounds_keep_the_context_of_the_round_before(shared_data):
    trace = read_trace(shared_data / "traces/tracelab/sanitized_round_trace_claude.jsonl")
    first, second, third = list(trace)[:3]
    assert (first.turn, first.context_tokens, first.think_time_s) == (0, None, None)
    # Sent with the last tool result, 19.291 s after the last tool call of the answer before.
    assert (second.arrival_s, second.think_time_s) == (30.787, 19.291)
    assert (second.prompt_tokens, second.context_tokens) == (35740, 29380)
    assert (third.context_tokens, third.turn) == (35738, 2)


def test_lmcache_calls_of_a_session_stand_in_order_of_time(shared_data):
    """The file is not in order, so its rows come rearranged."""
    trace = read_trace(shared_data / "traces/lmcache_agent/miniswe.lengths.jsonl.gz")
    rows = trace.requests.values("source_row")
    assert rows != sorted(rows)
    assert len(set(trace.requests.values("session_id"))) == 10


# ---------------------------------------------------------------- Mooncake and its family

MOONCAKE = {"timestamp": 1000, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}


def test_other_units_and_block_sizes_are_read_where_they_are_said(read):
    row = {"timestamp": 1.5, "input_length": 33, "output_length": 2, "hash_ids": [1, 2, 3]}
    trace = read(row, row | {"timestamp": 2}, time_unit="s", block_size=16)
    assert columns(trace, "arrival_s", "prefix_block_tokens") == [(0.0, 16), (0.5, 16)]
    assert trace.about == {"time_unit": "s", "block_size": 16}


def test_ids_that_do_not_fit_the_block_size_name_the_one_that_would(read):
    row = MOONCAKE | {"input_length": 33, "hash_ids": [1, 2, 3]}
    assert refusal(lambda: read(MOONCAKE, row)).endswith(
        "row 2: hash_ids '3 ids': must be 1 for 33 tokens at 512 per id; 16 tokens per id would fit: --hash-block-size"
    )


def test_fractions_of_an_unknown_unit_are_refused(read):
    assert "say which with --time-unit" in refusal(lambda: read(MOONCAKE | {"timestamp": 1.5}))


def test_a_rate_that_no_service_has_puts_the_unit_in_doubt(read):
    rows = [MOONCAKE | {"timestamp": second} for second in range(2000)]
    assert "if its times are in ms: say which unit" in refusal(lambda: read(*rows))
    assert read(*rows, time_unit="s").requests.arrival_s[-1] == 1999


def test_ids_of_64_bits_stay_whole(read):
    ids = [2**64 - 1, 2**63 - 1]
    trace = read(MOONCAKE | {"hash_ids": ids}, MOONCAKE | {"hash_ids": [-(2**63), 2**32]})
    assert columns(trace, "prefix_ids") == [(tuple(ids),), ((-(2**63), 2**32),)]


def test_later_turns_of_a_session_wait_for_their_delay(read):
    later = {"session_id": "a", "delay": 250, "input_length": 9, "output_length": 1}
    trace = read(
        {**MOONCAKE, "session_id": "a"}, later, later | {"delay": 500}, MOONCAKE | {"timestamp": 2000}
    )
    assert trace.arrivals == "first turns"
    assert columns(trace, "arrival_s", "session_id", "turn", "think_time_s") == [
        (0.0, "a", 0, None),
        (0.0, "a", 1, 0.25),
        (0.0, "a", 2, 0.5),
        (1.0, None, None, None),
    ]


def test_a_session_whose_first_turn_is_not_replayed_keeps_its_start(read):
    later = {"session_id": "a", "delay": 250, "input_length": 9, "output_length": 1}
    trace = read(MOONCAKE, MOONCAKE | {"timestamp": 3000, "session_id": "a", "output_length": 0}, later)
    assert columns(trace, "arrival_s", "turn") == [(0.0, None), (2.0, 0)]


def test_a_file_without_any_timestamp_has_no_arrivals(read):
    row = {"session_id": "a", "input_length": 9, "output_length": 1}
    trace = read(row, row | {"delay": 100}, row | {"session_id": "b"})
    assert trace.arrivals == "none"
    assert columns(trace, "arrival_s", "turn", "think_time_s") == [
        (0.0, 0, None),
        (0.0, 1, 0.1),
        (0.0, 0, None),
    ]
    assert "row 2: timestamp 5: must be left out" in refusal(
        lambda: read(row, row | {"session_id": "b", "timestamp": 5})
    )
    assert "row 2: timestamp None: must be a finite time in ms" in refusal(
        lambda: read(MOONCAKE, {"input_length": 9, "output_length": 1})
    )


def test_times_of_two_origins_are_refused_with_both_ranges(read):
    """Report 63: an arrival of 40,000 us and one of 1.787e15 us."""
    rows = [MOONCAKE | {"timestamp": 40_000}, MOONCAKE | {"timestamp": 1_787_000_000_000_000}]
    assert refusal(lambda: read(*rows, time_unit="us")).endswith(
        "has times of two origins: arrival from 0.04 to 0.04 s (1 rows) "
        "and arrival from 1.787e+09 to 1.787e+09 s (1 rows)"
    )


# ---------------------------------------------------------------- Qwen-Bailian

CHAT = {
    "chat_id": 159,
    "parent_chat_id": -1,
    "timestamp": 61.114,
    "input_length": 33,
    "output_length": 4,
    "type": "text",
    "turn": 1,
    "hash_ids": [7, 8, 9],
}


def test_bailian_sessions_are_named_after_their_first_chat(read):
    trace = read(
        CHAT,
        CHAT | {"chat_id": 5, "timestamp": 61.5, "type": "search"},
        CHAT | {"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.614},
        CHAT
        | {
            "chat_id": 161,
            "parent_chat_id": 160,
            "timestamp": 63.114,
            "input_length": 80,
            "hash_ids": [7] * 5,
        },
    )
    assert columns(trace, "session_id", "turn", "arrival_s", "prompt_tokens") == [
        ("159", 0, 0.0, 33),
        ("5", 0, 0.386, 33),
        ("159", 1, 1.5, 33),
        ("159", 2, 2.0, 80),
    ]
    assert trace.about == {"time_unit": "s", "block_size": 16, "types": {"text": 3, "search": 1}}
    assert trace.requests[0].prefix_ids == (7, 8, 9)


def test_bailian_parents_may_be_missing_at_the_head(read):
    trace = read(
        CHAT | {"chat_id": 2, "parent_chat_id": 1},
        CHAT | {"chat_id": 3, "parent_chat_id": 1, "output_length": 0},
        CHAT | {"chat_id": 4, "parent_chat_id": 3},
    )
    assert columns(trace, "session_id", "turn") == [("1", 0), ("1", 1)]
    assert trace.notes == ("1 sessions began before the file: their first chats are not in it",)


def test_bailian_prompts_may_lack_the_id_of_their_last_block(read):
    trace = read(CHAT | {"hash_ids": [7, 8]}, CHAT | {"chat_id": 1, "hash_ids": [7, 8, 9]})
    assert columns(trace, "prefix_ids") == [((7, 8),), ((7, 8, 9),)]
    assert "hash_ids '1 ids'" in refusal(lambda: read(CHAT | {"hash_ids": [7]}))


# ---------------------------------------------------------------- WEKA

CALL = {"t": 0.0, "type": "n", "model": "big", "in": 130, "out": 5, "hash_ids": [1, 2, 3], "api_time": 2.0}


def conversation(*requests: dict, **fields: object) -> dict:
    return {"id": "c1", "block_size": 64, "hash_id_scope": "local", "requests": list(requests), **fields}


def test_weka_rows_are_read_with_64_tokens_an_id(read):
    trace = read(
        {"t": 5, "in": 130, "out": 5, "hash_ids": [1, 2, 3]},
        {"t": 5.5, "in": 130, "out": 5, "hash_ids": [1, 2]},
    )
    assert columns(trace, "arrival_s", "prompt_tokens", "prefix_ids", "prefix_block_tokens") == [
        (0.0, 130, (1, 2, 3), 64),
        (0.5, 130, (1, 2), 64),
    ]


def test_weka_conversations_are_sessions_with_think_times(read):
    trace = read(
        conversation(CALL, CALL | {"t": 2.5}, CALL | {"t": 9.0, "think_time": 0.25}, CALL | {"t": 10.0})
    )
    assert trace.arrivals == "none"
    assert columns(trace, "session_id", "turn", "think_time_s", "arrival_s") == [
        ("c1", 0, None, 0.0),
        ("c1", 1, 0.5, 0.0),
        ("c1", 2, 0.25, 0.0),
        ("c1", 3, 0.0, 0.0),
    ]


def test_weka_ids_of_a_local_scope_are_equal_only_within_their_conversation(read):
    trace = read(
        conversation(CALL, CALL),
        conversation(CALL, id="c2"),
        conversation(CALL, id="c3", hash_id_scope="global"),
    )
    one, again, two, shared = (set(r.prefix_ids) for r in trace)
    assert one == again and not one & two and shared == {1, 2, 3} and not shared & (one | two)


def test_weka_sub_agents_are_sessions_of_their_own(read):
    agent = {"type": "subagent", "agent_id": "x", "requests": [CALL, CALL | {"t": 3}]}
    trace = read(conversation(CALL, agent, CALL | {"t": 9}))
    assert columns(trace, "session_id", "turn") == [("c1", 0), ("c1", 1), ("c1::1", 0), ("c1::1", 1)]
    assert any("sub-agents" in note for note in trace.notes)


def test_weka_conversations_may_be_pretty_printed(written):
    text = "\n".join(json.dumps(conversation(CALL, id=name), indent=1) for name in "ab")
    assert columns(read_trace(written(text)), "session_id") == [("a",), ("b",)]


def test_only_the_requests_of_one_model_are_read_where_one_is_asked_for(read):
    small = CALL | {"model": "small"}
    trace = read(conversation(CALL, small, CALL), model="small", tolerance=Tolerance.STRICT)
    assert trace.counts() == {"rows_read": 3, "rows_emitted": 1, "rows_dropped": {"other model": 2}}
    assert "model 'huge': must be one of its models: 'big', 'small'" in refusal(
        lambda: read(conversation(CALL, small), model="huge")
    )


# ---------------------------------------------------------------- vllm bench serve


def bench(**fields: object) -> dict:
    """A detailed result; the second request failed."""
    return {
        "date": "20260101-000000",
        "backend": "vllm",
        "model_id": "m",
        "num_prompts": 3,
        "request_rate": "inf",
        "duration": 9.0,
        "completed": 2,
        "total_input_tokens": 30,
        "input_lens": [10, 20, 30],
        "output_lens": [1, 0, 3],
        "ttfts": [0.1, 0.0, 0.3],
        "itls": [[], [], [0.1, 0.1]],
        "start_times": [100.5, 101.0, 100.0],
        "errors": ["", "refused", ""],
        **fields,
    }


def without(row: dict, *names: str) -> dict:
    return {name: value for name, value in row.items() if name not in names}


def test_bench_results_give_start_times_and_lengths(read):
    trace = read(bench())
    assert trace.format == "vllm bench"
    assert columns(trace, "arrival_s", "prompt_tokens", "output_tokens") == [(0.0, 30, 3), (0.5, 10, 1)]
    assert trace.rows_dropped == {"failed request": 1}


def test_bench_requests_with_an_error_or_without_output_have_failed(read):
    trace = read(bench(output_lens=[1, 5, 0], errors=["", "cut off", ""]))
    assert trace.rows_dropped == {"failed request": 2}
    assert read(bench(output_lens=[1, 2, 3], errors=None)).rows_emitted == 3


@pytest.mark.parametrize("indent", [None, 2])
def test_appended_bench_results_are_one_workload_by_one_clock(written, indent):
    later = bench(start_times=[201.0, 200.0, 203.0])
    path = written(json.dumps(bench(), indent=indent), json.dumps(later, indent=indent))
    trace = read_trace(path)
    assert [r.arrival_s for r in trace] == [0.0, 0.5, 101.0, 103.0]
    assert (trace.rows_read, trace.about["results"]) == (6, 2)


def test_bench_results_of_two_clocks_are_refused_with_both_ranges(read):
    """Report 63, for results: the machine was started again between them."""
    assert (
        "start_times of result 1 are from 100 to 101 s, those of result 2 from 2 to 4 s: not one after the other"
    ) in refusal(lambda: read(bench(), bench(start_times=[2, 3, 4])))
    assert "two origins" in refusal(lambda: read(bench(), bench(start_times=[1.7e9, 1.7e9, 1.7e9])))


def test_bench_results_without_start_times_have_no_arrivals(read):
    trace = read(without(bench(), "start_times"))
    assert trace.arrivals == "none"
    assert trace.requests.arrival_s.tolist() == [0.0, 0.0]
    assert trace.notes == ("start_times are missing; the benchmark's request_rate was 'inf'",)


@pytest.mark.parametrize("tolerance", Tolerance)
def test_bench_totals_alone_name_the_option_that_writes_the_lengths(read, tolerance):
    totals = without(bench(), "input_lens", "output_lens", "start_times", "errors", "ttfts", "itls")
    assert "with --save-detailed" in refusal(lambda: read(totals, tolerance=tolerance))
    assert "result 2: input_lens None: must be there" in refusal(lambda: read(bench(), totals))


def test_a_bench_list_that_ends_early_damages_only_the_requests_behind_its_end(read):
    short = bench(output_lens=[1, 2], errors=None)
    trace = read(short, tolerance=Tolerance.LENIENT)
    assert trace.counts() == {"rows_read": 3, "rows_emitted": 2, "rows_dropped": {"damaged: output_lens": 1}}
    assert "row 3: result 1: output_lens '2 values': must be one for each of the 3 requests" in refusal(
        lambda: read(short)
    )


# ---------------------------------------------------------------- LLMServingSim

FLAT = {"input_toks": 20, "output_toks": 3, "arrival_time_ns": 2 * SECOND}
SUB = {"input_toks": 5, "output_toks": 2, "tool_duration_ns": SECOND // 2}
AGENT = {"session_id": "s", "arrival_time_ns": SECOND, "sub_requests": [SUB, SUB | {"input_toks": 9}, SUB]}


def test_llmservingsim_flat_and_agentic_lines_may_be_mixed(read):
    trace = read(FLAT, AGENT)
    assert trace.arrivals == "first turns"
    assert columns(
        trace, "arrival_s", "session_id", "turn", "think_time_s", "prompt_tokens", "source_row"
    ) == [
        (0.0, "s", 0, None, 5, 2),
        (0.0, "s", 1, 0.5, 9, 2),
        (0.0, "s", 2, 0.5, 5, 2),
        (1.0, None, None, None, 20, 1),
    ]
    assert trace.requests.values("request_id") == ["row-000002", "row-000002.2", "row-000002.3", "row-000001"]


def test_llmservingsim_pauses_behind_a_dropped_request_are_kept(read):
    trace = read(AGENT | {"sub_requests": [SUB, SUB | {"output_toks": 0}, SUB]})
    assert columns(trace, "turn", "think_time_s") == [(0, None), (1, 1.0)]
    assert trace.rows_dropped == {"zero output tokens": 1}


def test_llmservingsim_token_ids_are_the_prompt(read):
    row = {
        "input_toks": 2,
        "output_toks": 1,
        "arrival_time_ns": 0,
        "input_tok_ids": [4, 5],
        "output_tok_ids": [6],
    }
    trace = read(row | {"hash_ids": [1]})
    assert columns(trace, "prompt_token_ids", "output_token_ids", "prefix_ids") == [((4, 5), (6,), None)]
    assert "input_tok_ids '1 ids': must be as many as input_toks (2)" in refusal(
        lambda: read(row | {"input_tok_ids": [4]})
    )


def test_llmservingsim_messages_name_the_line(read):
    broken = AGENT | {"sub_requests": [SUB, SUB | {"input_toks": -1}]}
    assert "row 2: input_toks -1: must be a whole number" in refusal(lambda: read(FLAT, broken))
    assert "row 2: session_id None: must be a text" in refusal(
        lambda: read(FLAT, without(AGENT, "session_id"))
    )
    assert "row 2: session_id 's': must be unique" in refusal(lambda: read(AGENT, AGENT))


# ---------------------------------------------------------------- LMCache

CALLED = {
    "timestamp_us": 1_760_428_436_000_000,
    "session_id": "s",
    "input_length": 20,
    "output_length": 2,
    "hash_ids": [1, 2],
}
TEXTS = {
    "timestamp": 1_760_428_436_000_000,
    "session_id": "s",
    "input": "one two three",
    "output": "four five",
}


def test_lmcache_lines_out_of_order_are_sorted(read):
    trace = read(CALLED | {"timestamp_us": 1_760_428_438_500_000}, CALLED)
    assert columns(trace, "arrival_s", "source_row", "prefix_block_tokens") == [(0.0, 2, 16), (2.5, 1, 16)]


def test_lmcache_empty_inputs_and_outputs_are_dropped_by_name(read):
    trace = read(
        TEXTS, TEXTS | {"input": ""}, TEXTS | {"output": ""}, TEXTS | {"output": " "}, tokenize=words
    )
    assert trace.rows_dropped == {"zero prompt tokens": 1, "zero output tokens": 2}
    assert columns(trace, "prompt_token_ids", "output_token_ids") == [((3, 3, 5), (4, 4))]


def test_an_empty_lmcache_file_is_said_to_be_empty(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    assert refusal(lambda: read_trace(tmp_path / "empty.jsonl")).endswith("is empty")


@pytest.mark.parametrize(
    "row",
    [
        TEXTS,
        {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "a b", "max_tokens": 2},
        },
        [{"id": "x", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}],
    ],
)
def test_texts_without_a_tokenizer_are_refused_with_the_option_that_gives_one(read, row):
    assert refusal(lambda: read(row)).endswith("say which tokenizer counts them with --tokenizer")


# ---------------------------------------------------------------- AIBrix


def test_aibrix_lines_hold_several_requests_in_either_spelling(read):
    trace = read(
        {"timestamp": 1000, "requests": [{"Prompt Length": 5, "Output Length": 2}]},
        {"timestamp": 1500, "requests": [{"prompt_length": 6, "output_length": 3, "session_id": 0}] * 2},
        {"timestamp": 1600, "requests": []},
    )
    assert columns(trace, "arrival_s", "prompt_tokens", "session_id", "turn", "source_row") == [
        (0.0, 5, None, None, 1),
        (0.5, 6, "0", 0, 2),
        (0.5, 6, "0", 1, 2),
    ]
    assert trace.counts() == {"rows_read": 4, "rows_emitted": 3, "rows_dropped": {"no requests": 1}}


def test_aibrix_answers_of_no_length_get_the_one_asked_for_or_are_dropped(read):
    line = {
        "timestamp": 1,
        "requests": [{"prompt_length": 6, "output_length": None}, {"prompt_length": 6, "output_length": 3}],
    }
    assert read(line).rows_dropped == {"no output length": 1}
    assert columns(read(line, output_tokens=9), "output_tokens") == [(9,), (3,)]


def test_aibrix_prompts_are_counted_where_there_is_a_tokenizer(read):
    line = {"timestamp": 1, "requests": [{"prompt": "a bb", "prompt_length": 6, "output_length": 3}]}
    assert columns(read(line, tokenize=words), "prompt_tokens", "prompt_token_ids") == [(2, (1, 2))]
    assert columns(read(line), "prompt_tokens") == [(6,)]


def test_one_damaged_aibrix_request_hides_no_other(read):
    line = {
        "timestamp": 1,
        "requests": [{"prompt_length": 6, "output_length": 3}, 7, {"prompt_length": 6, "output_length": 3}],
    }
    trace = read(line, '{"timestamp": 2, "requests": 3}', '{"timestamp"', tolerance=Tolerance.LENIENT)
    assert (trace.rows_read, trace.rows_emitted) == (5, 2)
    assert [(o.row, o.reason) for o in trace.offences] == [
        (1, "damaged: requests"),
        (2, "damaged: requests"),
        (3, "damaged: row"),
    ]


# ---------------------------------------------------------------- TraceLab


def event(second: float, kind: str) -> dict:
    return {"event_type": kind, "timestamp": f"2026-06-01T05:40:{second:06.3f}Z", "source": "x"}


def round_(index: int, *events: dict, prefix: int = 0, new: int = 100, output: int = 10) -> dict:
    return {
        "session_id": "s",
        "round_index": index,
        "model": "m",
        "prefix_tokens": prefix,
        "newly_append_tokens": new,
        "output_tokens": output,
        "timing_events": list(events),
    }


def test_tracelab_think_time_is_from_the_end_of_an_answer_to_the_last_input(read):
    trace = read(
        round_(
            0, event(1, "user_message"), event(3, "text"), event(4, "tool_call"), event(9, "user_message")
        ),
        round_(1, event(5, "tool_result"), event(7.5, "tool_result"), event(8, "text"), prefix=150),
    )
    assert columns(trace, "arrival_s", "think_time_s", "context_tokens", "prompt_tokens") == [
        (0.0, None, None, 100),
        (6.5, 3.5, 110, 250),
    ]


def test_tracelab_rounds_out_of_order_or_of_a_wrong_sum_are_damaged(read):
    first = round_(1, event(1, "user_message"))
    assert "row 2: round_index 1: must be more than 1" in refusal(lambda: read(first, first))
    assert "input_tokens_total 99: must be prefix_tokens + newly_append_tokens, which is 100" in refusal(
        lambda: read(first | {"input_tokens_total": 99})
    )


# ---------------------------------------------------------------- ShareGPT, OpenAI batch

TALK = [
    {"from": "human", "value": "a b c"},
    {"from": "gpt", "value": "d e"},
    {"from": "human", "value": "f"},
    {"from": "gpt", "value": "g h i"},
]


def test_sharegpt_uses_the_first_two_messages_and_says_so(read):
    trace = read(
        [{"id": "x", "conversations": TALK}, {"conversations": TALK[:1]}, {"conversations": []}],
        tokenize=words,
    )
    assert columns(trace, "prompt_tokens", "output_tokens", "arrival_s") == [(3, 2, 0.0)]
    assert trace.rows_dropped == {"fewer than two messages": 2}
    assert trace.arrivals == "none" and "only the first two messages" in trace.notes[0]


def test_sharegpt_answers_may_be_given_a_length(read):
    trace = read([{"conversations": TALK}], tokenize=words, output_tokens=50)
    assert columns(trace, "output_tokens", "output_token_ids") == [(50, None)]


def test_sharegpt_sessions_grow_by_answer_and_question(read):
    trace = read([{"conversations": [*TALK, TALK[0]]}], tokenize=words, format="sharegpt sessions")
    assert columns(trace, "prompt_tokens", "output_tokens", "context_tokens", "turn", "session_id") == [
        (3, 2, None, 0, "conversation-1"),
        (6, 3, 5, 1, "conversation-1"),
    ]


def test_sharegpt_must_be_a_list(written):
    path = written({"conversations": TALK}, name="a.json")
    options = ReadOptions(format="sharegpt", tokenize=words)
    assert refusal(lambda: read_trace(path, options)).endswith("must be a JSON list")


def batch(custom_id: str, url: str = "/v1/chat/completions", **body: object) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}


def test_batch_lines_are_requests_with_unique_ids(read):
    parts = [{"type": "text", "text": "a b"}, {"type": "image_url", "image_url": {"url": "x"}}]
    trace = read(
        batch(
            "same",
            messages=[{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}],
            max_tokens=5,
        ),
        batch("same", messages=[{"role": "user", "content": parts}], max_completion_tokens=6),
        batch("p", "/v1/completions", prompt="a b c d", max_tokens=7),
        batch("ids", "/v1/completions", prompt=[5, 6], max_tokens=7),
        batch("e", "/v1/embeddings", input="a"),
        batch("open", prompt="a"),
        tokenize=words,
    )
    assert columns(trace, "request_id", "prompt_tokens", "output_tokens") == [
        ("same", 3, 5),
        ("same@2", 2, 6),
        ("p", 4, 7),
        ("ids", 2, 7),
    ]
    assert trace.rows_dropped == {"no generation": 1, "no output length": 1}
    assert trace.arrivals == "none"


def test_batch_answers_of_no_length_get_the_one_asked_for(read):
    assert columns(read(batch("a", prompt="x"), tokenize=words, output_tokens=3), "output_tokens") == [(3,)]


def test_batch_requests_for_several_answers_are_refused(read):
    assert "row 1: n 2: must be 1" in refusal(
        lambda: read(batch("a", prompt="x", n=2, max_tokens=1), tokenize=words)
    )


# ---------------------------------------------------------------- any JSON lines


def test_fields_of_any_name_are_read_through_a_map(read):
    rows = [
        {"at": 2500, "usage": {"in": 7, "out": 2}, "conv": 9, "ids": [1, 2]},
        {"at": 1000, "usage": {"in": 5, "out": 2.0}},
    ]
    trace = read(
        *rows,
        format="jsonl",
        time_unit="ms",
        block_size=4,
        columns={
            "arrival_s": "at",
            "prompt_tokens": "usage.in",
            "output_tokens": "usage.out",
            "session_id": "conv",
            "prefix_ids": "ids",
        },
    )
    assert columns(trace, "arrival_s", "prompt_tokens", "session_id", "prefix_ids") == [
        (0.0, 5, None, None),
        (1.5, 7, "9", (1, 2)),
    ]


def test_dates_need_no_unit_and_numbers_under_another_name_do(read):
    row = {"at": "2026-01-01T00:00:01.5Z", "prompt_tokens": 3, "output_tokens": 1}
    options = {"format": "jsonl", "columns": {"arrival_s": "at"}}
    assert columns(read(row, row | {"at": "2026-01-01T00:00:00Z"}, **options), "arrival_s") == [
        (0.0,),
        (1.5,),
    ]
    assert "at 5: must be in a unit that is known: say it with --time-unit" in refusal(
        lambda: read(row | {"at": 5}, **options)
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt_tokens": 3}, "output_tokens None: must be given"),
        ({"prompt_tokens": 3, "output_tokens": 1, "context_tokens": 2}, "context_tokens 2 must be left out"),
        ({"prompt_tokens": 3, "output_tokens": 1, "priority": 2**70}, "priority"),
        (
            {"prompt_tokens": 3, "output_tokens": 1, "arrival_s": 4},
            "arrival_s 4: must be left out, as in the rows before",
        ),
        (
            {"prompt_tokens": 3, "output_tokens": 1, "request_id": "row-000001"},
            "request_id 'row-000001': must be unique; row 1",
        ),
    ],
)
def test_a_damaged_mapped_row_is_refused_by_name(read, row, message):
    assert f"row 2: {message}" in refusal(
        lambda: read({"prompt_tokens": 3, "output_tokens": 1}, row, format="jsonl")
    ).replace("request 'row-000002': ", "")


def test_maps_that_cannot_be_meant_are_refused(read):
    row = {"prompt_tokens": 3, "output_tokens": 1, "x": [1]}
    assert "column for 'prompt': must be for one of arrival_s" in refusal(
        lambda: read(row, format="jsonl", columns={"prompt": "x"})
    )
    assert "--hash-block-size" in refusal(lambda: read(row, format="jsonl", columns={"prefix_ids": "x"}))


# ---------------------------------------------------------------- folders of runs


def run_folder(path: Path, state: object = "complete", **header: object) -> Path:
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"state": state, "reason": None, **header}))
    spec = RequestSpec(request_id="a", arrival_s=0.5, prompt_tokens=4, output_tokens=2, priority=1)
    write_jsonl(path / "workload.jsonl.zst", [spec])
    return path


def test_a_run_gives_the_requests_that_it_received(tmp_path):
    trace = read_trace(run_folder(tmp_path / "run"))
    assert (trace.format, trace.rows_read) == ("run folder", 1)
    assert columns(trace, "request_id", "arrival_s", "priority") == [("a", 0.5, 1)]


def test_a_run_that_ended_early_says_so(tmp_path):
    trace = read_trace(run_folder(tmp_path / "run", "failed", reason="interrupted"))
    assert trace.notes == ("the run ended early (interrupted): these are the requests until then",)


def test_runs_that_are_not_whole_are_refused_in_one_line(tmp_path):
    assert "goes on or was killed" in refusal(lambda: read_trace(run_folder(tmp_path / "a", "running")))
    assert "state 7: must be one of complete, failed" in refusal(
        lambda: read_trace(run_folder(tmp_path / "b", 7))
    )
    damaged = run_folder(tmp_path / "c")
    (damaged / "run.json").write_text('{"state": ')
    assert "run.json: is not JSON" in refusal(lambda: read_trace(damaged))
    (damaged / "run.json").write_text("[]")
    assert "must be a JSON object" in refusal(lambda: read_trace(damaged))
    lost = run_folder(tmp_path / "d")
    (lost / "workload.jsonl.zst").unlink()
    assert "is a run without workload.jsonl.zst" in refusal(lambda: read_trace(lost))
    cut = run_folder(tmp_path / "e")
    (cut / "workload.jsonl.zst").write_bytes((cut / "workload.jsonl.zst").read_bytes()[:-9])
    assert "workload.jsonl.zst: cannot be read" in refusal(lambda: read_trace(cut))


# ---------------------------------------------------------------- every reader, any damage

MAPPED = {"at": 5, "n": {"in": 7}, "output_tokens": 2, "session_id": "a", "think_time_s": 1.5, "ids": [1, 2]}
LATER = {"session_id": "a", "delay": 3, "input_length": 9, "output_length": 1}
IDENTIFIED = {
    "request_id": "x",
    "input_toks": 1,
    "output_toks": 1,
    "arrival_time_ns": 5,
    "input_tok_ids": [4],
}
COUNTED = {"prompt": "a b", "prompt_length": 6, "output_length": 3, "session_id": 1}
MAP = {"arrival_s": "at", "prompt_tokens": "n.in", "prefix_ids": "ids"}
SAMPLES: dict[str, tuple[list, dict]] = {
    "mooncake": ([MOONCAKE, MOONCAKE | {"session_id": "a"}, LATER], {}),
    "bailian": ([CHAT, CHAT | {"chat_id": 160, "parent_chat_id": 159}], {}),
    "weka": (
        [
            conversation(CALL, {"type": "subagent", "requests": [CALL]}, CALL | {"t": 4}),
            conversation(CALL, id="c2"),
        ],
        {},
    ),
    "vllm bench": ([bench(), bench(start_times=[201.0, 200.0, 203.0])], {}),
    "llmservingsim": ([FLAT | {"hash_ids": [1, 2]}, AGENT, IDENTIFIED], {}),
    "lmcache": ([CALLED, TEXTS], {"tokenize": words}),
    "lmcache texts": ([TEXTS, TEXTS], {"tokenize": words}),
    "aibrix": ([{"timestamp": 1, "requests": [COUNTED]}] * 2, {"tokenize": words}),
    "tracelab jsonl": (
        [
            round_(0, event(1, "user_message"), event(2, "text")),
            round_(1, event(3, "tool_result"), prefix=50),
        ],
        {},
    ),
    "sharegpt": ([[{"conversations": TALK}, {"conversations": TALK[:2]}]], {"tokenize": words}),
    "sharegpt sessions": ([[{"conversations": TALK}]], {"tokenize": words, "format": "sharegpt sessions"}),
    "openai batch": (
        [
            batch("a", messages=[{"role": "user", "content": "x y"}], max_tokens=2),
            batch("b", prompt=[3], max_tokens=1),
        ],
        {"tokenize": words},
    ),
    "jsonl": (
        [MAPPED, MAPPED | {"at": 9}],
        {"format": "jsonl", "time_unit": "s", "block_size": 4, "columns": MAP},
    ),
}
"""Rows of each format and the options that read them. `lmcache` holds a row of its other form: damaged there."""

NASTY = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            -1,
            0,
            0.5,
            1e300,
            -0.0,
            2**31,
            2**63,
            2**64 - 1,
            -(2**63),
            "",
            "-1",
            "NaN",
            "\u2028",
            "a" * 5000,
            [],
            {},
            [None],
            [[]],
            [{}],
            [1.5],
            [-1],
            [2**63],
            [2**31],
            {"a": [1]},
        ]
    ),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.lists(st.integers(-3, 9), max_size=40),
)
RAW = st.sampled_from(
    [
        b"NaN",
        b"Infinity",
        b"-1e999",
        b"9" * 5000,
        b"[" * 1000 + b"]" * 1000,
        b"[" * 5000,
        b'{"a":' * 900 + b"1" + b"}" * 900,
        b"\xff\xfe",
        b"\xe9",
        b"\x00",
        b"\xef\xbb\xbf",
        b"\r\n",
        b"\n",
        b"}\n{",
        b'"',
        b",",
        b"\\ud800",
        b"",
        b"{}",
    ]
)


def places(value: object) -> list[tuple]:
    """The ways to every value inside of a JSON value."""
    found: list[tuple] = []
    waiting: list[tuple[tuple, object]] = [((), value)]
    while waiting:
        way, inner = waiting.pop()
        steps = (
            inner.items() if isinstance(inner, dict) else enumerate(inner) if isinstance(inner, list) else ()
        )
        for step, child in steps:
            found.append((*way, step))
            waiting.append(((*way, step), child))
    return found


def damaged_value(draw, rows: list) -> None:
    """Puts another value into some place of the rows, or takes one out."""
    way = draw(st.sampled_from([way for way in places(rows) if len(way) > 1]))
    holder = rows
    for step in way[:-1]:
        holder = holder[step]
    if draw(st.booleans()):
        holder[way[-1]] = deepcopy(draw(NASTY))
    else:
        del holder[way[-1]]


@st.composite
def damaged_files(draw, name: str) -> bytes:
    """A file of this format that has been damaged."""
    rows = json.loads(json.dumps(SAMPLES[name][0]))
    for _ in range(draw(st.integers(0, 3))):
        if any(len(way) > 1 for way in places(rows)):
            damaged_value(draw, rows)
    newline = draw(st.sampled_from([b"\n", b"\r\n"]))
    indent = draw(st.sampled_from([None, None, None, 1]))
    data = newline.join(json.dumps(row, indent=indent).encode() for row in rows)
    for _ in range(draw(st.integers(0, 2))):
        begin = draw(st.integers(0, len(data)))
        end = draw(st.sampled_from([begin, begin, begin + 1, begin + 9, len(data)]))
        data = data[:begin] + draw(RAW) + data[end:]
    mark = draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf"]))
    return mark + data


@pytest.mark.parametrize("name", sorted(SAMPLES))
@settings(max_examples=settings.default.max_examples // 4)
@given(st.data(), st.sampled_from(Tolerance), st.booleans())
def test_any_damage_gives_sound_requests_or_a_refusal_that_names_the_file(
    tmp_path_factory, name, data, tolerance, named
):
    """A RequestSpec checks itself, and a trace its account, when they are made."""
    path = tmp_path_factory.getbasetemp() / "damaged.jsonl"
    path.write_bytes(data.draw(damaged_files(name)))
    options = {"tolerance": tolerance, **SAMPLES[name][1]}
    if named:
        options.setdefault("format", name.removesuffix(" texts"))
    try:
        trace = read_trace(path, ReadOptions(**options))
    except WorkloadError as e:
        assert str(e).startswith(str(path)) and "\n" not in str(e) and len(str(e)) < 3000
        return
    requests = list(trace)
    assert trace.rows_read == len(requests) + sum(trace.rows_dropped.values())
    assert len({request.request_id for request in requests}) == len(requests) > 0


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_samples_are_known_by_their_content_whatever_they_are_packed_in(tmp_path, name):
    """Byte-order mark, CRLF, no last newline, gzip, zstandard: the same requests."""
    rows, options = SAMPLES[name]
    options = {"tolerance": Tolerance.LENIENT, **options}
    plain = b"\n".join(map(orjson.dumps, rows))
    packed = [
        plain,
        b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n"),
        gzip.compress(plain),
        zstandard.compress(plain),
    ]
    traces = []
    for data in packed:
        (tmp_path / "trace").write_bytes(data)
        traces.append(read_trace(tmp_path / "trace", ReadOptions(**options)))
    assert {trace.format for trace in traces} == {name.removesuffix(" texts")}
    assert all(trace.requests == traces[0].requests for trace in traces)


@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - {"jsonl"}))
def test_no_sample_is_of_two_formats(written, name):
    """Where a format has two readings, the other one must be asked for."""
    head = Source(written(*SAMPLES[name][0])).head
    assert [f.name for f in FORMATS if f.matches(head)] == [
        name.removesuffix(" texts").removesuffix(" sessions")
    ]


def test_a_document_that_does_not_end_is_given_up_when_it_is_too_long():
    lines = ["{", '"a": 1,', '"b": 2,', '{"c": 3}', "{", '"d": 4', "}"]
    assert [text for _, text in documents(lines, longest=10)] == [
        '{\n"a": 1,\n"b": 2,',
        '{"c": 3}',
        '{\n"d": 4\n}',
    ]


def test_rows_of_increments_are_read_by_name_only(tmp_path):
    """Dynamo's mooncake-delta: prompts grow by what is new; as plain Mooncake each row is a whole prompt."""
    path = tmp_path / "delta.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 100, "output_length": 20, "session_id": "s", "hash_ids": [1]},
        {"delay": 500, "input_length": 40, "output_length": 0, "session_id": "s"},
        {"delay": 500, "input_length": 30, "output_length": 5, "session_id": "s", "hash_ids": [2]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_trace(path, ReadOptions(format="mooncake delta"))
    assert (first.prompt_tokens, first.prefix_ids) == (100, (1,))
    assert (second.prompt_tokens, second.context_tokens, second.prefix_ids) == (150, 120, None)
    assert [r.prompt_tokens for r in read_trace(path)] == [100, 30]
