"""Readers of csv traces (Vidur, BurstGPT, Splitwise-sim, TraceLab, any csv) and of ServeGen's client folders."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from servetwin.workloads.spec import MAX_TOKENS, RequestSpec, WorkloadError
from servetwin.workloads.traces import ReadOptions, Tolerance, Trace, csv_rows, read_trace
from servetwin.workloads.traces.csv_kinds import SIGNED, optional
from servetwin.workloads.traces.csv_whole import turns_of
from servetwin.workloads.traces.rows import Rows
from servetwin.workloads.traces.servegen_clients import Histogram, client_files
from servetwin.workloads.traces.source import Source
from servetwin.workloads.traces.vidur import LENGTH

Write = Callable[..., Path]
FEWER = settings(max_examples=settings.default.max_examples // 3)
"""For properties that are tried on every format: each example writes and reads a file."""


@pytest.fixture
def csv_file(tmp_path: Path) -> Write:
    """Writes lines; gives the path."""

    def write(*lines: str) -> Path:
        path = tmp_path / "trace.csv"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def read(path: Path, **options: object) -> Trace:
    return read_trace(path, ReadOptions(**options))  # type: ignore[arg-type]


def lengths(trace: Trace) -> list[tuple[int, int]]:
    return [(r.prompt_tokens, r.output_tokens) for r in trace]


def ns_of(trace: Trace) -> list[int]:
    return [round(r.arrival_s * 1e9) for r in trace]


# ---------------------------------------------------------------- Vidur

VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens"


def test_vidur_has_the_requests_of_the_azure_rows_it_shares(shared_data: Path) -> None:
    vidur = read(shared_data / "traces/vidur/splitwise_conv_rows1-3000.csv")
    azure = read(shared_data / "traces/azure/AzureLLMInferenceTrace_conv_rows00001-10000.csv")
    assert (vidur.format, vidur.rows_read, vidur.rows_dropped) == ("vidur", 3000, {})
    assert list(vidur) == list(azure.requests[:3000])


def test_vidur_lengths_only_has_no_arrivals(shared_data: Path) -> None:
    trace = read(shared_data / "traces/vidur/arxiv_summarization_rows1-6000.csv")
    assert (trace.format, trace.arrivals, len(trace)) == ("vidur", "none", 6000)
    assert trace.requests.arrival_s.max() == 0
    assert (trace.requests.prompt_tokens + trace.requests.output_tokens).max() <= 4096
    assert trace.requests[0].prompt_tokens == 3772


def test_vidur_lengths_may_be_fractions_and_are_cut(csv_file: Write) -> None:
    trace = read(csv_file(VIDUR, "0.5,12.0,3", "1,12.9,3.0", "1.5,0.4,2"))
    assert lengths(trace) == [(12, 3), (12, 3)]
    assert trace.rows_dropped == {"zero prompt tokens": 1}
    assert trace.notes == ("2 rows have lengths with fractions: cut to whole tokens",)


def test_vidur_unit_can_be_said(csv_file: Write) -> None:
    path = csv_file(VIDUR, "1000,5,5", "3000,5,5")
    assert (ns_of(read(path))[1], ns_of(read(path, time_unit="ms"))[1]) == (2000 * 10**9, 2 * 10**9)


def test_vidur_in_a_smaller_unit_is_doubted_where_no_service_has_the_rate(csv_file: Write) -> None:
    rows = [f"{i * 1e-5:.6f},5,5" for i in range(3000)]
    with pytest.raises(WorkloadError, match=r"3,000 requests over 0\.02999 s.*time-unit"):
        read(csv_file(VIDUR, *rows))


def test_vidur_lengths_only_refuses_a_unit(csv_file: Write) -> None:
    with pytest.raises(WorkloadError, match="time_unit has no use: the file has lengths only"):
        read(csv_file("num_prefill_tokens,num_decode_tokens", "5,5"), time_unit="s")


# ---------------------------------------------------------------- BurstGPT

BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST_SESSIONS = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
)


def test_burstgpt_real_rows(shared_data: Path) -> None:
    trace = read(shared_data / "traces/burstgpt/BurstGPT_1_first3rows.csv")
    assert (trace.format, ns_of(trace)) == ("burstgpt", [0, 40 * 10**9, 113 * 10**9])
    assert lengths(trace) == [(472, 18), (1087, 230), (417, 276)]
    assert "time zone" in trace.notes[0]


def test_burstgpt_with_six_columns_drops_failures(shared_data: Path) -> None:
    trace = read(shared_data / "traces/burstgpt/format_6col_with_failures_MADE_UP.csv")
    assert (trace.rows_read, trace.rows_dropped) == (5, {"failed request": 2})
    assert lengths(trace) == [(120, 35), (64, 512), (9000, 1)]
    assert [offence.row for offence in trace.offences] == [2, 3]


def test_burstgpt_with_eight_columns_has_sessions_and_think_times(shared_data: Path) -> None:
    trace = read(shared_data / "traces/burstgpt/format_8col_sessions_MADE_UP.csv")
    assert trace.rows_dropped == {"failed request": 1}
    assert lengths(trace) == [(100, 60), (640, 20), (190, 90)]
    assert [r.turn for r in trace] == [0, None, 1]
    assert [r.session_id is None for r in trace] == [False, True, False]
    # Sent at 33 s; the answer to the request of 0 s ended at 4.2 s.
    assert [r.think_time_s for r in trace] == [None, None, 28.8]
    assert all(r.context_tokens is None for r in trace)


def test_burstgpt_columns_are_found_by_name(csv_file: Write) -> None:
    trace = read(csv_file("Model,Response tokens,Timestamp,Request tokens", "GPT-4,7,3,40"))
    assert lengths(trace) == [(40, 7)]


def test_burstgpt_overlapping_turns_have_no_think_time(csv_file: Write) -> None:
    rows = ["5,a,2,M,1,1,2,x", "0,a,9,M,1,1,2,x", "8,a,,M,1,1,2,x", "20,a,1,M,1,1,2,x"]
    trace = read(csv_file(BURST_SESSIONS, *rows))
    assert [(r.source_row, r.turn, r.think_time_s) for r in trace] == [
        (2, 0, None),
        (1, 1, None),  # sent 4 s before the answer to the one before had ended
        (3, 2, 1.0),
        (4, 3, None),  # nobody says when the answer to the one before ended
    ]
    assert trace.notes[1].startswith("1 requests of sessions were sent before")


def test_burstgpt_failed_requests_are_no_turns(csv_file: Write) -> None:
    rows = ["0,a,2,M,1,1,2,x", "4,a,1,M,5,0,5,x", "10,a,3,M,1,1,2,x"]
    trace = read(csv_file(BURST_SESSIONS, *rows))
    assert [(r.turn, r.think_time_s) for r in trace] == [(0, None), (1, 8.0)]


@pytest.mark.parametrize("header", [BURST, BURST_SESSIONS])
def test_burstgpt_one_model_only_is_no_offence(csv_file: Write, header: str) -> None:
    middle = ",s,1" if header == BURST_SESSIONS else ""
    rows = [f"0{middle},ChatGPT,1,2,3,x", f"9{middle},GPT-4,3,4,7,x"]
    trace = read(csv_file(header, *rows), model="GPT-4", tolerance=Tolerance.STRICT)
    assert (lengths(trace), trace.rows_read, trace.rows_dropped) == ([(3, 4)], 2, {"other model": 1})
    with pytest.raises(WorkloadError, match="model 'GPT-5': must be one of its models: 'ChatGPT', 'GPT-4'"):
        read(csv_file(header, *rows), model="GPT-5")


# ---------------------------------------------------------------- Splitwise-sim

SPLITWISE = "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size"


def test_splitwise_real_rows(shared_data: Path) -> None:
    trace = read(shared_data / "traces/splitwise_sim/test_trace.csv")
    assert (trace.format, ns_of(trace)) == ("splitwise", [0, 2 * 10**9, 3 * 10**9])
    assert lengths(trace) == [(4096, 32), (2048, 8), (2048, 16)]


def test_splitwise_other_types_are_dropped_and_batches_refused(csv_file: Write) -> None:
    rows = ["0,2,0,1,1,10,5", "1,1,0,2,1,10,5", "2,2,0,3,2,10,5"]
    assert read(csv_file(SPLITWISE, *rows[:2])).rows_dropped == {"request_type is not 2": 1}
    with pytest.raises(WorkloadError, match="row 3: batch_size 2: must be 1: a row is one request"):
        read(csv_file(SPLITWISE, *rows))


# ---------------------------------------------------------------- TraceLab

TRACELAB = "session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms"


def test_tracelab_many_sessions(shared_data: Path) -> None:
    trace = read(shared_data / "traces/tracelab/multi_session_large.csv")
    assert (trace.format, trace.arrivals, len(trace)) == ("tracelab csv", "first turns", 303)
    assert len({r.session_id for r in trace}) == 48
    requests = list(trace)
    planned = sum(r.context_tokens or 0 for r in requests) / sum(r.prompt_tokens for r in requests)
    assert planned == pytest.approx(0.817, abs=5e-4)
    session = [r for r in requests if r.session_id == "0"]
    assert [
        (r.turn, r.prompt_tokens, r.output_tokens, r.context_tokens, r.think_time_s) for r in session
    ] == [
        (0, 2318, 200, None, None),
        (1, 2518 + 348, 131, 2518, 0.3),
        (2, 2997 + 812, 104, 2997, 0.154),
    ]
    assert {r.arrival_s for r in session} == {0.0}


def test_tracelab_without_arrivals_begins_in_the_middle_and_compacts(shared_data: Path) -> None:
    trace = read(shared_data / "traces/tracelab/session_workload_example.csv")
    assert (trace.arrivals, len(trace)) == ("none", 11)
    first, last = trace.requests[0], trace.requests[10]
    assert (first.prompt_tokens, first.context_tokens, first.think_time_s) == (12461 + 5875, None, None)
    assert (last.context_tokens, last.prompt_tokens) == (48060, 48060 + 9844)
    assert trace.notes == (
        "1 sessions begin with context that the file lacks: it is sent as fresh tokens",
        "1 rounds keep less than the round before them kept (compaction)",
    )


def test_tracelab_other_order_of_columns_and_rows(csv_file: Write) -> None:
    header = "id,input_len,output_len,arrival_time,round_idx,tool_wait_after_ms,prefix_len"
    trace = read(csv_file(header, "b,4,9,70,7,0,25", "b,20,5,50,3,100.5,0", "a,6,1,90,0,0,0"))
    assert [(r.session_id, r.turn, r.arrival_s, r.think_time_s, r.context_tokens) for r in trace] == [
        ("b", 1, 0.0, 0.1005, 25),
        ("b", 0, 0.0, None, None),
        ("a", 0, 0.04, None, None),
    ]
    assert trace.notes == (
        "1 rounds state another arrival_time than the first of their session, which rules",
    )


def test_tracelab_context_is_at_most_what_the_turn_before_had(csv_file: Write) -> None:
    trace = read(csv_file(TRACELAB, "a,0,0,0,10,5,1", "a,0,1,40,2,3,1"))
    assert (trace.requests[1].prompt_tokens, trace.requests[1].context_tokens) == (42, 15)
    assert trace.notes[0].startswith("1 rounds keep more than the round before them had")


def test_tracelab_rounds_without_tokens_are_dropped_and_no_turns(csv_file: Write) -> None:
    trace = read(csv_file(TRACELAB, "a,0,0,0,10,5,7", "a,0,1,15,2,0,8", "a,0,2,17,2,3,9"))
    assert trace.rows_dropped == {"zero output tokens": 1}
    assert [(r.turn, r.think_time_s, r.context_tokens) for r in trace] == [(0, None, None), (1, 0.007, 15)]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("a,0,0,0,10,5,1", r"row 2: round_idx 0: must be unique in session 'a'; row 1 has it too"),
        (",0,1,0,10,5,1", r"row 2: session_id None: must be a text"),
        ("a,0,1,1000000000,1,5,1", r"row 2: prefix_len \+ input_len 1000000001"),
        ("a,0,1,0,10,5,-1", r"row 2: tool_wait_after_ms '?-1"),
    ],
)
def test_tracelab_damage_is_refused_or_dropped_by_name(csv_file: Write, row: str, problem: str) -> None:
    path = csv_file(TRACELAB, "a,0,0,0,10,5,1", row)
    with pytest.raises(WorkloadError, match=problem):
        read(path)
    trace = read(path, tolerance=Tolerance.LENIENT)
    assert (trace.rows_read, trace.rows_emitted) == (2, 1)


def test_tracelab_needs_one_session_column(csv_file: Write) -> None:
    with pytest.raises(WorkloadError, match="has both session_id and id"):
        read(csv_file("id," + TRACELAB, "a,a,0,0,0,1,1,0"))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=12))
def test_turns_are_those_of_each_session_sorted_by_order(rows: list[tuple[str, int]]) -> None:
    turns = turns_of([name for name, _ in rows], np.array([order for _, order in rows], dtype=np.int64))
    for name in "abc":
        members = sorted((order, row) for row, (session, order) in enumerate(rows) if session == name)
        for place, (_, row) in enumerate(members):
            before = -1 if place == 0 else members[place - 1][1]
            found = turns.place[row], turns.previous[row], turns.first[row]
            assert found == (place, before, members[0][1])


# ---------------------------------------------------------------- any csv


def test_csv_in_our_own_names_needs_no_map(csv_file: Write) -> None:
    header = "request_id,arrival_s,prompt_tokens,output_tokens,session_id,turn,think_time_s,context_tokens,priority"
    trace = read(csv_file(header, "x,0.5,9,2,s,0,,,-3", "y,1.75,20.0,4,s,1,0.25,11,", 'z,2,1,1,"",,,,'))
    assert trace.format == "csv"
    assert list(trace) == [
        RequestSpec(
            request_id="x",
            arrival_s=0.0,
            prompt_tokens=9,
            output_tokens=2,
            session_id="s",
            turn=0,
            priority=-3,
            source_row=1,
        ),
        RequestSpec(
            request_id="y",
            arrival_s=1.25,
            prompt_tokens=20,
            output_tokens=4,
            session_id="s",
            turn=1,
            think_time_s=0.25,
            context_tokens=11,
            source_row=2,
        ),
        RequestSpec(request_id="z", arrival_s=1.5, prompt_tokens=1, output_tokens=1, source_row=3),
    ]


def test_csv_columns_are_mapped_and_times_need_their_unit(csv_file: Write) -> None:
    path = csv_file("when,in,out,who", "2500,7,3,me", "4000,8,2,you")
    columns = {"arrival_s": "when", "prompt_tokens": "in", "output_tokens": "out", "client_id": "who"}
    trace = read(path, format="csv", columns=columns, time_unit="ms")
    assert (ns_of(trace), lengths(trace)) == ([0, 1_500_000_000], [(7, 3), (8, 2)])
    assert [r.client_id for r in trace] == ["me", "you"]
    with pytest.raises(WorkloadError, match=r"column 'when' \(for arrival_s\): its unit is not known"):
        read(path, format="csv", columns=columns)


def test_csv_dates_need_no_unit(csv_file: Write) -> None:
    path = csv_file(
        "at,prompt_tokens,output_tokens", "2024-05-10 00:00:01+00:00,1,1", "2024-05-10T00:00:03Z,1,1"
    )
    assert ns_of(read(path, columns={"arrival_s": "at"})) == [0, 2 * 10**9]
    with pytest.raises(WorkloadError, match="time_unit has no use"):
        read(path, columns={"arrival_s": "at"}, time_unit="s")


def test_csv_without_arrivals_says_so(csv_file: Write) -> None:
    trace = read(csv_file("prompt_tokens,output_tokens", "3,4"))
    assert (trace.arrivals, trace.requests[0].arrival_s) == ("none", 0.0)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"length": "in"}, "column for 'length': must be for one of arrival_s, prompt_tokens"),
        ({"prompt_tokens": "nowhere"}, r"column 'nowhere' \(for prompt_tokens\) is not in the header"),
        ({"prompt_tokens": "in"}, "no column for output_tokens: say which of in, out it is"),
        ({"prompt_tokens": "in", "output_tokens": "in"}, "must be different ones"),
        (
            {"prompt_tokens": "in", "output_tokens": "out", "context_tokens": "in"},
            "context_tokens: must come with one for session_id",
        ),
    ],
)
def test_csv_map_is_checked(csv_file: Write, columns: dict[str, str], problem: str) -> None:
    with pytest.raises(WorkloadError, match=problem):
        read(csv_file("in,out", "1,1"), format="csv", columns=columns)


def test_csv_with_a_name_or_a_cell_of_any_length_is_read_or_refused_shortly(csv_file: Write) -> None:
    long = "A" * 200_000
    assert len(read(csv_file(f"prompt_tokens,output_tokens,{long}", f"1,2,{long}"))) == 1
    assert len(read(csv_file("prompt_tokens,output_tokens,x", f'1,2,"{long}"'))) == 1
    with pytest.raises(WorkloadError, match="no column for output_tokens") as refused:
        read(csv_file(f"prompt_tokens,{long}", "1,2"), format="csv")
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("x,5,5,s,2", "row 2: request_id 'x': must be unique; row 1 has it too"),
        (",5,5,s,2", "row 2: request_id None: must be a text, not empty"),
        ("y,5,5,,2", "row 2: context_tokens 2: must be at most prompt_tokens"),
        ("y,5,5,s,6", r"row 2: context_tokens 6: must be at most prompt_tokens \(5\)"),
    ],
)
def test_csv_rows_agree_with_themselves_and_one_another(csv_file: Write, row: str, problem: str) -> None:
    path = csv_file("request_id,prompt_tokens,output_tokens,session_id,context_tokens", "x,9,2,s,", row)
    with pytest.raises(WorkloadError, match=problem):
        read(path)
    assert len(read(path, tolerance=Tolerance.LENIENT)) == 1


def test_header_of_two_formats_is_refused_until_one_is_named(csv_file: Write) -> None:
    path = csv_file(f"{VIDUR},prompt_tokens,output_tokens", "0,1,2,3,4")
    with pytest.raises(WorkloadError, match="may be vidur, csv: say which with --trace-format"):
        read(path)
    columns = {"arrival": "arrived_at"}
    assert lengths(read(path, format="csv", columns=columns, time_unit="s")) == [(3, 4)]


# ---------------------------------------------------------------- ServeGen

LENGTHS = {"input_tokens": "{0: 0.25, 100: 0.75}", "output_tokens": "{10: 0.5, 20: 0.5}"}
IDLE = "0,0,,0,0"


def client(
    folder: Path,
    *windows: str,
    number: int = 3,
    lengths: dict[str, dict[str, str]] | None = None,
) -> Path:
    """Writes the files of a client: one window of 600 s after another, without their times; gives the folder."""
    folder.mkdir(exist_ok=True)
    rows = "".join(f"{600 * i},{window}\r\n" for i, window in enumerate(windows))
    (folder / f"chunk-{number}-trace.csv").write_bytes(rows.encode())
    (folder / f"chunk-{number}-dataset.json").write_text(json.dumps(lengths or {"0": LENGTHS}))
    return folder


def first_rates(file: Path, windows: int) -> list[float]:
    rows = gzip.decompress(file.read_bytes()).decode().split()
    return [float(row.split(",")[1]) for row in rows[:windows]]


@pytest.mark.parametrize("name", ["reason/deepseek-r1", "language/m-small", "multimodal/mm-image"])
def test_servegen_has_the_rate_and_the_lengths_of_its_first_hour(shared_data: Path, name: str) -> None:
    folder = shared_data / "traces/servegen" / name
    trace = read(folder)
    rates = [first_rates(files.trace, 6) for files in client_files(folder)]
    assert trace.format == "servegen"
    assert trace.rows_read == trace.rows_emitted + sum(trace.rows_dropped.values())
    # Rates are counts of requests divided by 600 s, so the drawn numbers are exactly theirs.
    assert trace.rows_read == round(np.sum(rates) * 600)
    assert trace.about["window_s"] == [0, 3600]
    assert any("first active hour, 0 s to 3600 s" in note for note in trace.notes)


def test_servegen_is_drawn_again_alike_and_differently_with_another_seed(shared_data: Path) -> None:
    folder = shared_data / "traces/servegen/reason/deepseek-r1"
    once, twice, other = read(folder), read(folder), read(folder, seed=1)
    assert once.requests == twice.requests
    assert len(other) == len(once) and other.requests.arrival_s.tolist() != once.requests.arrival_s.tolist()


def test_servegen_window_is_a_part_of_a_longer_one(shared_data: Path) -> None:
    folder = shared_data / "traces/servegen/reason/deepseek-r1"
    long, short = read(folder, window_s=(600.0, 4000.0)), read(folder, window_s=(1000.0, 2500.0))

    def within(trace: Trace, begin_s: float) -> list[tuple[float, str | None, int, int]]:
        times = [(round(r.arrival_s + begin_s, 6), r) for r in trace]
        return [(t, r.client_id, r.prompt_tokens, r.output_tokens) for t, r in times if 1000 <= t < 2500]

    assert within(short, 1000.0) == within(long, 600.0)


def test_servegen_idle_windows_send_nothing_and_zero_lengths_are_dropped_by_name(tmp_path: Path) -> None:
    trace = read(
        client(tmp_path / "c", IDLE, "1,1,Gamma,1,1", IDLE, "0.001,1,Gamma,1,1", "2,3,Weibull,0.4,1")
    )
    assert trace.about["active_windows"] == 3 and trace.about["idle_windows"] == 2
    assert trace.about["window_s"] == [600, 3000]
    windows = np.floor((trace.requests.arrival_s + 600) / 600)
    assert set(windows.tolist()) <= {1.0, 3.0, 4.0}
    assert set(trace.rows_dropped) == {"zero prompt tokens"}
    assert trace.rows_dropped["zero prompt tokens"] / trace.rows_read == pytest.approx(0.25, abs=0.05)
    assert {r.client_id for r in trace} == {"3"}


def test_servegen_prompts_and_answers_are_independent(tmp_path: Path) -> None:
    lengths = {"input_tokens": "{1: 0.5, 2: 0.5}", "output_tokens": "{10: 0.5, 20: 0.5}"}
    trace = read(client(tmp_path / "c", "20,1,Gamma,1,1", lengths={"0": lengths}))
    prompt, output = trace.requests.prompt_tokens, trace.requests.output_tokens
    assert len(trace) == 12_000
    assert abs(np.corrcoef(prompt, output)[0, 1]) < 0.03
    assert (prompt == 1).mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(("pattern", "shape", "cv"), [("Gamma", 0.25, 2.0), ("Weibull", 2.0, 0.5227)])
def test_servegen_gaps_have_the_variation_of_their_shape(
    tmp_path: Path, pattern: str, shape: float, cv: float
) -> None:
    folder = client(
        tmp_path / "c", f"100,{cv},{pattern},{shape},1", lengths={"0": LENGTHS | {"input_tokens": "{1: 1}"}}
    )
    gaps = np.diff(read(folder).requests.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_servegen_rates_below_one_request_are_kept_on_average(tmp_path: Path) -> None:
    windows = ["0.0005,1,Gamma,1,1"] * 800
    trace = read(client(tmp_path / "c", *windows), window_s=(0, 800 * 600))
    assert trace.rows_read == pytest.approx(240, abs=40)


def test_servegen_lengths_come_from_the_last_window_that_has_some(tmp_path: Path) -> None:
    empty = {"input_tokens": "{}", "output_tokens": "{}"}
    later = {"input_tokens": "{7: 1.0}", "output_tokens": "{8: 1.0}"}
    folder = client(
        tmp_path / "c",
        *["1,1,Gamma,1,1"] * 108,
        lengths={"0": empty, "21600": later, "43200": empty},
    )
    trace = read(folder, window_s=(0, 64_800))
    assert trace.rows_dropped == {"no distribution of lengths": 21_600}
    assert set(lengths(trace)) == {(7, 8)}


def test_servegen_images_are_drawn_one_by_one(tmp_path: Path) -> None:
    fields = {
        "text_tokens": "{10: 1.0}",
        "image_tokens": "{100: 0.5, 200: 0.5}",
        "image_count": "{0: 0.5, 2: 0.5}",
        "output_tokens": "{5: 1.0}",
        "reason_ratio": "{0.5: 1.0}",
    }
    trace = read(client(tmp_path / "c", "5,1,Gamma,1,1", lengths={"0": fields}))
    assert set(trace.requests.prompt_tokens.tolist()) == {10, 210, 310, 410}
    assert any("image" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("window", "problem"),
    [
        ("-1,1,Gamma,1,1", r"chunk-3-trace\.csv: row 2: rate -1\.0: must be a number from 0"),
        ("nan,1,Gamma,1,1", r"chunk-3-trace\.csv: row 2: rate 'nan': must be a finite number"),
        ("1,1,Pareto,1,1", r"row 2: pattern 'Pareto': must be Gamma or Weibull, or empty"),
        ("1,1,Gamma,0,1", r"row 2: shape 0\.0: must be above 0"),
        ("1,1,Gamma,1", r"row 2: scale None: must be there; the row ends before it"),
    ],
)
def test_servegen_damaged_windows_are_refused_or_dropped(tmp_path: Path, window: str, problem: str) -> None:
    folder = client(tmp_path / "c", "1,1,Gamma,1,1", window)
    with pytest.raises(WorkloadError, match=problem):
        read(folder)
    trace = read(folder, tolerance=Tolerance.LENIENT)
    assert any(reason.startswith("damaged") for reason in trace.rows_dropped)
    assert any(offence.detail.startswith("chunk-3-trace.csv: ") for offence in trace.offences)


@pytest.mark.parametrize(
    "distribution",
    [
        "__import__('os').getcwd()",
        "{1: 1.0" + "}" * 9,
        "{" * 5000,
        "-" * 100_000 + "1",
        "{1: " + "9" * 6000 + "}",
        "{" + "1: 1.0, " * 600_000 + "}",
        "{1: 0.5, 2: 0.1}",
        "{-1: 1.0}",
        "{1.5: 1.0}",
        "{1: -0.5, 2: 1.5}",
        "{1: 1e999}",
        "{1, 2}",
        "[1]",
        "",
    ],
)
def test_servegen_distributions_are_literals_and_nothing_else(tmp_path: Path, distribution: str) -> None:
    folder = client(tmp_path / "c", "1,1,Gamma,1,1", lengths={"0": LENGTHS | {"output_tokens": distribution}})
    with pytest.raises(WorkloadError, match=r"chunk-3-dataset\.json: window 0, output_tokens: ") as refused:
        read(folder)
    assert len(str(refused.value)) < 500


def test_servegen_folder_is_complete_and_unambiguous(tmp_path: Path) -> None:
    folder = client(tmp_path / "c", "1,1,Gamma,1,1")
    (folder / "chunk-3-trace.csv.gz").write_bytes(b"")
    with pytest.raises(WorkloadError, match=r"is the same file of client 3"):
        read(folder)
    (folder / "chunk-3-trace.csv.gz").unlink()
    (folder / "chunk-3-trace.csv").unlink()
    with pytest.raises(WorkloadError, match=r"chunk-3-trace\.csv: is not there, although client 3 is"):
        read(folder)


@pytest.mark.parametrize("window_s", [(5.0, 5.0), (-1.0, 5.0), (0.0, float("inf")), (1e6, 2e6)])
def test_servegen_window_is_checked(tmp_path: Path, window_s: tuple[float, float]) -> None:
    with pytest.raises(WorkloadError, match="window_s"):
        read(client(tmp_path / "c", "1,1,Gamma,1,1"), window_s=window_s)


def test_servegen_too_many_requests_are_refused_before_they_are_drawn(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"holds 600,000,000 requests: at most 5,000,000"):
        read(client(tmp_path / "c", "1000000,1,Gamma,1,1"))


def test_servegen_shapes_at_the_limits_of_floats_still_fill_their_window(tmp_path: Path) -> None:
    shapes = ["1e-300", "1e-12", "1e-3", "1e12", "1e300"]
    windows = [f"0.1,1,{pattern},{shape},1" for pattern in ("Gamma", "Weibull") for shape in shapes]
    times_s = read(client(tmp_path / "c", *windows), window_s=(0, 6000), tolerance=0).requests.arrival_s
    assert np.isfinite(times_s).all() and 0 <= times_s.min() <= times_s.max() <= 6000


def test_histogram_draws_every_value_as_often_as_it_says() -> None:
    drawn = Histogram({0: 0.1, 5: 0.0, 9: 0.6, 400: 0.3}).sample(100_000, np.random.default_rng(0))
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [0, 9, 400]
    assert counts / 1e5 == pytest.approx([0.1, 0.6, 0.3], abs=0.005)


# ---------------------------------------------------------------- any damage


@dataclass(frozen=True)
class Sample:
    """A good file of a format."""

    header: str
    rows: tuple[str, ...]


SAMPLES = {
    "vidur": Sample(VIDUR, ("0.5,10,5", "1.25,20,7", "3,30,9")),
    "vidur lengths": Sample("num_prefill_tokens,num_decode_tokens,pd_ratio", ("10,5,2.0", "20,7,2.9")),
    "burstgpt": Sample(BURST, ("0,A,10,5,15,x", "7.5,B,20,7,27,x", "9,A,30,9,39,x")),
    "burstgpt sessions": Sample(
        BURST_SESSIONS, ("0,a,1.5,A,10,5,15,x", "7,,,B,20,7,27,x", "9,a,2,A,30,9,39,x")
    ),
    "splitwise": Sample(SPLITWISE, ("0,2,0,1,1,10,5", "1,2,0,2.5,1,20,7", "2,2,0,4,1,30,9")),
    "tracelab": Sample(TRACELAB, ("a,0,0,0,10,5,7", "a,0,1,15,4,5,3.5", "b,60,0,0,9,2,0")),
    "csv": Sample(
        "request_id,arrival_s,prompt_tokens,output_tokens,session_id,turn,think_time_s,context_tokens,priority",
        ("x,0.5,9,2,s,0,,,-3", "y,1.75,20,4,s,1,0.25,11,4", "z,2,1,1,,,,,"),
    ),
}
ODD_CELLS = st.one_of(
    st.sampled_from(
        [
            "",
            " ",
            "nan",
            "inf",
            "-inf",
            "-1",
            "-0",
            "0",
            "1e400",
            "1e-400",
            "0x1f",
            "1_0",
            "\N{ARABIC-INDIC DIGIT ONE}\N{ARABIC-INDIC DIGIT TWO}",
            "1e9",
            "1e18",
            "1.5",
        ]
    ),
    st.sampled_from(
        ["9" * 30, "9" * 5000, "0." + "1" * 300, "1e" + "9" * 50, "NULL", '"', '"a,b"', "a\rb", "\x0b7"]
    ),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(repr),
    st.text(max_size=8),
)


def with_cell(sample: Sample, row: int, column: int, cell: str) -> str:
    rows = [line.split(",") for line in sample.rows]
    rows[row % len(rows)][column % len(rows[0])] = cell
    return "\n".join([sample.header, *map(",".join, rows)]) + "\n"


def moved(sample: Sample, order: list[int], *, header_too: bool) -> str:
    """Columns in another order, doubled or missing; in the header, too, or below it only."""

    def picked(line: str) -> str:
        cells = line.split(",")
        return ",".join(cells[i % len(cells)] for i in order)

    header = picked(sample.header) if header_too else sample.header
    return "\n".join([header, *map(picked, sample.rows)]) + "\n"


@st.composite
def damaged_bytes(draw: st.DrawFn, sample: Sample) -> bytes:
    """A file that something has happened to."""
    text = draw(
        st.one_of(
            st.builds(with_cell, st.just(sample), st.integers(0, 9), st.integers(0, 9), ODD_CELLS),
            st.builds(
                moved, st.just(sample), st.lists(st.integers(0, 9), max_size=12), header_too=st.booleans()
            ),
            st.builds(
                lambda f: f"{sample.header}\n" + "\n".join(sample.rows * f), st.sampled_from([0, 1, 40])
            ),
        )
    )
    text = text.replace("\n", draw(st.sampled_from(["\n", "\r\n", "\n\n", "\r"])))
    data = text.encode(draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32", "cp037"])), "replace")
    cut = draw(st.one_of(st.just(len(data)), st.integers(0, len(data))))
    put = draw(st.one_of(st.just(b""), st.binary(max_size=6)))
    return data[:cut] + put + draw(st.sampled_from([b"", data[cut:]]))


def read_or_refuse(path: Path, options: ReadOptions) -> str:
    """What a reader says of a file; what it gives must keep its promises."""
    try:
        trace = read_trace(path, options)
    except WorkloadError as refused:
        assert str(path) in str(refused) and len(str(refused)) < 5000
        return str(refused)
    requests = list(trace)
    assert len(requests) == trace.rows_emitted > 0
    assert [r.arrival_s for r in requests] == sorted(r.arrival_s for r in requests)
    assert trace.rows_read == len(requests) + sum(trace.rows_dropped.values())
    assert len({r.request_id for r in requests}) == len(requests)
    return ""


@pytest.mark.parametrize("name", SAMPLES)
@FEWER
@given(data=st.data(), tolerance=st.sampled_from(Tolerance))
def test_any_damage_gives_sound_requests_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject, tolerance: Tolerance
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.csv"
    path.write_bytes(data.draw(damaged_bytes(SAMPLES[name])))
    read_or_refuse(path, ReadOptions(tolerance=tolerance))


@pytest.mark.parametrize("name", SAMPLES)
@FEWER
@given(data=st.data())
def test_one_odd_cell_is_taken_or_refused_by_row_and_column(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    sample = SAMPLES[name]
    row = data.draw(st.integers(0, len(sample.rows) - 1))
    column = data.draw(st.integers(0, sample.header.count(",")))
    cell = data.draw(st.floats().map(repr) | st.integers().map(str) | st.sampled_from(["", "x", "9" * 9000]))
    path = tmp_path_factory.getbasetemp() / "odd.csv"
    path.write_text(with_cell(sample, row, column, cell))
    refused = read_or_refuse(path, ReadOptions())
    if refused and "of two origins" not in refused:
        field = sample.header.split(",")[column]
        assert re.search(rf": row \d+: .*{field}", refused)


@FEWER
@given(data=st.data(), tolerance=st.sampled_from(Tolerance))
def test_any_damage_to_a_servegen_folder_gives_sound_requests_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, tolerance: Tolerance
) -> None:
    folder = client(
        tmp_path_factory.getbasetemp() / "servegen", "0.05,1,Gamma,1,1", IDLE, "0.1,2,Weibull,0.6,1"
    )
    trace, dataset = folder / "chunk-3-trace.csv", folder / "chunk-3-dataset.json"
    header, *rows = trace.read_text().split()
    if data.draw(st.booleans()):
        trace.write_bytes(data.draw(damaged_bytes(Sample(header, tuple(rows)))))
    else:
        text = dataset.read_text()
        at = data.draw(st.integers(0, len(text)))
        put = data.draw(
            st.sampled_from(["[" * 3000, "{", '"', "\\", "9" * 40, "NaN", "-", "{}", "\x00", "é"])
            | st.text(max_size=4)
        )
        dataset.write_text(text[:at] + put + data.draw(st.sampled_from(["", text[at:], text[at + 1 :]])))
    read_or_refuse(folder, ReadOptions(tolerance=tolerance))


# ---------------------------------------------------------------- whole columns and single cells

KINDS = {
    "COUNT": csv_rows.COUNT,
    "FLOAT_COUNT": csv_rows.FLOAT_COUNT,
    "NUMBER": csv_rows.NUMBER,
    "DATE": csv_rows.DATE,
    "TEXT": csv_rows.TEXT,
    "time in s": csv_rows.time_in("s"),
    "time in ms": csv_rows.time_in("ms"),
    "time in ns": csv_rows.time_in("ns"),
    "optional COUNT": optional(csv_rows.COUNT),
    "optional time in ms": optional(csv_rows.time_in("ms")),
    "optional DATE": optional(csv_rows.DATE),
    "SIGNED": SIGNED,
    "Vidur length": LENGTH,
}
DIGITS = st.text("0123456789", max_size=45)
NUMBERS = st.builds(
    "{}{}{}{}{}".format,
    st.sampled_from(["", "", "", "-", "+", " "]),
    DIGITS,
    st.just("") | DIGITS.map(lambda digits: f".{digits[:20]}"),
    st.just("") | st.integers(-400, 400).map(lambda power: f"e{power}"),
    st.sampled_from(["", "", "", " "]),
)
DATES = st.builds(
    "{}{}{}".format,
    st.datetimes().map(lambda time: str(time.replace(microsecond=0)))
    | st.sampled_from(
        ["2024-05-10T00:00:01", "2024-02-30 00:00:00", "2024-05-10 24:00:00", "2024-05-10 00:00:60"]
    ),
    st.just("") | st.text("0123456789", max_size=10).map(lambda digits: f".{digits}"),
    st.sampled_from(["", "", "Z", "+00:00", "-05:30", "+0100", "+23", "+99:99", " "]),
)
CELLS = st.one_of(
    st.integers(0, 10**7).map(str),
    NUMBERS,
    DATES,
    st.sampled_from(
        [
            "",
            "nan",
            "inf",
            "Infinity",
            "-0",
            "0x10",
            "1_0",
            "\N{ARABIC-INDIC DIGIT ONE}",
            "²",
            "1e5",
            "2024-05-10",
            str(MAX_TOKENS + 1),
        ]
    ),
    st.text(st.characters(exclude_characters=',"\r\n\0', exclude_categories=["Cs"]), max_size=5),
)


def parsed(
    path: Path, kind: csv_rows.Kind
) -> tuple[list[object], list[object], dict[str, int], list[object]]:
    rows = Rows(str(path), Tolerance.LENIENT)
    numbers: list[object] = []
    values: list[object] = []
    for batch in csv_rows.each_batch(Source(path), rows, [csv_rows.Column("x", kind)]):
        numbers += batch.numbers.tolist()
        values += batch.list("x")
    return numbers, values, dict(rows.dropped), list(rows.offences)


@pytest.mark.parametrize("kind", KINDS)
@FEWER
@given(cells=st.lists(CELLS, min_size=1, max_size=4), same=st.booleans())
@example(cells=["0" * 50 + "1"], same=True)
@example(cells=["0." + "3" * 60], same=True)
def test_whole_columns_and_single_cells_are_read_alike(
    tmp_path_factory: pytest.TempPathFactory, kind: str, cells: list[str], same: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "kinds.csv"
    cells = cells[:1] * len(cells) if same else cells
    path.write_text("\n".join(["y,x", *(f"1,{cell}" for cell in cells)]))
    at_once = parsed(path, KINDS[kind])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_rows, "_plain_table", lambda text, width: None)
        assert parsed(path, KINDS[kind]) == at_once
