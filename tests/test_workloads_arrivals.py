"""Arrival processes against their definitions: rates, variation, dispersion, distributions, seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from servetwin.workloads import (
    MMPP,
    AllAtOnce,
    BenchServe,
    Constant,
    Diurnal,
    Gamma,
    Hyperexponential,
    NegativeBinomialCounts,
    OnOff,
    Poisson,
    RampUp,
    RateSteps,
    Spike,
    Spikes,
    Superposition,
    Weibull,
    WorkloadError,
)
from servetwin.workloads.streams import stream

DRAWS = 100_000
RATE = 4.0
"""Mean rate of every process of the lists below, in requests per second."""
ALPHA = 0.01
"""A correct process fails a test of fit at a given seed with this probability."""

RENEWALS = [
    Poisson(rate_per_s=RATE),
    Gamma(rate_per_s=RATE, cv=0.3),
    Gamma(rate_per_s=RATE, cv=2.5),
    Weibull.from_cv(rate_per_s=RATE, cv=0.3),
    Weibull.from_cv(rate_per_s=RATE, cv=2.5),
    Hyperexponential(rate_per_s=RATE, cv=3.0),
]
MODULATED = [
    NegativeBinomialCounts(rate_per_s=RATE, index_of_dispersion=6.0, bin_s=2.0),
    OnOff(rate_per_s=RATE, on_s=2.0, off_s=6.0),
    MMPP.two_state(rates_per_s=(1.0, 10.0), leaving_per_s=(0.1, 0.2)),
    MMPP(rates_per_s=(0.0, 2.0, 10.0), switching_per_s=((0, 1, 1), (2, 0, 0), (1, 1, 0))),
    Superposition(parts=(Poisson(rate_per_s=1.0), Gamma(rate_per_s=3.0, cv=2.0))),
]
SCHEDULED = [
    Diurnal(rate_per_s=RATE, amplitude=0.8, period_s=600.0),
    Spikes(base_rate_per_s=2.0, spikes=(Spike(start_s=10.0, duration_s=5.0, rate_per_s=50.0),)),
    RateSteps(starts_s=(0, 5, 9), rates_per_s=(3, 0, 8)),
]
VLLM = [
    BenchServe(rate_per_s=RATE, burstiness=0.5),
    RampUp(strategy="linear", start_rate_per_s=1.0, end_rate_per_s=7.0, burstiness=2.0),
]
RANDOM = RENEWALS + MODULATED + SCHEDULED + VLLM


def gaps_of(times_s):
    return np.diff(times_s, prepend=0.0)


def counts_of(times_s, bin_s):
    """Requests in each whole bin."""
    return np.bincount((times_s / bin_s).astype(int))[:-1]


def dispersion(counts):
    return counts.var() / counts.mean()


def fits(sample, distribution):
    return stats.kstest(sample, distribution).pvalue > ALPHA


# ---------------------------------------------------------------- what holds for all


@pytest.mark.parametrize("process", [*RANDOM, Constant(rate_per_s=RATE), AllAtOnce()], ids=repr)
def test_times_are_ascending_float64_seconds_and_repeatable(process):
    times = process.times_s(5000)
    assert times.dtype == np.float64 and times.shape == (5000,)
    assert (np.diff(times) >= 0).all() and times[0] >= 0 and np.isfinite(times).all()
    assert (times == process.times_s(5000)).all()
    assert process.times_s(0).shape == (0,)


@pytest.mark.parametrize("process", RENEWALS + MODULATED + SCHEDULED, ids=repr)
def test_a_longer_draw_begins_with_the_shorter_one(process):
    longer = process.times_s(20_000)
    for n in (1, 100, 7000):
        assert (longer[:n] == process.times_s(n)).all()


@pytest.mark.parametrize("process", VLLM, ids=repr)
def test_what_vllm_does_by_the_number_of_requests_changes_with_it(process):
    assert (process.times_s(500)[1:100] != process.times_s(100)[1:]).all()


@pytest.mark.parametrize("process", RENEWALS + MODULATED + SCHEDULED[:1], ids=repr)
def test_the_mean_rate_is_that_asked_for(process):
    times = process.times_s(4 * DRAWS)
    assert len(times) / times[-1] == pytest.approx(getattr(process, "rate_per_s", RATE), rel=0.03)


# ---------------------------------------------------------------- which seed rules (reports.md 65)


@pytest.mark.parametrize("process", RANDOM, ids=repr)
def test_65_three_seeds_give_three_workloads_and_one_seed_gives_one(process):
    draws = [process.times_s(50, stream(seed, "arrivals")).tobytes() for seed in (1, 2, 3, 1)]
    assert len(set(draws)) == 3 and draws[0] == draws[3]


def test_65_client_streams_of_one_root_seed_do_not_send_in_step():
    """Neither two named streams nor two equal parts of a superposition draw alike."""
    client = Poisson(rate_per_s=1.0)
    assert (client.times_s(50, stream(7, "client-0")) != client.times_s(50, stream(7, "client-1"))).all()
    assert (np.diff(Superposition(parts=(client, client)).times_s(50)) > 0).all()


def test_65_clients_told_to_send_in_step_are_refused():
    client = Poisson(rate_per_s=1.0, seed=3)
    with pytest.raises(WorkloadError, match="2 have the seed 3 and would draw alike"):
        Superposition(parts=(client, client))


def test_every_seed_gives_other_arrivals():
    draws = [tuple(Poisson(rate_per_s=1.0, seed=seed).times_s(5)) for seed in (0, 1, 2, 3)]
    assert len(set(draws)) == 4
    assert tuple(Poisson(rate_per_s=1.0).times_s(5)) == draws[0]


def test_the_own_seed_of_a_process_wins_over_the_generator_it_is_handed():
    own = Poisson(rate_per_s=1.0, seed=3)
    assert (own.times_s(5, np.random.default_rng(1)) == own.times_s(5)).all()


# ---------------------------------------------------------------- independent gaps


@pytest.mark.parametrize("process", RENEWALS, ids=repr)
def test_mean_rate_and_gap_cv_are_those_asked_for(process):
    gaps = gaps_of(process.times_s(4 * DRAWS))
    assert 1 / gaps.mean() == pytest.approx(RATE, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(getattr(process, "cv", 1.0), rel=0.03)


@pytest.mark.parametrize(
    ("process", "distribution"),
    [
        (Poisson(rate_per_s=RATE), stats.expon(scale=1 / RATE)),
        (Gamma(rate_per_s=RATE, cv=1.5), stats.gamma(1 / 1.5**2, scale=1.5**2 / RATE)),
        (
            Weibull(rate_per_s=RATE, shape=0.6),
            stats.weibull_min(0.6, scale=1 / (RATE * math.gamma(1 + 1 / 0.6))),
        ),
        (BenchServe(rate_per_s=RATE, burstiness=0.5), stats.gamma(0.5, scale=2 / RATE)),
    ],
    ids=["Poisson", "Gamma", "Weibull", "BenchServe"],
)
def test_gaps_have_their_distribution(process, distribution):
    assert fits(gaps_of(process.times_s(DRAWS)), distribution.cdf)


def test_hyperexponential_gaps_have_balanced_means():
    """Half of the time passes in gaps of either kind: the mixture of two exponentials that the docstring states."""
    p = (1 + math.sqrt((3.0**2 - 1) / (3.0**2 + 1))) / 2
    short, long = stats.expon(scale=1 / (2 * p * RATE)), stats.expon(scale=1 / (2 * (1 - p) * RATE))
    gaps = gaps_of(Hyperexponential(rate_per_s=RATE, cv=3.0).times_s(DRAWS))
    assert fits(gaps, lambda x: p * short.cdf(x) + (1 - p) * long.cdf(x))


@pytest.mark.parametrize("cv", [0.001, 0.5, 1.0, 3.0, 100.0])
def test_weibull_from_cv_has_that_cv(cv):
    assert Weibull.from_cv(rate_per_s=1.0, cv=cv).cv == pytest.approx(cv)


def test_weibull_of_shape_1_is_poisson():
    assert Weibull(rate_per_s=1.0, shape=1.0).cv == pytest.approx(1.0)


def test_the_first_request_waits_for_its_gap_too():
    assert Constant(rate_per_s=4.0).times_s(3).tolist() == [0.25, 0.5, 0.75]


def test_all_at_once_is_time_zero():
    assert AllAtOnce().times_s(3).tolist() == [0.0, 0.0, 0.0]


def test_vllm_burstiness_is_the_gamma_shape():
    assert Gamma.from_burstiness(rate_per_s=2.0, burstiness=4.0, seed=5) == Gamma(
        rate_per_s=2.0, cv=0.5, seed=5
    )


# ---------------------------------------------------------------- vllm bench serve


@pytest.mark.parametrize("burstiness", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("n", [1, 2, 1000])
def test_bench_serve_ends_exactly_at_n_over_rate_and_only_stretches_gamma_gaps(burstiness, n):
    rescaled = BenchServe(rate_per_s=RATE, burstiness=burstiness, seed=5).times_s(n)
    plain = Gamma.from_burstiness(rate_per_s=RATE, burstiness=burstiness, seed=5).times_s(n)
    assert rescaled[-1] == pytest.approx(n / RATE, rel=1e-12)
    assert rescaled == pytest.approx(plain * (n / RATE / plain[-1]), rel=1e-9)


def test_bench_serve_with_a_high_burstiness_has_the_cv_of_its_shape():
    gaps = gaps_of(BenchServe(rate_per_s=RATE, burstiness=16.0).times_s(DRAWS))
    assert gaps.std() / gaps.mean() == pytest.approx(0.25, rel=0.02)


def test_bench_serve_is_constant_at_infinite_burstiness_and_at_once_at_infinite_rate():
    assert BenchServe(rate_per_s=4.0, burstiness=math.inf).times_s(3).tolist() == [0.25, 0.5, 0.75]
    assert BenchServe(rate_per_s=math.inf, burstiness=0.5).times_s(3).tolist() == [0.0, 0.0, 0.0]


def test_ramp_up_rates_follow_the_index_of_the_request():
    """Five requests from 2 to 10 per second, as `_get_current_request_rate` has them."""
    linear = RampUp(strategy="linear", start_rate_per_s=2.0, end_rate_per_s=10.0)
    assert linear.rates_per_s(5).tolist() == [2.0, 4.0, 6.0, 8.0, 10.0]
    exponential = RampUp(strategy="exponential", start_rate_per_s=2.0, end_rate_per_s=32.0)
    assert exponential.rates_per_s(5) == pytest.approx([2.0, 4.0, 8.0, 16.0, 32.0])
    assert linear.rates_per_s(1).tolist() == [2.0]


def test_ramp_up_with_constant_gaps_adds_up_one_over_rate_and_is_not_rescaled():
    ramp = RampUp(strategy="linear", start_rate_per_s=1.0, end_rate_per_s=4.0, burstiness=math.inf)
    assert ramp.times_s(4) == pytest.approx(np.cumsum([1, 1 / 2, 1 / 3, 1 / 4]))


def test_ramp_up_gaps_times_their_rates_are_gamma_of_mean_1():
    ramp = RampUp(strategy="exponential", start_rate_per_s=1.0, end_rate_per_s=50.0, burstiness=2.0)
    unit_gaps = gaps_of(ramp.times_s(DRAWS)) * ramp.rates_per_s(DRAWS)
    assert fits(unit_gaps, stats.gamma(2.0, scale=0.5).cdf)


# ---------------------------------------------------------------- modulated


@pytest.mark.parametrize(("d", "bin_s"), [(1.5, 1.0), (6.0, 2.0), (40.0, 5.0)])
def test_negative_binomial_counts_have_their_index_of_dispersion_and_distribution(d, bin_s):
    counts = counts_of(
        NegativeBinomialCounts(rate_per_s=RATE, index_of_dispersion=d, bin_s=bin_s).times_s(10 * DRAWS), bin_s
    )
    assert counts.mean() == pytest.approx(RATE * bin_s, rel=0.03)
    assert dispersion(counts) == pytest.approx(d, rel=0.03)
    expected = stats.nbinom(RATE * bin_s / (d - 1), 1 / d)
    assert (counts == 0).mean() == pytest.approx(expected.pmf(0), abs=0.01)


def test_requests_of_a_bin_are_spread_uniformly_over_it():
    process = NegativeBinomialCounts(rate_per_s=RATE, index_of_dispersion=6.0, bin_s=2.0)
    assert fits(process.times_s(DRAWS) % 2.0, stats.uniform(0, 2.0).cdf)


def mmpp2_dispersion(rates, leaving, window_s):
    """Index of dispersion of MMPP(2) counts in a window: 1 + 2 (r1-r2)^2 p1 p2 / (mean s) (1 - (1-e^-st)/(st))."""
    s = sum(leaving)
    p1, p2 = leaving[1] / s, leaving[0] / s
    mean = p1 * rates[0] + p2 * rates[1]
    decay = 1 - (1 - math.exp(-s * window_s)) / (s * window_s)
    return 1 + 2 * (rates[0] - rates[1]) ** 2 * p1 * p2 / (mean * s) * decay


@pytest.mark.parametrize("window_s", [0.5, 5.0, 50.0])
def test_mmpp_counts_have_the_dispersion_of_the_closed_form(window_s):
    rates, leaving = (1.0, 10.0), (0.1, 0.2)
    times = MMPP.two_state(rates_per_s=rates, leaving_per_s=leaving).times_s(10 * DRAWS)
    expected = mmpp2_dispersion(rates, leaving, window_s)
    assert dispersion(counts_of(times, window_s)) == pytest.approx(expected, rel=0.04)


def test_mmpp_mean_is_weighted_by_the_time_in_each_state():
    """(q21 r1 + q12 r2)/(q12 + q21) for two states; three states balanced by hand."""
    assert MMPP.two_state(rates_per_s=(1.0, 10.0), leaving_per_s=(0.1, 0.2)).rate_per_s == pytest.approx(
        (0.2 * 1 + 0.1 * 10) / 0.3
    )
    cycle = MMPP(rates_per_s=(3.0, 6.0, 0.0), switching_per_s=((0, 1, 0), (0, 0, 2), (4, 0, 0)))
    assert cycle.state_shares == pytest.approx([4 / 7, 2 / 7, 1 / 7])


def test_mmpp_starts_in_its_long_run_distribution():
    """The first second of many draws has the mean rate, although a stay lasts 100 s."""
    slow = MMPP.two_state(rates_per_s=(0.0, 4.0), leaving_per_s=(0.01, 0.01))
    first = [np.searchsorted(slow.times_s(20, stream(seed, "arrivals")), 1.0) for seed in range(500)]
    assert np.mean(first) == pytest.approx(2.0, abs=0.3)


def test_on_off_is_silent_for_the_exponential_time_it_is_off():
    """With 400 requests/s while on, gaps above 50 ms are silences: memoryless, of mean 6 s."""
    gaps = gaps_of(OnOff(rate_per_s=100.0, on_s=2.0, off_s=6.0).times_s(10 * DRAWS))
    silences = gaps[gaps > 0.05]
    assert len(silences) == pytest.approx(10 * DRAWS / 800, rel=0.1)
    assert fits(silences - 0.05, stats.expon(scale=6.0).cdf)


def test_on_off_gaps_vary_as_those_of_an_interrupted_poisson_process():
    """cv^2 = 1 + 2 r q_on / (q_on + q_off)^2 (r: rate while on, q: ends of on and of off per second)."""
    process = OnOff(rate_per_s=RATE, on_s=2.0, off_s=6.0)
    q_on, q_off = 1 / 2.0, 1 / 6.0
    gaps = gaps_of(process.times_s(4 * DRAWS))
    expected = math.sqrt(1 + 2 * process.on_rate_per_s * q_on / (q_on + q_off) ** 2)
    assert gaps.std() / gaps.mean() == pytest.approx(expected, rel=0.03)


# ---------------------------------------------------------------- schedules


def test_diurnal_arrivals_become_a_unit_poisson_process_in_operational_time():
    """The integral of the rate up to each arrival has exponential gaps of mean 1."""
    day = Diurnal(rate_per_s=RATE, amplitude=0.8, peak_hour=6.0, period_s=600.0)
    t = day.times_s(DRAWS)
    turns = 2 * math.pi * (t / 600.0 - 6 / 24)
    phase = 600.0 / (2 * math.pi) * (np.sin(turns) + math.sin(2 * math.pi * 6 / 24))
    assert fits(gaps_of(RATE * (t + 0.8 * phase)), stats.expon().cdf)


def test_diurnal_peak_stands_at_its_hour_and_is_that_many_times_the_trough():
    day = Diurnal.from_peak_to_trough(rate_per_s=2.0, peak_to_trough=9.0, peak_hour=15.0)
    assert day.amplitude == pytest.approx(0.8)
    hours = np.arange(24) * 3600.0
    rates = day.rates_at(hours)
    assert (rates.argmax(), rates.argmin()) == (15, 3)
    assert (rates[15], rates[3], rates.mean()) == pytest.approx((3.6, 0.4, 2.0))


def test_a_spike_has_its_own_rate_and_an_outage_is_silent():
    schedule = Spikes(
        base_rate_per_s=5.0,
        spikes=(
            Spike(start_s=200.0, duration_s=50.0, rate_per_s=0),
            Spike(start_s=100.0, duration_s=20.0, rate_per_s=500.0),
        ),
    )
    counts, _ = np.histogram(schedule.times_s(20_000), bins=[0, 100, 120, 200, 250, 1000])
    expected = np.array([500, 10_000, 400, 0, 3750])
    assert (abs(counts - expected) <= 4 * np.sqrt(expected)).all()


def test_spikes_that_touch_follow_one_another():
    touching = Spikes(
        base_rate_per_s=1.0,
        spikes=(
            Spike(start_s=0.0, duration_s=5.0, rate_per_s=2.0),
            Spike(start_s=5.0, duration_s=5.0, rate_per_s=3.0),
        ),
    )
    assert touching.steps() == RateSteps(starts_s=(0.0, 5.0, 10.0), rates_per_s=(2.0, 3.0, 1.0))


def test_rate_steps_become_a_unit_poisson_process_in_operational_time():
    steps = RateSteps(starts_s=(0, 1000, 3000), rates_per_s=(10, 0, 40))
    t = steps.times_s(DRAWS)
    assert not ((t > 1000) & (t < 3000)).any()
    assert fits(
        gaps_of(np.interp(t, [0, 1000, 3000, 10_000], [0, 10_000, 10_000, 290_000])), stats.expon().cdf
    )


# ---------------------------------------------------------------- superposition


def test_poisson_processes_add_up_to_a_poisson_process():
    both = Superposition(parts=(Poisson(rate_per_s=1.0), Poisson(rate_per_s=3.0)))
    assert fits(gaps_of(both.times_s(DRAWS)), stats.expon(scale=1 / RATE).cdf)


def test_a_superposition_holds_the_requests_of_its_parts():
    own = Poisson(rate_per_s=1.0, seed=3)
    merged = Superposition(parts=(own, Constant(rate_per_s=2.0))).times_s(300)
    expected = np.concatenate([own.times_s(300), Constant(rate_per_s=2.0).times_s(300)])
    assert (merged == np.sort(expected)[:300]).all()


# ---------------------------------------------------------------- wrong parameters


def spike(start_s):
    return Spike(start_s=start_s, duration_s=10.0, rate_per_s=5.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Poisson(rate_per_s=0), "rate_per_s 0: must be a finite number above 0"),
        (lambda: Constant(rate_per_s=float("inf")), "AllAtOnce"),
        (lambda: Gamma(rate_per_s=float("nan"), cv=1), "rate_per_s nan"),
        (lambda: Poisson(rate_per_s=True), "rate_per_s True"),
        (lambda: Poisson(rate_per_s=1, seed=-1), "seed -1"),
        (lambda: Gamma(rate_per_s=1, cv=0), "cv 0: must be between 0.001 and 100"),
        (lambda: Gamma(rate_per_s=1, cv="2"), "cv '2': must be between"),
        (lambda: Hyperexponential(rate_per_s=1, cv=0.9), "cv 0.9: must be between 1 and 100"),
        (lambda: Gamma.from_burstiness(rate_per_s=1, burstiness=float("inf")), "burstiness inf"),
        (lambda: Weibull(rate_per_s=1, shape=0), "shape 0: must be between 0.1 and 2000"),
        (lambda: Weibull.from_cv(rate_per_s=1, cv=float("nan")), "cv nan: must be between 0.001 and 100"),
        (lambda: BenchServe(rate_per_s=0), "rate_per_s 0: must be a number above 0, or infinite"),
        (lambda: BenchServe(rate_per_s=1, burstiness=-1), "burstiness -1: must be a number above 0"),
        (
            lambda: RampUp(strategy="cubic", start_rate_per_s=1, end_rate_per_s=2),
            "strategy 'cubic': must be linear or exponential",
        ),
        (
            lambda: RampUp(strategy="linear", start_rate_per_s=0, end_rate_per_s=2),
            "start_rate_per_s 0: must be a finite number above 0",
        ),
        (
            lambda: RampUp(strategy="linear", start_rate_per_s=3, end_rate_per_s=2),
            "end_rate_per_s 2: must be the rate at the start, 3, or more",
        ),
        (lambda: Diurnal(rate_per_s=1, amplitude=1.1), "amplitude 1.1: must be between 0 and 1"),
        (
            lambda: Diurnal(rate_per_s=1, amplitude=0.5, peak_hour=25),
            "peak_hour 25: must be between 0 and 24",
        ),
        (lambda: Diurnal(rate_per_s=1, amplitude=0.5, period_s=0), "period_s 0"),
        (lambda: Diurnal.from_peak_to_trough(rate_per_s=1, peak_to_trough=0.5), "peak_to_trough 0.5"),
        (lambda: Spike(start_s=-1, duration_s=1, rate_per_s=1), "start_s -1: must be between 0 and"),
        (lambda: Spikes(base_rate_per_s=0, spikes=(spike(1),)), "base_rate_per_s 0"),
        (lambda: Spikes(base_rate_per_s=1, spikes=()), "spikes .*: must hold at least one"),
        (lambda: Spikes(base_rate_per_s=1, spikes=(spike(9), spike(1))), "must not overlap"),
        (lambda: RateSteps(starts_s=(1,), rates_per_s=(1,)), r"starts_s \(1,\): must begin with 0"),
        (lambda: RateSteps(starts_s=(0, 1), rates_per_s=(1,)), r"must be as many as starts_s \(2\)"),
        (lambda: RateSteps(starts_s=(0,), rates_per_s=(0,)), r"rates_per_s\[0\] 0: .*it holds for ever"),
        (
            lambda: MMPP.two_state(rates_per_s=(0, 0), leaving_per_s=(1, 1)),
            r"rates_per_s \(0, 0\): must have one above 0",
        ),
        (
            lambda: MMPP.two_state(rates_per_s=(1, 2), leaving_per_s=(1, 0)),
            "switching_per_s .*: must lead from every state to all",
        ),
        (
            lambda: MMPP.two_state(rates_per_s=(1, 2), leaving_per_s=(1e6, 1e6)),
            "must be at most 100 changes per request",
        ),
        (lambda: MMPP(rates_per_s=(1, 2), switching_per_s=((0, 1),)), "must be 2 rows of 2"),
        (lambda: MMPP(rates_per_s=(1, -2), switching_per_s=((0, 1), (1, 0))), r"rates_per_s\[1\] -2"),
        (lambda: MMPP(rates_per_s=(1, 2), switching_per_s=((3, 1), (1, 0))), r"switching_per_s\[0\]\[0\] 3"),
        (lambda: OnOff(rate_per_s=1, on_s=0, off_s=1), "on_s 0: must be a finite number above 0"),
        (
            lambda: NegativeBinomialCounts(rate_per_s=1, index_of_dispersion=1),
            r"index_of_dispersion 1: must be above 1 \(Poisson has 1\)",
        ),
        (
            lambda: NegativeBinomialCounts(rate_per_s=1e-9, index_of_dispersion=2),
            "bin_s 1.0: must be longer",
        ),
        (
            lambda: NegativeBinomialCounts(rate_per_s=1e9, index_of_dispersion=2),
            r"rate_per_s \* bin_s 1000000000.0: must be between 0 and 100000 requests per bin",
        ),
        (lambda: Superposition(parts=()), "parts .*: must hold at least one"),
        (lambda: Poisson(rate_per_s=1).times_s(-1), "n -1"),
        (lambda: BenchServe(rate_per_s=1).times_s(-1), "n -1"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(build, message):
    with pytest.raises(WorkloadError, match=message):
        build()
