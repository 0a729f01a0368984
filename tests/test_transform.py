"""Traces made of traces: written and read back, scaled, cut, spread, merged, drawn again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from request_strategies import IDS_64, requests

from servetwin.workloads import (
    RequestSpec,
    WorkloadError,
    cut,
    first_of,
    merged,
    read_trace,
    resampled,
    scaled,
    scaled_to_rate,
    ticks_spread,
    write_mooncake,
    write_trace,
)
from servetwin.workloads.columns import RequestColumns
from servetwin.workloads.prompt_blocks import PromptBlocks
from servetwin.workloads.statistics.prefix_reuse import prefix_figures
from servetwin.workloads.to_mooncake import not_said
from servetwin.workloads.traces import ReadOptions, Tolerance

CONVERSATION = "traces/mooncake/conversation_trace_rows00001-05000.jsonl.gz"


def spec(i: int, **fields: object) -> RequestSpec:
    return RequestSpec(
        **{"request_id": f"r{i}", "arrival_s": float(i), "prompt_tokens": 10, "output_tokens": 5} | fields
    )


def plain(found: Sequence[RequestSpec]) -> list[RequestSpec]:
    """Without source rows, which are those of the file."""
    return [replace(r, source_row=None) for r in found]


def by_arrival(found: Sequence[RequestSpec]) -> list[RequestSpec]:
    return sorted(plain(found), key=lambda r: r.arrival_s)


def hit_percent(found: RequestColumns) -> float:
    reuse = prefix_figures(found)
    assert reuse is not None
    return reuse.infinite.block_hit_percent


@pytest.fixture
def conversation(shared_data) -> RequestColumns:
    return read_trace(shared_data / CONVERSATION).requests


# ---------------------------------------------------------------- files


@given(some=requests(IDS_64), ending=st.sampled_from([".jsonl", ".jsonl.zst", ".jsonl.gz"]))
def test_jsonl_is_read_back_without_loss(tmp_path_factory, ending, some):
    path = tmp_path_factory.mktemp("trace") / f"t{ending}"
    write_trace(path, some)
    assert plain(read_trace(path)) == by_arrival(some)


@given(some=requests())
def test_parquet_is_read_back_without_loss(tmp_path_factory, some):
    """Prefix ids of any size, too."""
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    write_trace(path, some)
    trace = read_trace(path)
    assert plain(trace) == by_arrival(some)
    assert trace.format == "servetwin parquet"


def test_a_foreign_trace_is_converted_without_loss(conversation, tmp_path):
    """Requests that their source names no ids for keep the names they are shown by."""
    for ending in (".parquet", ".jsonl.zst"):
        write_trace(tmp_path / f"t{ending}", conversation)
        assert plain(read_trace(tmp_path / f"t{ending}")) == plain(conversation)


def test_an_id_beyond_64_bits_is_refused_where_json_cannot_hold_it(tmp_path):
    requests = [spec(0, prefix_ids=(2**64,), prefix_block_tokens=16)]
    with pytest.raises(WorkloadError, match=r"row 1: .* a \.parquet can hold it"):
        write_trace(tmp_path / "t.jsonl", requests)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [("t.csv", "must end in .jsonl"), ("no/t.jsonl", "no folder"), ("old.jsonl", "exists")],
)
def test_a_file_that_cannot_be_written_is_refused(tmp_path, name, message):
    (tmp_path / "old.jsonl").write_text("old")
    with pytest.raises(WorkloadError, match=message):
        write_trace(tmp_path / name, [spec(0)])
    assert (tmp_path / "old.jsonl").read_text() == "old"


def test_a_file_is_replaced_when_asked_for_and_only_when_the_new_one_is_whole(tmp_path):
    path = tmp_path / "t.parquet"
    path.write_text("old")
    with pytest.raises(WorkloadError, match="request_id 'r0': must be unique"):
        write_trace(path, [spec(0), spec(0)], overwrite=True)
    assert path.read_text() == "old"
    write_trace(path, [spec(0)], overwrite=True)
    assert plain(read_trace(path)) == [spec(0)]


def test_whoever_waits_is_told_what_is_written(tmp_path):
    for ending in (".jsonl", ".parquet"):
        told: list[int] = []
        write_trace(tmp_path / f"t{ending}", [spec(i) for i in range(8192)], wrote=told.append)
        assert sum(told) == 8192


# ---------------------------------------------------------------- damaged Parquet


@pytest.fixture
def parquet(tmp_path):
    """Writes columns as they are; gives the path."""

    def write(**columns: object) -> Path:
        good = {
            "request_id": ["a", "b"],
            "arrival_s": [0.0, 1.0],
            "prompt_tokens": [3, 4],
            "output_tokens": [1, 2],
        }
        table = {name: values for name, values in (good | columns).items() if values is not None}
        pq.write_table(pa.table(table), tmp_path / "t.parquet")
        return tmp_path / "t.parquet"

    return write


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"arrival_s": [0.0, float("nan")]}, r"row 2: arrival_s nan: must be a finite number"),
        ({"prompt_tokens": [0, 4]}, r"row 1: prompt_tokens 0: must be a whole number, 1 or more"),
        ({"output_tokens": [1.5, 2.0]}, r"row 1: output_tokens 1.5: must be"),
        ({"request_id": ["a", "a"]}, r"row 2: request_id 'a': must be unique; row 1 has it too"),
        ({"request_id": [None, "b"]}, r"row 1: request_id None: must be given"),
        ({"prefix_ids": [["x"], None], "prefix_block_tokens": [1, None]}, r"row 1: prefix_ids 'x'"),
        ({"min_tokens": [7, 0]}, r"row 1: .*min_tokens 7 must be between"),
        ({"output_tokens": None}, r"column 'output_tokens' is missing"),
        ({"lora": ["x", "y"]}, r"column 'lora': must be one of request_id"),
        (
            {"arrival_s": pa.array([0, 1], pa.timestamp("s"))},
            r"column 'arrival_s': type timestamp.* must be",
        ),
    ],
)
def test_parquet_is_checked_as_jsonl_is(parquet, columns, message):
    with pytest.raises(WorkloadError, match=message):
        read_trace(parquet(**columns))


def test_a_damaged_row_of_a_parquet_can_be_left_out(parquet):
    trace = read_trace(parquet(prompt_tokens=[0, 4]), ReadOptions(tolerance=Tolerance.LENIENT))
    assert (len(trace), trace.rows_dropped) == (1, {"damaged: prompt_tokens": 1})


@given(data=st.data())
def test_a_parquet_of_damaged_bytes_gives_requests_or_an_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    write_trace(path, [spec(i, session_id="s", prefix_ids=(i,), prefix_block_tokens=16) for i in range(5)])
    whole = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(4, len(whole))) :]
    for place in data.draw(st.lists(st.integers(4, max(4, len(whole) - 1)), max_size=5)):
        whole[place : place + 1] = bytes([data.draw(st.integers(0, 255))])
    path.write_bytes(whole)
    try:
        read_trace(path, ReadOptions(tolerance=Tolerance.LENIENT))
    except WorkloadError as e:
        assert str(path) in str(e)


# ---------------------------------------------------------------- scaled and cut


@given(some=requests(), speed_up=st.floats(0.1, 100))
def test_scaling_divides_all_times_and_nothing_else(some, speed_up):
    def times(r: RequestSpec, divisor: float) -> list[float | None]:
        return [None if t is None else t / divisor for t in (r.arrival_s, r.think_time_s, r.abort_s)]

    for before, after in zip(by_arrival(some), plain(scaled(some, speed_up=speed_up)), strict=True):
        assert times(after, 1) == times(before, speed_up)
        changed = {name: getattr(after, name) for name in ("arrival_s", "think_time_s", "abort_s")}
        assert replace(before, **changed) == after


def test_a_rate_is_reached_exactly(conversation):
    found = scaled_to_rate(conversation, rate_per_s=10).arrival_s
    assert len(found) / (found[-1] - found[0]) == pytest.approx(10)


@pytest.mark.parametrize("speed_up", [0, -1, float("nan"), float("inf"), 1e-9])
def test_an_impossible_speed_up_is_refused(speed_up):
    with pytest.raises(WorkloadError, match="speed_up"):
        scaled([spec(0), spec(100)], speed_up=speed_up)


def test_requests_that_all_come_at_once_have_no_rate():
    with pytest.raises(WorkloadError, match="all requests arrive at one time"):
        scaled_to_rate([spec(0, arrival_s=2), spec(1, arrival_s=2)], rate_per_s=1)


@given(some=requests(), edges=st.lists(st.floats(0, 1e6), min_size=2, max_size=2, unique=True).map(sorted))
def test_windows_beside_one_another_hold_every_request_once(some, edges):
    """Each begins at its start and ends before its end; times count from the start."""
    kept = []
    for start, end in ((0.0, edges[0]), (edges[0], edges[1]), (edges[1], None)):
        try:
            part = cut(some, start_s=start, end_s=end)
        except WorkloadError as e:
            assert "nothing arrives" in str(e) or start == end
            continue
        assert all(r.arrival_s >= 0 for r in part)
        kept += [r.request_id for r in part]
        originals = {r.request_id: r.arrival_s for r in some}
        assert all(r.arrival_s == originals[r.request_id] - start for r in part)
    assert kept == [r.request_id for r in by_arrival(some)]


def test_the_first_requests_are_those_that_arrive_first():
    assert [r.request_id for r in first_of([spec(3), spec(1), spec(2)], 2)] == ["r1", "r2"]
    with pytest.raises(WorkloadError, match="n 4: must be at most 3"):
        first_of([spec(3), spec(1), spec(2)], 4)


# ---------------------------------------------------------------- ticks


def test_mooncakes_ticks_are_spread_to_about_a_poisson_process(conversation):
    """Order, ids and hits stay; no request leaves its tick; the gaps' CV falls from 2.9 to about 1."""
    spread = ticks_spread(conversation, seed=1)
    times_s, before_s = spread.arrival_s, conversation.arrival_s
    assert spread.values("source_row") == conversation.values("source_row")
    assert ((times_s >= before_s) & (times_s < before_s + 3.004)).all()
    gaps = np.diff(times_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.1)
    assert hit_percent(spread) == hit_percent(conversation)


def test_spreading_follows_its_seed():
    some = [spec(i, arrival_s=float(i // 10), abort_s=float(i // 10) + 5) for i in range(100)]
    assert ticks_spread(some, seed=1) == ticks_spread(some, seed=1)
    assert ticks_spread(some, seed=1) != ticks_spread(some, seed=2)
    assert all(r.abort_s - r.arrival_s == pytest.approx(5) for r in ticks_spread(some))


def test_turns_of_one_session_at_one_instant_stay_together():
    some = [spec(i, arrival_s=float(i // 10), session_id=f"s{i % 3}") for i in range(100)]
    groups: dict[tuple[float, str], set[float]] = {}
    for before, after in zip(
        some, sorted(ticks_spread(some), key=lambda r: int(r.request_id[1:])), strict=True
    ):
        groups.setdefault((before.arrival_s, before.session_id), set()).add(after.arrival_s)
    assert {len(times) for times in groups.values()} == {1}


def test_arrivals_without_ticks_are_not_spread():
    with pytest.raises(WorkloadError, match="not quantised: 100 instants among 100 requests"):
        ticks_spread([spec(i) for i in range(100)])


# ---------------------------------------------------------------- merged


@given(parts=st.lists(requests(IDS_64, max_size=5), min_size=1, max_size=3))
def test_merging_keeps_every_request_and_keeps_traces_apart(parts):
    result = list(merged(parts))
    assert [r.arrival_s for r in result] == sorted(r.arrival_s for part in parts for r in part)
    assert len({r.request_id for r in result}) == sum(map(len, parts))
    lengths = sorted((r.arrival_s, r.prompt_tokens, r.output_tokens) for r in result)
    assert lengths == sorted((r.arrival_s, r.prompt_tokens, r.output_tokens) for part in parts for r in part)
    assert len({r.session_id for r in result} - {None}) == sum(
        len({r.session_id for r in p} - {None}) for p in parts
    )
    ids = {id_ for r in result for id_ in r.prefix_ids or ()}
    assert len(ids) == sum(len({id_ for r in p for id_ in r.prefix_ids or ()}) for p in parts)


def test_merged_traces_share_prefixes_only_when_told(conversation):
    assert hit_percent(merged([conversation, conversation])) == pytest.approx(hit_percent(conversation))
    assert hit_percent(merged([conversation, conversation], shared_prefixes=True)) > 60


def test_merged_names_are_told_apart():
    found = merged([[spec(0), spec(1, request_id="r0@2")], [spec(0, session_id="s"), spec(2)]])
    assert sorted(r.request_id for r in found) == ["r0", "r0@2", "r0@2@2", "r2"]


# ---------------------------------------------------------------- resampled


@given(some=requests(IDS_64), n=st.integers(1, 30), seed=st.integers(0, 3))
def test_resampling_draws_requests_of_the_trace(some, n, seed):
    result = list(resampled(some, n=n, seed=seed))
    assert len(result) == len({r.request_id for r in result}) == n
    drawn = {(r.prompt_tokens, r.output_tokens, r.priority) for r in result}
    assert drawn <= {(r.prompt_tokens, r.output_tokens, r.priority) for r in some}
    assert [r.arrival_s for r in result] == sorted(r.arrival_s for r in result)
    assert plain(resampled(some, n=n, seed=seed)) == plain(result)


def test_resampling_keeps_rate_burstiness_and_reuse(conversation):
    """Twice the requests: a tail drawn twice is no reuse, what others share is."""
    found = resampled(conversation, n=10_000, seed=3)
    gaps, before = np.diff(found.arrival_s), np.diff(conversation.arrival_s)
    assert gaps.mean() == pytest.approx(before.mean(), rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(before.std() / before.mean(), rel=0.1)
    assert 33 < hit_percent(found) < 42


def test_sessions_are_drawn_as_a_whole():
    some = [spec(10 * s + t, session_id=f"s{s}", turn=t) for s in range(5) for t in range(4)]
    sessions: dict[str, list[int]] = {}
    for r in resampled(some, n=40, seed=1):
        sessions.setdefault(r.session_id, []).append(r.turn)
    assert len(sessions) == 10
    assert all(turns == [0, 1, 2, 3] for turns in sessions.values())


# ---------------------------------------------------------------- Mooncake's format


def test_a_mooncake_trace_comes_back_as_it_was(conversation, tmp_path):
    assert write_mooncake(tmp_path / "m.jsonl", conversation) == []
    assert plain(read_trace(tmp_path / "m.jsonl")) == plain(conversation)


@pytest.mark.parametrize(("block", "percent"), [(128, 33.62), (1024, 33.23)])
def test_ids_are_split_and_joined(shared_data, tmp_path, block, percent):
    """Hit tokens: 33.60 % at the trace's own 512, nearly the same in parts, less where only all of a pair counts."""
    trace = read_trace(shared_data / "traces/mooncake/synthetic_trace_rows0001-2000.jsonl.gz")
    write_mooncake(tmp_path / "m.jsonl", trace.requests, block_tokens=block)
    reuse = prefix_figures(read_trace(tmp_path / "m.jsonl", ReadOptions(block_size=block)).requests)
    assert reuse.infinite.token_hit_percent == pytest.approx(percent, abs=0.006)


def test_blocks_are_named_by_what_is_in_them():
    """Equal ids up to there, equal blocks; what is not known is nobody else's; a salt keeps apart."""
    blocks = PromptBlocks(8)
    first = spec(0, prompt_tokens=20, prefix_ids=(1, 2), prefix_block_tokens=6)
    assert blocks.ids(first) == [0, 1, 2]
    assert blocks.ids(replace(first, request_id="again")) == [0, 3, 4]
    assert blocks.ids(replace(first, request_id="other", prefix_ids=(1, 3)))[0] == 5
    assert blocks.ids(replace(first, request_id="salted", cache_salt="x"))[0] == 8


def test_a_turn_shares_the_prompt_and_answer_of_the_turn_before():
    blocks = PromptBlocks(4)
    first = spec(0, prompt_tokens=8, output_tokens=4, session_id="s")
    second = spec(1, prompt_tokens=16, context_tokens=12, session_id="s")
    third = spec(2, prompt_tokens=20, context_tokens=8, session_id="s")
    assert [blocks.ids(r) for r in (first, second, third)] == [[0, 1], [0, 1, 2, 3], [0, 1, 4, 5, 6]]


def test_prompts_given_by_their_tokens_share_what_is_equal():
    blocks = PromptBlocks(2)
    assert blocks.ids(spec(0, prompt_tokens=3, prompt_token_ids=(1, 2, 3))) == [0, 1]
    assert blocks.ids(spec(1, prompt_tokens=3, prompt_token_ids=(1, 2, 4))) == [0, 2]


def test_what_mooncake_cannot_say_is_said(tmp_path):
    some = [spec(0, priority=2, arrival_s=0.0004, client_id="c"), spec(1, session_id="s", think_time_s=0.25)]
    losses = " ".join(not_said(RequestColumns.of(some), 64))
    for part in (
        "request_id, priority, client_id",
        "rounded to whole milliseconds: 1 arrival",
        "no hash_ids",
        "--hash-block-size 64",
    ):
        assert part in losses
    write_mooncake(tmp_path / "m.jsonl", some)
    assert "hash_ids" not in (tmp_path / "m.jsonl").read_text()


def test_context_that_hash_ids_cannot_say_is_counted():
    """A prompt of 10 tokens and its answer of 5 before a turn: blocks of 4 name 8 of its 15 context tokens."""
    turns = [
        spec(0, session_id="s", turn=0),
        spec(1, session_id="s", turn=1, prompt_tokens=20, context_tokens=15),
        spec(2, session_id="t", turn=0, context_tokens=0),
    ]
    losses = " ".join(not_said(RequestColumns.of(turns), 4))
    assert "of 15 context tokens of later turns hash_ids say 8 (53 %)" in losses
    whole = [turns[0], replace(turns[1], context_tokens=8)]
    assert "context" not in " ".join(not_said(RequestColumns.of(whole), 4))


@given(some=requests(IDS_64), block=st.sampled_from([1, 7, 16, 512]))
def test_mooncake_rows_are_accepted_by_its_reader(tmp_path_factory, some, block):
    """Whatever is written: every request, with its lengths, and an id for each block that its prompt begins."""
    small = [r for r in some if r.prompt_tokens <= 1000] or [spec(0)]
    path = tmp_path_factory.mktemp("trace") / "m.jsonl"
    write_mooncake(path, small, block_tokens=block)
    found = read_trace(path, ReadOptions(block_size=block, time_unit="ms"))
    lengths = sorted((r.prompt_tokens, r.output_tokens) for r in found)
    assert lengths == sorted((r.prompt_tokens, r.output_tokens) for r in small)
