"""Queueing theory against the simulator, with the engine reduced to the queue that each formula describes.

* One seat, one output token, a step as long as its prompt: a single server, service times at will (M/G/1).
* Four seats, steps of equal length, geometric numbers of output tokens: four servers that move in common steps. As the
  steps shrink this is M/M/4; the tests hold the engine against the exact formula for its steps.

What is random has its seed here, and its interval is one of 99.9 % (`tests/queueing.py`). Every claim is also shown to
fail for an engine 3 % faster and 3 % slower. The numbers of requests were chosen for that: of 100 draws of the same
queues outside the simulator, at least 95 tell the difference. Steady periods of one engine: `test_timeline.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from engines import engine_config, serve, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from queueing import Floats, Interval, erlang_c, geometric_servers, interval, pollaczek_khinchine, waits

from servetwin.sim.events import MemorySink
from servetwin.sim.steptime.features import StepFeatures
from servetwin.sim.steptime.modelled import ModelledStepTimer
from servetwin.sim.tables import ns_array
from servetwin.sim.token_source import TokenSource
from servetwin.workloads import RequestSpec

Ints = NDArray[np.int64]
S = 1_000_000_000
MS = 1_000_000
MEAN_PROMPT = 1000
"""Tokens, of 1 ms each: a mean service of one second."""
FASTER_AND_SLOWER = (0.97, 1.03)
WHOLE_RUNS = settings(max_examples=settings().max_examples // 5)


@dataclass(frozen=True)
class PerToken:
    """A step model: so many ns for each token computed."""

    token_ns: int

    def durations_ns(self, features: StepFeatures) -> Ints:
        return features.new_tokens * self.token_ns


def holds_at_this_speed_only(expected: float, mean: Callable[[float], Interval]) -> None:
    """`mean`: slowdown of the engine -> interval of its mean time in system; `expected` at slowdown 1."""
    assert expected in mean(1.0)
    assert not [slowdown for slowdown in FASTER_AND_SLOWER if expected in mean(slowdown)]


def in_system(log: MemorySink) -> Ints:
    """ns from arrival to last token, in order of arrival."""
    requests = log.requests
    assert (requests.finish_reason == "length").all()
    times: Ints = (ns_array(requests.last_token_s) - ns_array(requests.arrival_s)).astype(np.int64)
    return times


# ---------------------------------------------------------------- one server


def one_server(gaps_ns: Ints, prompts: Ints, slowdown: float = 1.0) -> MemorySink:
    """One seat that serves prompts whole, at 1 ms a token."""
    config = engine_config(
        block_size=1 << 16, max_model_len=1 << 16, max_num_seqs=1, max_num_batched_tokens=1 << 16
    )
    requests = [
        spec(str(i), int(prompt), 1, int(at) / S)
        for i, (prompt, at) in enumerate(zip(prompts, np.cumsum(gaps_ns), strict=True))
    ]
    timer = ModelledStepTimer(PerToken(round(slowdown * MS)), TokenSource(100), "per token")
    return serve(requests, config, timer=timer, log_blocks=False)


def poisson_gaps(rng: np.random.Generator, rate: float, count: int) -> Ints:
    """Exponential gaps in ns; `rate` in requests per second."""
    return np.rint(rng.exponential(S / rate, count)).astype(np.int64)


def draw_luck(gaps_ns: Ints, rate: float) -> list[tuple[Floats, float]]:
    """What arrivals were drawn, in seconds, and what was to be expected."""
    gaps = gaps_ns / S
    return [(gaps, 1 / rate), (gaps**2, 2 / rate**2)]


@WHOLE_RUNS
@given(st.lists(st.tuples(st.integers(0, 30 * MS), st.integers(1, 20)), min_size=1, max_size=30))
def test_one_seat_is_a_single_server_to_the_tick(load: list[tuple[int, int]]) -> None:
    """Every wait is that of Lindley's recursion, in whole ns; ties of an arrival and an end included."""
    gaps, prompts = np.array(load, dtype=np.int64).T
    log = one_server(gaps, prompts)
    assert in_system(log).tolist() == (waits(gaps, prompts * MS) + prompts * MS).tolist()
    for slowdown in FASTER_AND_SLOWER:
        assert (in_system(one_server(gaps, prompts, slowdown)) != in_system(log)).all()


@pytest.mark.parametrize("gap_ms", [1_100, 1_000, 800])
def test_d_d_1(gap_ms: int) -> None:
    """Equal gaps a, equal services s: request k waits k (s - a), or nobody waits."""
    gaps = np.full(50, gap_ms * MS, dtype=np.int64)
    times = in_system(one_server(gaps, np.full(50, 1000, dtype=np.int64)))
    assert times.tolist() == [S + k * max(S - gap_ms * MS, 0) for k in range(50)]


@pytest.mark.parametrize(
    ("rate", "count"), [(0.5, 12_000), pytest.param(0.7, 40_000, marks=pytest.mark.full)]
)
def test_m_d_1(rate: float, count: int) -> None:
    """Equal prompts, Poisson arrivals: the mean time in system is that of Pollaczek and Khinchine."""
    gaps = poisson_gaps(np.random.default_rng(1), rate, count)
    prompts = np.full(count, MEAN_PROMPT)

    def mean(slowdown: float) -> Interval:
        return interval(in_system(one_server(gaps, prompts, slowdown)) / S, draw_luck(gaps, rate))

    holds_at_this_speed_only(pollaczek_khinchine(rate, 1.0), mean)


def two_lengths(rng: np.random.Generator, count: int) -> tuple[Ints, float]:
    """Three short prompts for each long one, and their mean square service in s^2 (coefficient of variation 0.87)."""
    return np.where(rng.random(count) < 0.75, 500, 2500), 0.75 * 0.5**2 + 0.25 * 2.5**2


def geometric_lengths(rng: np.random.Generator, count: int) -> tuple[Ints, float]:
    """Geometric prompt lengths: an exponential service in whole milliseconds."""
    return rng.geometric(1 / MEAN_PROMPT, count), 2 - 1 / MEAN_PROMPT


@pytest.mark.full
@pytest.mark.parametrize("lengths", [two_lengths, geometric_lengths], ids=["M/G/1", "M/M/1"])
def test_m_g_1(lengths: Callable[[np.random.Generator, int], tuple[Ints, float]]) -> None:
    """Prompts of random length, utilisation 0.5, 40,000 requests: Pollaczek and Khinchine again."""
    rate, count, rng = 0.5, 40_000, np.random.default_rng(2)
    gaps = poisson_gaps(rng, rate, count)
    prompts, mean_square = lengths(rng, count)
    services = prompts / MEAN_PROMPT
    luck = [*draw_luck(gaps, rate), (services, 1.0)]

    def mean(slowdown: float) -> Interval:
        return interval(in_system(one_server(gaps, prompts, slowdown)) / S, luck)

    holds_at_this_speed_only(pollaczek_khinchine(rate, mean_square), mean)


def test_m_m_1_is_a_case_of_m_g_1() -> None:
    """1 / (mu - lambda); whole milliseconds instead of exponential times change it by less than 0.05 %."""
    assert pollaczek_khinchine(0.5, 2.0) == erlang_c(0.5, 1) == 1 / (1 - 0.5)
    assert pollaczek_khinchine(0.5, 2 - 1 / MEAN_PROMPT) == pytest.approx(2.0, rel=5e-4)


# ---------------------------------------------------------------- four servers

STEP = 0.2
"""Of the mean service: a request needs five steps on average."""


def four_servers(gaps_ns: Ints, steps: Ints, slowdown: float = 1.0) -> MemorySink:
    """Four seats; a request needs as many steps of 200 ms as it has output tokens."""
    config = engine_config(block_size=1 << 16, max_num_seqs=4)
    requests = [
        spec(str(i), 1, int(count), int(at) / S)
        for i, (count, at) in enumerate(zip(steps, np.cumsum(gaps_ns), strict=True))
    ]
    return serve(requests, config, step_ns=round(STEP * slowdown * S), log_blocks=False)


@pytest.mark.parametrize(
    ("rate", "count"), [(2.0, 10_000), pytest.param(2.8, 40_000, marks=pytest.mark.full)]
)
def test_m_m_4_in_common_steps(rate: float, count: int) -> None:
    """Four seats, Poisson arrivals, geometric lengths: the mean time in system is that of the exact chain."""
    rng = np.random.default_rng(3)
    gaps, steps = poisson_gaps(rng, rate, count), rng.geometric(STEP, count)
    drawn = steps.astype(np.float64)
    luck = [*draw_luck(gaps, rate), (drawn, 1 / STEP), (drawn**2, (2 - STEP) / STEP**2)]

    def mean(slowdown: float) -> Interval:
        return interval(in_system(four_servers(gaps, steps, slowdown)) / S, luck)

    holds_at_this_speed_only(geometric_servers(rate, 4, STEP), mean)


@pytest.mark.parametrize("rate", [2.0, 2.8])
def test_short_steps_are_m_m_4(rate: float) -> None:
    """The exact chain tends to Erlang's formula with the step: half a step of waiting for its end, at most."""
    for step in (STEP, 0.02, 0.001):
        discretisation = geometric_servers(rate, 4, step) - erlang_c(rate, 4)
        assert 0 < discretisation < step / 2


# ---------------------------------------------------------------- laws of any run


@st.composite
def loads(draw: st.DrawFn) -> list[RequestSpec]:
    """Up to ten requests close in time; some are given up, and the pool below is soon too small."""
    return [
        spec(
            f"r{i}",
            draw(st.integers(1, 20)),
            draw(st.integers(1, 15)),
            draw(st.integers(0, 50)) / 1000,
            abort_s=draw(st.none() | st.integers(0, 300).map(lambda ms: ms / 1000)),
        )
        for i in range(draw(st.integers(1, 10)))
    ]


def small_engine(requests: list[RequestSpec], token_ns: int) -> MemorySink:
    """Three seats, 11 usable blocks of 4 tokens, 16 tokens a step."""
    config = engine_config(usable_blocks=11, max_model_len=40, max_num_seqs=3, max_num_batched_tokens=16)
    return serve(requests, config, timer=ModelledStepTimer(PerToken(token_ns), TokenSource(100), "per token"))


def present_ns(log: MemorySink) -> int:
    """Requests in the engine, integrated over the steps: request-ns."""
    steps = log.steps
    return int(((steps.running + steps.waiting) * (ns_array(steps.end_s) - ns_array(steps.start_s))).sum())


def stays_ns(log: MemorySink) -> int:
    """The time of all requests in the engine together, in ns."""
    return int((ns_array(log.requests.finish_s) - ns_array(log.requests.queued_s)).sum())


@WHOLE_RUNS
@given(loads())
def test_little_s_law(requests: list[RequestSpec]) -> None:
    """Mean number present (from `steps`) = rate x mean stay (from `requests`), with preemptions and aborts.

    Both sides times the duration: an identity in whole ns. An engine 3 % slower has another mean number.
    """
    log = small_engine(requests, MS)
    assert present_ns(log) == stays_ns(log)
    if patient := [r for r in requests if r.abort_s is None]:
        slower, log = small_engine(patient, round(1.03 * MS)), small_engine(patient, MS)
        assert present_ns(slower) != stays_ns(log)


@WHOLE_RUNS
@given(loads())
def test_utilisation_law(requests: list[RequestSpec]) -> None:
    """Busy time = tokens computed x time of a token, whatever was preempted; 3 % show."""
    for token_ns in (MS, *(round(x * MS) for x in FASTER_AND_SLOWER)):
        log = small_engine([r for r in requests if r.abort_s is None], token_ns)
        lost = int(log.requests.recomputed_tokens.sum())
        known = int((log.requests.num_prompt_tokens + log.requests.num_output_tokens - 1).sum())
        assert int(ns_array(log.steps.device_s).sum()) == (known + lost) * token_ns


@WHOLE_RUNS
@given(loads())
def test_batch_bound(requests: list[RequestSpec]) -> None:
    """Nobody is faster than seats and budget allow: a step gives each of 3 seats a token, and computes 16 at most."""
    step_ns = 7 * MS
    config = engine_config(usable_blocks=11, max_model_len=40, max_num_seqs=3, max_num_batched_tokens=16)
    log = serve(requests, config, step_ns=step_ns)
    done = log.requests[log.requests.finish_reason == "length"]
    computed = int((done.num_prompt_tokens + done.num_output_tokens - 1).sum())
    busy_steps = int(ns_array(log.steps.device_s).sum()) // step_ns
    assert busy_steps >= max(done.num_output_tokens.sum() / 3, computed / 16)


@pytest.mark.parametrize(("clients", "together"), [(1, 1), (2, 2), (4, 4), (8, 4)])
def test_closed_loop_bounds_are_reached(clients: int, together: int) -> None:
    """X = min(clients, seats) / (step x outputs) with requests alike: the asymptotic bounds of a closed system."""
    requests = [spec(f"r{i}", 3, 5) for i in range(40)]
    for step_ns in (100, 97, 103):
        log = serve(requests, engine_config(max_num_seqs=4), step_ns=step_ns, max_concurrency=clients)
        duration_ns = round(log.requests.finish_s.max() * S)
        assert duration_ns * together == 40 * 5 * step_ns


@given(st.integers(1, 60), st.integers(1, 20), st.integers(8, 20))
@WHOLE_RUNS
def test_a_request_alone(prompt: int, outputs: int, budget: int) -> None:
    """First token after ceil(prompt / budget) steps, the others a step each; exact, and 3 % show."""
    config = engine_config(max_num_batched_tokens=budget)
    chunks = -(-prompt // budget)
    for step_ns in (100, 97, 103):
        (row,) = serve([spec("r", prompt, outputs)], config, step_ns=step_ns).requests.itertuples()
        ends_ns = [round(t * S) for t in (row.first_token_s, row.last_token_s)]
        assert ends_ns == [chunks * step_ns, (chunks + outputs - 1) * step_ns]
