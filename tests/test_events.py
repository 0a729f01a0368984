"""The event log turns what the driver tells into the rows that interfaces promise."""

from __future__ import annotations

import pytest
from engines import NO_SHAPE
from stories import S, Story, four_tokens_a_step, preempted_once, request

from servetwin.sim.contract import ModelRunnerOutput, StepResult
from servetwin.sim.events import FIRST_FLUSH_ROWS, EventLog, MemorySink
from servetwin.sim.records import (
    Admission,
    BlockChange,
    EngineCoreOutputs,
    Preemption,
    WaitReason,
)
from servetwin.sim.timeline import StepTimes


def test_a_preempted_request_keeps_its_first_times() -> None:
    """Times, counts and events of one request through preemption and resumption (reports.md 54)."""
    sink = preempted_once()
    (row,) = sink.requests.to_dict("records")
    assert row == {
        "request_id": "a",
        "num_prompt_tokens": 4,
        "num_output_tokens": 5,
        "arrival_s": 0.0,
        "queued_s": 0.0,
        "first_scheduled_s": 2.0,
        "first_token_s": 3.0,
        "last_token_s": 12.0,
        "finish_s": 12.0,
        "preemptions": 1,
        "cached_tokens": 2,
        "recomputed_tokens": 2,
        "finish_reason": "length",
        "priority": 0,
        "session_id": row["session_id"],
        "client_id": row["client_id"],
        "sent_s": 0.0,
        "replica": 0,
    }
    events = sink.events
    events = events[events.kind != "wait"]
    assert list(zip(events.time_s, events.kind, events.computed_tokens, events.blocks, strict=True)) == [
        (0, "arrived", 0, 0),
        (2, "scheduled", 2, 1),
        (5, "preempted", 5, 2),
        (9, "resumed", 3, 2),
        (12, "finished", 4 + 5 - 1, 2),
    ]
    assert sink.tokens.time_s.tolist() == [3, 4, 10, 11, 12]
    assert sink.tokens["index"].tolist() == [0, 1, 2, 3, 4]
    assert sink.itl.gap_s.tolist() == [1, 6, 1, 1]


def test_every_request_has_one_row() -> None:
    """Refused, aborted and still open requests are there too, with nulls where something did not happen."""
    story = Story()
    story.log.refused(request("refused", arrival_s=0.5), 1 * S, "too long")
    story.log.arrived(request("aborted"), 1 * S)
    story.log.aborted("aborted", 2 * S, computed_tokens=0, blocks=0)
    story.log.arrived(request("open"), 2 * S)
    story.log.close(3 * S)

    rows = story.sink.requests.set_index("request_id")
    assert sorted(rows.index) == ["aborted", "open", "refused"]
    assert rows.finish_reason["refused"] == "refused"
    assert rows.finish_reason["aborted"] == "abort"
    assert rows.isna().loc["open", ["first_scheduled_s", "first_token_s", "finish_s", "finish_reason"]].all()
    assert rows.isna().loc["refused", ["queued_s", "first_scheduled_s"]].all()
    assert rows.finish_s["refused"] == 1.0
    refused = story.sink.events.query("kind == 'refused'")
    assert refused.reason.tolist() == ["too long"]


def test_an_aborted_request_takes_its_gaps_back() -> None:
    """The pool of inter-token gaps holds those of completed requests only."""
    story = Story()
    for name in "ab":
        story.log.arrived(request(name), 0)
    for second in range(3):
        story.step(second, second + 1, "a", "b")
    story.log.aborted("b", 3 * S, computed_tokens=7, blocks=1)
    story.step(3, 5, "a", a="stop")
    story.log.close(5 * S)
    assert story.sink.itl.groupby("gap_s").samples.sum().to_dict() == {1.0: 2, 2.0: 1}


def test_waits_have_one_interval_per_reason() -> None:
    """The head waits for its own reason, the others behind it; an interval ends with its reason."""
    story = Story()
    for name in "abc":
        story.log.arrived(request(name), 0)
    story.schedule(
        0, {"a": 4}, admitted=[Admission("a", False, 0, 1)], head="b", head_reason=WaitReason.SEATS
    )
    story.schedule(1, {"a": 1}, head="b", head_reason=WaitReason.SEATS)
    story.schedule(2, {"a": 1}, head="b", head_reason=WaitReason.BLOCKS)
    story.log.aborted("b", 3 * S, 0, 0)
    story.schedule(3, {"a": 1}, head="c", head_reason=WaitReason.SEATS)
    story.schedule(5, {"c": 4}, admitted=[Admission("c", False, 0, 1)])
    story.log.close(6 * S)
    assert sorted(story.waits()) == [
        ("b", "blocks", 2, 3),
        ("b", "seats", 0, 2),
        ("c", "head of line", 0, 3),
        ("c", "seats", 3, 5),
    ]


def test_a_preempted_request_waits_from_that_step_on() -> None:
    """A preempted request waits again; whoever was the head stands behind it."""
    story = Story()
    for name in "ab":
        story.log.arrived(request(name), 0)
    story.schedule(
        0, {"a": 4}, admitted=[Admission("a", False, 0, 1)], head="b", head_reason=WaitReason.BLOCKS
    )
    preempted = [Preemption("a", 4, 1, False)]
    story.schedule(2, preempted=preempted, head="a", head_reason=WaitReason.PREEMPTION)
    story.log.close(3 * S)
    assert sorted(story.waits()) == [
        ("a", "preemption", 2, 3),
        ("b", "blocks", 0, 2),
        ("b", "head of line", 2, 3),
    ]


def test_a_victim_that_ends_with_the_token_in_flight_waits_no_longer() -> None:
    """Asynchronous scheduling: its last token comes while it waits to resume."""
    story = Story()
    story.log.arrived(request("a"), 0)
    first = story.schedule(0, {"a": 4}, admitted=[Admission("a", False, 0, 1)])
    preempted = [Preemption("a", 5, 1, False)]
    second = story.schedule(1, preempted=preempted, head="a", head_reason=WaitReason.PREEMPTION)
    story.update(first, 2, "a", a="length")
    story.update(second, 3)
    story.schedule(3)
    story.log.close(9 * S)
    assert story.waits() == [("a", "preemption", 1, 2)]


def test_a_cache_reset_is_an_event_of_nobody() -> None:
    """With how it went as its reason."""
    story = Story()
    story.log.cache_reset(2 * S, done=False)
    story.log.cache_reset(3 * S, done=True)
    story.log.close(4 * S)
    events = story.sink.events
    assert list(zip(events.time_s, events.kind, events.reason, strict=True)) == [
        (2, "cache_reset", "refused: blocks are in use"),
        (3, "cache_reset", "done"),
    ]
    assert events.request_id.isna().all()


def test_a_step_says_where_it_lay_on_the_lanes() -> None:
    """Schedule, prepare and device have their starts; the host's time is schedule and update together."""
    story = Story()
    story.log.arrived(request("a"), 0)
    frame = story.schedule(1, {"a": 4}, admitted=[Admission("a", False, 0, 1)])
    result = StepResult(2 * S, 4 * S, ModelRunnerOutput([], {}, []), "story", shape=NO_SHAPE)
    times = StepTimes(1 * S, 3 * S, 6 * S, 10 * S, update_ns=5 * S)
    story.log.stepped(frame, result, times, 15 * S, EngineCoreOutputs({"a": [7]}))
    story.log.close(15 * S)
    (row,) = story.sink.steps.to_dict("records")
    lanes = (
        "start_s",
        "schedule_s",
        "prepare_start_s",
        "prepare_s",
        "device_start_s",
        "device_s",
        "end_s",
        "host_s",
    )
    assert [row[name] for name in lanes] == [1, 1, 3, 2, 6, 4, 15, 1 + 5]


def test_several_tokens_in_a_step_are_one_output() -> None:
    """Gaps lie between outputs, whatever they bring; tokens of one output share its time (reports.md 55)."""
    sink = four_tokens_a_step()
    assert sink.tokens.time_s.tolist() == [1] + [2] * 4 + [3] * 4
    assert sink.tokens["index"].tolist() == list(range(9))
    assert sink.requests.num_output_tokens.tolist() == [9]
    assert list(zip(sink.itl.gap_s, sink.itl.samples, strict=True)) == [(1, 1), (1, 1)]


def test_admitted_at_once_is_no_wait() -> None:
    """A request admitted at the instant at which it was queued has no wait row."""
    story = Story()
    story.log.arrived(request("a"), 0)
    story.schedule(0, {"a": 4}, admitted=[Admission("a", False, 0, 1)])
    story.log.close(S)
    assert story.waits() == []


def residencies(*changes: tuple[int, BlockChange]) -> list[tuple[object, ...]]:
    """Rows of `blocks` after changes at whole seconds, without the block id; None for null."""
    sink = MemorySink()
    log = EventLog(sink)
    for second, change in changes:
        log.block_changes([change], second * S)
    log.close(99 * S)
    frame = sink.blocks.drop(columns=["block_id", "replica"]).astype(object)
    return list(frame.where(frame.notna(), None).itertuples(index=False, name=None))


def test_a_block_without_content_is_freed() -> None:
    """A residency without a hash ends with its last reference."""
    take = BlockChange(1, "take", "a", references=1)
    assert residencies((0, take), (4, BlockChange(1, "release", "a", references=0))) == [
        ("a", None, 0, 4, "freed", 1, 4, 0)
    ]


def test_cached_content_outlives_its_request() -> None:
    """Shared, released, reused by a later request, dropped for another: one row per residency."""
    assert residencies(
        (0, BlockChange(1, "take", "a", references=1)),
        (1, BlockChange(1, "hash", prefix_id="p", references=1)),
        (2, BlockChange(1, "touch", "b", references=2)),
        (3, BlockChange(1, "release", "a", references=1)),
        (4, BlockChange(1, "release", "b", references=0)),
        (6, BlockChange(1, "touch", "c", references=1)),
        (7, BlockChange(1, "release", "c", references=0)),
        (9, BlockChange(1, "evict", prefix_id="p")),
        (9, BlockChange(1, "take", "d", references=1)),
    ) == [
        ("a", "p", 0, 6, "reused", 2, 4, 1),
        ("c", "p", 6, 9, "evicted", 1, 7, 0),
        ("d", None, 9, None, None, 1, None, 0),
    ]


def test_an_unknown_block_change_is_refused() -> None:
    """A kind that the pool does not have raises ValueError and names the allowed ones."""
    with pytest.raises(ValueError, match="kind 'move'; allowed: take hash touch release evict"):
        residencies((0, BlockChange(1, "move", "a")))


def test_counts_of_a_step_come_from_its_record() -> None:
    """A row of `steps` holds the plan's rows and the record's counts, with durations in seconds."""
    story = Story()
    story.log.arrived(request("a"), 0)
    record = {"prefill_tokens": 4, "running": 1, "used_blocks": 1, "free_blocks": 5, "evictions": 3}
    story.update(story.schedule(1, {"a": 4}, admitted=[Admission("a", False, 0, 1)], **record), 2, "a")
    story.log.close(2 * S)
    (row,) = story.sink.steps.to_dict("records")
    assert record.items() <= row.items()
    assert (row["start_s"], row["prepare_s"], row["device_s"], row["host_s"]) == (1, 0, 1, 0)
    assert (row["rows"], row["decode_rows"], row["source"]) == (1, 0, "story")


def test_the_padded_size_of_a_graph_is_null_where_none_ran() -> None:
    story = Story()
    story.log.arrived(request("a"), 0)
    for step, size in enumerate([None, 8]):
        frame = story.schedule(step, {"a": 1})
        result = StepResult(0, S, ModelRunnerOutput([], {}, []), "story", graph_tokens=size, shape=NO_SHAPE)
        times = StepTimes(0, frame.start_ns, frame.start_ns, (step + 1) * S)
        story.log.stepped(frame, result, times, (step + 1) * S, EngineCoreOutputs({"a": [1]}, {}))
    story.log.close(2 * S)
    assert story.sink.steps.graph_tokens.isna().tolist() == [True, False]
    assert story.sink.steps.graph_tokens[1] == 8


def test_parts_are_flushed_as_the_run_grows() -> None:
    """Before the run ends, at least half of its rows have been handed to the sink."""
    story = Story()
    story.log.arrived(request("a"), 0)
    for n in range(4000):
        story.step(n, n + 1, "a")
        assert n < FIRST_FLUSH_ROWS or sum(len(p) for p in story.sink.parts("steps")) >= n / 2
    story.log.close(4000 * S)
    assert len(story.sink.parts("steps")) < 10
