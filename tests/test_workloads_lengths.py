"""Length models against their definitions: one length, input and output together."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from servetwin.workloads import (
    Empirical,
    EmpiricalPairs,
    Exponential,
    Fixed,
    Independent,
    Lognormal,
    ParetoLognormal,
    QuantileGrid,
    RankCorrelated,
    SplitTotal,
    TruncatedNormal,
    Uniform,
    WorkloadError,
    Zipf,
)
from servetwin.workloads.streams import stream

DRAWS = 100_000
SEED = 7

MIXTURE = ParetoLognormal(
    mu=6.0, sigma=0.8, tail_share=0.2, tail_from_tokens=1500.0, tail_index=1.5, max_tokens=100_000
)
MODELS = [
    Fixed(7),
    Uniform(min_tokens=3, max_tokens=9),
    Exponential(mean_tokens=0.2, max_tokens=4096),
    Lognormal(mu=5.0, sigma=2.0, max_tokens=4096, min_tokens=3),
    Lognormal(mu=700.0, sigma=300.0, max_tokens=4096),
    TruncatedNormal(mean_tokens=10.0, std_tokens=20.0, max_tokens=100),
    MIXTURE,
    Zipf(),
    Empirical([3, 5, 5, 90]),
    QuantileGrid({0: 1, 0.5: 10.5, 1: 100}),
]


def drawn(model, n=DRAWS):
    return model.sample(n, stream(SEED, "lengths"))


def largest_gap(sample, cdf):
    """Kolmogorov-Smirnov distance between whole lengths and P(length <= k): 0.005 has a p-value of 1 % at 1e5."""
    values, counts = np.unique(sample, return_counts=True)
    return np.abs(counts.cumsum() / len(sample) - cdf(values)).max()


# ---------------------------------------------------------------- one length


@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_lengths_are_int64_tokens_of_at_least_one(model):
    sample = drawn(model, 1000)
    assert sample.dtype == np.int64 and sample.shape == (1000,)
    assert sample.min() >= 1


@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_a_longer_draw_begins_with_the_shorter_one(model):
    assert (drawn(model, 500)[:100] == drawn(model, 100)).all()


@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_the_quantile_function_never_falls_and_takes_a_share_of_0(model):
    lengths = model.tokens_at(np.array([0.0, 1e-300, 0.2, 0.5, 0.9, 1 - 2**-53]))
    assert (np.diff(lengths) >= 0).all() and lengths[0] >= 1


def test_uniform_draws_every_length_of_its_range_equally():
    values, counts = np.unique(drawn(Uniform(min_tokens=3, max_tokens=9)), return_counts=True)
    assert values.tolist() == [*range(3, 10)]
    assert counts / DRAWS == pytest.approx(np.full(7, 1 / 7), abs=0.005)


def test_exponential_has_its_distribution_and_mean():
    sample = drawn(Exponential(mean_tokens=400.0, max_tokens=100_000))
    assert largest_gap(sample, lambda k: stats.expon(scale=400.0).cdf(k + 0.5)) < 0.005
    assert sample.mean() == pytest.approx(400.0, rel=0.01)


def test_lognormal_has_its_distribution():
    sample = drawn(Lognormal(mu=6.0, sigma=1.0, max_tokens=1_000_000))
    assert largest_gap(sample, lambda k: stats.lognorm(1.0, scale=math.exp(6.0)).cdf(k + 0.5)) < 0.005


def test_lognormal_meets_its_median_and_p90_and_is_clipped():
    model = Lognormal.from_quantiles(p50=500, p90=2000, min_tokens=20, max_tokens=4000)
    sample = drawn(model, 2 * DRAWS)
    assert np.percentile(sample, [50, 90]) == pytest.approx([500, 2000], rel=0.02)
    assert (sample.min(), sample.max()) == (20, 4000)


def test_truncated_normal_has_its_distribution_and_piles_nothing_up_on_its_limits():
    model = TruncatedNormal(mean_tokens=200.0, std_tokens=300.0, min_tokens=50, max_tokens=900)
    sample = drawn(model)
    expected = stats.truncnorm((50 - 200) / 300, (900 - 200) / 300, loc=200, scale=300)
    assert largest_gap(sample, lambda k: expected.cdf(k + 0.5)) < 0.005
    assert sample.mean() == pytest.approx(expected.mean(), rel=0.01)
    assert (sample == 50).mean() < 0.005


def test_pareto_lognormal_mixes_body_and_tail_by_share():
    body = stats.lognorm(0.8, scale=math.exp(6.0))
    tail = stats.pareto(1.5, scale=1500.0)
    sample = drawn(MIXTURE)
    inside = sample[sample < 100_000]
    assert largest_gap(inside, lambda k: 0.8 * body.cdf(k + 0.5) + 0.2 * tail.cdf(k + 0.5)) < 0.006
    assert (sample > 20_000).mean() == pytest.approx(0.2 * (1500 / 20_000) ** 1.5, rel=0.1)


def test_zipf_falls_as_a_power_of_the_rank():
    sample = drawn(Zipf(theta=1.2, min_tokens=10, max_tokens=509))
    shares = np.arange(1, 501) ** -1.2
    assert largest_gap(sample, lambda k: (shares.cumsum() / shares.sum())[k - 10]) < 0.005
    assert (sample.min(), sample.max()) == (10, 509)


def test_zipf_of_theta_0_is_uniform():
    values, counts = np.unique(drawn(Zipf(theta=0, min_tokens=1, max_tokens=4)), return_counts=True)
    assert values.tolist() == [1, 2, 3, 4]
    assert counts / DRAWS == pytest.approx(np.full(4, 0.25), abs=0.005)


def test_empirical_draws_only_observed_values_by_their_share():
    values, counts = np.unique(drawn(Empirical(np.array([90, 3, 5, 5]))), return_counts=True)
    assert values.tolist() == [3, 5, 90]
    assert counts / DRAWS == pytest.approx([0.25, 0.5, 0.25], abs=0.005)


def test_many_observed_values_are_shown_in_a_few_words():
    assert repr(Empirical([3, 5])) == "Empirical([3, 5])"
    assert repr(Empirical(range(1, 101))) == "Empirical(100 values, mean 50.5, 1 to 100)"


def test_quantile_grid_meets_its_knots_and_its_mean():
    grid = QuantileGrid({0: 10, 0.5: 20, 0.9: 100, 1: 1000})
    sample = drawn(grid, 2 * DRAWS)
    assert [(sample <= tokens).mean() for tokens in (20, 100)] == pytest.approx([0.5, 0.9], abs=0.03)
    assert grid.quantile(0.7) == pytest.approx(60)
    assert grid.mean_tokens == pytest.approx(0.5 * 15 + 0.4 * 60 + 0.1 * 550)
    assert sample.mean() == pytest.approx(grid.mean_tokens, rel=0.02)


def test_a_grid_of_observed_values_gives_them_back_in_distribution():
    observed = drawn(MIXTURE)
    again = QuantileGrid.from_values(observed).sample(DRAWS, stream(SEED, "again"))
    assert stats.ks_2samp(observed, again).statistic < 0.01


# ---------------------------------------------------------------- input and output together


def spearman(pairs):
    return stats.spearmanr(*pairs).statistic


@pytest.mark.parametrize("r", [-0.9, -0.3, 0.0, 0.5, 1.0])
def test_a_copula_has_its_rank_correlation_and_leaves_both_distributions_alone(r):
    inputs, outputs = MIXTURE, Exponential(mean_tokens=400.0, max_tokens=100_000)
    pairs = RankCorrelated(input_lengths=inputs, output_lengths=outputs, rank_correlation=r).sample_pairs(
        DRAWS, SEED
    )
    assert spearman(pairs) == pytest.approx(r, abs=0.01)
    alone = Independent(input_lengths=inputs, output_lengths=outputs).sample_pairs(DRAWS, SEED)
    assert (pairs[0] == alone[0]).all()
    assert largest_gap(pairs[1], lambda k: stats.expon(scale=400.0).cdf(k + 0.5)) < 0.005


def test_no_correlation_draws_as_independent_lengths_do():
    parts = {"input_lengths": Zipf(), "output_lengths": Uniform(min_tokens=1, max_tokens=100)}
    copula = RankCorrelated(**parts, rank_correlation=0).sample_pairs(100, SEED)
    assert np.array_equal(copula, Independent(**parts).sample_pairs(100, SEED))


def test_a_copula_of_observed_pairs_gives_lengths_and_rank_correlation_back():
    parts = {"input_lengths": MIXTURE, "output_lengths": Lognormal(mu=5.0, sigma=1.0, max_tokens=9999)}
    observed = RankCorrelated(**parts, rank_correlation=-0.4).sample_pairs(DRAWS, SEED)
    again = RankCorrelated.from_pairs(*observed).sample_pairs(DRAWS, SEED + 1)
    assert spearman(again) == pytest.approx(-0.4, abs=0.015)
    assert max(stats.ks_2samp(*sides).statistic for sides in zip(observed, again, strict=True)) < 0.01


def test_pairs_of_one_length_only_have_no_correlation():
    assert RankCorrelated.from_pairs([5, 5, 5], [1, 2, 3]).rank_correlation == 0


def test_observed_pairs_stay_together_and_are_drawn_by_their_share():
    inputs, outputs = EmpiricalPairs([10, 20, 20], [1, 2, 3]).sample_pairs(DRAWS, SEED)
    pairs, counts = np.unique([inputs, outputs], axis=1, return_counts=True)
    assert pairs.T.tolist() == [[10, 1], [20, 2], [20, 3]]
    assert counts / DRAWS == pytest.approx(np.full(3, 1 / 3), abs=0.005)


def test_vidurs_default_splits_a_zipf_total_twenty_to_one():
    totals = drawn(Zipf(theta=0.6, min_tokens=1024, max_tokens=4096))
    inputs, outputs = SplitTotal(total_lengths=Zipf(), prefill_to_decode_ratio=20.0).sample_pairs(DRAWS, SEED)
    assert (inputs + outputs == totals).all()
    assert (outputs == np.rint(totals / 21)).all()


@pytest.mark.parametrize("ratio", [1e-9, 1e9])
def test_a_split_leaves_a_token_on_either_side(ratio):
    pairs = SplitTotal(total_lengths=Fixed(2), prefill_to_decode_ratio=ratio).sample_pairs(1, SEED)
    assert [side.tolist() for side in pairs] == [[1], [1]]


# ---------------------------------------------------------------- wrong parameters


class OnlySamples:
    """Lengths without a quantile function."""

    def sample(self, n, rng):
        return rng.integers(1, 5, n)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Fixed(0), "tokens 0: must be a whole number, 1 or more"),
        (lambda: Fixed(2.5), "tokens 2.5"),
        (lambda: Uniform(min_tokens=5, max_tokens=4), "max_tokens 4: .* 5 or more"),
        (
            lambda: Uniform(min_tokens=1, max_tokens=10**10),
            "max_tokens 10000000000: must be between 1 and 1e",
        ),
        (lambda: Exponential(mean_tokens=0, max_tokens=9), "mean_tokens 0"),
        (lambda: Lognormal(mu=1, sigma=-1, max_tokens=9), "sigma -1"),
        (lambda: Lognormal(mu=float("nan"), sigma=1, max_tokens=9), "mu nan"),
        (lambda: Lognormal(mu=1, sigma=1, max_tokens=3, min_tokens=4), "max_tokens 3: .* 4 or more"),
        (lambda: Lognormal.from_quantiles(p50=10, p90=9, max_tokens=99), "p90 9"),
        (lambda: TruncatedNormal(mean_tokens=5, std_tokens=0, max_tokens=9), "std_tokens 0"),
        (
            lambda: TruncatedNormal(mean_tokens=-900, std_tokens=1, max_tokens=9),
            "mean_tokens -900: must leave a share of at least 1e-06 between min_tokens",
        ),
        (
            lambda: ParetoLognormal(
                mu=1, sigma=1, tail_share=1.5, tail_from_tokens=9, tail_index=1, max_tokens=9
            ),
            "tail_share 1.5: must be between 0 and 1",
        ),
        (
            lambda: ParetoLognormal(
                mu=1, sigma=0, tail_share=0.5, tail_from_tokens=9, tail_index=1, max_tokens=9
            ),
            "sigma 0",
        ),
        (lambda: Zipf(theta=-1), "theta -1: must be between 0 and 100"),
        (lambda: Zipf(min_tokens=1, max_tokens=10**8), "max_tokens 100000000: must be less than min_tokens"),
        (lambda: Empirical([]), "values"),
        (lambda: Empirical([3, 0]), "values"),
        (lambda: Empirical([1.5]), "values"),
        (lambda: QuantileGrid({0.1: 1, 1: 2}), "must run from probability 0 to 1"),
        (lambda: QuantileGrid({0: 5, 1: 2}), "never fall"),
        (lambda: QuantileGrid({0: 0, 1: 2}), "1 token or more"),
        (
            lambda: RankCorrelated(input_lengths=Fixed(1), output_lengths=Fixed(1), rank_correlation=2),
            "rank_correlation 2: must be between -1 and 1",
        ),
        (
            lambda: RankCorrelated(input_lengths=OnlySamples(), output_lengths=Fixed(1), rank_correlation=0),
            "input_lengths .*: must be lengths with a quantile function",
        ),
        (lambda: EmpiricalPairs([1, 2], [1]), r"output_tokens: must be as many as input_tokens \(2\)"),
        (lambda: EmpiricalPairs([1, 0], [1, 1]), "input_tokens: must be whole numbers of tokens"),
        (lambda: SplitTotal(total_lengths=Fixed(9), prefill_to_decode_ratio=0), "prefill_to_decode_ratio 0"),
        (lambda: SplitTotal(total_lengths=Fixed(1)).sample_pairs(1, 0), "total_lengths Fixed"),
    ],
)
def test_length_parameters_out_of_range_are_refused_by_name(build, message):
    with pytest.raises(WorkloadError, match=message):
        build()
