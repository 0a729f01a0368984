"""Steady states: what is cut, what is measured, and when a run is called overloaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from engines import engine_config, serve, spec
from hypothesis import given
from hypothesis import strategies as st
from planned import constant_engine, evenly, write_workload

from servetwin.sim.planning.one_run import EndRun, run_one
from servetwin.sim.planning.saturation import SaturatedError, SaturationWatch
from servetwin.sim.planning.slo import Latencies
from servetwin.sim.planning.spec import RunSpec
from servetwin.sim.planning.steady import (
    Lives,
    Verdict,
    Window,
    account,
    averages,
    mser5,
    steady_rate,
    steady_state,
    token_rate,
)

S = 1e9


def single_server(gaps_s: np.ndarray, services_s: np.ndarray) -> Lives:
    """Requests at one server, first come first served."""
    sent = np.cumsum(gaps_s)
    begin = np.zeros(len(sent))
    free = 0.0
    for i, (t, service) in enumerate(zip(sent, services_s, strict=True)):
        begin[i] = max(t, free)
        free = begin[i] + service
    return Lives(sent * S, begin * S, (begin + services_s) * S, np.ones(len(sent), dtype=bool))


def markovian(load: float, n: int, seed: int) -> Lives:
    rng = np.random.default_rng(seed)
    return single_server(rng.exponential(1 / load, n), rng.exponential(1.0, n))


# ------------------------------------------------------------ reports.md, by number


def test_report_66_start_up_does_not_dilute_the_rate() -> None:
    """101 completions, one a second from 50 s on: 1.0/s in the steady part, 0.67/s only over the whole run."""
    completions = np.arange(50, 151) * S
    assert steady_rate(completions, Window(0.0, 150 * S)) == pytest.approx(1.0)
    assert len(completions) / 150 == pytest.approx(0.67, abs=0.005)


def test_report_67_what_warm_up_excludes() -> None:
    """Warm-up of 10 s; one request starts at 1 s, has its first token at 9 s and one each second up to 15 s."""
    tokens = serve(
        [spec("r", 1, 7, at_s=8.0)], engine_config(), step_ns=1_000_000_000
    )  # Its first token is out at 9 s, the last at 15 s.
    requests = tokens.requests.assign(arrival_s=1.0, sent_s=1.0)
    assert requests.first_token_s.tolist() == [9.0] and requests.last_token_s.tolist() == [15.0]
    window = Window(10 * S, 20 * S)
    assert Latencies.of(requests, window).count == 0
    # Its tokens at 10, 11, ... 15 s count.
    assert token_rate(tokens, window) * window.length_s == pytest.approx(6)
    assert Latencies.of(requests, Window(0.0, 20 * S)).count == 1


def test_report_68_a_saturated_run_says_so(tmp_path: Path) -> None:
    """One request a second is served, two arrive, for 100 s; the run is ended there."""
    workload = write_workload(tmp_path / "w.jsonl", evenly(200, 2.0), 16, 1)

    def horizon(num_steps: int, num_ended: int, now_ns: int) -> None:
        if now_ns >= 100 * S:
            raise EndRun("horizon of 100 s")

    result = run_one(RunSpec.from_fields(str(workload), **constant_engine(1, 1.0)), on_progress=horizon)
    assert result.ended_early == "horizon of 100 s"
    requests = result.log.requests
    counts = account(requests)
    injected = int((result.log.events.kind == "arrived").sum())
    assert injected == len(requests) == sum(counts.values()) >= 199
    assert counts["completed"] == 100 and counts["waiting"] >= 98
    assert counts["refused"] == counts["aborted"] == 0
    steady = steady_state(Lives.of(requests))
    assert steady.verdict is Verdict.OVERLOADED
    assert steady.saturated_rate == pytest.approx(1.0, rel=0.01)
    assert steady.growth == pytest.approx(0.5, abs=0.02)
    # The figures of latency are lower bounds: who has no answer counts as infinite, not as absent.
    latencies = Latencies.of(requests, Window(0.0, 100 * S))
    assert latencies.percentile("ttft", 99) == np.inf
    assert account(requests, 50 * S) == counts | {"completed": 50, "running": 1, "waiting": 50}


# ------------------------------------------------------------ verdicts


@pytest.mark.parametrize("seed", range(5))
def test_verdicts_of_a_single_server(seed: int) -> None:
    """At 70 % of its capacity it is never called overloaded, at 150 % always; rates are those that were put in."""
    stable, overloaded = (steady_state(markovian(load, 4000, seed)) for load in (0.7, 1.5))
    assert stable.verdict is Verdict.STABLE
    assert stable.arrival_rate == pytest.approx(0.7, rel=0.06)
    assert stable.served_rate == pytest.approx(0.7, rel=0.1)
    assert overloaded.verdict is Verdict.OVERLOADED
    assert overloaded.saturated_rate == pytest.approx(1.0, rel=0.05)
    assert overloaded.growth == pytest.approx(1 - 1 / 1.5, rel=0.35)


@pytest.mark.parametrize("load", [1.005, 1.05, 2.0])
def test_the_least_overload_shows_where_nothing_is_random(load: float) -> None:
    state = steady_state(single_server(np.full(1000, 1 / load), np.ones(1000)))
    assert state.verdict is Verdict.OVERLOADED
    assert state.saturated_rate == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("load", [0.5, 0.95, 0.999])
def test_no_queue_where_nothing_is_random_and_there_is_room(load: float) -> None:
    state = steady_state(single_server(np.full(1000, 1 / load), np.ones(1000)))
    assert state.verdict is Verdict.STABLE and state.longest_queue <= 1


def test_a_burst_that_is_worked_off_is_no_overload() -> None:
    """The first 300 of 1,000 requests come at once, the others slowly."""
    gaps = np.concatenate([np.full(300, 1e-3), np.full(700, 1.25)])
    burst = steady_state(single_server(gaps, np.ones(1000)))
    assert burst.verdict is not Verdict.OVERLOADED
    # One that has not been worked off at the end is a backlog.
    late = steady_state(single_server(gaps[::-1], np.ones(1000)))
    assert late.verdict is Verdict.BACKLOGGED


def test_a_queue_that_stands_to_the_end_has_not_settled() -> None:
    """A little more arrives than is served, with luck on both sides: no line, but nobody found the server free."""
    rng = np.random.default_rng(8)
    state = steady_state(single_server(rng.exponential(1 / 1.04, 600), rng.exponential(1.0, 600)))
    assert state.verdict is not Verdict.STABLE
    assert state.queued_share > 0.25


def test_the_window_leaves_out_the_start_and_the_end() -> None:
    """10 s each, three a second: steady after 10 s; whoever comes in the last 10 s sees the engine empty."""
    n = 600
    sent = np.arange(n) / 3 * S
    lives = Lives(sent, sent, sent + 10 * S, np.ones(n, dtype=bool))
    state = steady_state(lives)
    assert state.has_settled and state.verdict is Verdict.STABLE
    assert 8 * S <= state.window.start_ns <= 14 * S
    assert state.window.end_ns == pytest.approx(sent[-1] - 10 * S)


def test_mser_cuts_the_transient() -> None:
    rng = np.random.default_rng(3)
    steady = rng.normal(10, 1, 250)
    cut = mser5(steady)
    assert cut is not None and cut <= 0.2
    ramp = np.concatenate([np.linspace(-20, 10, 50), rng.normal(10, 1, 200)])
    cut = mser5(ramp)
    assert cut is not None and 0.14 <= cut <= 0.3
    assert mser5(np.arange(250.0)) is None


@given(st.lists(st.tuples(st.floats(0, 90), st.floats(0.01, 50)), min_size=1, max_size=40))
def test_the_averages_are_the_time_in_the_system(lives: list[tuple[float, float]]) -> None:
    begin = np.array([b for b, _ in lives])
    end = begin + np.array([length for _, length in lives])
    pieces = averages(begin, end, 0.0, 100.0, pieces=20)
    inside = np.minimum(end, 100.0) - begin
    assert pieces.sum() * 5 == pytest.approx(inside.sum(), rel=1e-9, abs=1e-6)


def test_requests_without_an_answer_count_as_present() -> None:
    requests = pd.DataFrame(
        {
            "request_id": ["a", "b", "c"],
            "arrival_s": [0.0, 1.0, 2.0],
            "sent_s": [0.0, 1.0, 2.0],
            "first_scheduled_s": [0.0, 3.0, np.nan],
            "finish_s": [3.0, np.nan, np.nan],
            "finish_reason": ["length", None, None],
        }
    )
    assert account(requests) == {
        "completed": 1,
        "running": 1,
        "waiting": 1,
        "refused": 0,
        "aborted": 0,
        "lost": 0,
        "failed": 0,
    }
    assert account(requests, 1.5 * S)["waiting"] == 1


# ------------------------------------------------------------ recognition while it runs


def watched(rate: float, served: float, *, room: int, n: int = 1000) -> SaturatedError | None:
    """Whether a watch ends a run that serves so many per second at most."""
    arrivals = (np.arange(n) / rate * S).astype(np.int64)
    watch = SaturationWatch(arrivals, room)
    for i in range(n):
        done = max(i / served, i / rate) * S
        try:
            watch(1, 1, int(done))
        except SaturatedError as e:
            return e
    return None


def test_a_hopeless_run_is_ended_early() -> None:
    ended = watched(3.0, 1.0, room=20)
    assert ended is not None and ended.ended <= 300
    assert ended.served_rate == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("rate", "room"), [(0.9, 20), (1.05, 20), (3.0, 1000)])
def test_a_run_that_may_come_to_its_end_is_not(rate: float, room: int) -> None:
    """Below capacity, hardly above it, or with room for all that have come."""
    assert watched(rate, 1.0, room=room) is None
