"""The lessons that public bug reports of trace readers and replayers teach, by number, each held by what we ship.

Numbers of lessons are those of the reference page on workloads (section 4), numbers of reports those of the page of
reports. Each docstring names the threads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from servetwin.sim.cli import run
from servetwin.sim.runs import Run, read_run
from servetwin.workloads import ReadOptions, Tolerance, WorkloadError, open_workload, read_trace, write_jsonl

ELSEWHERE = {
    16: "test_sessions.py::test_a_client_with_a_limit_sends_late_and_both_latencies_are_told",
    24: "test_sessions.py::test_report_64_replaying_what_was_received_gives_the_same_log",
}
"""Lesson -> the test that holds it."""
REPORTS_ELSEWHERE = {
    64: "test_sessions.py::test_report_64_replaying_what_was_received_gives_the_same_log",
    65: "test_workloads_arrivals.py::test_65_client_streams_of_one_root_seed_do_not_send_in_step",
    70: "test_sessions.py::test_report_70_a_closed_loop_waits_for_the_answer",
}
"""Report -> the test that holds it, or (65) that part of it which is not held here."""
LESSONS = range(1, 31)

STEPS = ["--executor", "constant", "--step-time-s", "0.01"]

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens"
TRACELAB = "session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms"

EXPORTS = {"ours.jsonl.zst": "servetwin", "ours.parquet": "servetwin", "mooncake.jsonl": "mooncake"}
"""Name of a file -> the format in which `trace convert` writes it."""
BY_WORDS = ReadOptions(tokenize=lambda text: [len(word) for word in text.split()])

Rows = Callable[..., Path]
Replay = Callable[..., Run]
Refusal = Callable[..., str]
Trace = Callable[..., str]


@pytest.fixture
def written(tmp_path: Path) -> Rows:
    """Writes rows (JSON values, or lines as they are) to a file of its own; gives the path."""
    numbers = count()

    def write(*rows: object) -> Path:
        path = tmp_path / f"trace-{next(numbers)}"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
        return path

    return write


@pytest.fixture
def replay(tmp_path: Path) -> Replay:
    """Serves a workload (None: what the arguments make) by the command line, 10 ms a step; gives the run."""
    numbers = count()

    def replayed(workload: str | Path | None, *arguments: str) -> Run:
        out = tmp_path / f"run-{next(numbers)}"
        assert run([*command(workload), *arguments, "--out", str(out)]) == 0
        return read_run(out)

    return replayed


@pytest.fixture
def trace(capsys: pytest.CaptureFixture[str]) -> Trace:
    """What a `trace` command prints."""

    def traced(*arguments: str | Path) -> str:
        capsys.readouterr()
        assert run(["trace", *map(str, arguments)]) == 0
        return capsys.readouterr().out

    return traced


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """The one line with which the command line refuses a workload; nothing is served or written."""

    def refused(workload: str | Path, *arguments: str) -> str:
        out = tmp_path / "refused"
        capsys.readouterr()
        assert run([*command(workload), *arguments, "--out", str(out)]) == 2
        printed = capsys.readouterr()
        assert printed.err.count("\n") == 1 and printed.out == "" and not out.exists()
        return printed.err

    return refused


def command(workload: str | Path | None) -> list[str]:
    return ["run", *([] if workload is None else [str(workload)]), *STEPS]


def mooncake(timestamp: float | None, prompt: int, output: int = 2, **fields: object) -> dict[str, object]:
    """A row of a Mooncake trace; without timestamp for None."""
    time = {} if timestamp is None else {"timestamp": timestamp}
    return time | {"input_length": prompt, "output_length": output} | fields


def column(run: Run, name: str) -> list[Any]:
    """One value of each request, as their rows stand in the trace (a run logs them as they end)."""
    values: list[Any] = run.requests.sort_values("request_id")[name].tolist()
    return values


def hits(run: Run) -> list[int]:
    """Prompt tokens of each request that came from the prefix cache."""
    return column(run, "cached_tokens")


def pauses_s(run: Run) -> list[float]:
    """From the end of each turn to the next one, of a run that served one session."""
    ends_s, arrivals_s = column(run, "finish_s")[:-1], column(run, "arrival_s")[1:]
    return [sent - ended for ended, sent in zip(ends_s, arrivals_s, strict=True)]


def times_s(path: Path) -> list[float]:
    """Arrivals of a trace."""
    times: list[float] = read_trace(path).requests.arrival_s.tolist()
    return times


def written_by(run: Run) -> list[Path]:
    """The files of a run but its header, which tells when it ran."""
    files = (path.relative_to(run.path) for path in run.path.rglob("*") if path.is_file())
    return [file for file in files if file.name != "run.json"]


# ---------------------------------------------------------------- units of time


def test_lesson_01_the_unit_the_span_and_the_rate_are_told(written: Rows, trace: Trace) -> None:
    """kvcache-ai/Mooncake#4: nobody could tell that timestamps are ms, so what they were taken for is shown."""
    path = written(*[mooncake(500 * i, 600) for i in range(21)])
    cells = [line.strip("│ ").split("│") for line in trace("info", path).splitlines()]
    figures = {pair[0].strip(): pair[1].strip() for pair in cells if len(pair) == 2}
    assert (figures["span"], figures["rate (requests / span)"]) == ("10 s", "2.1 requests/s")
    assert json.loads(trace("info", path, "--json"))["about"]["time_unit"] == "ms"


def test_lesson_02_a_unit_is_said_or_beyond_doubt(written: Rows, replay: Replay, refusal: Refusal) -> None:
    """ai-dynamo/dynamo#2557: always dividing by 1000 broke files in s; ours says the unit, or is refused."""
    in_ms, in_s = [written(*[mooncake(t, 600) for t in times]) for times in ((0, 1500), (0.0, 1.5))]
    assert column(replay(in_ms), "arrival_s") == [0, 1.5]
    assert column(replay(in_s, "--time-unit", "s"), "arrival_s") == [0, 1.5]
    assert "it may be in s or in ms: say which with --time-unit" in refusal(in_s)
    whole_seconds = written(*[mooncake(i // 5, 600) for i in range(5000)])
    assert "5,000 requests over 0.999 s, if its times are in ms: say which unit" in refusal(whole_seconds)


def test_report_63_two_origins_in_one_trace_are_refused_with_both_ranges(
    written: Rows, replay: Replay, refusal: Refusal
) -> None:
    """inference-sim#1606, #1611: a relative arrival beside a time since 1970; one origin alone begins at 0."""
    mixed = written(mooncake(40_000, 600), mooncake(1_787_000_000_000_000, 600))
    message = refusal(mixed, "--time-unit", "us")
    assert "times of two origins: arrival from 0.04 to 0.04 s" in message
    assert "and arrival from 1.787e+09 to 1.787e+09 s" in message
    since_1970 = written(*[mooncake(1_787_000_000_000_000 + t, 600) for t in (40_000, 1_040_000)])
    assert column(replay(since_1970, "--time-unit", "us"), "arrival_s") == [0, 1]


def test_report_63_our_own_times_since_1970_change_no_figure(written: Rows, replay: Replay) -> None:
    """inference-sim#1606: our JSONL keeps its times as written, and a run counts from its first arrival."""
    request = {"prompt_tokens": 40, "output_tokens": 5}
    durations = []
    for origin_s in (0, 1.787e9):
        rows = [{"request_id": str(i), "arrival_s": origin_s + i} | request for i in range(2)]
        summary = replay(written(*rows)).summary
        durations.append((summary["duration"], summary["mean_ttft_ms"]))
    # A double holds 1.787e9 s to a quarter of a microsecond.
    assert durations[1] == pytest.approx(durations[0], rel=1e-4)


def test_lesson_23_deadlines_and_arrivals_count_from_one_origin(written: Rows, replay: Replay) -> None:
    """inference-sim#1606: deadlines of another origin than arrivals let everything time out, or never anything."""
    request = {"request_id": "a", "arrival_s": 5, "prompt_tokens": 40, "output_tokens": 50}
    # In our own files all times count from one start: this one never gives up, that one does before it is sent.
    assert column(replay(written(request | {"abort_s": 1.787e9})), "finish_reason") == ["length"]
    [note] = read_trace(written(request | {"arrival_s": 1.787e9, "abort_s": 60})).notes
    assert note == "abort_s of 1 requests is before their arrival_s: they give up as soon as they are sent"
    assert column(replay(written(request | {"abort_s": 5.1})), "finish_reason") == ["abort"]
    # A measured run has both: when its requests came, and what became of them by a monotonic clock.
    measured = {"input_toks": 40, "output_toks": 5, "queued_ts": 81.25, "first_token_ts": 81.5}
    path = written(*[measured | {"request_id": str(i), "arrival_time": 1.787e9 + i} for i in range(3)])
    assert read_trace(path).requests.arrival_s.tolist() == [0, 1, 2]


OURS: dict[str, object] = {"prompt_tokens": 5, "output_tokens": 5}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([mooncake(0, 600), mooncake(None, 600)], "row 2: timestamp None: must be a finite time in ms"),
        (
            [mooncake(0, 600), {"timestamp": "soon", "input_length": 5, "output_length": 5}],
            "row 2: timestamp 'soon': must be a finite",
        ),
        ([VIDUR, "0,5,5", "nan,5,5"], "row 2: arrived_at 'nan': must be a finite"),
        ([VIDUR, "0,5,5", "1,5,5", "inf,5,5"], "row 3: arrived_at 'inf': must be a finite"),
        ([VIDUR, "0,5,5", ",5,5"], "row 2: arrived_at '': must be"),
        ([AZURE, "2023-11-16 18:00:00,5,5", ",5,5"], "row 2: TIMESTAMP '': must be a time like"),
        (
            [OURS | {"request_id": "a", "arrival_s": 0}, OURS | {"request_id": "b"}],
            "row 2: arrival_s None: must be given",
        ),
        (
            [mooncake(0, 600), '{"timestamp": NaN, "input_length": 5, "output_length": 5}'],
            "row 2: timestamp nan: must",
        ),
    ],
    ids=["missing", "text", "nan", "inf", "empty", "no date", "our own", "NaN in JSON"],
)
def test_lesson_06_a_time_that_is_none_is_refused_by_row_and_nothing_is_served(
    written: Rows, refusal: Refusal, rows: list[object], message: str
) -> None:
    """ai-dynamo/aisimulate#183: an arrival that was missing or not finite stalled the replay without a word."""
    assert message in refusal(written(*rows))


def test_lesson_07_a_trace_begins_at_its_first_arrival_and_windows_share_no_request(
    written: Rows, trace: Trace, tmp_path: Path
) -> None:
    """ai-dynamo/aiperf#187: traces need not start at 0; ours do once read, and windows meet without overlap."""
    path = written(*[mooncake(27_482 + 1000 * i, 600 + i) for i in range(10)])
    assert times_s(path) == [*range(10)]
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    trace("cut", path, "--end", "4", "-o", first)
    trace("cut", path, "--start", "4", "-o", second)
    assert (times_s(first), times_s(second)) == ([0, 1, 2, 3], [0, 1, 2, 3, 4, 5])
    assert [r.prompt_tokens for part in (first, second) for r in read_trace(part)] == [*range(600, 610)]


def test_lesson_10_whatever_is_measured_in_seconds_is_scaled_together(
    written: Rows, replay: Replay, trace: Trace, tmp_path: Path
) -> None:
    """ai-dynamo/aiperf#1129: a speed-up that left idle times alone; pauses and patience shrink with the gaps."""
    session = {"session_id": "s", "prompt_tokens": 600, "output_tokens": 2}
    path = written(
        session | {"request_id": "0", "arrival_s": 0, "turn": 0},
        session | {"request_id": "1", "arrival_s": 0, "turn": 1, "think_time_s": 4},
        {"request_id": "2", "arrival_s": 10, "prompt_tokens": 9, "output_tokens": 900, "abort_s": 12},
    )
    faster = tmp_path / "faster.jsonl"
    trace("scale", path, "--speed-up", "4", "-o", faster)
    for workload, pause_s, sent_s, given_up_s in ((path, 4, 10, 12), (faster, 1, 2.5, 3)):
        served = replay(workload)
        arrivals_s, ends_s = column(served, "arrival_s"), column(served, "finish_s")
        assert arrivals_s[1] - ends_s[0] == pytest.approx(pause_s)
        assert arrivals_s[2] == sent_s
        assert ends_s[2] == pytest.approx(given_up_s, abs=0.02)


def test_lesson_11_a_speed_up_makes_it_faster_and_a_rate_is_requests_per_second(
    written: Rows, trace: Trace, tmp_path: Path
) -> None:
    """vllm-project/guidellm#620: a "rate" of 1000 made a replay 1000 times slower, which looked like a hang."""
    path, out = written(*[mooncake(1000 * i, 600) for i in range(11)]), tmp_path / "out.jsonl"
    said = trace("scale", path, "--speed-up", "1000", "-o", out)
    assert said == f"{out}: 11 requests over 0.01 s (1,100 requests/s)\n"
    said = trace("scale", path, "--rate", "1000", "-o", out, "--overwrite")
    assert said == f"{out}: 11 requests over 0.011 s (1,000 requests/s)\n"


def test_lesson_15_times_are_absolute_and_do_not_drift_with_the_server(replay: Replay) -> None:
    """vllm-project/vllm#21104, #21108: sleeping gap by gap gave 183.5 in the place of 200 requests/s."""
    dataset = ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "8"]
    paced = ["--num-prompts", "400", "--request-rate", "200", "--max-num-seqs", "4"]
    served = replay(None, *dataset, *paced)
    assert column(served, "arrival_s")[-1] == pytest.approx(400 / 200, abs=1e-9)
    assert max(column(served, "finish_s")) > 4


def test_lesson_17_a_client_with_a_limit_sends_in_bursts_which_the_log_shows(
    written: Rows, replay: Replay
) -> None:
    """vllm-project/vllm#45502: slots that come free together turn a paced load into bursts; both times are told."""
    # One a second; the first four end in the same step, in which the next four are sent.
    rows = [mooncake(1000 * i, 40, 900 - 100 * i if i < 4 else 5) for i in range(8)]
    served = replay(written(*rows), "--max-concurrency", "4", "--no-async-scheduling")
    assert column(served, "arrival_s") == [*range(8)]
    freed_s = column(served, "finish_s")[0]
    assert column(served, "sent_s") == [0, 1, 2, 3, *[freed_s] * 4]
    held_back_ms = 1000 * sum(freed_s - i for i in range(4, 8)) / 8
    assert served.summary["mean_client_queue_time_ms"] == pytest.approx(held_back_ms)


# ---------------------------------------------------------------- prompts that begin alike


def test_lesson_03_ids_of_64_bits_stay_whole(
    written: Rows, replay: Replay, trace: Trace, tmp_path: Path
) -> None:
    """ai-dynamo/dynamo#12046: ids cut to 32 bits merged distinct prefixes; ours stay whole through every file."""
    ids = [5, 2**32 + 5, 2**63 + 5, 5 - 2**63, 2**32 + 5]
    path = written(*[mooncake(5000 * i, 513, hash_ids=[id_, 100 + i]) for i, id_ in enumerate(ids)])
    assert hits(replay(path)) == [0, 0, 0, 0, 512]
    for name, to in EXPORTS.items():
        trace("convert", path, "--to", to, "-o", tmp_path / name)
        assert hits(replay(tmp_path / name)) == [0, 0, 0, 0, 512]


@pytest.mark.parametrize("prompt", [1, 511, 512, 513, 1024, 1025])
@pytest.mark.parametrize("ids", [1, 2, 3])
def test_lesson_08_there_is_an_id_for_each_block_that_a_prompt_begins(
    written: Rows, prompt: int, ids: int
) -> None:
    """ai-dynamo/aiperf#581: documented examples broke (n - 1) * 512 < input_length <= n * 512."""
    path = written(mooncake(0, prompt, hash_ids=list(range(ids))))
    if (ids - 1) * 512 < prompt <= ids * 512:
        assert read_trace(path).requests[0].prompt_tokens == prompt
    else:
        with pytest.raises(WorkloadError, match=f"row 1: hash_ids '{ids} ids': must be "):
            read_trace(path)


def test_lesson_04_the_part_of_a_block_at_the_end_has_its_id_and_is_kept(
    written: Rows, replay: Replay, refusal: Refusal, trace: Trace, tmp_path: Path
) -> None:
    """ai-dynamo/dynamo#10095: a writer dropped the partial block at the end, and with it the length of the prompt."""
    path = written(mooncake(0, 700, hash_ids=[1, 2]), mooncake(5000, 700, hash_ids=[1, 2]))
    served = replay(path)
    assert column(served, "num_prompt_tokens") == [700, 700]
    # What a tail that comes again fills of the engine's own blocks is hit: 43 blocks of 16.
    assert hits(served) == [0, 688]
    again = tmp_path / "again.jsonl"
    trace("convert", path, "--to", "mooncake", "-o", again)
    assert [json.loads(line)["hash_ids"] for line in again.read_text().splitlines()] == [[1, 2], [1, 2]]
    dropped = written(mooncake(0, 700, hash_ids=[1]))
    assert "row 1: hash_ids '1 ids': must be 2 for 700 tokens at 512 per id" in refusal(dropped)


def test_lesson_12_too_many_ids_are_refused_with_what_would_fit(written: Rows, refusal: Refusal) -> None:
    """vllm-project/guidellm#948: rows made by hand had more ids than blocks."""
    message = refusal(written(mooncake(0, 600, hash_ids=[1, 2]), mooncake(9, 600, hash_ids=[1, 2, 3])))
    assert "row 2: hash_ids '3 ids': must be 2 for 600 tokens at 512 per id" in message
    assert "256 tokens per id would fit: --hash-block-size" in message


def test_lesson_13_no_default_block_size_can_make_prompts_shorter(
    written: Rows, replay: Replay, refusal: Refusal
) -> None:
    """vllm-project/vllm#39795: ids of another size than the default gave prompts 32 times too short."""
    small = written(mooncake(0, 40, hash_ids=[1, 2, 3]))
    assert "16 tokens per id would fit" in refusal(small)
    assert column(replay(small, "--hash-block-size", "16"), "num_prompt_tokens") == [40]
    # Whoever only looks at the file is told, too, though all its rows are dropped.
    with pytest.raises(WorkloadError, match=r"none of its 1 rows can be used.* 16 tokens per id would fit"):
        read_trace(small, ReadOptions(tolerance=Tolerance.LENIENT))


def test_lesson_13_mooncakes_own_file_is_not_read_with_16_tokens_an_id(
    refusal: Refusal, shared_data: Path
) -> None:
    """vllm-project/vllm#39795: 16 is vLLM's default for `timed_trace`, 512 is what the file has."""
    conversation = shared_data / "traces" / "mooncake" / "conversation_trace_rows00001-05000.jsonl.gz"
    assert "512 tokens per id would fit" in refusal(conversation, "--hash-block-size", "16")


def test_lesson_20_shared_prefixes_survive_every_way_of_writing_them(
    written: Rows, replay: Replay, trace: Trace, tmp_path: Path
) -> None:
    """inference-sim#829: an export lost prefix groups, and its replay had no cache hit."""
    groups = [7, 8, 7, 9, 8, 7]
    rows = [mooncake(5000 * i, 600, hash_ids=[id_, 100 + i]) for i, id_ in enumerate(groups)]
    first = replay(written(*rows))
    assert hits(first) == [0, 0, 512, 0, 512, 512]
    assert hits(replay(first.path)) == hits(first)
    for name, to in EXPORTS.items():
        trace("convert", first.path, "--to", to, "-o", tmp_path / name)
        assert hits(replay(tmp_path / name)) == hits(first)


def test_lesson_26_the_length_of_a_prompt_is_not_computed_from_its_ids(written: Rows, replay: Replay) -> None:
    """inference-sim#1604: WEKA's versions give ids to begun or to full blocks only; `in` rules in both."""
    rows = [{"t": i, "in": 100, "out": 2, "hash_ids": ids} for i, ids in enumerate(([1, 2], [1]))]
    served = replay(written(*rows))
    assert column(served, "num_prompt_tokens") == [100, 100]
    assert hits(served) == [0, 64]


def test_lesson_29_where_a_trace_names_no_prefixes_none_are_made_up(
    written: Rows, replay: Replay, trace: Trace
) -> None:
    """Azure/AzurePublicDataset#53: equal lengths are no equal prompts; reuse is unknown, which is not 0 %."""
    path = written(AZURE, *[f"2023-11-16 18:00:0{i},512,4" for i in range(5)])
    served = replay(path)
    assert served.config["engine"]["cache"]["enable_prefix_caching"] is True
    assert hits(served) == [0] * 5
    assert "prefix reuse unknown" in trace("info", path)
    assert json.loads(trace("info", path, "--json"))["prefix"] == {"block_hit_percent_infinite": None}


# ---------------------------------------------------------------- sessions


def test_lesson_05_whole_prompts_and_increments_are_formats_of_their_own(
    written: Rows, replay: Replay
) -> None:
    """ai-dynamo/dynamo#9653: one conversation, told as whole prompts and as what each turn adds, is the same."""
    whole = written(mooncake(0, 100, 20, session_id="s"), mooncake(None, 160, 20, session_id="s", delay=1000))
    increments = written(TRACELAB, "s,0,0,0,100,20,1000", "s,0,1,120,40,20,0")
    assert [read_trace(path).format for path in (whole, increments)] == ["mooncake", "tracelab csv"]
    for path in (whole, increments):
        assert column(replay(path), "num_prompt_tokens") == [100, 160]


def test_lesson_09_follow_ups_are_whole_prompts_and_count_their_history_once(
    written: Rows, replay: Replay
) -> None:
    """ai-dynamo/aiperf#1393: Bailian's rows are whole prompts; put behind their history they count it twice."""
    chat = {"type": "text", "turn": 1, "output_length": 5}
    first = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0, "input_length": 48, "hash_ids": [1, 2, 3]}
    later = {"chat_id": 2, "parent_chat_id": 1, "timestamp": 9, "input_length": 64, "hash_ids": [1, 2, 3, 4]}
    path = written(chat | first, chat | later)
    for loop in ("open", "closed"):
        served = replay(path, "--loop", loop)
        assert column(served, "num_prompt_tokens") == [48, 64]
        assert hits(served) == [0, 48]


def test_lesson_25_sessions_grow_think_and_forget(written: Rows, replay: Replay) -> None:
    """inference-sim#1478, #1613: context that was compacted counts once (it was 312 % too much), pauses are kept."""
    path = written(TRACELAB, "s,0,0,0,100,28,1500", "s,0,1,128,32,16,250", "s,0,2,48,16,4,0")
    served = replay(path)
    assert served.header["workload"]["loop"] == "closed"
    assert column(served, "num_prompt_tokens") == [100, 160, 64]
    # Whole blocks of what is kept; the last token of an answer was computed by nobody.
    assert hits(served) == [0, 112, 48]
    assert pauses_s(served) == pytest.approx([1.5, 0.25])


def test_lesson_25_turns_without_times_of_their_own_wait_for_their_answers(
    written: Rows, replay: Replay
) -> None:
    """inference-sim#1478: a turn of which neither time nor delay is known comes after the answer before it."""
    served = replay(written(mooncake(0, 100, 20, session_id="s"), mooncake(None, 160, 20, session_id="s")))
    assert pauses_s(served) == [0]


@pytest.mark.parametrize(
    ("rows", "format_"),
    [
        ([[{"conversations": [{"value": "one two"}, {"value": "three"}] * 2}]], "sharegpt sessions"),
        ([{"id": "c", "block_size": 64, "requests": [{"t": t, "in": 9, "out": 2} for t in (0, 1)]}], None),
    ],
    ids=["sharegpt", "weka"],
)
def test_lesson_25_sessions_sent_at_a_rate_wait_for_their_answers(
    written: Rows, rows: list[object], format_: str | None
) -> None:
    """inference-sim#1478: a rate gives sessions a beginning, and their later turns no time."""
    read = replace(BY_WORDS, format=format_) if format_ else None
    assert open_workload(written(*rows), rate_per_s=1, read=read).about["loop"] == "closed"


def test_lesson_28_every_row_is_a_request_with_its_own_figures(written: Rows, replay: Replay) -> None:
    """sgl-project/sglang#12603, #20461, #37201: rows left as they were, and rounds whose metrics were misaligned."""
    lengths = {
        ("a", 0): (100, 9),
        ("b", 0): (50, 4),
        ("a", 1): (300, 7),
        ("b", 1): (200, 30),
        ("a", 2): (400, 2),
    }
    path = written(
        *[
            mooncake(None if turn else 1, *size, session_id=name, **({"delay": 70} if turn else {}))
            for (name, turn), size in lengths.items()
        ]
    )
    assert {(r.session_id, r.turn): (r.prompt_tokens, r.output_tokens) for r in read_trace(path)} == lengths
    served = replay(path)
    sizes = zip(column(served, "num_prompt_tokens"), column(served, "num_output_tokens"), strict=True)
    assert [*sizes] == [*lengths.values()]
    assert served.summary["completed"] == len(lengths)
    assert served.summary["total_output_tokens"] == sum(output for _, output in lengths.values())


# ---------------------------------------------------------------- rows that are used, and how long they are


def test_lesson_14_burstgpt_keeps_times_and_models_and_never_invents_rows(
    written: Rows, replay: Replay, refusal: Refusal, trace: Trace, tmp_path: Path
) -> None:
    """vllm-project/vllm#13063: times unused, all but GPT-4 left out, and fewer rows than were asked for."""
    path = written(
        BURSTGPT,
        "5,ChatGPT,472,18,490,Conversation log",
        "45,GPT-4,100,20,120,API log",
        "118,ChatGPT,7,0,7,API log",
        "218,ChatGPT,30,40,70,API log",
    )
    served = replay(path)
    assert column(served, "arrival_s") == [0, 40, 213]
    assert served.header["workload"]["rows_dropped"] == {"failed request": 1}
    assert "--num-prompts 9: must be at most 3, the usable rows" in refusal(path, "--num-prompts", "9")
    trace("resample", path, "-n", "9", "-o", tmp_path / "nine.jsonl")
    assert len(replay(tmp_path / "nine.jsonl").requests) == 9


def test_lesson_18_prompts_have_exactly_the_length_that_was_drawn(
    replay: Replay, written: Rows, tmp_path: Path
) -> None:
    """vllm-project/vllm#10847: texts made of random tokens were tokenised again, and had another length."""
    row = {"conversations": [{"value": "how long is this one"}, {"value": "so long"}]}
    [counted] = read_trace(written([row]), BY_WORDS)
    path = tmp_path / "counted.jsonl"
    write_jsonl(path, [counted])
    assert counted.prompt_token_ids == (3, 4, 2, 4, 3)
    assert column(replay(path), "num_prompt_tokens") == [5]
    dataset = ["--dataset-name", "random", "--num-prompts", "9", "--random-input-len", "50"]
    served = replay(None, *dataset, "--random-range-ratio", "0.5")
    drawn = [request.prompt_tokens for request in read_trace(served.path)]
    assert column(served, "num_prompt_tokens") == drawn and len({*drawn}) > 1


def test_lesson_19_answers_are_as_long_as_recorded_or_as_the_context_allows(
    written: Rows, replay: Replay
) -> None:
    """vllm-project/vllm#56730, #46701: answers were cut to 16 tokens; only max_model_len - prompt may cut them."""
    path = written(mooncake(0, 40, 100), mooncake(0, 200, 100), mooncake(0, 256, 100))
    served = replay(path, "--max-model-len", "256")
    assert column(served, "num_output_tokens") == [100, 56, 0]
    assert column(served, "finish_reason") == ["length", "length", "refused"]


def test_lesson_21_what_a_chat_template_adds_is_said_to_be_missing(written: Rows) -> None:
    """inference-sim#1269, #1299: counts of the client miss 10 to 30 tokens a prompt, so TTFT comes out too low."""
    message = {"custom_id": "a", "body": {"messages": [{"content": "two words"}], "max_tokens": 3}}
    bench = {
        "backend": "openai-chat",
        "num_prompts": 1,
        "input_lens": [5],
        "output_lens": [2],
        "start_times": [0.5],
    }
    for found in (read_trace(written(message), BY_WORDS), read_trace(written(bench))):
        assert any("chat template" in note for note in found.notes)
    completions = read_trace(written(bench | {"backend": "vllm"}))
    assert completions.notes == ()


ZERO_PROMPTS: dict[str, list[object]] = {
    "mooncake": [mooncake(0, 0), mooncake(1000, 5)],
    "azure": [AZURE, "2023-11-16 18:00:00,0,5", "2023-11-16 18:00:01,5,5"],
    "vidur": [VIDUR, "0,0,5", "1,5,5"],
    "burstgpt": [BURSTGPT, "0,GPT-4,0,5,5,API log", "1,GPT-4,5,5,10,API log"],
    "weka": [{"t": 0, "in": 0, "out": 5}, {"t": 1, "in": 5, "out": 5}],
    "llmservingsim": [{"input_toks": n, "output_toks": 5, "arrival_time_ns": n} for n in (0, 5)],
    "aibrix": [{"timestamp": n, "requests": [{"prompt_length": n, "output_length": 5}]} for n in (0, 5)],
    "vllm bench": [{"num_prompts": 2, "input_lens": [0, 5], "output_lens": [5, 5], "start_times": [0, 1]}],
    "tracelab csv": [TRACELAB, "a,0,0,0,0,5,0", "b,0,0,0,5,5,0"],
}


@pytest.mark.parametrize("format_", ZERO_PROMPTS)
def test_lesson_22_prompts_without_tokens_are_left_out_by_name(written: Rows, format_: str) -> None:
    """inference-sim#1301: a request without input passes every KV check; it is counted, or refused when strict."""
    path = written(*ZERO_PROMPTS[format_])
    found = read_trace(path)
    assert (found.format, found.rows_dropped, len(found)) == (format_, {"zero prompt tokens": 1}, 1)
    with pytest.raises(WorkloadError, match=r"row 1: .*zero prompt tokens"):
        read_trace(path, ReadOptions(tolerance=Tolerance.STRICT))


def test_lesson_22_our_own_files_cannot_hold_a_prompt_without_tokens(written: Rows, refusal: Refusal) -> None:
    """inference-sim#1301: whoever writes one by hand is told its row."""
    row = {"request_id": "a", "arrival_s": 0, "prompt_tokens": 0, "output_tokens": 5}
    assert "row 1: prompt_tokens 0: must be a whole number, 1 or more" in refusal(written(row))


def test_lesson_27_the_model_that_a_trace_names_leaves_nobody_out(
    written: Rows, replay: Replay, refusal: Refusal
) -> None:
    """inference-sim#1479: a recorded model name matched no instance; it chooses rows only where it is asked to."""
    path = written(BURSTGPT, "0,GPT-4,5,5,10,API log", "1,ChatGPT,6,5,11,API log")
    assert column(replay(path), "num_prompt_tokens") == [5, 6]
    assert column(replay(path, "--trace-model", "ChatGPT"), "num_prompt_tokens") == [6]
    message = refusal(path, "--trace-model", "llama-3.1-8b")
    assert "model 'llama-3.1-8b': must be one of its models: 'GPT-4', 'ChatGPT'" in message


def test_lesson_30_an_idle_head_is_warned_of_and_can_be_cut_off(
    written: Rows, trace: Trace, tmp_path: Path
) -> None:
    """HPMLL/BurstGPT#11: whoever takes the first rows measures an idle service; profile and warning show it."""
    idle, busy = range(0, 5000, 250), range(5000, 10_000, 5)
    path = written(BURSTGPT, *[f"{t},GPT-4,50,5,55,API log" for t in (*idle, *busy)])
    figures = json.loads(trace("info", path, "--json"))
    profile = figures["rate_profile"]["requests"]
    assert max(profile[:50]) <= 1 and min(profile[51:]) >= 19
    [advice] = [w.rpartition("trace cut ")[2] for w in figures["warnings"] if w.startswith("idle head")]
    window = tmp_path / "window.jsonl"
    result = json.loads(trace("cut", path, *advice.split(), "-o", window, "--json"))
    assert result["rate_per_s"] == pytest.approx(1 / 5, rel=0.03)
    assert result["requests"] == len(read_trace(window)) == pytest.approx(len(busy), abs=25)


# ---------------------------------------------------------------- which seed rules


def test_report_65_the_seed_of_the_command_reaches_the_workload(replay: Replay) -> None:
    """inference-sim#284, #306: three seeds gave one workload; here three, and one seed gives the same bytes."""
    runs = [replay("chat", "--num-prompts", "20", "--seed", seed) for seed in ("1", "2", "3", "1")]
    first, second, third, again = (tuple(column(r, "arrival_s")) for r in runs)
    assert len({first, second, third}) == 3 and again == first
    for file in written_by(runs[0]):
        assert (runs[0].path / file).read_bytes() == (runs[3].path / file).read_bytes(), file


def test_report_65_another_rate_leaves_the_lengths_alone(replay: Replay) -> None:
    """vllm-project/vllm#28512: every use has a stream of its own, so what one draws moves no other."""
    slow, fast = (replay("chat", "--num-prompts", "20", "--request-rate", rate) for rate in ("1", "9"))
    for name in ("num_prompt_tokens", "num_output_tokens"):
        assert column(slow, name) == column(fast, name)
    assert column(slow, "arrival_s") == pytest.approx([9 * t for t in column(fast, "arrival_s")])


# ---------------------------------------------------------------- every lesson has its test


def test_every_lesson_is_held_here_or_elsewhere() -> None:
    """No lesson is left out, none is counted twice, and the tests named elsewhere exist."""
    here = {int(match[1]) for name in globals() if (match := re.match(r"test_lesson_(\d+)_", name))}
    assert here.isdisjoint(ELSEWHERE) and here | ELSEWHERE.keys() == {*LESSONS}
    for place in (*ELSEWHERE.values(), *REPORTS_ELSEWHERE.values()):
        file, name = place.split("::")
        assert f"def {name}(" in (Path(__file__).parent / file).read_text()
