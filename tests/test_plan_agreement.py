"""Two runs step by step: how long their plans agree, and the reason that the first difference is given."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from engines import engine_config, spec

from servetwin.sim.config import EngineConfig
from servetwin.sim.host_model import HostModel, LinearHostModel
from servetwin.sim.steptime.features import Ints, StepFeatures
from servetwin.sim.tables import Tables
from servetwin.sim.validation.plan_agreement import PlanAgreement, common_in_order, plan_agreement
from servetwin.sim.validation.replay import simulated
from servetwin.workloads import RequestSpec

MS = 1_000_000
REQUESTS = [spec("a", 20, 30), spec("b", 30, 40, 0.0105), spec("c", 25, 20, 0.0205)]
CONFIG = engine_config(usable_blocks=60, max_num_seqs=4, max_num_batched_tokens=64)

ASYNCHRONOUS = engine_config(
    usable_blocks=60, max_num_seqs=4, max_num_batched_tokens=64, async_scheduling=True
)


class PerRow:
    """A millisecond a step, and more for each row."""

    def __init__(self, per_row_ns: int) -> None:
        self._per_row_ns = per_row_ns

    def durations_ns(self, features: StepFeatures) -> Ints:
        return np.where(features.new_tokens > 0, MS + self._per_row_ns * features.rows, 0)


def run(
    requests: list[RequestSpec] = REQUESTS,
    per_row_ns: int = 0,
    config: EngineConfig = CONFIG,
    host: HostModel | None = None,
) -> Tables:
    return simulated(requests, config, PerRow(per_row_ns), host).log


def agreement(first: Tables, second: Tables) -> PlanAgreement:
    found = plan_agreement(first, second)
    assert found is not None
    return found


def parting(first: Tables, second: Tables) -> tuple[str, str]:
    """(kind, words)"""
    found = agreement(first, second).parting
    assert found is not None
    return found.kind, found.words


class Changed(Tables):
    """A log with other tables in the place of some of its own."""

    def __init__(self, log: Tables, **frames: pd.DataFrame) -> None:
        self._log, self._frames = log, frames

    def parts(self, table: str) -> Any:
        return self._log.parts(table)

    def frame(self, table: str) -> pd.DataFrame:
        return self._frames[table] if table in self._frames else self._log.frame(table)


def test_a_run_agrees_with_itself() -> None:
    found = agreement(run(), run())
    assert found.parting is None
    assert found.agreeing == found.steps[0] == found.steps[1] > 40
    assert found.in_order_percent == 100
    assert found.drift is not None
    assert (found.drift.last_ms, found.drift.largest_ms) == (0, 0)


def test_plans_agree_until_a_request_comes_on_the_other_side_of_a_schedule_call() -> None:
    """Rows take 0.05 ms more in the simulation: after 10 steps of 1 ms its 11th call comes at 10.5 ms, not at 10."""
    config = engine_config(
        usable_blocks=60, max_num_seqs=4, max_num_batched_tokens=64, async_scheduling=False
    )
    requests = [spec("a", 20, 30), spec("b", 30, 40, 0.0103)]
    measured, simulated = run(requests, config=config), run(requests, 50_000, config)
    found = agreement(measured, simulated)
    assert found.agreeing == 10
    kind, words = parting(measured, simulated)
    assert kind == "arrival"
    assert words == (
        "request 'b' came 0.2 ms before the step was scheduled in the simulation, 0.3 ms after it in the measured run"
    )
    assert found.drift is not None
    # The last of the ten began after nine others.
    assert found.drift.last_ms == pytest.approx(9 * 0.05)
    assert found.drift.busy_s == pytest.approx(0.010)
    assert found.drift.percent == pytest.approx(4.5)
    assert found.parting is not None
    assert found.parting.first == {
        "start_s": 0.010, "rows": 1, "prefill_tokens": 0, "decode_tokens": 1, "new_requests": 0
    }  # fmt: skip
    assert found.parting.second is not None
    assert found.parting.second["new_requests"] == 1


def test_a_request_on_its_way_was_sent_before_and_queued_after() -> None:
    """As on the wall clock, where it takes a while to reach the engine."""
    measured, simulated = run(), run()
    requests = measured.requests.copy()
    scheduled = measured.requests.set_index("request_id").first_scheduled_s["c"]
    steps = measured.steps
    before = steps.start_s[steps.start_s < scheduled].max()
    requests.loc[requests.request_id == "c", "arrival_s"] = before - 1e-4
    requests.loc[requests.request_id == "c", "queued_s"] = before + 2e-4
    early = run([*REQUESTS[:2], replace(REQUESTS[2], arrival_s=before - 1e-4)])
    kind, words = parting(Changed(measured, requests=requests), early)
    assert kind == "arrival"
    assert "in the measured run it was sent 0.1 ms before and reached the engine 0.2 ms after" in words
    assert agreement(measured, simulated).parting is None


def test_a_request_that_only_one_run_has() -> None:
    gone = [*REQUESTS, spec("gone", 12, 30, 0.0205, abort_s=0.025)]
    assert parting(run(gone), run()) == ("request", "request 'gone' is in the measured run only (aborted)")
    assert (
        parting(run(), run([*REQUESTS, spec("d", 12, 3, 0.0205)]))[1]
        == "request 'd' is in the simulation only"
    )


def test_a_seat_that_only_one_engine_has() -> None:
    kind, words = parting(
        run(), run(config=engine_config(usable_blocks=60, max_num_seqs=2, max_num_batched_tokens=64))
    )
    assert kind == "wait"
    assert (
        words == "request 'c' was taken in by the measured run; in the simulation it waited: no seat was free"
    )


def test_blocks_that_only_one_pool_has() -> None:
    """The reason is the preemption, and that the pools differ is said."""
    small = engine_config(usable_blocks=30, max_num_seqs=4, max_num_batched_tokens=64)
    kind, words = parting(run(), run(config=small))
    assert kind == "preemption"
    assert "was preempted in the simulation only; blocks in use then: " in words
    assert "; the pools differ: 60 blocks in the measured run, 30 in the simulation" in words


def test_prompts_that_only_one_cache_found() -> None:
    cached = engine_config(usable_blocks=60, max_num_seqs=4, max_num_batched_tokens=64, caching=True)
    alike = [replace(r, prefix_ids=(1, 2, 3, 4), prefix_block_tokens=4) for r in REQUESTS]
    kind, words = parting(run(alike, config=cached), run(config=cached))
    assert kind == "cache"
    assert (
        words == "request 'b' found 16 tokens of its prompt cached in the measured run, 0 in the simulation"
    )


def test_a_stop_is_known_a_step_later_than_an_end_by_length() -> None:
    """Asynchronous scheduling has the row in flight once more; the simulation must not know the end beforehand."""
    answer = (*[5] * 11, 7)
    stopped = [replace(REQUESTS[0], output_token_ids=answer, stop_token_ids=(7,)), REQUESTS[1]]
    by_length = [replace(REQUESTS[0], output_tokens=12), REQUESTS[1]]
    kind, words = parting(run(stopped, config=ASYNCHRONOUS), run(by_length, config=ASYNCHRONOUS))
    assert kind == "end"
    assert (
        "request 'a' ended with step 11 (stop) in the measured run, with step 11 (length) in the simulation"
        in words
    )
    assert "known a step later" in words


def test_an_end_that_comes_earlier() -> None:
    shorter = [replace(REQUESTS[0], output_tokens=12), *REQUESTS[1:]]
    assert parting(run(), run(shorter))[0] == "end"


def test_what_the_logs_do_not_explain_is_told_in_figures() -> None:
    """A budget of fewer tokens cuts the first prompt."""
    small = engine_config(usable_blocks=60, max_num_seqs=4, max_num_batched_tokens=16)
    kind, words = parting(run(), run(config=small))
    assert kind == "other"
    assert words.startswith("20 against 16 prompt tokens of the same requests")


def test_steps_without_tokens_do_not_count() -> None:
    """After the last token a step tells the worker of the end; whether it comes is no matter."""
    log = run()
    empty = log.steps[log.steps["rows"] == 0]
    assert len(empty) > 0
    without = Changed(log, steps=log.steps[log.steps["rows"] > 0].reset_index(drop=True))
    assert agreement(log, without).parting is None


def test_after_parting_like_steps_are_found_again() -> None:
    """One request more in the middle: the plans part there, and most steps have a like one all the same."""
    found = agreement(run(), run([*REQUESTS, spec("d", 12, 2, 0.0155)]))
    assert found.agreeing < 20
    assert 90 < found.in_order_percent < 100


def test_runs_of_before_are_not_compared() -> None:
    log = run()
    assert plan_agreement(Changed(log, steps=log.steps.assign(new_requests=np.nan)), log) is None


def test_drift_counts_busy_time_once_though_steps_overlap() -> None:
    """Asynchronous: a step is scheduled while the one before runs; between two requests the engine stands still."""
    apart = [spec("a", 20, 10), spec("b", 20, 10, 1.0)]
    late = LinearHostModel(update_base_ns=100_000)
    found = agreement(run(apart, config=ASYNCHRONOUS), run(apart, config=ASYNCHRONOUS, host=late))
    assert found.drift is not None
    assert found.drift.busy_s == pytest.approx(0.020)


def longest_common(a: list[int], b: list[int]) -> int:
    """By the textbook table."""
    above = [0] * (len(b) + 1)
    for x in a:
        row = [0]
        for place, y in enumerate(b):
            row.append(above[place] + 1 if x == y else max(above[place + 1], row[-1]))
        above = row
    return above[-1]


@pytest.mark.parametrize("seed", range(6))
def test_the_longest_common_subsequence_is_exact(seed: int) -> None:
    random = np.random.default_rng(seed)
    a, b = (random.integers(0, 2 + 3 * seed, int(random.integers(1, 150))) for _ in range(2))
    found = common_in_order(a, b)
    assert found == longest_common(a.tolist(), b.tolist())
    matcher = difflib.SequenceMatcher(None, a.tolist(), b.tolist(), autojunk=False)
    assert found >= sum(block.size for block in matcher.get_matching_blocks())


def test_nothing_in_common() -> None:
    nothing = np.array([], dtype=np.int64)
    assert common_in_order(nothing, nothing) == common_in_order(np.array([1]), np.array([2])) == 0
