"""Traces without times of arrival stay such traces, whatever they are written as; times of ours are never epochs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from request_strategies import IDS_64, requests

from servetwin.sim.cli import run
from servetwin.workloads import RequestColumns, RequestSpec, WorkloadError, read_trace, write_trace
from servetwin.workloads.traces import Tolerance
from servetwin.workloads.traces.formats import with_waiting_turns
from servetwin.workloads.traces.options import ReadOptions

ENDINGS = st.sampled_from([".jsonl", ".parquet"])
Written = Callable[..., Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    def write(*rows: dict[str, object], name: str = "trace.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def plain(found: Sequence[RequestSpec]) -> list[RequestSpec]:
    return [replace(request, source_row=None) for request in found]


# ---------------------------------------------------------------- round trips


@given(some=requests(IDS_64), ending=ENDINGS)
def test_requests_without_times_are_read_back_without_times(
    tmp_path_factory: pytest.TempPathFactory, some: list[RequestSpec], ending: str
) -> None:
    path = tmp_path_factory.mktemp("none") / f"trace{ending}"
    untimed = with_waiting_turns(RequestColumns.of([replace(request, arrival_s=0.0) for request in some]))
    write_trace(path, untimed, arrivals="none")
    trace = read_trace(path)
    assert (trace.arrivals, plain(trace.requests)) == ("none", plain(untimed))


@given(some=requests(IDS_64), ending=ENDINGS)
def test_later_turns_without_times_are_read_back_without_times(
    tmp_path_factory: pytest.TempPathFactory, some: list[RequestSpec], ending: str
) -> None:
    path = tmp_path_factory.mktemp("turns") / f"trace{ending}"
    start_s: dict[str | None, float] = {}
    starts = [
        request
        if request.session_id is None
        else replace(request, arrival_s=start_s.setdefault(request.session_id, request.arrival_s))
        for request in some
    ]
    waiting = with_waiting_turns(RequestColumns.of(starts).in_order_of_arrival())
    write_trace(path, waiting, arrivals="first turns")
    trace = read_trace(path)
    assert plain(trace.requests) == plain(waiting)
    sessions = [request.session_id for request in some if request.session_id is not None]
    # JSONL says it by the rows that lack a time: where there is none, all have times.
    some_wait = ending == ".parquet" or len(set(sessions)) < len(sessions)
    assert trace.arrivals == ("first turns" if some_wait else "recorded")


# ---------------------------------------------------------------- our JSONL and Parquet

OURS: dict[str, object] = {"prompt_tokens": 9, "output_tokens": 2}
A, B, C = ({"request_id": name, **OURS} for name in "abc")


def test_rows_without_arrival_stand_at_the_start_of_their_session(written: Written) -> None:
    turn = {"session_id": "s"}
    trace = read_trace(written(A | {"arrival_s": 3}, B | turn | {"arrival_s": 5}, C | turn))
    found = [(r.request_id, r.arrival_s, r.think_time_s) for r in trace]
    assert (trace.arrivals, found) == ("first turns", [("a", 3.0, None), ("b", 5.0, None), ("c", 5.0, 0.0)])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([A | {"arrival_s": 1}, B], "row 2: arrival_s None: must be given"),
        ([A | {"arrival_s": 1}, B | {"session_id": "s"}], "row 2: arrival_s None: must be given"),
        ([A, B | {"arrival_s": 1}], "row 2: arrival_s 1: must be left out, as in the rows before"),
    ],
)
def test_a_time_is_left_out_in_all_rows_or_in_later_turns(
    written: Written, rows: list[dict[str, object]], message: str
) -> None:
    with pytest.raises(WorkloadError, match=message):
        read_trace(written(*rows))
    assert read_trace(written(*rows), ReadOptions(tolerance=Tolerance.LENIENT)).rows_emitted == 1


def test_a_parquet_whose_mark_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    write_trace(path, [RequestSpec(request_id="a", arrival_s=4.0, prompt_tokens=1, output_tokens=1)])
    table = pq.read_table(path)
    for mark, message in (
        ("sometimes", "metadata servetwin.arrivals 'sometimes': must be one of recorded, first turns, none"),
        ("none", "row 1: arrival_s 4.0: must be 0 in a file that says it has no arrival times"),
    ):
        pq.write_table(table.replace_schema_metadata({"servetwin.arrivals": mark}), path)
        with pytest.raises(WorkloadError, match=message):
            read_trace(path)


def test_requests_that_have_times_are_not_written_without(tmp_path: Path) -> None:
    timed = [RequestSpec(request_id="a", arrival_s=4.0, prompt_tokens=1, output_tokens=1)]
    with pytest.raises(WorkloadError, match="arrivals 'none': must be 'recorded'"):
        write_trace(tmp_path / "trace.jsonl", timed, arrivals="none")


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.zst", ".parquet"])
def test_a_converted_trace_without_times_wants_a_rate_and_nothing_else(
    written: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    row = {"input_length": 20, "output_length": 2}
    source = written(row, row, row)
    ours = str(tmp_path / f"ours{ending}")
    assert run(["trace", "convert", str(source), "-o", ours]) == 0
    assert run(["trace", "scale", ours, "--speed-up", "2", "-o", str(tmp_path / "x.jsonl")]) == 2
    assert "has no arrival times, so there is nothing to scale" in capsys.readouterr().err
    load = ["run", ours, "--executor", "constant", "--step-time-s", "0.01", "--out", str(tmp_path / "run")]
    assert run(load) == 2
    assert "has no times: give a request rate" in capsys.readouterr().err
    assert run([*load, "--request-rate", "5"]) == 0
    back = tmp_path / "back.jsonl"
    assert run(["trace", "convert", ours, "--to", "mooncake", "-o", str(back)]) == 0
    assert "no timestamps in the file" in capsys.readouterr().err
    assert [json.loads(line) for line in back.read_text().splitlines()] == [row, row, row]
    assert read_trace(back).arrivals == "none"


def test_times_that_are_recorded_at_one_instant_are_times(
    written: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(A | {"arrival_s": 0}, B | {"arrival_s": 0})
    load = [
        "run",
        str(path),
        "--executor",
        "constant",
        "--step-time-s",
        "0.01",
        "--out",
        str(tmp_path / "run"),
    ]
    assert run([*load, "--request-rate", "5"]) == 2
    assert "has of its own" in capsys.readouterr().err
    assert run(load) == 0


def test_merged_traces_keep_what_is_known_of_their_times(written: Written, tmp_path: Path) -> None:
    untimed, timed = written(A, B), written(A | {"arrival_s": 1}, name="timed.jsonl")
    out = str(tmp_path / "merged.jsonl")
    assert run(["trace", "merge", str(untimed), str(untimed), "-o", out]) == 0
    assert read_trace(out).arrivals == "none"
    assert run(["trace", "merge", str(untimed), str(timed), "-o", out, "--overwrite"]) == 0
    assert read_trace(out).arrivals == "recorded"


# ---------------------------------------------------------------- times far away


def test_our_own_times_are_never_taken_for_times_since_1970(written: Written, tmp_path: Path) -> None:
    never = written(A | {"arrival_s": 0, "abort_s": 1.7e9}, B | {"arrival_s": 20})
    assert [request.abort_s for request in read_trace(never)] == [1.7e9, None]
    slow = tmp_path / "slow.jsonl"
    source = written(A | {"arrival_s": 0}, B | {"arrival_s": 20})
    assert run(["trace", "scale", str(source), "--speed-up", "1e-8", "-o", str(slow)]) == 0
    assert read_trace(slow).requests.arrival_s.tolist() == [0, 2e9]


# ---------------------------------------------------------------- what cannot be replayed as said


def test_context_that_the_turn_before_did_not_have_is_told(written: Written) -> None:
    def turn(name: str, number: int, prompt: int, **fields: object) -> dict[str, object]:
        row = {"request_id": name, "arrival_s": number, "session_id": "s", "turn": number}
        return row | {"prompt_tokens": prompt, "output_tokens": 5} | fields

    exact = [turn("a", 0, 10), turn("b", 1, 20, context_tokens=15)]
    assert read_trace(written(*exact)).notes == ()
    assert read_trace(written(*exact, turn("c", 2, 40, context_tokens=26))).notes == (
        "context_tokens of 1 turns are more than the prompt and answer of the turn before: what is beyond them is "
        "taken as new",
    )
