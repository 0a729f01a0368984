"""Queueing theory against several replicas, each reduced to a single server: one seat, a step as long as its tokens.

Exact where the recursions are (every wait, in whole ns); else intervals of 99.9 % (`tests/queueing.py`), each of which
is also shown to fail for replicas 3 % faster and 3 % slower.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from engines import engine_config, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from queueing import Floats, Interval, erlang_c, interval, pollaczek_khinchine, waits
from test_theory import (
    MEAN_PROMPT,
    MS,
    PerToken,
    S,
    draw_luck,
    geometric_lengths,
    holds_at_this_speed_only,
    poisson_gaps,
)

from servetwin.sim.cluster.config import ClusterConfig, Disaggregation
from servetwin.sim.cluster.fleet import ReplicaParts, simulate_cluster
from servetwin.sim.config import RunConfig
from servetwin.sim.events import MemorySink
from servetwin.sim.steptime.modelled import ModelledStepTimer
from servetwin.sim.tables import ns_array
from servetwin.sim.token_source import TokenSource
from servetwin.workloads import ListWorkload

Ints = NDArray[np.int64]
SOME = settings(max_examples=max(settings().max_examples // 30, 1))
ONE_SEAT = {
    "block_size": 1 << 16,
    "max_model_len": 1 << 16,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1 << 16,
}


def servers(
    gaps_ns: Ints,
    prompts: Ints,
    cluster: ClusterConfig,
    slowdown: float = 1.0,
    *,
    outputs: Ints | None = None,
    max_concurrency: int | None = None,
) -> MemorySink:
    """Replicas of one seat, at 1 ms a token; prompts are served whole."""
    outputs = np.ones(len(prompts), dtype=np.int64) if outputs is None else outputs
    requests = [
        spec(str(i), int(prompt), int(output), int(at) / S)
        for i, (prompt, output, at) in enumerate(zip(prompts, outputs, np.cumsum(gaps_ns), strict=True))
    ]
    config, tokens, log = engine_config(**ONE_SEAT), TokenSource(100), MemorySink()
    timer = ModelledStepTimer(PerToken(round(slowdown * MS)), tokens, "per token")
    simulate_cluster(
        RunConfig(engine=config, executor="x", cluster=cluster),
        ListWorkload(requests),
        ReplicaParts(config, timer.another),
        log,
        tokens=tokens,
        log_blocks=False,
        max_concurrency=max_concurrency,
    )
    return log


def in_system(log: MemorySink) -> Ints:
    """ns from arrival to last token, in the order of the requests (rows of one instant are in that of the replicas)."""
    rows = ordered(log)
    assert (rows.finish_reason == "length").all()
    times: Ints = (ns_array(rows.last_token_s) - ns_array(rows.arrival_s)).astype(np.int64)
    return times


def ordered(log: MemorySink) -> pd.DataFrame:
    rows = log.requests
    return rows.iloc[np.argsort(rows.request_id.astype(int).to_numpy())]


loads = st.lists(st.tuples(st.integers(0, 15 * MS), st.integers(1, 20)), min_size=1, max_size=40)


@SOME
@given(loads, st.integers(1, 3), st.sampled_from(["random", "least_requests", "power_of_two"]))
def test_each_replica_is_a_single_server_to_the_tick(
    load: list[tuple[int, int]], replicas: int, router: str
) -> None:
    """Given who was sent where, every wait is that of Lindley's recursion there; ties included."""
    gaps, prompts = np.array(load, dtype=np.int64).T
    log = servers(gaps, prompts, ClusterConfig(replicas=replicas, router=router))
    times, where, arrivals = in_system(log), ordered(log).replica.to_numpy(), np.cumsum(gaps)
    for replica in range(replicas):
        mine = where == replica
        if mine.any():
            service = prompts[mine] * MS
            expected = waits(np.diff(arrivals[mine], prepend=0), service) + service
            assert times[mine].tolist() == expected.tolist()


@SOME
@given(loads, st.integers(1, 3))
def test_a_shared_queue_to_the_tick(load: list[tuple[int, int]], replicas: int) -> None:
    """The client keeps as many in flight as there are replicas: each request gets the one that is free first."""
    gaps, prompts = np.array(load, dtype=np.int64).T
    cluster = ClusterConfig(replicas=replicas, router="least_requests")
    log = servers(gaps, prompts, cluster, max_concurrency=replicas)
    free, expected = [0] * replicas, []
    for at, prompt in zip(np.cumsum(gaps).tolist(), prompts.tolist(), strict=True):
        first = free.index(min(free))
        free[first] = max(free[first], at) + prompt * MS
        expected.append(free[first] - at)
    assert in_system(log).tolist() == expected


@SOME
@given(loads, st.data())
def test_prefill_and_decode_are_two_servers_in_a_row_to_the_tick(
    load: list[tuple[int, int]], data: st.DataObject
) -> None:
    """With a wire of no time: Lindley's recursion twice, the second fed with the ends of the first."""
    gaps, prompts = np.array(load, dtype=np.int64).T
    outputs = np.array(data.draw(st.lists(st.integers(1, 20), min_size=len(load), max_size=len(load))))
    log = servers(gaps, prompts, PAIR, outputs=outputs)
    arrivals, first, second = np.cumsum(gaps), prompts * MS, outputs * MS
    handed_over = arrivals + waits(gaps, first) + first
    expected = handed_over + waits(np.diff(handed_over, prepend=0), second) + second - arrivals
    assert in_system(log).tolist() == expected.tolist()


PAIR = ClusterConfig(replicas=2, disaggregation=Disaggregation(prefill_replicas=1, decode_replicas=1))


# ---------------------------------------------------------------- means


def mean_of(log: MemorySink, luck: list[tuple[Floats, float]]) -> Interval:
    return interval(in_system(log) / S, luck)


@pytest.mark.full
def test_a_random_split_is_so_many_m_m_1() -> None:
    """Four replicas at utilisation 0.5 each: the mean time of one M/M/1, not of M/M/4."""
    rate, count, rng = 0.5, 40_000, np.random.default_rng(4)
    gaps = poisson_gaps(rng, 4 * rate, count)
    prompts, mean_square = geometric_lengths(rng, count)
    luck = [*draw_luck(gaps, 4 * rate), (prompts / MEAN_PROMPT, 1.0)]
    cluster = ClusterConfig(replicas=4, router="random")
    expected = pollaczek_khinchine(rate, mean_square)

    def mean(slowdown: float) -> Interval:
        return mean_of(servers(gaps, prompts, cluster, slowdown), luck)

    holds_at_this_speed_only(expected, mean)
    assert erlang_c(4 * rate, 4) not in mean(1.0)


@pytest.mark.full
def test_a_shared_queue_is_m_m_c() -> None:
    """Four replicas and a client that holds requests back until one is free, utilisation 0.7."""
    rate, count, rng = 2.8, 60_000, np.random.default_rng(5)
    gaps = poisson_gaps(rng, rate, count)
    prompts, _ = geometric_lengths(rng, count)
    services = prompts / MEAN_PROMPT
    luck = [*draw_luck(gaps, rate), (services, 1.0), (services**2, 2 - 1 / MEAN_PROMPT)]
    cluster = ClusterConfig(replicas=4, router="least_requests")

    def mean(slowdown: float) -> Interval:
        return mean_of(servers(gaps, prompts, cluster, slowdown, max_concurrency=4), luck)

    holds_at_this_speed_only(erlang_c(rate, 4), mean)


def mean_field_power_of_two(rate: float) -> float:
    """Mean time in system with many servers and the shorter of two queues at random (Mitzenmacher 2001, theorem 3)."""
    return float(sum(rate ** (2.0**i - 2) for i in range(1, 12)))


@pytest.mark.full
def test_power_of_two_is_its_mean_field() -> None:
    """A hundred replicas at utilisation 0.7: 1.61 mean services, where a random split takes 3.33."""
    rate, replicas, count = 0.7, 100, 30_000
    rng = np.random.default_rng(6)
    gaps = poisson_gaps(rng, replicas * rate, count)
    prompts, _ = geometric_lengths(rng, count)
    services = prompts / MEAN_PROMPT
    luck = [*draw_luck(gaps, replicas * rate), (services, 1.0), (services**2, 2 - 1 / MEAN_PROMPT)]
    cluster = ClusterConfig(replicas=replicas, router="power_of_two")

    def mean(slowdown: float) -> Interval:
        return mean_of(servers(gaps, prompts, cluster, slowdown), luck)

    holds_at_this_speed_only(mean_field_power_of_two(rate), mean)
    at_random = servers(gaps, prompts, ClusterConfig(replicas=replicas, router="random"))
    assert in_system(at_random).mean() > 1.8 * mean(1.0).mean * S


@pytest.mark.full
def test_prefill_and_decode_are_a_tandem() -> None:
    """Two M/M/1 in a row, with independent services: the sum of their mean times (Jackson 1957)."""
    rate, count, rng = 0.5, 30_000, np.random.default_rng(7)
    gaps = poisson_gaps(rng, 10 * rate, count)
    # A tenth of the length, so that an answer is not a thousand steps; the time unit is 100 ms.
    prompts, outputs = rng.geometric(0.01, count), rng.geometric(0.01, count)
    luck = [
        *draw_luck(gaps, 10 * rate),
        (prompts / 100, 1.0),
        (outputs / 100, 1.0),
        ((outputs / 100) ** 2, 2 - 0.01),
    ]

    def mean(slowdown: float) -> Interval:
        times = in_system(servers(gaps, prompts, PAIR, slowdown, outputs=outputs)) / S * 10
        return interval(times, luck)

    holds_at_this_speed_only(2 * pollaczek_khinchine(rate, 2 - 0.01), mean)


@pytest.mark.full
def test_a_queue_limit_is_m_m_1_k() -> None:
    """One seat and two who may wait, utilisation 1: a quarter finds it full (the loss of M/M/1/3)."""
    count, rng = 40_000, np.random.default_rng(8)
    gaps = poisson_gaps(rng, 1.0, count)
    prompts, _ = geometric_lengths(rng, count)
    services = prompts / MEAN_PROMPT
    luck = [*draw_luck(gaps, 1.0), (services, 1.0)]

    def refused(slowdown: float) -> Interval:
        log = servers(gaps, prompts, ClusterConfig(max_queued_requests=2), slowdown)
        return interval((ordered(log).finish_reason == "refused").to_numpy().astype(np.float64), luck)

    assert 0.25 in refused(1.0)
    assert 0.25 not in refused(0.93)
    assert 0.25 not in refused(1.07)


def test_least_requests_beat_a_random_split_and_round_robin_lies_between() -> None:
    """At utilisation 0.8 of four replicas: the order that theory has for exponential services."""
    count, rng = 2_500, np.random.default_rng(9)
    gaps = poisson_gaps(rng, 3.2, count)
    prompts, _ = geometric_lengths(rng, count)
    means = {
        router: float(in_system(servers(gaps, prompts, ClusterConfig(replicas=4, router=router))).mean())
        for router in ("random", "round_robin", "power_of_two", "least_requests")
    }
    assert means["random"] > 1.2 * means["round_robin"]
    assert means["round_robin"] > 1.2 * means["power_of_two"] > 1.2 * means["least_requests"]


def test_refused_requests_are_in_no_mean() -> None:
    """Twice the load that one seat can serve, one may wait: half is refused, the others wait for one at most."""
    gaps, prompts = np.full(200, 500 * MS), np.full(200, MEAN_PROMPT)
    log = servers(gaps, prompts, ClusterConfig(max_queued_requests=1))
    rows = log.requests
    assert 90 <= (rows.finish_reason == "refused").sum() <= 100
    served = rows[rows.finish_reason == "length"]
    assert (ns_array(served.finish_s) - ns_array(served.arrival_s)).max() <= 2 * S
