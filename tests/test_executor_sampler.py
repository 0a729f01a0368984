"""Sampling rules: field reports 33 to 38 and 40, and rows that do not influence each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from servetwin.executor.sampler import Sampler, SamplingRow, restrict
from servetwin.sim.contract import SamplingParams

EOS = 2
CPU = torch.device("cpu")


def sampler(seed: int = 0) -> Sampler:
    return Sampler([EOS], seed, CPU)


def row(*, seed: int | None = None, num_output_tokens: int = 0, **params: object) -> SamplingRow:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return SamplingRow(SamplingParams(**{"temperature": 1.0, **params}), generator, num_output_tokens)  # type: ignore[arg-type]


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)


def draws(logits: torch.Tensor, params: SamplingRow, times: int = 300) -> set[int]:
    """Tokens that can come out."""
    return set(sampler().sample(logits.expand(times, -1), [params] * times).tolist())


def test_disabled_top_k_beside_enabled_top_k() -> None:
    """Case 33: 0, -1 and more than the vocabulary mean all of it, in one batch with other settings."""
    logits = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    rows = [row(temperature=0), row(top_k=64, top_p=0.95), row(top_k=-1), row(top_k=1000), row(top_k=0)]
    tokens = sampler().sample(logits, rows)
    assert tokens[0] == logits[0].argmax()
    assert ((tokens >= 0) & (tokens < 128)).all()
    kept = restrict(logits, [r.params for r in rows]).isfinite().sum(dim=-1).tolist()
    assert kept[0] == kept[2] == kept[3] == kept[4] == 128
    assert kept[1] <= 64


def test_greedy_row_with_masked_logits_beside_a_random_one() -> None:
    """Case 34: -inf stays -inf."""
    inf = float("inf")
    logits = logits_of([-inf, 1.0, -inf, 3.0], [0.0, -inf, 1.0, 2.0])
    for seed in range(20):
        tokens = sampler(seed).sample(logits, [row(temperature=0), row(temperature=0.8)])
        assert tokens[0] == 3
        assert tokens[1] != 1


@pytest.mark.filterwarnings("ignore:temperature .* is raised")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("temperature", [1e-12, 1e-6, 1e-5, 1e-4, 1e-3, 0.01])
def test_very_small_temperatures_take_the_largest_logit(temperature: float, dtype: torch.dtype) -> None:
    """Case 35: no overflow between greedy and 0.01."""
    logits = logits_of([-30.0, 30.0, 28.0, 0.0]).to(dtype)
    assert draws(logits, row(temperature=temperature)) == {1}


def test_tiny_top_p_keeps_one_token() -> None:
    assert draws(logits_of([0.0, 0.1, 0.2, 0.1]), row(top_p=1e-6)) == {2}


def test_ties_under_greedy_go_to_the_lowest_id() -> None:
    """Case 37: alone and beside a random row; also where a long row is reduced in pieces."""
    tied = logits_of([1.0, 1.0, 0.0])
    assert sampler().sample(tied, [row(temperature=0)]).tolist() == [0]
    assert sampler().sample(tied.expand(2, -1), [row(temperature=0), row()])[0] == 0
    long = torch.zeros(1, 50_000)
    long[0, [777, 31_000, 49_999]] = 5.0
    assert sampler().sample(long, [row(temperature=0)]).tolist() == [777]


@given(
    position=st.integers(0, 3), others=st.lists(st.sampled_from(["greedy", "seedless", "seeded"]), max_size=4)
)
def test_neighbours_do_not_change_a_seeded_row(position: int, others: list[str]) -> None:
    """Case 38: equal logits and an equal seed give equal draws in any company and place."""
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(3))
    kinds = {"greedy": row(temperature=0), "seedless": row(), "seeded": row(seed=1)}
    rows = [kinds[name] for name in others]
    position = min(position, len(rows))
    rows.insert(position, row(seed=42, temperature=0.8))
    together = [int(sampler(seed=9).sample(logits.expand(len(rows), -1), rows)[position]) for _ in range(3)]
    alone_row = row(seed=42, temperature=0.8)
    alone = [int(sampler().sample(logits, [alone_row])) for _ in range(3)]
    assert together == alone


def test_equal_seeds_give_equal_streams_and_different_ones_do_not() -> None:
    logits = torch.zeros(1, 1000)

    def stream(seed: int) -> list[int]:
        seeded = row(seed=seed)
        return [int(sampler().sample(logits, [seeded])) for _ in range(5)]

    assert stream(1) == stream(1)
    assert stream(1) != stream(2)


def test_rows_without_a_seed_follow_the_seed_of_the_sampler() -> None:
    logits = torch.zeros(8, 1000)
    rows = [row() for _ in range(8)]
    first, again, other = (sampler(seed).sample(logits, rows).tolist() for seed in (5, 5, 6))
    assert first == again
    assert first != other
    assert len(set(first)) > 1


def test_min_tokens_holds_back_every_token_that_could_end_the_request() -> None:
    """Case 40: with EOS and a stop token preferred, exactly min_tokens others come first."""
    logits = logits_of([0.0, 1.0, 9.0, 8.0])
    for temperature in (0.0, 1.0):
        for produced in range(4):
            held = row(
                temperature=temperature, min_tokens=4, stop_token_ids=[3, 4000], num_output_tokens=produced
            )
            assert int(sampler().sample(logits, [held])) in (0, 1)
    free = row(temperature=0, min_tokens=4, num_output_tokens=4)
    assert sampler().sample(logits, [free]).tolist() == [EOS]


def test_min_tokens_of_one_row_leaves_the_others_and_the_logits_alone() -> None:
    logits = logits_of([0.0, 1.0, 9.0], [0.0, 1.0, 9.0])
    before = logits.clone()
    tokens = sampler().sample(logits, [row(temperature=0, min_tokens=2), row(temperature=0)])
    assert tokens.tolist() == [1, EOS]
    assert torch.equal(logits, before)


def test_top_k_keeps_the_k_largest() -> None:
    logits = logits_of([0.0, 3.0, 1.0, 2.0, -1.0])
    assert draws(logits, row(top_k=2, temperature=5.0)) == {1, 3}
    assert draws(logits, row(top_k=1, temperature=5.0)) == {1}


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, kept in ((0.4, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4), (1.0, 4)):
        assert int(restrict(logits, [SamplingParams(top_p=top_p)]).isfinite().sum()) == kept


def test_top_p_applies_to_what_top_k_left() -> None:
    """Of 0.5 and 0.3 the first alone has 0.625."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = restrict(logits, [SamplingParams(top_k=2, top_p=0.6)])
    assert kept.isfinite().tolist() == [[True, False, False, False]]


def test_top_p_one_keeps_the_whole_tail() -> None:
    """Rounding of the cumulative sum may not drop the least likely tokens of a large vocabulary."""
    logits = torch.linspace(0, -20, 50_000).unsqueeze(0)
    both = restrict(logits.expand(2, -1), [SamplingParams(top_p=1.0), SamplingParams(top_p=0.5)])
    assert int(both[0].isfinite().sum()) == 50_000


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.6, 0.3, 0.1])
    tokens = sampler().sample(probabilities.log().expand(20_000, -1), [row()] * 20_000)
    observed = torch.bincount(tokens, minlength=3) / 20_000
    torch.testing.assert_close(observed, probabilities, atol=0.015, rtol=0)
