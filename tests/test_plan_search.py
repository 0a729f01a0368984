"""The search for the largest good load, on functions whose limit is known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from math import exp, inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servetwin.sim.planning.search import WIDEST_GAP, Limit, Outcome, Point, find_limit

LIMITS = st.floats(0.01, 1e4)
GUESSES = st.floats(0.3, 3.0)


def straight(limit: float) -> Callable[[float, int], Outcome]:
    return lambda rate, seed: Outcome(log(limit / rate))


def exploding(limit: float, knee: float) -> Callable[[float, int], Outcome]:
    """As a latency of 1 / (1 - rate / knee) against what it is at the limit."""
    at_limit = 1 - limit / knee
    return lambda rate, seed: Outcome(log((1 - rate / knee) / at_limit) if rate < knee else -inf)


def cliff(limit: float) -> Callable[[float, int], Outcome]:
    """Nothing is told but good or bad."""
    return lambda rate, seed: Outcome(1.0 if rate <= limit else -inf)


@given(LIMITS, GUESSES, st.sampled_from([straight, cliff]))
def test_it_finds_the_limit_from_a_guess_that_is_wrong_by_a_factor(
    limit: float, guess: float, shape: Callable[[float], Callable[[float, int], Outcome]]
) -> None:
    found = find_limit(shape(limit), guess * limit)
    assert found.rate is not None and found.upper is not None
    assert found.rate <= limit < found.upper * (1 + 1e-9)
    assert found.upper / found.rate <= 1.011
    assert found.is_monotone and found.converged
    assert found.probes <= 13


@given(LIMITS, st.floats(0.1, 0.99), st.booleans())
def test_it_finds_where_a_latency_explodes(knee: float, part: float, knows_the_knee: bool) -> None:
    limit = knee * part
    found = find_limit(exploding(limit, knee), 0.9 * knee, ceiling=knee if knows_the_knee else None)
    assert found.rate is not None
    assert found.rate == pytest.approx(limit, rel=0.011)
    assert found.is_monotone and found.probes <= 13


@given(LIMITS, st.floats(1.0, 1.2))
def test_a_ceiling_that_is_none_is_passed(limit: float, short_of_it: float) -> None:
    """What was taken for more than can be served is less than the limit: the look beyond finds good loads there."""
    found = find_limit(straight(limit), 0.9 * limit / short_of_it, ceiling=limit / short_of_it, max_probes=20)
    assert found.rate == pytest.approx(limit, rel=0.011)
    assert found.is_monotone


@given(LIMITS)
def test_no_load_is_good(scale: float) -> None:
    found = find_limit(lambda rate, seed: Outcome(-1.0), scale)
    assert found.rate is None and found.interval is None
    assert found.probes <= 5


@given(LIMITS, st.floats(0.45, 0.6), st.floats(1.4, 1.6), st.floats(0.6, 1.0))
def test_a_good_stretch_above_a_bad_one_is_told(
    limit: float, first_end: float, width: float, guess: float
) -> None:
    """Good up to `first_end`, bad, good again, bad beyond the limit; the search begins in the second stretch."""

    def probe(rate: float, seed: int) -> Outcome:
        is_good = rate <= first_end * limit or width * first_end * limit <= rate <= limit
        return Outcome(0.5 if is_good else -0.5)

    found = find_limit(probe, guess * limit, max_probes=25)
    assert found.rate is not None
    assert probe(found.rate, 0).margin > 0
    if not found.is_monotone:
        # The answer is safe: no load below it is bad.
        assert found.rate <= first_end * limit
        assert all(rate > found.rate for rate in found.good_above)
    elif found.rate > first_end * limit:
        # It was not seen only where the bad stretch fits between the rates that are tried.
        assert width < WIDEST_GAP * 1.3


def test_a_wide_dip_below_the_answer_is_never_missed() -> None:
    """Bad between 40 % and 70 % of the limit."""
    found = find_limit(
        lambda rate, seed: Outcome(1.0 if rate < 4 or 7 < rate < 10 else -1.0), 9.0, max_probes=25
    )
    assert found.rate == pytest.approx(4, rel=0.011) and found.rate < 4
    assert not found.is_monotone and min(found.good_above) > 7


def test_a_monotone_function_is_not_called_something_else_for_its_noise() -> None:
    """A rate that is good by less than two standard errors is no proof."""

    def probe(rate: float, seed: int) -> Outcome:
        return Outcome(log(8 / rate) + random.Random(f"{rate}").gauss(0, 0.05), 0.05)

    found = [find_limit(probe, guess) for guess in (6.0, 7.0, 8.0, 9.0)]
    assert all(f.is_monotone for f in found)


@given(st.integers(0, 10_000), LIMITS)
def test_noise_is_met_with_the_same_seeds_at_every_rate(root: int, limit: float) -> None:
    asked: Counter[tuple[float, int]] = Counter()

    def probe(rate: float, seed: int) -> Outcome:
        asked[rate, seed] += 1
        luck = random.Random(f"{root} {seed}").gauss(0, 0.03) + random.Random(f"{root} {seed} {rate}").gauss(
            0, 0.003
        )
        return Outcome(log(limit / rate) + luck, 0.03)

    found = find_limit(probe, limit, seeds=(0, 1, 2), max_probes=24)
    assert max(asked.values()) == 1
    assert found.probes == len(asked) <= 24
    assert found.rate is not None and found.interval is not None
    # 0.03 per seed, three seeds: a mean of 0.02 off is one standard deviation.
    assert abs(log(found.rate / limit)) < 0.15
    assert found.interval[0] <= found.rate <= found.interval[1]


def test_the_interval_holds_the_limit_as_often_as_it_says() -> None:
    """95 % intervals from three seeds: of 200 searches at least 180 hold the truth, and not by being useless."""
    held, widths = 0, []
    for root in range(200):

        def probe(rate: float, seed: int, root: int = root) -> Outcome:
            luck = random.Random(f"{root} {seed}").gauss(0, 0.05)
            return Outcome(log(10 / rate) + luck, 0.05)

        found = find_limit(probe, 9.0, seeds=(0, 1, 2), max_probes=20)
        assert found.interval is not None
        held += found.interval[0] <= 10 <= found.interval[1]
        widths.append(log(found.interval[1] / found.interval[0]))
    assert held >= 180
    assert sum(widths) / len(widths) < 0.5


def test_one_seed_is_enough_where_nothing_is_in_doubt() -> None:
    found = find_limit(straight(10), 9.0, seeds=range(5))
    assert all(len(point.outcomes) == 1 for point in found.points)


def test_the_mean_over_the_seeds_decides_not_the_first() -> None:
    """The first seed alone would say 10; the others say 9 and 8."""
    limits = {0: 10.0, 1: 9.0, 2: 8.0}
    found = find_limit(
        lambda rate, seed: Outcome(log(limits[seed] / rate), 0.2), 9.0, seeds=(0, 1, 2), max_probes=30
    )
    truth = exp(sum(map(log, limits.values())) / 3)
    assert found.rate == pytest.approx(truth, rel=0.1) and found.rate < 9.5


def test_a_seed_that_was_lucky_elsewhere_counts_less() -> None:
    """Seed 0 is 10 % better than the mean at every rate. Where it alone was tried, that is taken into account."""
    luck = {0: 0.1, 1: -0.05, 2: -0.05}
    found = find_limit(
        lambda rate, seed: Outcome(log(10 / rate) + luck[seed], 0.1), 9.5, seeds=(0, 1, 2), max_probes=30
    )
    alone = [point for point in found.points if len(point.outcomes) == 1]
    assert any(1.0 < point.rate / 10 < 1.1 or point.rate < 10 for point in alone)
    for point in alone:
        assert point.margin == pytest.approx(log(10 / point.rate), abs=1e-9)
    assert found.rate == pytest.approx(10, rel=0.06)


@pytest.mark.parametrize("root", [71, 143, 155, 195])
def test_the_answer_does_not_rest_on_the_luck_of_other_loads_alone(root: int) -> None:
    """A load that missed the limits where it was tried is no answer before the other seeds were tried there."""
    draws = random.Random(root)
    luck = [draws.gauss(0, 0.3) for _ in range(3)]
    found = find_limit(
        lambda rate, seed: Outcome(log(10 / rate) + luck[seed], 0.01), 7, seeds=(0, 1, 2), max_probes=24
    )
    answer = next(point for point in found.points if point.rate == found.rate)
    assert sum(outcome.margin for outcome in answer.outcomes.values()) >= 0


def test_a_spent_budget_is_told() -> None:
    found = find_limit(cliff(10), 1.0, max_probes=6)
    assert found.probes == 6 and not found.converged
    assert found.rate is not None and found.rate <= 10


def test_a_point_without_answers_is_bad() -> None:
    point = Point(1.0, {0: Outcome(0.1), 1: Outcome(-inf), 2: Outcome(0.1)})
    assert not point.is_good and point.margin == pytest.approx((0.1 - 0.7 + 0.1) / 3)


def test_limits_are_values() -> None:
    one, two = (find_limit(straight(3), 2.5) for _ in range(2))
    assert isinstance(one, Limit) and one == two
