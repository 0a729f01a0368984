"""Capacity of real engines in simulated time, against what is known of them without any search."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planned import constant_engine, evenly, lognormal, poisson, write_workload

from servetwin.sim.planning.capacity import Capacity, Effort, largest_load, nearest, slower
from servetwin.sim.planning.probing import Measured, Prober
from servetwin.sim.planning.slo import Slo, SloError
from servetwin.sim.planning.spec import RunSpec
from servetwin.sim.planning.steady import Verdict

SEATS, STEP_S, OUTPUT = 16, 0.05, 20
ANALYTIC = SEATS / (OUTPUT * STEP_S)
"""Every request holds a seat for OUTPUT steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plan")


def spec_of(folder: Path, name: str, arrivals: list[float], outputs: list[int] | int, **more: Any) -> RunSpec:
    workload = write_workload(folder / f"{name}.jsonl", arrivals, more.pop("prompt", 64), outputs)
    return RunSpec.from_fields(str(workload), **constant_engine(SEATS, STEP_S, **more))


@pytest.fixture(scope="module")
def even(folder: Path) -> Capacity:
    return largest_load(spec_of(folder, "even", evenly(1000), OUTPUT), Slo(), Effort())


@pytest.fixture(scope="module")
def random(folder: Path) -> Capacity:
    return largest_load(
        spec_of(folder, "random", poisson(1000), lognormal(1000, OUTPUT, 1.0)), Slo(ttft_ms=1500), Effort()
    )


# ------------------------------------------------------------ the answer


def test_it_finds_the_analytic_capacity(even: Capacity) -> None:
    """A constant step time: within 1 %, in under 15 simulations."""
    assert even.rate == pytest.approx(ANALYTIC, rel=0.01)
    assert even.knee == pytest.approx(ANALYTIC, rel=0.015)
    assert even.simulations < 15
    assert even.limit is not None and even.limit.converged and even.limit.is_monotone
    assert even.binding == "seats"


def test_it_finds_the_analytic_capacity_with_random_arrivals(folder: Path) -> None:
    found = largest_load(spec_of(folder, "poisson", poisson(1500), OUTPUT), Slo(), Effort())
    assert found.rate == pytest.approx(ANALYTIC, rel=0.01)
    assert found.simulations < 15


def test_it_finds_what_a_brute_force_scan_finds(random: Capacity) -> None:
    """Lognormal lengths and a limit of TTFT P99: within 3 %, in under 15 simulations."""
    assert random.rate is not None and random.simulations < 15
    scan = Prober(random.spec, random.slo, watch=False)
    rates = random.rate * np.exp(np.arange(-0.08, 0.081, 0.02))
    kept = [scan.at(float(rate)).values["ttft"] or inf for rate in rates]
    good = [value <= 1500 for value in kept]
    assert good[0] and not good[-1]
    brute = rates[good.index(False) - 1]
    assert random.rate == pytest.approx(brute, rel=0.03)


def test_beyond_the_answer_the_limit_is_missed(random: Capacity) -> None:
    assert random.at_limit is not None and random.beyond is not None
    at, beyond = random.at_limit.values["ttft"], random.beyond.values["ttft"]
    assert at is not None and beyond is not None and at <= 1500 < beyond
    assert random.beyond.rate <= 1.011 * random.at_limit.rate
    assert random.headroom is not None and random.headroom > 0.02


def test_the_curve_rises_with_the_load(random: Capacity) -> None:
    runs = [run for run in random.runs if run.rate != inf]
    values = [run.values["ttft"] or inf for run in runs]
    assert values == sorted(values)
    assert all(run.intervals["ttft"] is not None for run in runs if run.ended_early is None)


def test_no_load_is_good_where_a_step_is_longer_than_the_limit(folder: Path) -> None:
    found = largest_load(spec_of(folder, "slow", evenly(200), OUTPUT), Slo(tpot_ms=49.5), Effort())
    assert found.rate is None and found.headroom is None and found.binding == "compute"
    point = nearest(found)
    assert point["tpot_ms"] == pytest.approx(50) and point["rate"] < 0.1 * ANALYTIC


def test_fractions_of_a_millisecond_count(folder: Path) -> None:
    spec = spec_of(folder, "fractions", evenly(200), OUTPUT)
    assert largest_load(spec, Slo(tpot_ms=50.0), Effort(max_simulations=6)).rate is not None
    assert largest_load(spec, Slo(tpot_ms=49.9999), Effort(max_simulations=6)).rate is None


# ------------------------------------------------------------ what a saturated probe costs


def test_a_saturated_probe_costs_no_more_than_twice_a_stable_one(folder: Path) -> None:
    prober = Prober(spec_of(folder, "cost", poisson(2000), lognormal(2000, OUTPUT, 0.5)), Slo())
    stable, saturated = prober.at(0.8 * ANALYTIC), prober.at(3 * ANALYTIC)
    assert stable.verdict is Verdict.STABLE and stable.counts["completed"] == 2000
    assert saturated.verdict is Verdict.OVERLOADED and saturated.ended_early is not None
    assert saturated.simulated_steps < stable.simulated_steps
    assert saturated.counts["completed"] < 1000
    assert saturated.steady.saturated_rate == pytest.approx(ANALYTIC, rel=0.05)
    assert sum(saturated.counts.values()) == saturated.requests


# ------------------------------------------------------------ what binds


def bound(folder: Path, name: str, slo: Slo, **more: Any) -> Capacity:
    outputs = more.pop("outputs", OUTPUT)
    spec = spec_of(folder, name, poisson(400), outputs, **more)
    return largest_load(spec, slo, Effort(max_simulations=8))


def test_kv_binds_where_the_pool_is_small(folder: Path) -> None:
    """Blocks for 8 whole requests (or the prompts of 12), and seats for 16."""
    found = bound(folder, "kv", Slo(ttft_ms=500), num_gpu_blocks_override=8 * 6 + 1, max_model_len=640)
    assert found.binding == "kv"
    assert found.knee is not None and found.knee < 0.65 * ANALYTIC


def test_the_token_budget_binds_where_prompts_are_long(folder: Path) -> None:
    """2,000 tokens a prompt and 1,000 a step: a request for every two steps, far fewer than seats allow."""
    found = bound(folder, "budget", Slo(), prompt=2000, outputs=2, max_num_batched_tokens=1000)
    assert found.binding == "token budget"
    assert found.knee == pytest.approx(1 / (2 * STEP_S), rel=0.05)


def test_compute_binds_where_a_fuller_step_takes_as_much_longer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with steps whose time grows with their tokens: a larger budget would not help."""
    (folder / "per_token.py").write_text(PER_TOKEN)
    monkeypatch.syspath_prepend(str(folder))
    workload = write_workload(folder / "compute.jsonl", poisson(400), 2000, 2)
    fields = constant_engine(SEATS, 1, max_num_batched_tokens=1000)
    fields |= {"executor": "per_token:PerToken", "step_time_s": None}
    found = largest_load(RunSpec.from_fields(str(workload), **fields), Slo(), Effort(max_simulations=8))
    assert found.binding == "compute"
    assert "would not help" in found.reason


PER_TOKEN = '''
from servetwin.sim.contract import StepResult
from servetwin.sim.steptime.features import StepFeatures
from servetwin.sim.steptime.modelled import LinearStepModel, ModelledStepTimer
from servetwin.sim.token_source import TokenSource


class PerToken(ModelledStepTimer):
    """50 us for each token."""

    def __init__(self, options):
        model = LinearStepModel(1000, prefill_token_ns=50_000, decode_row_ns=50_000)
        super().__init__(model, TokenSource(32_000), "own")
'''


# ------------------------------------------------------------ how far an error of the step times goes


def test_slower_steps_are_the_same_runs_in_slow_motion(folder: Path) -> None:
    """The rate found for steps that take 1.25 times as long is the one of an engine whose steps do."""
    lengths = lognormal(600, OUTPUT, 0.7)
    spec = spec_of(folder, "slower", poisson(600), lengths)
    slo, effort = Slo(ttft_ms=1200), Effort()
    found = largest_load(spec, slo, effort)
    foretold = slower(found, 1.25, effort)
    truth = largest_load(spec.with_(step_time_s=STEP_S * 1.25), slo, effort).rate
    assert foretold == pytest.approx(truth, rel=0.025)
    assert found.rate is not None and foretold is not None and foretold < 0.85 * found.rate


# ------------------------------------------------------------ the workload


def test_only_the_times_of_the_workload_change(folder: Path) -> None:
    seen: list[Measured] = []
    prober = Prober(spec_of(folder, "times", evenly(50), OUTPUT), Slo(), on_run=seen.append)
    for rate in (0.5, 2.0):
        prober.at(rate)
    one, two = seen
    assert one.requests == two.requests == 50
    assert one.steady.arrival_rate == pytest.approx(0.5, rel=0.03)
    assert two.steady.arrival_rate == pytest.approx(2.0, rel=0.03)
    assert prober.at(0.5) is one and prober.simulations == 2
    assert not prober.is_drawn()


def test_a_preset_is_drawn_again_for_another_seed_and_has_enough_requests() -> None:
    spec = RunSpec.from_fields("chat", executor="constant", step_time_s=0.02, max_num_seqs=200)
    prober = Prober(spec, Slo())
    assert prober.is_drawn()
    found = largest_load(spec, Slo(), Effort(seeds=1, max_simulations=4))
    assert found.spec["num_prompts"] == 8 * 200
    assert any("1,600 requests are drawn" in note for note in found.notes)


def test_a_trace_that_is_too_short_is_told(folder: Path) -> None:
    found = largest_load(spec_of(folder, "short", evenly(40), OUTPUT), Slo(), Effort(max_simulations=4))
    assert any("40 requests are few" in note for note in found.notes)


# ------------------------------------------------------------ limits


def test_attainment_counts_requests_that_keep_all_limits(folder: Path) -> None:
    spec = spec_of(folder, "attain", poisson(600), lognormal(600, OUTPUT, 1.0))
    slo = Slo(ttft_ms=250, e2e_ms=4000, attainment=0.9)
    found = largest_load(spec, slo, Effort())
    assert found.at_limit is not None and found.beyond is not None
    assert found.at_limit.attained is not None and found.at_limit.attained >= 0.899
    assert found.beyond.attained is not None and found.beyond.attained < 0.9


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ttft_ms": 0.0}, "--ttft 0"),
        ({"tpot_ms": -1.0}, "--tpot -1"),
        ({"e2e_ms": inf}, "--e2e inf"),
        ({"percentile": 100.0}, "--percentile 100"),
        ({"ttft_ms": 1.0, "attainment": 1.5}, "--attainment 1.5"),
        ({"attainment": 0.9}, "needs a limit"),
    ],
)
def test_limits_that_cannot_be_meant_are_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(SloError, match=message):
        Slo(**given)  # type: ignore[arg-type]


def test_a_short_run_does_not_hide_that_its_queue_grows(folder: Path) -> None:
    """One seat, 0.1 s a request, and limits that 400 requests at a little more than 10/s would keep."""
    spec = spec_of(folder, "short", evenly(400), 1).with_(max_num_seqs=1, step_time_s=0.1)
    found = largest_load(spec, Slo(ttft_ms=300, percentile=90), Effort())
    assert found.knee == pytest.approx(10)
    assert found.rate is not None and 9.9 < found.rate < 10
    assert found.at_limit is not None and found.at_limit.rate == found.rate
    assert found.simulations < 15
