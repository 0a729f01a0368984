"""Several replicas behind a router: nothing gets lost, and the log is the same however steps are taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_strategies import ROUTERS, ClusterCase, cluster_cases
from engines import engine_config, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from leaping_strategies import Case, cases

from servetwin.sim.cluster.config import Autoscale, ClusterConfig, Disaggregation, Failure
from servetwin.sim.cluster.fleet import ReplicaParts, simulate_cluster, timer_for_each
from servetwin.sim.config import RunConfig
from servetwin.sim.events import MemorySink
from servetwin.sim.explain import explain
from servetwin.sim.metrics import finish_counts, summarize
from servetwin.sim.runs import RunWriter, read_run
from servetwin.sim.step_rows import figures
from servetwin.sim.steptime.modelled import ConstantStepModel, ModelledStepTimer
from servetwin.sim.tables import differences, tables_equal
from servetwin.sim.token_source import TokenSource
from servetwin.sim.token_times import OutputTimes
from servetwin.workloads import ListWorkload, RequestSpec

FEW = settings(max_examples=max(settings().max_examples // 30, 1))
"""Each example is three runs of several engines."""


# ---------------------------------------------------------------- any cluster


@FEW
@given(cases(), st.sampled_from(ROUTERS))
def test_one_replica_is_the_engine_itself(case: Case, router: str) -> None:
    """Behind a router, whichever it is: every table, every row."""
    expected, error = case.run()
    found, other_error = ClusterCase(case, ClusterConfig(router=router)).run()
    assert differences(expected, found) == []
    assert other_error == error


def assert_the_same(case: ClusterCase) -> None:
    """With plans, without plans, and many steps at once; every request in one row, with a reason unless it stalled."""
    log, error = case.run(plans=True)
    assert log.requests.request_id.is_unique
    if error is None:
        assert set(log.requests.request_id) == {r.request_id for r in case.case.requests}
        assert log.requests.finish_reason.notna().all()
        assert finish_counts(log)["open"] == 0
    for how in ({"leaps": False}, {"leaps": True}):
        found, other_error = case.run(**how)
        assert differences(log, found) == [], how
        assert other_error == error, how


@FEW
@given(cluster_cases())
def test_a_cluster_is_the_same_with_leaps(case: ClusterCase) -> None:
    """Whatever happens to replicas and requests: failures, scaling, refusals, aborts, prompts computed elsewhere."""
    assert_the_same(case)


@pytest.mark.full
@settings(max_examples=500)
@given(cluster_cases())
def test_many_clusters_are_the_same_with_leaps(case: ClusterCase) -> None:
    """The same, more often."""
    assert_the_same(case)


@FEW
@given(cluster_cases())
def test_outputs_and_gaps_of_a_cluster_agree(case: ClusterCase) -> None:
    """The instants of all outputs, request by request, give the pool of gaps of those that completed."""
    log, _ = case.run()
    done = log.requests[log.requests.finish_reason.isin(["length", "stop"])]
    gaps: list[int] = []
    for row, times in zip(done.itertuples(), OutputTimes(log).of_each(done), strict=True):
        assert len(times) == row.num_output_tokens
        gaps += (times[1:] - times[:-1]).tolist()
    pooled = [n for n, count in zip(*log.gap_lengths, strict=True) for _ in range(count)]
    assert sorted(gaps) == pooled


# ---------------------------------------------------------------- small clusters


def serve(
    requests: list[RequestSpec],
    cluster: ClusterConfig,
    *,
    step_s: float = 1.0,
    seed: int = 0,
    sink: Any = None,
    on_progress: Callable[[int, int, int], None] | None = None,
    max_concurrency: int | None = None,
    leaps: bool = True,
    **engine: Any,
) -> MemorySink:
    """The log of requests served by replicas whose steps take a second."""
    tokens, log = TokenSource(50), MemorySink()
    config = engine_config(**{"max_model_len": 200, **engine})
    timer = ModelledStepTimer(ConstantStepModel(round(step_s * 1e9)), tokens, "constant")
    simulate_cluster(
        RunConfig(engine=config, executor="constant", cluster=cluster, seed=seed),
        ListWorkload(requests),
        ReplicaParts(config, timer.another),
        log if sink is None else sink,
        tokens=tokens,
        on_progress=on_progress,
        max_concurrency=max_concurrency,
        leaps=leaps,
    )
    return log


def by_id(log: MemorySink) -> Any:
    return log.requests.set_index("request_id")


def kinds(log: MemorySink, request_id: str) -> list[tuple[float, str, int]]:
    """What happened to a request, waits left out: time, kind, replica."""
    mine = log.events[(log.events.request_id == request_id) & (log.events.kind != "wait")]
    return list(zip(mine.time_s, mine.kind, mine.replica, strict=True))


def test_arrivals_are_routed_when_all_steps_of_their_instant_are_over() -> None:
    """Replica 1 ends its request at the instant of an arrival, which finds it empty although replica 0 came first."""
    requests = [spec("a", 8, 9), spec("b", 8, 3), spec("c", 8, 1, 3.0)]
    log = serve(requests, ClusterConfig(replicas=2, router="least_requests"))
    assert by_id(log).replica.to_dict() == {"a": 0, "b": 1, "c": 1}
    assert by_id(log).first_token_s["c"] == 4.0


@pytest.mark.parametrize("leaps", [False, True])
def test_who_arrives_as_a_step_ends_is_in_the_next(leaps: bool) -> None:
    """Both replicas are at a boundary at 4 s; those who are sent there at that instant run from 4 s on."""
    requests = [spec("a", 8, 9), spec("b", 8, 9), spec("c", 8, 1, 4.0), spec("d", 8, 1, 4.0)]
    log = serve(requests, ClusterConfig(replicas=2), leaps=leaps)
    assert by_id(log).replica.tolist() == [0, 1, 0, 1]
    assert by_id(log).first_scheduled_s.tolist() == [0.0, 0.0, 4.0, 4.0]


def test_a_leap_is_cut_only_by_what_reaches_its_replica() -> None:
    """Forty arrivals at replica 1 leave the long decode of replica 0 in one row of its log."""
    requests = [spec("long", 8, 180), *(spec(f"r{i}", 8, 2, 3.5 + 4 * i) for i in range(40))]
    cluster = ClusterConfig(replicas=2, router="least_requests")
    log = serve(requests, cluster)
    assert set(by_id(log).replica[1:]) == {1}
    rows = [part for part in log.parts("steps") if part["replica"][0].as_py() == 0]
    assert sum(map(len, rows)) < 8
    assert sum(figures(part).num_steps for part in rows) == 180


def test_a_run_is_its_seed() -> None:
    """Equal seeds, equal logs; another seed, another split of the requests."""
    requests = [spec(f"r{i}", 8, 5, i / 3) for i in range(40)]
    cluster = ClusterConfig(replicas=3, router="random")
    one, again, other = (serve(requests, cluster, seed=seed) for seed in (1, 1, 2))
    assert tables_equal(one, again)
    assert one.requests.replica.tolist() != other.requests.replica.tolist()


def test_the_client_s_limit_holds_for_all_replicas_together() -> None:
    """Three in flight over two replicas, never more; the others are sent when one of these ends."""
    requests = [spec(f"r{i}", 8, 4) for i in range(9)]
    log = serve(requests, ClusterConfig(replicas=2, router="least_requests"), max_concurrency=3)
    rows = log.requests
    for at_s in range(12):
        assert ((rows.sent_s <= at_s) & (rows.finish_s > at_s)).sum() == 3
    assert sorted(rows.sent_s) == [0.0] * 3 + [4.0] * 3 + [8.0] * 3


def test_a_full_queue_refuses() -> None:
    """One seat, one may wait: the third at a replica is refused, by the one of the router's choice, and counted."""
    log = serve(
        [spec(f"r{i}", 8, 5, i / 10) for i in range(6)],
        ClusterConfig(replicas=2, max_queued_requests=1),
        max_num_seqs=1,
    )
    rows = by_id(log)
    assert rows.finish_reason.tolist() == ["length"] * 4 + ["refused"] * 2
    assert rows.replica.tolist() == [0, 1, 0, 1, 0, 1]
    refused = log.events[log.events.kind == "refused"]
    assert refused.reason.iloc[0] == "queue full: 1 requests wait at replica 0"
    assert summarize(log)["servetwin"]["requests"] == {"length": 4, "refused": 2, "open": 0}


# ---------------------------------------------------------------- failures

ONE_FAILS = Failure(replica=1, from_s=3.0, to_s=10.0)


@pytest.mark.parametrize(
    ("on_failure", "expected"),
    [
        ("lost", [(0.0, "arrived", 1), (0.0, "scheduled", 1), (3.0, "lost", 1)]),
        (
            "retry",
            [
                (0.0, "arrived", 1),
                (0.0, "scheduled", 1),
                (3.0, "lost", 1),
                (10.0, "retried", 1),
                (10.0, "scheduled", 1),
                (15.0, "finished", 1),
            ],
        ),
        (
            "reroute",
            [
                (0.0, "arrived", 1),
                (0.0, "scheduled", 1),
                (3.0, "retried", 0),
                (3.0, "scheduled", 0),
                (8.0, "finished", 0),
                (3.0, "lost", 1),
            ],
        ),
    ],
)
def test_what_becomes_of_requests_of_a_replica_that_fails(on_failure: str, expected: list[Any]) -> None:
    """Lost, waiting for it, or elsewhere at once; what was computed is gone, times count from the first try."""
    requests = [spec("a", 8, 2), spec("b", 8, 5), spec("late", 8, 1, 4.0)]
    cluster = ClusterConfig.model_validate(
        {"replicas": 2, "failures": (ONE_FAILS,), "on_failure": on_failure}
    )
    log = serve(requests, cluster)
    assert sorted(kinds(log, "b")) == sorted(expected)
    row = by_id(log).loc["b"]
    assert row.finish_reason == ("lost" if on_failure == "lost" else "length")
    assert row.arrival_s == row.sent_s == 0.0
    # While it is gone nobody is sent there.
    assert by_id(log).replica["late"] == 0
    times = log.steps[log.steps.replica == 1]
    assert not ((times.start_s < 10) & (times.end_s > 3)).any()
    residencies = log.blocks[(log.blocks.request_id == "b") & (log.blocks.replica == 1)]
    assert (residencies[residencies.from_s < 3].ended == "lost").all()
    assert len(residencies) > 0


def test_a_step_that_ends_at_the_instant_of_a_failure_is_lost() -> None:
    """And a request that arrives then goes elsewhere."""
    requests = [spec("a", 8, 1), spec("b", 8, 3), spec("c", 8, 1, 3.0), spec("d", 8, 1, 3.0)]
    log = serve(requests, ClusterConfig(replicas=2, failures=(ONE_FAILS,)))
    assert by_id(log).finish_reason.tolist() == ["length", "lost", "length", "length"]
    assert by_id(log).replica.tolist() == [0, 1, 0, 0]


def test_requests_wait_at_the_door_while_nobody_is_there() -> None:
    """One replica, gone from 3 to 10 s."""
    failure = Failure(replica=0, from_s=3.0, to_s=10.0)
    log = serve([spec("a", 8, 1), spec("b", 8, 2, 5.0)], ClusterConfig(failures=(failure,)))
    assert by_id(log).queued_s.tolist() == [0.0, 10.0]
    assert by_id(log).finish_s.tolist() == [1.0, 12.0]


def test_explain_follows_a_request_to_another_replica() -> None:
    """Its story has both replicas in order, and its phases add up."""
    requests = [spec("a", 8, 2), spec("b", 8, 5)]
    cluster = ClusterConfig(replicas=2, failures=(ONE_FAILS,), on_failure="reroute")
    log = serve(requests, cluster)
    story = explain(log, engine_config(max_model_len=200), "b")
    assert [m.kind for m in story.moments] == [
        "arrived",
        "scheduled",
        "lost",
        "retried",
        "scheduled",
        "first token",
        "finished",
    ]
    assert "replica 1 failed" in story.moments[2].text
    assert sum(p.duration_ns for p in story.phases) == story.total_ns == 8_000_000_000


# ---------------------------------------------------------------- scaling


def scale(signal: Any, up: float, down: float, **rest: Any) -> ClusterConfig:
    return ClusterConfig(
        autoscale=Autoscale(
            signal=signal, scale_up_at=up, scale_down_at=down, max_replicas=3, interval_s=5.0, **rest
        ),
        router="least_requests",
    )


def changes(log: MemorySink) -> list[tuple[float, str, int]]:
    """Replicas that come and go."""
    events = log.events[log.events.request_id.isna()]
    return list(zip(events.time_s, events.kind, events.replica, strict=True))


def test_a_queue_gets_replicas_and_gives_them_back() -> None:
    """Up at 5 s with a start of 2 s, and again; drained when the queue is gone, and off when empty."""
    requests = [spec(f"r{i}", 8, 5, i / 2) for i in range(30)] + [spec("last", 8, 30, 60.0)]
    log = serve(requests, scale("queue", 1.0, 0.2, startup_delay_s=2.0), max_num_seqs=2)
    seen = changes(log)
    assert seen[:5] == [
        (0.0, "replica_ready", 0),
        (5.0, "replica_starting", 1),
        (7.0, "replica_ready", 1),
        (10.0, "replica_starting", 2),
        (12.0, "replica_ready", 2),
    ]
    drained = [(time_s, replica) for time_s, kind, replica in seen if kind == "replica_draining"]
    stopped = [(time_s, replica) for time_s, kind, replica in seen if kind == "replica_stopped"]
    assert [replica for _, replica in drained] == [replica for _, replica in stopped] == [2, 1]
    assert all(off >= drain for (drain, _), (off, _) in zip(drained, stopped, strict=True))
    # Whatever was there when it drained has been served there.
    assert (log.requests.finish_reason == "length").all()
    figures = summarize(log)["servetwin"]["cluster"]
    ends = {0: 90.0, 1: stopped[1][0], 2: stopped[0][0]}
    there = {0: 90.0, 1: ends[1] - 5.0, 2: ends[2] - 10.0}
    assert [one["there_s"] for one in figures["of_each"]] == pytest.approx(list(there.values()))
    assert figures["replica_hours"] == pytest.approx(sum(there.values()) / 3600)


def test_a_replica_that_drains_serves_what_it_has_and_gets_no_more() -> None:
    """A long request is served to its end; those that arrive meanwhile go elsewhere."""
    requests = [spec("a", 8, 40), spec("b", 8, 40), *(spec(f"r{i}", 8, 1, 12.0 + i) for i in range(10))]
    cluster = scale("rate", 9.0, 1.0).model_copy(update={"replicas": 2})
    log = serve(requests, cluster)
    assert (10.0, "replica_draining", 1) in changes(log) or (5.0, "replica_draining", 1) in changes(log)
    assert by_id(log).replica["b"] == 1
    assert set(by_id(log).replica[2:]) == {0}
    assert (40.0, "replica_stopped", 1) in changes(log)


@pytest.mark.parametrize("leaps", [False, True])
def test_the_share_of_blocks_is_that_of_the_instant(leaps: bool) -> None:
    """A decode of 200 tokens crosses half of 100 blocks of 2 in its 100th step: seen at 100 s, inside a leap."""
    config = scale("kv", 0.5, 0.0)
    log = serve(
        [spec("a", 1, 150)], config, leaps=leaps, block_size=2, usable_blocks=100, max_num_batched_tokens=8
    )
    starting = [time_s for time_s, kind, _ in changes(log) if kind == "replica_starting"]
    steps = log.steps
    shares = steps.used_blocks / 100
    over = steps[shares > 0.5].start_s.min()
    assert starting[0] == 5 * (over // 5 + 1) == 105.0


def test_cooldown_and_limits() -> None:
    """One decision in 12 s, and never more than three replicas."""
    requests = [spec(f"r{i}", 8, 20, i / 10) for i in range(60)]
    log = serve(requests, scale("queue", 0.5, 0.0, cooldown_s=12.0), max_num_seqs=2)
    assert [time_s for time_s, kind, _ in changes(log) if kind == "replica_starting"] == [5.0, 20.0]


# ---------------------------------------------------------------- prompts and answers apart


def split(prefill: int = 1, decode: int = 1, **rest: Any) -> ClusterConfig:
    return ClusterConfig(
        replicas=prefill + decode,
        disaggregation=Disaggregation(prefill_replicas=prefill, decode_replicas=decode, **rest),
    )


def test_a_prompt_goes_over_the_wire() -> None:
    """Prefill 2 steps, 100 tokens of 10 bytes at 400 bytes/s and half a second: 3 s on their way; then 4 steps."""
    cluster = split(kv_transfer_bandwidth=400.0, kv_transfer_latency_s=0.5, kv_bytes_per_token=10)
    log = serve([spec("a", 100, 4)], cluster, max_num_batched_tokens=64)
    assert kinds(log, "a") == [
        (0.0, "arrived", 0),
        (0.0, "scheduled", 0),
        (2.0, "prefilled", 0),
        (5.0, "received", 1),
        (5.0, "scheduled", 1),
        (9.0, "finished", 1),
    ]
    (row,) = log.requests.itertuples()
    assert (row.replica, row.first_scheduled_s, row.first_token_s, row.num_output_tokens) == (1, 0.0, 6.0, 4)
    steps = log.steps[log.steps.replica == 1]
    # The last prompt token is computed again; the blocks of the whole prompt are there from the first step on.
    assert steps.prefill_tokens.tolist()[:2] == [1, 0]
    assert steps.used_blocks.iloc[0] == 25


def test_kv_that_is_preempted_is_computed_again() -> None:
    """Two answers outgrow the blocks of the replica that computes them; the one preempted begins with its prompt."""
    requests = [spec("a", 16, 30), spec("b", 16, 30)]
    log = serve(
        requests, split(), usable_blocks=16, max_model_len=60, scheduler_reserve_full_isl=False, caching=False
    )
    rows = by_id(log)
    assert rows.finish_reason.tolist() == ["length", "length"]
    assert rows.preemptions.sum() > 0
    assert rows.recomputed_tokens.sum() > 16
    assert set(rows.replica) == {1}


def test_a_request_that_the_second_replica_could_not_run_is_refused_by_the_first() -> None:
    """Its prompt alone would fit."""
    log = serve([spec("a", 20, 180)], split(), usable_blocks=49, max_model_len=199, block_size=4)
    (row,) = log.requests.itertuples()
    assert (row.finish_reason, row.replica) == ("refused", 0)


# ---------------------------------------------------------------- logs, folders, figures


def test_a_folder_of_several_replicas_reads_as_it_was_written(tmp_path: Path) -> None:
    """Parts come from each replica when it has enough; tables, gaps and figures are those of the log in memory."""
    requests = [spec(f"r{i}", 8, 3 + i % 7, i / 9, abort_s=2.5 if i == 9 else None) for i in range(300)]
    cluster = ClusterConfig(replicas=3, router="power_of_two")
    log = serve(requests, cluster, max_num_seqs=4)
    writer = RunWriter.create(tmp_path / "run", {"config": {}})
    serve(requests, cluster, max_num_seqs=4, sink=writer)
    writer.complete()
    run = read_run(tmp_path / "run")
    assert len(run.header["parts"]["steps"]) > 3
    assert differences(log, run) == []
    assert run.steps.start_s.is_monotonic_increasing
    assert run.itl.equals(log.itl)
    assert summarize(run) == summarize(log)
    figures = summarize(log)["servetwin"]["cluster"]
    assert [one["completed"] for one in figures["of_each"]] == log.requests[
        log.requests.finish_reason == "length"
    ].replica.value_counts().sort_index().tolist()
    assert figures["busy_time_s"] == pytest.approx(summarize(log)["busy_time_s"])
    busiest = max(one["busy_time_s"] for one in figures["of_each"])
    assert figures["imbalance"]["busy_time_s"] == pytest.approx(busiest * 3 / figures["busy_time_s"])


def test_a_run_of_one_engine_has_no_figures_of_a_cluster() -> None:
    """Also behind a router."""
    log = serve([spec("a", 8, 4)], ClusterConfig(router="random"))
    assert "cluster" not in summarize(log)["servetwin"]
    assert log.steps.replica.unique().tolist() == [0]


class Broken(Exception):
    """What ends a run early."""


@pytest.mark.parametrize("leaps", [False, True])
def test_a_cluster_that_breaks_off_knows_how_far_each_request_had_come(leaps: bool) -> None:
    """Outputs are those of the steps that are logged, also of replicas that were amid a leap."""
    sink = MemorySink()

    def on_progress(num_steps: int, num_ended: int, now_ns: int) -> None:
        if now_ns >= 20e9:
            raise Broken

    requests = [spec("a", 8, 21), spec("b", 8, 90), spec("c", 8, 90, 4.5)]
    cluster = ClusterConfig(replicas=3)
    with pytest.raises(Broken):
        serve(requests, cluster, sink=sink, on_progress=on_progress, leaps=leaps)
    rows = sink.requests.set_index("request_id")
    assert rows.finish_reason.isna().sum() == (3 if not leaps else 2)
    for row in sink.requests.itertuples():
        steps = sink.steps[(sink.steps.replica == row.replica) & (sink.steps.rows > 0)]
        assert row.num_output_tokens == len(steps) >= 15


def test_measured_steps_are_of_one_engine() -> None:
    """A model that runs cannot be several."""

    class Measured(ModelledStepTimer):
        pass

    with pytest.raises(ValueError, match="several replicas need modelled step times"):
        timer_for_each(Measured(ConstantStepModel(1), TokenSource(50), "x"))


def test_replicas_of_different_kinds() -> None:
    """The second is twice as fast, so that the fewest requests in flight send it most."""
    tokens, log, config = TokenSource(50), MemorySink(), engine_config(max_num_seqs=1)
    timers = [ModelledStepTimer(ConstantStepModel(ns), tokens, "x") for ns in (10**9, 5 * 10**8)]
    simulate_cluster(
        RunConfig(engine=config, executor="x", cluster=ClusterConfig(replicas=2, router="least_requests")),
        ListWorkload([spec(f"r{i}", 8, 4, i) for i in range(60)]),
        [ReplicaParts(config, timer.another) for timer in timers],
        log,
        tokens=tokens,
    )
    counts = log.requests.replica.value_counts()
    assert counts[1] > 1.5 * counts[0]
    with pytest.raises(ValueError, match="parts of 1 replicas were given; the cluster may have 2"):
        simulate_cluster(
            RunConfig(engine=config, executor="x", cluster=ClusterConfig(replicas=2)),
            ListWorkload([]),
            [ReplicaParts(config, timers[0].another)],
            log,
            tokens=tokens,
        )
