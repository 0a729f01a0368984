"""Trace readers, our JSONL, and opening a workload by name or path."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from servetwin.workloads import (
    ListWorkload,
    RequestSpec,
    WorkloadError,
    open_workload,
    read_trace,
    to_jsonl,
    write_jsonl,
)
from servetwin.workloads.spec import ArgumentError
from servetwin.workloads.traces.options import ReadOptions

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
GOOD_ROW = "2023-11-16 18:15:46.6805900,374,44"
GOOD = {"request_id": "a", "arrival_s": 0.5, "prompt_tokens": 4, "output_tokens": 2}


@pytest.fixture
def azure(tmp_path):
    """Writes rows in the Azure layout; gives the path."""

    def write(*rows: str, header: str = AZURE_HEADER, newline: str = "\n") -> Path:
        path = tmp_path / "trace.csv"
        path.write_bytes(newline.join([header, *rows]).encode())
        return path

    return write


@pytest.fixture
def jsonl(tmp_path):
    """Writes JSON rows (or raw lines); gives the path."""

    def write(*rows: dict | str) -> Path:
        path = tmp_path / "trace.jsonl"
        lines = [row if isinstance(row, str) else orjson.dumps(row).decode() for row in rows]
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def plain(request_id, arrival_s=0):
    return RequestSpec(request_id=request_id, arrival_s=arrival_s, prompt_tokens=3, output_tokens=2)


def id_of(spec):
    return spec.request_id


def ns_of(trace):
    return [round(r.arrival_s * 1e9) for r in trace]


def gap_cv(trace):
    gaps = np.diff([r.arrival_s for r in trace])
    return gaps.std() / gaps.mean()


def mean(trace, name):
    return np.mean([getattr(r, name) for r in trace])


# ---------------------------------------------------------------- Azure, real samples


def test_azure_2023_code_is_read_whole(shared_data):
    trace = read_trace(shared_data / "traces/azure/AzureLLMInferenceTrace_code.csv")
    assert (trace.format, trace.rows_read, trace.rows_emitted, trace.rows_dropped) == (
        "azure",
        8819,
        8819,
        {},
    )
    first, last = trace.requests[0], trace.requests[-1]
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0, 4808, 10)
    # The file ends without a newline.
    assert (last.arrival_s, last.prompt_tokens, last.output_tokens) == (3435.948056, 549, 173)
    assert gap_cv(trace) == pytest.approx(13.15, abs=0.005)
    assert mean(trace, "prompt_tokens") == pytest.approx(2047.8, abs=0.05)
    assert mean(trace, "output_tokens") == pytest.approx(27.9, abs=0.05)


def test_azure_2023_conv_is_read(shared_data):
    trace = read_trace(shared_data / "traces/azure/AzureLLMInferenceTrace_conv_rows00001-10000.csv")
    assert (trace.rows_read, trace.rows_emitted) == (10_000, 10_000)
    assert trace.requests[-1].arrival_s == 1787.309283


def test_azure_2024_week_keeps_microseconds_across_a_week(shared_data):
    trace = read_trace(shared_data / "traces/azure/AzureLLMInferenceTrace_code_1week_printed_rows.csv")
    assert len(trace) == 8
    assert ns_of(trace)[:3] == [0, 7_405_000, 12_384_000]
    assert ns_of(trace)[-1] == 604_799_918_514_000


def test_azure_layout_of_another_tool_is_read(shared_data):
    assert len(read_trace(shared_data / "traces/inference_perf/trace.csv")) == 20


# ---------------------------------------------------------------- Azure, made up


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_azure_spellings_of_time_are_the_same_instant(azure, newline, mark):
    rows = [
        "2024-05-10 00:00:01+00:00,1,1",
        "2024-05-10T00:00:01.000000Z,1,1",
        "2024-05-10 02:00:01.5+02:00,1,1",
    ]
    trace = read_trace(azure(*rows, header=mark + AZURE_HEADER, newline=newline))
    assert ns_of(trace) == [0, 0, 500_000_000]


def test_azure_nanoseconds_are_exact(azure):
    trace = read_trace(azure("2023-11-16 00:00:00.000000001,1,1", "2023-11-30 23:59:59.123456789,1,1"))
    assert ns_of(trace) == [0, (15 * 86_400 - 1) * 10**9 + 123_456_788]


def test_foreign_times_start_at_the_earliest_and_are_sorted_stably(azure):
    times = ["00:00:03", "00:00:01.5", "00:00:03", "00:00:02"]
    trace = read_trace(azure(*[f"2023-11-16 {t},{i},1" for i, t in enumerate(times, start=1)]))
    got = [(r.arrival_s, r.prompt_tokens, r.request_id, r.source_row) for r in trace]
    assert got == [
        (0.0, 2, "row-000002", 2),
        (0.5, 4, "row-000004", 4),
        (1.5, 1, "row-000001", 1),
        (1.5, 3, "row-000003", 3),
    ]


def test_rows_without_use_are_dropped_by_name_and_do_not_set_the_origin(azure):
    trace = read_trace(
        azure(
            "2023-11-16 00:00:00,0,5",
            "2023-11-16 00:00:01,5,0",
            "",
            "2023-11-16 00:00:02,0,0",
            "2023-11-16 00:00:09,7,3",
        )
    )
    assert trace.counts() == {
        "rows_read": 4,
        "rows_emitted": 1,
        "rows_dropped": {"zero prompt tokens": 2, "zero output tokens": 1},
    }
    assert (trace.requests[0].arrival_s, trace.requests[0].source_row) == (0.0, 4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:15:46.68", "row 2: ContextTokens None: must be there"),
        ("2023-11-16 18:15:46.68,5", "row 2: GeneratedTokens None: must be there"),
        ("2023-11-16 18:15:46.68,5,5,5", "row 2: row '2023-11-16 18:15:46.68,5,5,5': must be the 3 fields"),
        ("2023-11-16 18:15:46.68,many,5", "row 2: ContextTokens 'many': must be a whole number, 0 or more"),
        ("2023-11-16 18:15:46.68,5,-1", "row 2: GeneratedTokens '-1': must be a whole number"),
        ("2023-11-16 18:15:46.68,5.0,1", "row 2: ContextTokens '5.0'"),
        ("2023-11-16 18:15:46.68,,1", "row 2: ContextTokens ''"),
        ("yesterday,5,5", "row 2: TIMESTAMP 'yesterday': must be a time like"),
        ("2023-02-30 00:00:00,5,5", "row 2: TIMESTAMP '2023-02-30 00:00:00'"),
        ("2023-11-16 18:15:46.0123456789,5,5", "row 2: TIMESTAMP"),
        ("1700158546,5,5", "row 2: TIMESTAMP"),
    ],
)
def test_a_damaged_azure_row_is_refused_with_row_field_value_and_what_is_allowed(azure, row, message):
    path = azure(GOOD_ROW, row, GOOD_ROW)
    with pytest.raises(WorkloadError) as refusal:
        read_trace(path)
    assert str(refusal.value).startswith(f"{path}: {message}")


def test_a_wrong_azure_header_is_refused(azure):
    with pytest.raises(
        WorkloadError, match=r"header 'TIMESTAMP,GeneratedTokens,ContextTokens': must be 'TIMESTAMP"
    ):
        read_trace(azure(GOOD_ROW, header="TIMESTAMP,GeneratedTokens,ContextTokens"))


def test_a_trace_whose_rows_are_all_without_use_is_refused(azure):
    with pytest.raises(WorkloadError, match=r"none of its 1 rows can be used \(1 zero output tokens\)"):
        read_trace(azure("2023-11-16 18:15:46,5,0"))


# ---------------------------------------------------------------- our JSONL


def specs(request_id):
    """Any RequestSpec that our JSONL can hold."""
    seconds = st.floats(0, 1e6)
    prefix_ids = st.lists(st.integers(-(2**63), 2**64 - 1), max_size=1)
    token_ids = st.lists(st.integers(0, 200_000), min_size=1, max_size=6).map(tuple)

    @st.composite
    def build(draw):
        prompt = draw(st.one_of(token_ids, st.integers(1, 100_000)))
        by_tokens = isinstance(prompt, tuple)
        prefix = None if by_tokens else draw(st.none() | prefix_ids)
        output_tokens = draw(st.integers(1, 50_000))
        return RequestSpec(
            request_id=draw(request_id),
            arrival_s=draw(seconds),
            prompt_tokens=len(prompt) if by_tokens else prompt,
            prompt_token_ids=prompt if by_tokens else None,
            output_tokens=output_tokens,
            output_token_ids=draw(st.none() | token_ids.map(lambda ids: ids[:output_tokens])),
            priority=draw(st.integers(-5, 5)),
            session_id=draw(st.none() | st.text(min_size=1)),
            turn=draw(st.none() | st.integers(0, 9)),
            think_time_s=draw(st.none() | seconds),
            prefix_ids=None if prefix is None else tuple(prefix),
            prefix_block_tokens=None if prefix is None else draw(st.integers(1, 512)),
            min_tokens=draw(st.integers(0, output_tokens)),
            stop_token_ids=draw(st.just(()) | token_ids),
            ignore_eos=draw(st.none() | st.booleans()),
            abort_s=draw(st.none() | seconds),
            client_id=draw(st.none() | st.text(min_size=1)),
            cache_salt=draw(st.none() | st.text(min_size=1)),
            predicted_output_tokens=draw(st.none() | st.integers(1, 50_000)),
        )

    return build()


@given(
    requests=st.lists(specs(st.text(min_size=1)), min_size=1, max_size=5, unique_by=lambda r: r.request_id)
)
def test_jsonl_gives_back_what_was_written(requests, tmp_path_factory):
    """Equal but for the row they came from; in order of arrival, ties in the order written."""
    path = tmp_path_factory.mktemp("round") / "w.jsonl"
    write_jsonl(path, requests)
    back = [replace(r, source_row=None) for r in read_trace(path)]
    assert back == sorted(requests, key=lambda r: r.arrival_s)


def test_to_jsonl_leaves_out_what_holds_its_default():
    spec = RequestSpec(
        request_id="a", arrival_s=0.5, prompt_tokens=3, prompt_token_ids=(1, 2, 3), output_tokens=2
    )
    assert to_jsonl(spec) == {
        "request_id": "a",
        "arrival_s": 0.5,
        "prompt_token_ids": [1, 2, 3],
        "output_tokens": 2,
        "priority": 0,
    }


def test_our_times_stand_as_written_and_rows_may_come_in_any_order(jsonl):
    trace = read_trace(
        jsonl({**GOOD, "request_id": "late", "arrival_s": 7}, "", {**GOOD, "session_id": None})
    )
    got = [(r.request_id, r.arrival_s, r.source_row, r.session_id) for r in trace]
    assert got == [("a", 0.5, 2, None), ("late", 7.0, 1, None)]
    assert trace.format == "servetwin jsonl"


def test_an_abort_before_the_arrival_is_kept(jsonl):
    assert read_trace(jsonl({**GOOD, "abort_s": 0.25})).requests[0].abort_s == 0.25


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_are_written_and_read_by_their_suffix(tmp_path, suffix):
    path = tmp_path / f"w.jsonl{suffix}"
    requests = [
        RequestSpec(request_id=str(i), arrival_s=i, prompt_tokens=3, output_tokens=2) for i in range(500)
    ]
    write_jsonl(path, requests)
    unpack = gzip.decompress if suffix == ".gz" else zstandard.ZstdDecompressor().decompressobj().decompress
    assert unpack(path.read_bytes()).count(b"\n") == 500
    assert [replace(r, source_row=None) for r in read_trace(path)] == requests
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_trace(path)


def test_members_of_a_compressed_file_are_read_one_after_another(tmp_path):
    path = tmp_path / "w.jsonl.zst"
    rows = [orjson.dumps({**GOOD, "request_id": name}) + b"\n" for name in "ab"]
    path.write_bytes(b"".join(zstandard.compress(row) for row in rows))
    assert [r.request_id for r in read_trace(path)] == ["a", "b"]


def test_writing_that_fails_leaves_no_file(tmp_path):
    def broken():
        yield plain("a")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_jsonl(tmp_path / "w.jsonl", broken())
    assert list(tmp_path.iterdir()) == []


def without(name):
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (without("request_id"), "request_id None: must be given: a text"),
        (without("arrival_s"), "arrival_s None: must be given: a finite number"),
        (without("prompt_tokens"), "prompt_tokens None: must be given, or prompt_token_ids"),
        (without("output_tokens"), "output_tokens None: must be given"),
        ({**GOOD, "request_id": ""}, "request_id '': must be a text, not empty"),
        ({**GOOD, "arrival_s": -1}, "arrival_s -1: must be a finite number of seconds, 0 or more"),
        ({**GOOD, "arrival_s": "1"}, "arrival_s '1'"),
        ({**GOOD, "arrival_s": True}, "arrival_s True"),
        ({**GOOD, "prompt_tokens": 0}, "prompt_tokens 0: must be a whole number, 1 or more"),
        ({**GOOD, "prompt_tokens": True}, "prompt_tokens True"),
        ({**GOOD, "output_tokens": 2.0}, "output_tokens 2.0"),
        ({**GOOD, "priority": 1.5}, "priority 1.5: must be a whole number"),
        ({**GOOD, "ignore_eos": 1}, "ignore_eos 1: must be true or false"),
        (
            {**GOOD, "prompt_token_ids": [1, 2]},
            "request 'a': prompt_tokens 4 differs from the 2",
        ),
        ({**GOOD, "stop_token_ids": [-1]}, "stop_token_ids [-1]: must be a list of whole numbers, 0 or more"),
        ({**GOOD, "stop_token_ids": [True]}, "stop_token_ids [True]"),
        ({**GOOD, "prefix_ids": [1]}, "request 'a': prefix_block_tokens None must be 1 or more"),
        (
            {**GOOD, "prefix_ids": [1, 2], "prefix_block_tokens": 4},
            "request 'a': prefix_ids (1, 2)",
        ),
        (
            {**GOOD, "output_token_ids": [1, 2, 3]},
            "request 'a': output_token_ids (1, 2, 3) must be at most output_tokens (2) ids, not 3",
        ),
        ({**GOOD, "min_tokens": 3}, "request 'a': min_tokens 3 must be between 0 and output_tokens (2)"),
        ({**GOOD, "cache_salt": ""}, "cache_salt '': must be a text, not empty"),
        ({**GOOD, "predicted_output_tokens": 0}, "predicted_output_tokens 0: must be a whole number, 1"),
        ({**GOOD, "prompt_len": 3}, "field 'prompt_len': must be one of request_id, arrival_s"),
        ({**GOOD, "prompt_len": None}, "field 'prompt_len': must be one of request_id, arrival_s"),
        ({**GOOD, "arrival_s": None}, "arrival_s None: must be given"),
        (GOOD, "request_id 'first': must be unique"),
        ('{"arrival_s": NaN}', "arrival_s nan: must be a finite number of seconds"),
        ('{"request_id": "a", "arrival_s"', 'row \'{"request_id": "a", "arrival_s"\': must be JSON ('),
        ('["a", 0.5]', "row ['a', 0.5]: must be a JSON object"),
    ],
)
def test_a_damaged_jsonl_row_is_refused_with_row_field_value_and_what_is_allowed(jsonl, row, message):
    if row is GOOD:
        row = {**GOOD, "request_id": "first"}
    path = jsonl({**GOOD, "request_id": "first"}, row)
    with pytest.raises(WorkloadError) as refusal:
        read_trace(path)
    assert str(refusal.value).startswith(f"{path}: row 2: {message}")


@pytest.mark.parametrize("name", ["lora", "lora_name", "lora_request", "adapter", "adapter_id"])
def test_a_request_for_an_adapter_is_refused_by_name(jsonl, name):
    path = jsonl(GOOD, {**GOOD, "request_id": "b", name: "x"})
    with pytest.raises(
        WorkloadError, match=f"row 2: {name} 'x': must be left out: adapters are not modelled"
    ):
        read_trace(path)


TWICE = '{"request_id": "b", "arrival_s": 0, "prompt_tokens": 4, "output_tokens": 2, '


@pytest.mark.parametrize(
    ("end", "name", "value"),
    [
        ('"priority": 1, "priority": 0}', "priority", "0"),
        ('"output_tokens": 2}', "output_tokens", "2"),
        ('"client_id": null, "client_id": "c:d"}', "client_id", "'c:d'"),
        ('"turn": {"turn": 1}, "turn": 1}', "turn", "1"),
        ('"t\\u0075rn": 1, "turn": 1}', "turn", "1"),
    ],
)
def test_a_field_given_twice_is_refused(jsonl, end, name, value):
    with pytest.raises(WorkloadError) as refusal:
        read_trace(jsonl(GOOD, TWICE + end))
    assert str(refusal.value).endswith(f"row 2: {name} {value}: must be given once; the row has it twice")


def test_colons_and_names_of_fields_inside_texts_are_no_second_field(jsonl):
    row = {**GOOD, "session_id": '"priority": 1, "priority": 2', "client_id": "::"}
    assert read_trace(jsonl(row)).requests[0].session_id == row["session_id"]


def test_a_long_damaged_value_is_shortened_in_the_message(jsonl):
    with pytest.raises(WorkloadError) as refusal:
        read_trace(jsonl({**GOOD, "stop_token_ids": [-1] * 5000}))
    assert len(str(refusal.value)) < 400


# ---------------------------------------------------------------- files that are no traces


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.csv", b"", "is empty"),
        ("blank.csv", b"\n\r\n  \n", "is empty"),
        ("header.csv", AZURE_HEADER.encode() + b"\r\n", "has a header but no rows"),
        ("binary.csv", b"PK\x03\x04\x00\x00\x00", "is a binary file"),
        ("latin.csv", AZURE_HEADER.encode() + b"\n\xe9,1,1\n", "is not UTF-8 text"),
        ("wrong.csv", b"a,b,c\n1,2,3\n", "begins with 'a,b,c', which is no known format \\(azure, mooncake"),
        ("not.jsonl.zst", b'{"arrival_s": 1}', "cannot be read"),
        ("not.csv.gz", b"plain text", "cannot be read"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_clear_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(WorkloadError, match=message) as refusal:
        open_workload(path)
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(WorkloadError, match="is a folder"):
        open_workload(tmp_path)
    with pytest.raises(WorkloadError, match="no such file"):
        read_trace(tmp_path / "nowhere.csv")


# ---------------------------------------------------------------- open_workload


def test_a_preset_is_opened_by_name_with_its_options():
    workload = open_workload("chat", num_prompts=7, rate_per_s=2.0, seed=3)
    assert len(workload) == 7
    assert (workload.about["format"], workload.about["rate_per_s"], workload.about["seed"]) == (
        "synthetic",
        2.0,
        3,
    )
    assert workload.requests != open_workload("chat", num_prompts=7, rate_per_s=2.0, seed=4).requests


def test_a_file_is_opened_by_path_and_says_where_its_rows_went(azure):
    path = azure("2023-11-16 00:00:01,5,5", "2023-11-16 00:00:00,6,6", "2023-11-16 00:00:02,7,0")
    workload = open_workload(path)
    assert isinstance(workload, ListWorkload)
    assert [r.prompt_tokens for r in iter(workload.next, None)] == [6, 5]
    assert workload.about == {
        "format": "azure",
        "path": str(path),
        "rows_read": 3,
        "rows_emitted": 2,
        "rows_dropped": {"zero output tokens": 1},
        "requests": 2,
        "seed": 0,
        "loop": "open",
    }


def test_num_prompts_takes_the_first_in_order_of_arrival(azure):
    path = azure("2023-11-16 00:00:01,5,5", "2023-11-16 00:00:00,6,6", "2023-11-16 00:00:02,7,7")
    assert [r.prompt_tokens for r in open_workload(path, num_prompts=2).requests] == [6, 5]
    with pytest.raises(WorkloadError, match="num_prompts 4: must be at most 3, the usable rows of"):
        open_workload(path, num_prompts=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_prompts": 0}, "num_prompts 0: must be a whole number, 1 or more"),
        ({"rate_per_s": 2.0}, "rate_per_s 2.0: cannot change the times that .* has of its own"),
        ({"seed": -1}, "seed -1: must be a whole number, 0 or more"),
    ],
)
def test_options_that_do_not_fit_a_file_are_refused(azure, options, message):
    with pytest.raises(WorkloadError, match=message):
        open_workload(azure(GOOD_ROW, "2023-11-16 18:15:47,5,5"), **options)


def test_a_name_that_is_neither_lists_presets_and_formats():
    with pytest.raises(WorkloadError, match=r"'chatt': is neither .* Presets: chat, code. .*azure"):
        open_workload("chatt")


def test_a_name_that_is_both_is_refused_and_a_path_is_always_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl("chat", [plain("a")])
    with pytest.raises(WorkloadError, match=r"'chat': is a preset and a file here; the file is \./chat"):
        open_workload("chat")
    assert len(open_workload("./chat")) == len(open_workload(Path("chat"))) == 1


def test_one_field_is_mapped_once() -> None:
    """`arrival` and `arrival_s` are one field."""
    with pytest.raises(ArgumentError, match="arrival_s is mapped already, to ts"):
        ReadOptions(columns={"arrival": "ts", "arrival_s": "ts2"})
