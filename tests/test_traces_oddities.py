"""What foreign trace files hold that their schema does not say: rows in any order, NaN, other models, damage."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servetwin.sim.cli import run
from servetwin.workloads import RequestSpec, WorkloadError
from servetwin.workloads.traces import ReadOptions, Tolerance, Trace, read_trace

Read = Callable[..., Trace]


def trace_of(path: Path, *rows: object, **options: Any) -> Trace:
    """Reads a file of these rows: JSON values, or lines as they are."""
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return read_trace(path, ReadOptions(**options))


@pytest.fixture
def read(tmp_path: Path) -> Read:
    return lambda *rows, **options: trace_of(tmp_path / "trace.jsonl", *rows, **options)


# ---------------------------------------------------------------- Qwen-Bailian


def chat(name: object, parent: object, second: float, **fields: object) -> dict[str, object]:
    times = {"chat_id": name, "parent_chat_id": parent, "timestamp": second}
    return times | {"input_length": 20, "output_length": 2} | fields


def sessions(trace: Trace) -> list[tuple[str | None, int | None]]:
    return [(request.session_id, request.turn) for request in trace]


def test_bailian_children_may_stand_before_their_parents(read: Read) -> None:
    trace = read(chat(3, 2, 9), chat(2, 1, 5), chat(1, -1, 0))
    assert sessions(trace) == [("1", 0), ("1", 1), ("1", 2)]
    assert trace.notes == ()


def test_bailian_chats_at_one_time_follow_their_parents(read: Read) -> None:
    trace = read(chat(3, 2, 5), chat(2, 1, 5), chat(1, -1, 5))
    assert {r.source_row: r.turn for r in trace} == {1: 2, 2: 1, 3: 0}


def test_bailian_says_how_many_sessions_begin_before_the_file_wherever_their_rows_stand(read: Read) -> None:
    trace = read(chat(3, 2, 9), chat(2, 1, 5), chat(8, 7, 6))
    assert sessions(trace) == [("1", 0), ("7", 0), ("1", 1)]
    assert trace.notes == ("2 sessions began before the file: their first chats are not in it",)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([chat(1, -1, 0), chat(2, 3, 1), chat(3, 2, 2)], "row 2: parent_chat_id '3': must be a chat before"),
        ([chat(1, 1, 0)], "row 1: parent_chat_id '1': must be a chat before this one; its parents go round"),
        ([chat(4, 3, 0), chat(3, 3, 0)], "row 1: parent_chat_id '3': must be a chat before this one"),
        ([chat(1, -1, 0), chat(2, 1, 1), chat(1, 2, 2)], "row 1: chat_id '1': must be unique; another row"),
    ],
    ids=["circle", "its own parent", "behind a circle", "twice"],
)
def test_bailian_chats_that_have_no_place_are_refused_by_name(
    read: Read, rows: list[object], message: str
) -> None:
    with pytest.raises(WorkloadError) as error:
        read(*rows)
    assert message in str(error.value)


CHATS = st.integers(1, 6)


@given(
    links=st.lists(st.tuples(CHATS, CHATS | st.just(-1), st.booleans()), min_size=1, max_size=8),
    data=st.data(),
)
def test_the_order_of_bailian_rows_changes_nothing_but_their_numbers(
    tmp_path_factory: pytest.TempPathFactory, links: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    """Whatever the parents are: circles, chats that are there twice, missing ones, failed requests."""
    # Each row has a prompt length of its own, by which it is known again.
    rows: list[object] = [
        chat(c, p, second, input_length=20 + second, output_length=int(ok))
        for second, (c, p, ok) in enumerate(links)
    ]
    rows += [chat(99, -1, 50, input_length=99)]
    folder = tmp_path_factory.mktemp("bailian")
    plain = trace_of(folder / "a", *rows, tolerance=Tolerance.LENIENT)
    shuffled = trace_of(folder / "b", *data.draw(st.permutations(rows)), tolerance=Tolerance.LENIENT)

    def without_rows(trace: Trace) -> list[RequestSpec]:
        return [replace(request, request_id="any", source_row=None) for request in trace]

    assert without_rows(plain) == without_rows(shuffled)
    assert (plain.rows_dropped, plain.notes) == (shuffled.rows_dropped, shuffled.notes)


# ---------------------------------------------------------------- NaN and Infinity

MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}
NAN, INFINITY = float("nan"), float("-inf")


@pytest.mark.parametrize("value", [NAN, INFINITY, {"deep": [NAN]}])
def test_numbers_that_json_does_not_have_hurt_only_where_they_are_read(read: Read, value: object) -> None:
    trace = read(MOONCAKE | {"slo": value}, MOONCAKE | {"timestamp": 5, "slo": value, "text": "NaN"})
    assert (trace.format, trace.rows_emitted) == ("mooncake", 2)
    for name in MOONCAKE:
        with pytest.raises(WorkloadError, match=f"row 2: {name} "):
            read(MOONCAKE, MOONCAKE | {name: value})


def test_only_these_numbers_are_taken_beyond_json(read: Read) -> None:
    """A half of a character is no text, an open object no row, also beside a NaN."""
    for damage in ('"\\ud800"', '{"a": NaN', "[" * 100_000 + "NaN"):
        with pytest.raises(WorkloadError, match="row 2: row "):
            read(MOONCAKE, f'{{"timestamp": 5, "a": NaN, "b": {damage}}}')


def test_totals_of_a_bench_result_may_be_none(read: Read) -> None:
    result = {"input_lens": [5], "output_lens": [3], "start_times": [1.0], "mean_ttft_ms": NAN}
    assert len(read(result)) == 1
    with pytest.raises(WorkloadError, match="start_times nan: must be a finite time"):
        read(result | {"start_times": [NAN]})


# ---------------------------------------------------------------- rows of other models

BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


def test_rows_of_other_models_are_shown_and_none_are_not_counted(read: Read) -> None:
    rows = [BURST, *(f"{i},{'small' if i else 'big'},5,5,10,API log" for i in range(8))]
    trace = read(*rows, model="big")
    assert trace.rows_dropped == {"other model": 7}
    assert [offence.row for offence in trace.offences] == [2, 3, 4, 5, 6]
    assert read(*rows[:2], model="big").rows_dropped == {}


def test_json_rows_of_other_models_are_shown(read: Read) -> None:
    call = {"t": 0.0, "model": "big", "in": 130, "out": 5}
    trace = read(call, call | {"model": "small"}, call, model="big")
    assert trace.rows_dropped == {"other model": 1}
    assert [(offence.row, offence.reason) for offence in trace.offences] == [(2, "other model")]


# ---------------------------------------------------------------- several requests in a line


def test_requests_of_a_line_have_its_number_and_ids_of_their_own(read: Read) -> None:
    line = {"timestamp": 0, "requests": [{"prompt_length": 6, "output_length": 3}] * 2}
    broken = {"timestamp": 0, "requests": [*line["requests"], {"prompt_length": -1, "output_length": 1}]}
    trace = read(line, line)
    assert trace.requests.values("source_row") == [1, 1, 2, 2]
    assert trace.requests.values("request_id") == ["row-000001", "row-000001.2", "row-000002", "row-000002.2"]
    with pytest.raises(WorkloadError, match="row 2: prompt_length -1"):
        read(line, broken)


# ---------------------------------------------------------------- what a file says and nobody follows


def test_rows_that_depend_on_others_are_counted(read: Read) -> None:
    free = MOONCAKE | {"wait_for": [], "branches": None}
    trace = read(free, free | {"wait_for": [1]}, free | {"wait_for": [1], "branches": 2})
    assert trace.notes == (
        "branches of 1 rows, wait_for of 2 rows: not followed; these requests are sent at their own times",
    )
    assert read(free).notes == ()


BENCH = {"input_lens": [5], "output_lens": [3], "start_times": [1.0], "request_rate": "inf"}


def test_bench_results_say_what_paced_them(read: Read) -> None:
    assert read(BENCH | {"max_concurrency": None}).notes == ()
    held = read(BENCH | {"max_concurrency": 8}, BENCH | {"max_concurrency": 16, "start_times": [2.0]}).notes
    assert held == (
        "measured with max_concurrency 8, 16: the client held requests back until others had ended, so start_times "
        "carry the pace of the engine that was measured",
    )
    [paced] = read(BENCH | {"request_rate": 2.5}).notes
    assert paced == "measured with request_rate 2.5: start_times are those of the client's own process"


# ---------------------------------------------------------------- requests that cannot be meant


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"output_token_ids": (1, 2, 3)},
            r"output_token_ids \(1, 2, 3\) must be at most output_tokens \(2\)",
        ),
        ({"session_id": ""}, "session_id '' must be a text, not empty"),
        ({"client_id": ""}, "client_id '' must be a text, not empty"),
        ({"request_id": ""}, "request_id '' must be a text, not empty"),
    ],
)
def test_a_request_whose_names_or_answer_cannot_be_meant_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkloadError, match=message):
        RequestSpec(**{"request_id": "a", "arrival_s": 0.0, "prompt_tokens": 1, "output_tokens": 2} | fields)
    # The whole answer is one of its lengths.
    RequestSpec(request_id="a", arrival_s=0.0, prompt_tokens=1, output_tokens=2, output_token_ids=(1, 2))


# ---------------------------------------------------------------- files that are something else, or cannot be read


Say = Callable[..., str]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n2023-11-16 18:15:50,396,109\n"
RUN = ("--executor", "constant", "--step-time-s", "0.01", "--out")


@pytest.fixture
def said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    """What a command that is refused says: one line."""

    def refusal(*words: str) -> str:
        capsys.readouterr()
        assert run(words) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        return message

    return refusal


def test_a_fitted_model_and_a_trace_are_told_apart(tmp_path: Path, said: Say) -> None:
    trace, model = tmp_path / "trace.csv", tmp_path / "model.json"
    trace.write_text(AZURE)
    assert run(["trace", "fit", str(trace), "-o", str(model)]) == 0
    for words in (["trace", "info", str(model)], ["run", str(model), *RUN, str(tmp_path / "out")]):
        assert f"{model}: is a fitted model, no trace: `servetwin trace synth` makes" in said(*words)
    columns = tmp_path / "trace.parquet"
    assert run(["trace", "convert", str(trace), "-o", str(columns)]) == 0
    for path in (trace, columns):
        message = said("trace", "synth", str(path), "-o", str(tmp_path / "x.jsonl"))
        assert f"{path}: is no fitted model; where it is a trace, `servetwin trace fit` makes" in message


def test_what_the_system_refuses_names_the_file(tmp_path: Path, said: Say) -> None:
    folder, gz = tmp_path / "servegen", tmp_path / "cut.csv.gz"
    (folder / "chunk-0-trace.csv").mkdir(parents=True)
    (folder / "chunk-0-dataset.json").write_text("{}")
    gz.write_bytes(gzip.compress(AZURE.encode())[:40])
    loop = tmp_path / "loop.csv"
    loop.symlink_to(loop)
    long = tmp_path / ("n" * 300)
    for path, named in ((folder, folder / "chunk-0-trace.csv"), (gz, gz), (loop, loop), (long, long)):
        out = str(tmp_path / "out.jsonl")
        for words in (
            ["trace", "info", str(path)],
            ["trace", "convert", str(path), "-o", out],
            ["run", str(path), *RUN, out],
        ):
            message = said(*words)
            if path != loop:
                assert f"{named}: cannot be read: " in message
            assert str(path) in message


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, said: Say) -> None:
    trace, out = tmp_path / "trace.csv", tmp_path / ("n" * 300 + ".jsonl")
    trace.write_text(AZURE)
    assert f"{out}: cannot be written: " in said("trace", "convert", str(trace), "-o", str(out))
