"""`servetwin export perfetto`: a trace by the rules of the format, with the steps, waits and preemptions of the log."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported_runs import mixed_run

from servetwin.sim.cli import run
from servetwin.sim.export.perfetto_requests import REQUESTS_PID, phases_of
from servetwin.sim.export.perfetto_steps import COUNTS, _on_lanes, _one_behind_another, _Step
from servetwin.sim.export.trace_events import Track, process, thread
from servetwin.sim.runs import Run

Event = dict[str, Any]
MEASURED = ["--executor", "epyc-2cpu-llama-10m", "--model", "examples/llama-10m"]
"""Step times of a profile, in which the host takes its time, too."""


@pytest.fixture(scope="module")
def sync(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return mixed_run(tmp_path_factory.mktemp("perfetto") / "sync", "--no-async-scheduling")


@pytest.fixture(scope="module")
def overlapping(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return mixed_run(tmp_path_factory.mktemp("perfetto") / "async", "--save-tokens")


def trace_of(log: Run, tmp_path: Path, *flags: str) -> list[Event]:
    out = tmp_path / "trace.json"
    assert run(["export", "perfetto", str(log.path), "-o", str(out), "--overwrite", *flags]) == 0
    events: list[Event] = json.loads(out.read_text())["traceEvents"]
    return events


def ns(us: float) -> int:
    return round(us * 1000)


def tracks(events: list[Event]) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    """Slices of each track in order: start and end in ns, name."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = ns(event["ts"])
            found[event["pid"], event["tid"]].append((start, start + ns(event["dur"]), event["name"]))
    return {track: sorted(slices, key=lambda s: (s[0], -s[1])) for track, slices in found.items()}


def check_format(events: list[Event]) -> None:
    """The fields that each kind of event must have; slices of a track nest or follow each other."""
    needed = {
        "M": {"pid", "tid", "name", "args"},
        "X": {"pid", "tid", "name", "ts", "dur"},
        "C": {"pid", "tid", "name", "ts", "args"},
        "i": {"pid", "tid", "name", "ts", "s"},
        "s": {"pid", "tid", "name", "cat", "ts", "id"},
        "f": {"pid", "tid", "name", "cat", "ts", "id", "bp"},
    }
    for event in events:
        assert event.keys() - {"ph", "args"} == needed[event["ph"]] - {"args"}, event
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(v, (int, float)) for v in event["args"].values())
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert {pid for pid, _ in named} <= processes
    for track, slices in tracks(events).items():
        assert track in named
        open_ends: list[int] = []
        for start, end, name in slices:
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], (track, name, start)
            open_ends.append(end)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == sum(e["ph"] == "s" for e in events)
    for event in (*starts.values(), *ends.values()):
        covering = [s for s in tracks(events)[event["pid"], event["tid"]] if s[0] <= ns(event["ts"]) < s[1]]
        assert covering, event


def thread_id(events: list[Event], name: str, pid: int) -> tuple[int, int]:
    (found,) = {
        (e["pid"], e["tid"])
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name" and e["args"]["name"] == name and e["pid"] == pid
    }
    return found


def test_steps_that_follow_each_other_are_one_track(sync: Run, tmp_path: Path) -> None:
    events = trace_of(sync, tmp_path)
    check_format(events)
    slices = tracks(events)[thread_id(events, "steps", 1)]
    steps = sync.steps
    assert [s[:2] for s in slices] == [
        (round(a * 1e9), round(b * 1e9)) for a, b in zip(steps.start_s, steps.end_s, strict=True)
    ]
    args = [e["args"] for e in events if e["ph"] == "X" and e["pid"] == 1]
    for name in ("prefill_tokens", "decode_tokens", "rows", "waiting", "used_blocks", "evictions"):
        assert [a[name] for a in args] == steps[name].tolist()
    kinds = {"prefill": 0, "decode": 0, "prefill and decode": 0, "empty": 0}
    for _, _, name in slices:
        kinds[name] += 1
    assert kinds["empty"] == (steps.rows == 0).sum()
    assert kinds["prefill and decode"] == ((steps.prefill_tokens > 0) & (steps.decode_tokens > 0)).sum() > 0


def test_overlapping_steps_have_lanes_for_host_and_device(tmp_path: Path) -> None:
    log = mixed_run(tmp_path / "run", executor=MEASURED)
    assert (log.steps.start_s.to_numpy()[1:] < log.steps.end_s.to_numpy()[:-1] - 1e-9).any()
    events = trace_of(log, tmp_path)
    check_format(events)
    device = tracks(events)[thread_id(events, "device", 1)]
    busy = log.steps[log.steps.device_s > 0]
    assert [s[:2] for s in device] == [
        (round(a * 1e9), round(a * 1e9) + round(d * 1e9))
        for a, d in zip(busy.device_start_s, busy.device_s, strict=True)
    ]
    host = [tracks(events)[thread_id(events, f"host: {name}", 1)] for name in ("schedule", "update")]
    assert [sum(end - start for start, end, _ in lane) for lane in host] == [
        round(log.steps.schedule_s.sum() * 1e9),
        round((log.steps.host_s - log.steps.schedule_s).sum() * 1e9),
    ]


def test_measured_times_that_overlap_begin_where_the_one_before_ends() -> None:
    """A live run measures parts of one thing as another."""
    at = {
        "start_s": 0,
        "schedule_s": 2,
        "prepare_start_s": 2,
        "prepare_s": 2,
        "device_start_s": 4,
        "device_s": 10,
    }
    steps = [
        _Step(at | {"end_s": 20, "host_s": 8}, dict.fromkeys(COUNTS, 1), None),
        _Step(
            {name: t + 8 if "start" in name else t for name, t in at.items()} | {"end_s": 23, "host_s": 9},
            dict.fromkeys(COUNTS, 1),
            None,
        ),
    ]
    named = [e for tid in range(1, 6) for e in thread(Track(1, tid), "lane", tid)] + process(1, "engine", 0)
    for lanes in (_on_lanes, _one_behind_another):
        ends: dict[Track, int] = {}
        events = named + [event for step in steps for event in lanes(1, step, ends)]
        check_format(events)
        updates = [s for slices in tracks(events).values() for s in slices if s[2] == "update"]
        assert updates[0] == (14, 20, "update") and updates[1][1] == 23


def test_what_is_done_in_a_step_is_nested_in_it(tmp_path: Path) -> None:
    log = mixed_run(tmp_path / "run", "--no-async-scheduling", executor=MEASURED)
    events = trace_of(log, tmp_path)
    check_format(events)
    slices = tracks(events)[thread_id(events, "steps", 1)]
    names = [name for *_, name in slices]
    busy = int((log.steps.device_s > 0).sum())
    assert names.count("device") == busy and names.count("schedule") == names.count("update") >= busy


def test_a_counter_is_there_whenever_it_changes(sync: Run, tmp_path: Path) -> None:
    events = trace_of(sync, tmp_path)
    for name, columns in (
        ("requests", {"running": "running", "waiting": "waiting"}),
        ("KV blocks", {"used": "used_blocks", "cached free": "cached_free_blocks", "free": "free_blocks"}),
        ("tokens per step", {"prefill": "prefill_tokens", "decode": "decode_tokens"}),
    ):
        found = [(ns(e["ts"]), e["args"]) for e in events if e["ph"] == "C" and e["name"] == name]
        expected: list[tuple[int, dict[str, int]]] = []
        for row in sync.steps.to_dict("records"):
            values = {series: row[column] for series, column in columns.items()}
            if not expected or expected[-1][1] != values:
                expected.append((round(row["start_s"] * 1e9), values))
        assert found == expected
    evicted = sum(e["args"]["blocks"] for e in events if e["ph"] == "i" and e["name"] == "evictions")
    assert evicted == sync.steps.evictions.sum() > 0


def test_every_request_has_a_track_with_all_of_its_time(overlapping: Run, tmp_path: Path) -> None:
    """Phases follow each other from arrival to end; their instants are those of the tables."""
    events = trace_of(overlapping, tmp_path)
    check_format(events)
    log = overlapping
    by_track = tracks(events)
    preempted = log.events[log.events.kind == "preempted"].groupby("request_id").time_s.apply(list)
    resumed = log.events[log.events.kind == "resumed"].groupby("request_id").time_s.apply(list)
    tokens = {name: t.time_s.to_numpy() for name, t in log.tokens.groupby("request_id")}
    for place, row in enumerate(log.requests.itertuples(), start=1):
        assert thread_id(events, row.request_id, REQUESTS_PID) == (REQUESTS_PID, place)
        slices = by_track.get((REQUESTS_PID, place), [])
        assert all(a[1] == b[0] for a, b in pairwise(slices))
        if row.finish_reason == "refused":
            continue
        assert (slices[0][0], slices[-1][1]) == (round(row.arrival_s * 1e9), round(row.finish_s * 1e9))
        lengths: dict[str, int] = defaultdict(int)
        for start, end, name in slices:
            lengths[name] += end - start
        scheduled = row.finish_s if np.isnan(row.first_scheduled_s) else row.first_scheduled_s
        assert lengths["queued"] == round(scheduled * 1e9) - round(row.queued_s * 1e9)
        lost = [s[0] for s in slices if s[2] == "preempted"]
        assert lost == [round(t * 1e9) for t in preempted.get(row.request_id, [])]
        again = [round(t * 1e9) for t in resumed.get(row.request_id, [])]
        for begin in again:
            assert next(s for s in slices if s[0] == begin)[2] == "prefill"
        decodes = [s[0] for s in slices if s[2] == "decode"]
        assert set(decodes) <= {round(t * 1e9) for t in tokens.get(row.request_id, [])}
    flows = [e for e in events if e["ph"] == "s"]
    assert len(flows) == len(log.events[log.events.kind == "resumed"]) > 5
    ends = [e["name"] for e in events if e["ph"] == "i" and e["name"].startswith("ended")]
    assert len(ends) == 60 and ends.count("ended: abort") == (log.requests.finish_reason == "abort").sum()
    assert sum(e["ph"] == "i" and e["name"] == "arrival" for e in events) == 60


@pytest.mark.parametrize(
    ("cluster", "phase"),
    [
        (
            ["--replicas", "2", "--replica-failure", "0@2.5-3.2", "--on-failure", "reroute"],
            "lost with its replica",
        ),
        (
            ["--prefill-replicas", "1", "--decode-replicas", "1", "--kv-transfer-latency-s", "0.05"],
            "KV transfer",
        ),
    ],
)
def test_a_cluster_has_a_process_for_each_engine(tmp_path: Path, cluster: list[str], phase: str) -> None:
    log = mixed_run(tmp_path / "run", *cluster)
    events = trace_of(log, tmp_path)
    check_format(events)
    for replica in (0, 1):
        steps = log.steps[log.steps.replica == replica]
        name = (
            "device" if any(e["ph"] == "M" and e["args"].get("name") == "device" for e in events) else "steps"
        )
        slices = tracks(events)[thread_id(events, name, replica + 1)]
        assert len(slices) == ((steps.device_s > 0) if name == "device" else steps.start_s >= 0).sum()
    names = []
    by_track = tracks(events)
    for place, row in enumerate(log.requests.itertuples(), start=1):
        slices = by_track.get((REQUESTS_PID, place), [])
        names += [name for *_, name in slices]
        if row.finish_reason == "length":
            assert (slices[0][0], slices[-1][1]) == (round(row.arrival_s * 1e9), round(row.finish_s * 1e9))
            assert all(a[1] == b[0] for a, b in pairwise(slices))
    kind = {"KV transfer": "prefilled"}.get(phase, "lost")
    if kind == "prefilled":
        assert names.count(phase) == (log.events.kind == kind).sum() > 20
    else:
        # Where another replica takes it in at once, being lost takes no time.
        assert 0 < names.count(phase) <= (log.events.kind == kind).sum()


def test_phases_of_one_request() -> None:
    """Preempted in decode, resumed, and its token of a step in flight comes while it is preempted."""
    at = dict.fromkeys(("first_token_s", "last_token_s"), 0) | {
        "arrival_s": 0,
        "sent_s": 5,
        "queued_s": 10,
        "first_scheduled_s": 30,
        "finish_s": 100,
    }
    moves = [(60, "preempted"), (80, "resumed")]
    phases = [tuple(phase) for phase in phases_of(at, 100, moves, [40, 50, 65, 90, 100])]
    assert phases == [
        ("held back by the client", 0, 5),
        ("waits for the step to end", 5, 10),
        ("queued", 10, 30),
        ("prefill", 30, 40),
        ("decode", 40, 60),
        ("preempted", 60, 80),
        ("prefill", 80, 90),
        ("decode", 90, 100),
    ]
    lost_in_prefill = [
        tuple(phase) for phase in phases_of(at, 100, [(35, "preempted"), (50, "resumed")], [70, 100])
    ]
    assert lost_in_prefill[3:] == [
        ("prefill", 30, 35),
        ("preempted", 35, 50),
        ("prefill", 50, 70),
        ("decode", 70, 100),
    ]


def test_a_window_has_what_touches_it(sync: Run, tmp_path: Path) -> None:
    events = trace_of(sync, tmp_path, "--from-s", "2.5", "--to-s", "3.1")
    check_format(events)
    steps = sync.steps[(sync.steps.end_s >= 2.5) & (sync.steps.start_s <= 3.1)]
    assert sum(e["ph"] == "X" and e["pid"] == 1 for e in events) == len(steps) < len(sync.steps)
    requests = sync.requests[(sync.requests.finish_s >= 2.5) & (sync.requests.arrival_s <= 3.1)]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == REQUESTS_PID]
    assert names == requests.request_id.tolist()


def test_a_long_run_is_cut_aloud(sync: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = trace_of(sync, tmp_path)
    assert "note" not in capsys.readouterr().err
    events = trace_of(sync, tmp_path, "--max-events", "600")
    check_format(events)
    assert 200 < len(events) < 900 < len(whole)
    said = capsys.readouterr().err
    assert "note: there are more than 600 events: written is what happens until" in said
    first = [e for e in whole if e["ph"] == "X" and e["pid"] == 1]
    assert [e for e in events if e["ph"] == "X" and e["pid"] == 1] == first[
        : sum(e["ph"] == "X" and e["pid"] == 1 for e in events)
    ]


def test_a_name_in_gz_is_compressed(sync: Run, tmp_path: Path) -> None:
    out = tmp_path / "trace.json.gz"
    assert run(["export", "perfetto", str(sync.path), "-o", str(out)]) == 0
    assert json.loads(gzip.decompress(out.read_bytes()))["traceEvents"] == trace_of(sync, tmp_path)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--from-s", "-1"], "--from-s -1.0: must be 0 or more"),
        (["--from-s", "3", "--to-s", "3"], "--to-s 3.0: must be after --from-s 3.0"),
        (["--max-events", "0"], "--max-events 0: must be 1 or more"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    sync: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert run(["export", "perfetto", str(sync.path), "-o", str(tmp_path / "t"), *flags]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not [*tmp_path.iterdir()]
