"""Arrival processes, length models, shared prefixes, synthetic workloads and presets."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from servetwin.workloads import (
    PRESETS,
    AllAtOnce,
    Constant,
    Empirical,
    Fixed,
    Gamma,
    Hyperexponential,
    ListWorkload,
    Lognormal,
    Poisson,
    QuantileGrid,
    Synthetic,
    SystemPrompts,
    Workload,
    WorkloadError,
    build_preset,
)
from servetwin.workloads.streams import stream

RNG_SEED = 7

RANDOM_PROCESSES = [
    Poisson(rate_per_s=4.0),
    Gamma(rate_per_s=4.0, cv=0.3),
    Gamma(rate_per_s=4.0, cv=2.5),
    Hyperexponential(rate_per_s=4.0, cv=3.0),
]


def gaps_of(times_s):
    return np.diff(times_s, prepend=0.0)


def synthetic(**changes):
    parts = {
        "arrivals": Poisson(rate_per_s=2.0),
        "input_lengths": Lognormal.from_quantiles(p50=500, p90=2000, max_tokens=8192),
        "output_lengths": QuantileGrid({0: 1, 0.5: 100, 1: 900}),
        "prefixes": SystemPrompts.zipf(3, tokens=64),
        "n": 50,
        "seed": 1,
    }
    return Synthetic(**{**parts, **changes}).requests


def column(requests, name):
    return [getattr(r, name) for r in requests]


# ---------------------------------------------------------------- arrivals


@pytest.mark.parametrize("process", RANDOM_PROCESSES, ids=repr)
def test_mean_rate_and_gap_cv_are_those_asked_for(process):
    """Over 400,000 draws: rate within 3 %, CV within 3 %."""
    gaps = gaps_of(process.times_s(400_000))
    assert 1 / gaps.mean() == pytest.approx(4.0, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(getattr(process, "cv", 1.0), rel=0.03)


@pytest.mark.parametrize("process", [*RANDOM_PROCESSES, Constant(rate_per_s=4.0), AllAtOnce()], ids=repr)
def test_times_are_ascending_float64_seconds_and_repeatable(process):
    times = process.times_s(500)
    assert times.dtype == np.float64 and times.shape == (500,)
    assert (np.diff(times) >= 0).all() and times[0] >= 0
    assert (times == process.times_s(500)).all()
    assert len(process.times_s(0)) == 0


@pytest.mark.parametrize("process", RANDOM_PROCESSES, ids=repr)
def test_a_longer_draw_begins_with_the_shorter_one(process):
    assert (process.times_s(500)[:100] == process.times_s(100)).all()


def test_every_seed_gives_other_arrivals():
    draws = [tuple(Poisson(rate_per_s=1.0, seed=seed).times_s(5)) for seed in (0, 1, 2, 3)]
    assert len(set(draws)) == 4
    assert tuple(Poisson(rate_per_s=1.0).times_s(5)) == draws[0]


def test_the_own_seed_of_a_process_wins_over_the_generator_it_is_handed():
    own = Poisson(rate_per_s=1.0, seed=3)
    assert (own.times_s(5, np.random.default_rng(1)) == own.times_s(5)).all()


def test_the_first_request_waits_for_its_gap_too():
    assert Constant(rate_per_s=4.0).times_s(3).tolist() == [0.25, 0.5, 0.75]


def test_all_at_once_is_time_zero():
    assert AllAtOnce().times_s(3).tolist() == [0.0, 0.0, 0.0]


def test_vllm_burstiness_is_the_gamma_shape():
    assert Gamma.from_burstiness(rate_per_s=2.0, burstiness=4.0, seed=5) == Gamma(
        rate_per_s=2.0, cv=0.5, seed=5
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Poisson(rate_per_s=0), "rate_per_s 0: must be a finite number above 0"),
        (lambda: Constant(rate_per_s=float("inf")), "AllAtOnce"),
        (lambda: Gamma(rate_per_s=float("nan"), cv=1), "rate_per_s nan"),
        (lambda: Poisson(rate_per_s=True), "rate_per_s True"),
        (lambda: Poisson(rate_per_s=1, seed=-1), "seed -1"),
        (lambda: Gamma(rate_per_s=1, cv=0), "cv 0: must be between 0.001 and 100"),
        (lambda: Hyperexponential(rate_per_s=1, cv=0.9), "cv 0.9: must be between 1 and 100"),
        (lambda: Gamma.from_burstiness(rate_per_s=1, burstiness=float("inf")), "burstiness inf"),
        (lambda: Poisson(rate_per_s=1).times_s(-1), "n -1"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(build, message):
    with pytest.raises(WorkloadError, match=message):
        build()


# ---------------------------------------------------------------- lengths


@pytest.mark.parametrize(
    "model",
    [
        Fixed(7),
        Lognormal(mu=5.0, sigma=2.0, max_tokens=4096, min_tokens=3),
        Lognormal(mu=700.0, sigma=300.0, max_tokens=4096),
        Empirical([3, 5, 5, 90]),
        QuantileGrid({0: 1, 0.5: 10.5, 1: 100}),
    ],
    ids=repr,
)
def test_lengths_are_int64_tokens_of_at_least_one(model):
    sample = model.sample(1000, stream(RNG_SEED, "lengths"))
    assert sample.dtype == np.int64 and sample.shape == (1000,)
    assert sample.min() >= 1


def test_lognormal_meets_its_median_and_p90_and_is_clipped():
    model = Lognormal.from_quantiles(p50=500, p90=2000, min_tokens=20, max_tokens=4000)
    sample = model.sample(200_000, stream(RNG_SEED, "lengths"))
    assert np.percentile(sample, [50, 90]) == pytest.approx([500, 2000], rel=0.02)
    assert (sample.min(), sample.max()) == (20, 4000)


def test_empirical_draws_only_observed_values_by_their_share():
    sample = Empirical(np.array([3, 5, 5, 90])).sample(40_000, stream(RNG_SEED, "lengths"))
    values, counts = np.unique(sample, return_counts=True)
    assert values.tolist() == [3, 5, 90]
    assert counts / 40_000 == pytest.approx([0.25, 0.5, 0.25], abs=0.01)


def test_quantile_grid_meets_its_knots_and_its_mean():
    grid = QuantileGrid({0: 10, 0.5: 20, 0.9: 100, 1: 1000})
    sample = grid.sample(200_000, stream(RNG_SEED, "lengths"))
    assert [(sample <= tokens).mean() for tokens in (20, 100)] == pytest.approx([0.5, 0.9], abs=0.03)
    assert grid.quantile(0.7) == pytest.approx(60)
    assert grid.mean_tokens == pytest.approx(0.5 * 15 + 0.4 * 60 + 0.1 * 550)
    assert sample.mean() == pytest.approx(grid.mean_tokens, rel=0.02)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Fixed(0), "tokens 0: must be a whole number, 1 or more"),
        (lambda: Fixed(2.5), "tokens 2.5"),
        (lambda: Lognormal(mu=1, sigma=-1, max_tokens=9), "sigma -1"),
        (lambda: Lognormal(mu=float("nan"), sigma=1, max_tokens=9), "mu nan"),
        (lambda: Lognormal(mu=1, sigma=1, max_tokens=3, min_tokens=4), "max_tokens 3: .* 4 or more"),
        (lambda: Lognormal.from_quantiles(p50=10, p90=9, max_tokens=99), "p90 9"),
        (lambda: Empirical([]), "values"),
        (lambda: Empirical([3, 0]), "values"),
        (lambda: Empirical([1.5]), "values"),
        (lambda: QuantileGrid({0.1: 1, 1: 2}), "must run from probability 0 to 1"),
        (lambda: QuantileGrid({0: 5, 1: 2}), "never fall"),
        (lambda: QuantileGrid({0: 0, 1: 2}), "1 token or more"),
    ],
)
def test_length_parameters_out_of_range_are_refused_by_name(build, message):
    with pytest.raises(WorkloadError, match=message):
        build()


# ---------------------------------------------------------------- shared prefixes


def test_requests_of_one_system_prompt_share_its_ids_and_no_others():
    prompts = SystemPrompts(tokens=48, weights=(3.0, 1.0))
    assert prompts.prefix_ids(0) == (0, 1, 2)
    assert prompts.prefix_ids(1) == (3, 4, 5)


def test_popularity_follows_the_weights():
    kinds = SystemPrompts(tokens=16, weights=(3.0, 1.0)).sample(40_000, stream(RNG_SEED, "prefixes"))
    assert np.bincount(kinds) / 40_000 == pytest.approx([0.75, 0.25], abs=0.01)
    assert SystemPrompts.zipf(3, tokens=16).weights == pytest.approx((1, 1 / 2, 1 / 3))


def test_the_system_prompt_comes_on_top_of_the_input_and_only_it_is_named():
    requests = synthetic(
        input_lengths=Fixed(10), prefixes=SystemPrompts(tokens=64, weights=(1.0,), block_tokens=32)
    )
    assert {(r.prompt_tokens, r.prefix_ids, r.prefix_block_tokens) for r in requests} == {(74, (0, 1), 32)}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: SystemPrompts(tokens=20, weights=(1.0,)),
            r"tokens 20: must be a multiple of block_tokens \(16\)",
        ),
        (lambda: SystemPrompts(tokens=16, weights=()), "weights"),
        (lambda: SystemPrompts(tokens=16, weights=(1.0, 0.0)), "weights"),
        (lambda: SystemPrompts.zipf(0, tokens=16), "count 0"),
        (lambda: SystemPrompts.zipf(2, tokens=16, exponent=-1), "exponent -1"),
    ],
)
def test_prefix_parameters_out_of_range_are_refused_by_name(build, message):
    with pytest.raises(WorkloadError, match=message):
        build()


# ---------------------------------------------------------------- synthetic


def test_same_seed_same_requests_and_another_seed_others():
    assert synthetic() == synthetic()
    assert len({tuple(column(synthetic(seed=s), "arrival_s")) for s in (1, 2, 3)}) == 3


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        ({"arrivals": Gamma(rate_per_s=9.0, cv=3.0)}, {"arrival_s"}),
        ({"output_lengths": Fixed(5)}, {"output_tokens"}),
        ({"prefixes": SystemPrompts.zipf(9, tokens=64)}, {"prefix_ids"}),
        ({"input_lengths": Empirical([5, 9])}, {"prompt_tokens"}),
    ],
    ids=["arrivals", "output_lengths", "prefixes", "input_lengths"],
)
def test_changing_one_part_leaves_the_draws_of_the_others_alone(change, moved):
    names = ["arrival_s", "prompt_tokens", "output_tokens", "prefix_ids"]
    before, after = synthetic(), synthetic(**change)
    assert {name for name in names if column(before, name) != column(after, name)} == moved


def test_named_streams_of_one_root_differ():
    draws = {name: stream(1, name).random() for name in ("arrivals", "input_lengths", "output_lengths")}
    assert len(set(draws.values())) == 3


def test_a_longer_workload_begins_with_the_shorter_one():
    assert synthetic(n=80)[:50] == synthetic(n=50)


def test_a_synthetic_workload_is_an_open_loop_of_unique_requests():
    workload = Synthetic(arrivals=AllAtOnce(), input_lengths=Fixed(3), output_lengths=Fixed(2), n=4)
    assert isinstance(workload, Workload) and isinstance(workload, ListWorkload) and workload.open_loop
    sent = list(iter(workload.next, None))
    assert column(sent, "request_id") == ["req-000000", "req-000001", "req-000002", "req-000003"]
    assert {(r.prompt_tokens, r.output_tokens, r.prefix_ids) for r in sent} == {(3, 2, None)}


def test_no_requests_is_refused():
    with pytest.raises(WorkloadError, match="n 0: must be a whole number, 1 or more"):
        synthetic(n=0)


# ---------------------------------------------------------------- presets

PUBLISHED = {
    "chat": (5.53, 1.09, (1020, 2734, 4142), 1154.7, (129, 424, 601), 211.1),
    "code": (2.57, 13.15, (1469, 5187, 7436), 2047.8, (13, 55, 251), 27.9),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_quantiles_exactly_and_means_within_five_percent(name):
    _, _, inputs, input_mean, outputs, output_mean = PUBLISHED[name]
    preset = PRESETS[name]
    assert tuple(preset.input_lengths.quantile(p) for p in (0.5, 0.9, 0.99)) == inputs
    assert tuple(preset.output_lengths.quantile(p) for p in (0.5, 0.9, 0.99)) == outputs
    assert preset.input_lengths.mean_tokens == pytest.approx(input_mean, rel=0.05)
    assert preset.output_lengths.mean_tokens == pytest.approx(output_mean, rel=0.05)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_rate_and_gap_cv(name):
    """Over a million gaps within 5 %: with a CV of 13, a thousand requests say little about either."""
    rate_per_s, cv, *_ = PUBLISHED[name]
    gaps = gaps_of(PRESETS[name].arrivals(PRESETS[name].rate_per_s).times_s(1_000_000))
    assert 1 / gaps.mean() == pytest.approx(rate_per_s, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_prompts_of_code_stop_at_the_cap_of_its_service():
    assert max(column(build_preset("code", n=5000).requests, "prompt_tokens")) == 7437


@pytest.mark.parametrize("name", PRESETS)
def test_presets_call_themselves_synthetic_and_say_their_seed(name):
    workload = build_preset(name, n=3, seed=9)
    assert PRESETS[name].description.startswith("synthetic")
    assert (workload.about["format"], workload.about["preset"]) == ("synthetic", name)
    assert (workload.about["seed"], workload.about["requests"]) == (9, 3)


def test_another_rate_only_stretches_the_arrivals():
    slow, fast = (build_preset("code", n=40, rate_per_s=rate).requests for rate in (1.0, 4.0))
    assert [4 * t for t in column(fast, "arrival_s")] == pytest.approx(column(slow, "arrival_s"))
    assert column(fast, "prompt_tokens") == column(slow, "prompt_tokens")


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(WorkloadError, match="preset 'cha': must be one of chat, code"):
        build_preset("cha")


def test_importing_workloads_stays_light():
    heavy = "pandas", "pyarrow", "scipy", "torch"
    code = f"import sys, servetwin.workloads; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
