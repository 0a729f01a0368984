"""When a step occupies the host, the worker and the device: steady periods, lanes, and steps that take no time.

s, p, d, u are the times of schedule, prepare, device and update in ns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from engines import engine_config, serve, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from servetwin.sim.contract import SchedulerOutput, StepResult
from servetwin.sim.events import MemorySink
from servetwin.sim.host_model import LinearHostModel
from servetwin.sim.policy import FCFS, AdmissionState
from servetwin.sim.request import Request
from servetwin.sim.steptime.features import StepFeatures
from servetwin.sim.steptime.modelled import ConstantStepModel, ModelledStepTimer
from servetwin.sim.tables import ns_array
from servetwin.sim.timeline import Timeline
from servetwin.sim.token_source import TokenSource
from servetwin.workloads import RequestSpec

S = 1_000_000_000
WHOLE_RUNS = settings(max_examples=settings().max_examples // 5)
"""Every example serves a workload and reads its log."""


class FixedTimer:
    """Every step with tokens takes the same time on the worker and on the device."""

    def __init__(self, prepare_ns: int, device_ns: int) -> None:
        self._inner = ModelledStepTimer(ConstantStepModel(device_ns), TokenSource(1000), "fixed")
        self._prepare_ns = prepare_ns

    def run(self, plan: SchedulerOutput) -> StepResult:
        result = self._inner.run(plan)
        return replace(result, prepare_ns=self._prepare_ns) if plan.num_scheduled_tokens else result


@dataclass(frozen=True)
class Times:
    """What every step costs, in ns."""

    s: int
    p: int
    d: int
    u: int

    def slower(self) -> Times:
        """3 % more of each."""
        return Times(*(round(ns * 1.03) for ns in (self.s, self.p, self.d, self.u)))

    def log(self, requests: list[RequestSpec], **options: Any) -> MemorySink:
        """The log of a workload served at this cost."""
        host = LinearHostModel(schedule_base_ns=self.s, update_base_ns=self.u)
        return serve(requests, engine_config(**options), timer=FixedTimer(self.p, self.d), host=host)


def tokens_ns(log: MemorySink) -> NDArray[np.int64]:
    """When the steps that brought tokens ended."""
    return ns_array(log.steps.end_s[log.steps.rows > 0]).astype(np.int64)


# ---------------------------------------------------------------- steady periods

REGIMES = {
    "device": Times(101, 203, 5_009, 307),
    "worker": Times(101, 5_003, 211, 307),
    "host": Times(2_003, 103, 211, 3_001),
    "update alone": Times(0, 103, 211, 5_003),
    "chain": Times(2_003, 2_011, 2_017, 0),
    "chain of four": Times(1_009, 2_003, 2_011, 1_013),
    "device, nothing else": Times(0, 0, 1_009, 0),
    "a tie": Times(50, 100, 200, 50),
}
"""Which term is the largest."""


LAST = -2
"""The last two steps have no schedule call after them."""


def two_steps(t: Times) -> int:
    """The period of asynchronous scheduling over two steps, in ns (design.md 3)."""
    return max(2 * max(t.d, t.p, t.s + t.u), t.s + t.p + t.d + t.u)


@pytest.mark.parametrize("times", REGIMES.values(), ids=REGIMES)
def test_the_synchronous_period_is_the_sum(times: Times) -> None:
    """s + p + d + u, exactly, from the first step on; not that of an engine that is 3 % slower."""
    ends = tokens_ns(times.log([spec("r", 4, 12)]))
    period = times.s + times.p + times.d + times.u
    assert ends.tolist() == [period * (i + 1) for i in range(12)]
    assert tokens_ns(times.slower().log([spec("r", 4, 12)]))[-1] > ends[-1]


@pytest.mark.parametrize("times", REGIMES.values(), ids=REGIMES)
def test_the_asynchronous_period_over_two_steps(times: Times) -> None:
    """The larger of twice the busiest lane and of the whole chain of one step, exactly; not if all is 3 % slower."""
    periods = []
    for t in (times, times.slower()):
        ends = tokens_ns(t.log([spec("r", 4, 40)], async_scheduling=True))
        assert len(ends) == 40
        steady = ends[20:LAST]
        periods.append(set((steady[2:] - steady[:-2]).tolist()))
    assert periods[0] == {two_steps(times)}
    assert periods[1] == {two_steps(times.slower())} != periods[0]


def test_the_regimes_are_all_there() -> None:
    """Each of the four terms is the largest somewhere."""
    largest = set()
    for t in REGIMES.values():
        terms = {"d": 2 * t.d, "p": 2 * t.p, "s+u": 2 * (t.s + t.u), "chain": t.s + t.p + t.d + t.u}
        largest.add(max(terms, key=lambda name: terms[name]))
    assert largest == {"d", "p", "s+u", "chain"}


durations = st.integers(0, 50)


@WHOLE_RUNS
@given(durations, durations, st.integers(1, 50), durations)
def test_the_asynchronous_period_for_any_times(s: int, p: int, d: int, u: int) -> None:
    """The same formula, with ties and zeros."""
    ends = tokens_ns(Times(s, p, d, u).log([spec("r", 4, 200)], async_scheduling=True))
    steady = ends[:LAST]
    assert steady[-1] - steady[-3] == two_steps(Times(s, p, d, u))


def test_asynchronous_scheduling_hides_the_host() -> None:
    """With the device busy all the time the load is done sooner, token for token the same."""
    times = Times(2_000, 1_000, 10_000, 2_000)
    plain = times.log([spec("r", 4, 20)])
    overlapped = times.log([spec("r", 4, 20)], async_scheduling=True)
    assert tokens_ns(plain)[-1] == 20 * 15_000
    assert tokens_ns(overlapped)[-1] == 2_000 + 1_000 + 20 * 10_000 + 2_000
    assert plain.requests.num_output_tokens.tolist() == overlapped.requests.num_output_tokens.tolist()


# ---------------------------------------------------------------- lanes


def test_a_step_waits_for_its_worker_and_its_device() -> None:
    """Prepare begins when the worker is free, the device when the batch is ready and the device is free."""
    timeline = Timeline()
    first = timeline.submit(10, 3, prepare_ns=5, device_ns=100)
    second = timeline.submit(11, 1, prepare_ns=7, device_ns=10)
    third = timeline.submit(500, 1, prepare_ns=2, device_ns=10)
    assert (first.prepare_start_ns, first.device_start_ns, first.device_end_ns) == (10, 15, 115)
    assert (second.prepare_start_ns, second.device_start_ns, second.device_end_ns) == (15, 115, 125)
    assert (third.prepare_start_ns, third.device_start_ns, third.device_end_ns) == (500, 502, 512)


def columns_ns(log: MemorySink) -> dict[str, NDArray[np.int64]]:
    """The times of the steps with rows, in ns."""
    steps = log.steps[log.steps.rows > 0]
    names = (
        "start_s",
        "schedule_s",
        "prepare_start_s",
        "prepare_s",
        "device_start_s",
        "device_s",
        "host_s",
        "end_s",
    )
    return {name.removesuffix("_s"): ns_array(steps[name]).astype(np.int64) for name in names}


def lanes(ns: dict[str, NDArray[np.int64]]) -> dict[str, list[tuple[int, int]]]:
    """Lane -> its intervals of work in ns, in order of time."""
    update = ns["host"] - ns["schedule"]
    works = {
        "host": [(ns["start"], ns["schedule"]), (ns["end"] - update, update)],
        "worker": [(ns["prepare_start"], ns["prepare"])],
        "device": [(ns["device_start"], ns["device"])],
    }
    return {
        lane: sorted(
            (int(a), int(a + n)) for start, length in parts for a, n in zip(start, length, strict=True) if n
        )
        for lane, parts in works.items()
    }


@WHOLE_RUNS
@given(
    st.builds(Times, durations, durations, st.integers(1, 50), durations),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 300)), min_size=1, max_size=6),
    st.booleans(),
)
def test_no_lane_does_two_things_at_once(
    times: Times, loads: list[tuple[int, int, int]], async_scheduling: bool
) -> None:
    """Host, worker and device each work on one step at a time, in order, and a step goes through them in order."""
    requests = [spec(f"r{i}", prompt, output, at / S) for i, (prompt, output, at) in enumerate(loads)]
    log = times.log(requests, async_scheduling=async_scheduling, max_num_seqs=3, usable_blocks=6)
    ns = columns_ns(log)
    for lane, intervals in lanes(ns).items():
        assert all(end <= start for (_, end), (start, _) in pairwise(intervals)), lane
    assert (ns["start"] + ns["schedule"] <= ns["prepare_start"]).all()
    assert (ns["prepare_start"] + ns["prepare"] <= ns["device_start"]).all()
    assert (ns["device_start"] + ns["device"] <= ns["end"]).all()


# ---------------------------------------------------------------- steps that take no time


class NothingCosts:
    """A step model with all coefficients 0."""

    def durations_ns(self, features: StepFeatures) -> NDArray[np.int64]:
        return np.zeros(len(features), dtype=np.int64)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_62_a_step_of_no_duration_is_refused(async_scheduling: bool) -> None:
    """All coefficients 0: an error that names the model, instead of a clock that stands still."""
    timer = ModelledStepTimer(NothingCosts(), TokenSource(1000), "free lunch")
    with pytest.raises(ValueError, match="'free lunch' gives 0 ns for a step of 4 tokens"):
        serve([spec("r", 4, 2)], engine_config(async_scheduling=async_scheduling), timer=timer)
    with pytest.raises(ValueError, match="at least 1 ns, got 0 ns"):
        ConstantStepModel(0)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_62_the_clock_moves_with_every_step(async_scheduling: bool) -> None:
    """Steps with tokens end strictly one after the other; what takes no time is the flush after the last end.

    With asynchronous scheduling also the step that was begun while the last tokens were on their way.
    """
    requests = [spec(f"r{i}", 5, 4, i / S) for i in range(12)]
    config = engine_config(max_num_seqs=3, async_scheduling=async_scheduling)
    steps = serve(requests, config, step_ns=1).steps
    ends = ns_array(steps.end_s[steps.rows > 0])
    assert (np.diff(ends) > 0).all()
    flush = steps[steps.rows == 0]
    assert flush.index.tolist() == list(range(len(steps)))[-1 - async_scheduling :]
    assert (flush.device_s + flush.prepare_s + flush.host_s == 0).all()


class NobodyComesIn(FCFS):
    """Refuses everybody."""

    def may_admit(self, request: Request, state: AdmissionState) -> bool:
        return False


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_62_an_empty_batch_with_waiting_requests_is_no_step(async_scheduling: bool) -> None:
    """Nothing can be scheduled until the clients give up: the clock goes there at once."""
    requests = [spec("a", 4, 2, abort_s=5.0), spec("b", 4, 2, 1.0, abort_s=7.0)]
    log = serve(requests, engine_config(async_scheduling=async_scheduling), policy=NobodyComesIn())
    assert (log.steps.rows == 0).all()
    assert log.steps.start_s.tolist() == [5.0, 7.0]
    assert log.requests.finish_s.tolist() == [5.0, 7.0]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_62_an_idle_engine_schedules_no_step(async_scheduling: bool) -> None:
    """Not before the first arrival, and not between the end of one request and the arrival of the next."""
    requests = [spec("a", 4, 2, 50.0), spec("b", 4, 2, 90.0)]
    steps = serve(requests, engine_config(async_scheduling=async_scheduling)).steps
    assert steps.start_s[steps.rows > 0].tolist() == (
        [50, 50, 90, 90] if async_scheduling else [50, 51, 90, 91]
    )
    assert ((steps.start_s < 53) | (steps.start_s >= 90)).all()
    assert serve([], engine_config()).steps.empty


# ---------------------------------------------------------------- resets of the prefix cache


def resets(log: MemorySink) -> list[tuple[float, str]]:
    """(time, how it went) of each reset that was asked for."""
    events = log.events[log.events.kind == "cache_reset"]
    return list(zip(events.time_s, events.reason, strict=True))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_cache_reset_is_logged_as_done_or_refused(async_scheduling: bool) -> None:
    """Refused while a request holds blocks, done when nobody does; after it the same prompt misses."""
    shared: dict[str, Any] = {"prefix_ids": (1, 2), "prefix_block_tokens": 4}
    config = engine_config(caching=True, async_scheduling=async_scheduling)
    requests = [spec("a", 9, 3, **shared), spec("b", 9, 3, 10.0, **shared), spec("c", 9, 3, 20.0, **shared)]
    log = serve(requests, config, cache_resets_ns=[20 * S, 1 * S])
    assert resets(log) == [(1.0, "refused: blocks are in use"), (20.0, "done")]
    assert log.requests.set_index("request_id").cached_tokens.to_dict() == {"a": 0, "b": 8, "c": 0}
