"""The sampler against a plain one that goes token by token, rows that do not influence each other, fair draws."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sampling import EOS, draws, row, sample, tokens
from scipy.stats import chisquare, contingency, kstest

from servetwin.executor.distribution import token_probabilities
from servetwin.executor.noise import exponential_noise
from servetwin.executor.sampler import RowLogprobs, Sampler, SamplingRow, random_stream
from servetwin.executor.testing import torch_threads
from servetwin.sim.contract import SamplingParams

VOCAB_SIZE = 24
Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


# ---------------------------------------------------------------- a plain sampler


def plain_edits(logits: Floats, asked: SamplingRow) -> Floats:
    """Bias, masks and penalties, one token at a time."""
    params, outputs = asked.params, asked.output_token_ids.tolist()
    logits = logits.copy()
    for token_id, bias in (params.logit_bias or {}).items():
        logits[token_id] += np.float32(bias)
    banned = set()
    for word in params.bad_words_token_ids:
        if len(word) - 1 <= len(outputs) and outputs[len(outputs) - len(word) + 1 :] == word[:-1]:
            banned.add(word[-1])
    lost = set() if params.allowed_token_ids is None else set(range(VOCAB_SIZE)) - {*params.allowed_token_ids}
    if len(outputs) < params.min_tokens:
        lost |= {EOS, *params.stop_token_ids}
    if len(lost | banned) < VOCAB_SIZE:
        lost |= banned
    for token_id in range(VOCAB_SIZE):
        value, count = logits[token_id], outputs.count(token_id)
        if count or token_id in asked.prompt_token_ids:
            factor = np.float32(params.repetition_penalty)
            value = value / factor if value > 0 else value * factor
        if count:
            value += np.float32(-(count * params.frequency_penalty + params.presence_penalty))
        logits[token_id] = -np.inf if token_id in lost else value
    return logits


def plain_probabilities(logits: Floats, params: SamplingParams) -> npt.NDArray[np.float64]:
    """Temperature, min-p, top-k, top-p, over a sorted list of tokens."""
    scaled = logits.astype(np.float64) / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs[probs < params.min_p * probs.max()] = 0
    ranked = sorted(range(VOCAB_SIZE), key=lambda t: (-probs[t], t))
    if 0 < params.top_k < VOCAB_SIZE:
        smallest = probs[ranked[params.top_k - 1]]
        probs[probs < smallest] = 0
    probs /= probs.sum()
    before = 0.0
    for token_id in ranked:
        mass = probs[token_id]
        if before > 0 and before >= params.top_p and params.top_p < 1:
            probs[token_id] = 0
        before += mass
    return probs


def plain_token(logits: Floats, asked: SamplingRow) -> int:
    if asked.params.greedy:
        return int(logits.argmax())
    noise = exponential_noise([(asked.stream, asked.num_output_tokens)], VOCAB_SIZE)[0].numpy()
    return int((plain_probabilities(logits, asked.params) / noise).argmax())


def plain_logprobs(logits: Floats, token_id: int, count: int) -> RowLogprobs:
    exact = logits.astype(np.float64)
    logprobs = exact - exact.max() - math.log(np.exp(exact - exact.max()).sum())
    ranked = sorted(range(VOCAB_SIZE), key=lambda t: (-logits[t], t))
    listed = [token_id, *ranked[: VOCAB_SIZE if count == -1 else count]]
    return RowLogprobs(listed, logprobs[listed].tolist(), 1 + int((logits > logits[token_id]).sum()))


# ---------------------------------------------------------------- any batch

token_ids = st.integers(0, VOCAB_SIZE - 1)
# Cumulative probabilities of the logits below do not fall on these bounds, where rounding would decide.
settings_of_a_row = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.31, 0.7, 1.0, 1.63])},
    optional={
        "top_k": st.sampled_from([-1, 0, 1, 3, 10, VOCAB_SIZE, 1000]),
        "top_p": st.sampled_from([1e-6, 0.137, 0.371, 0.583, 0.857, 0.9931, 1.0]),
        "min_p": st.sampled_from([0.0, 0.0131, 0.1037, 0.371, 1.0]),
        "repetition_penalty": st.sampled_from([0.8, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([-1.5, 0.0, 0.6]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.7]),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(token_ids, max_size=2),
        "ignore_eos": st.booleans(),
        "allowed_token_ids": st.none() | st.lists(token_ids, min_size=1, max_size=6),
        "bad_words_token_ids": st.lists(st.lists(token_ids, min_size=1, max_size=3), max_size=4),
        "logit_bias": st.none()
        | st.dictionaries(token_ids, st.sampled_from([-100.0, -0.5, 2.25]), max_size=3),
        "logprobs": st.none() | st.sampled_from([-1, 0, 1, 3, VOCAB_SIZE, 100]),
    },
)


@st.composite
def sampling_rows(draw: st.DrawFn) -> SamplingRow:
    """One that the front end would let pass: something remains besides the tokens that min_tokens holds back."""
    params: dict[str, Any] = draw(settings_of_a_row)
    allowed = params.get("allowed_token_ids")
    assume(allowed is None or not {EOS, *params.get("stop_token_ids", [])}.issuperset(allowed))
    some = st.lists(token_ids, max_size=6)
    return row(stream=draw(st.integers(0, 2**64 - 1)), prompt=draw(some), outputs=draw(some), **params)


# Quarters, so that there are many ties.
some_logits = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).integers(-12, 13, VOCAB_SIZE).astype(np.float32) / 4
)
batches = st.lists(st.tuples(some_logits, sampling_rows()), min_size=1, max_size=4)


@given(batch=batches)
def test_every_row_is_what_a_plain_sampler_makes_of_it(batch: list[tuple[Floats, SamplingRow]]) -> None:
    """Same token, same log probabilities."""
    output = sample(torch.tensor(np.array([logits for logits, _ in batch])), [asked for _, asked in batch])
    results = zip(batch, output.token_ids.tolist(), output.logprobs, strict=True)
    for (logits, asked), token_id, entry in results:
        assert token_id == plain_token(plain_edits(logits, asked), asked)
        if asked.params.logprobs is None:
            assert entry is None
            continue
        assert entry is not None
        expected = plain_logprobs(logits, token_id, asked.params.logprobs)
        assert (entry.token_ids, entry.rank) == (expected.token_ids, expected.rank)
        assert entry.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@given(batch=batches)
def test_the_candidates_are_those_of_a_plain_sampler(batch: list[tuple[Floats, SamplingRow]]) -> None:
    """With their probabilities."""
    drawn = [(logits, asked.params) for logits, asked in batch if not asked.params.greedy]
    assume(drawn)
    weights = token_probabilities(
        torch.tensor(np.array([logits for logits, _ in drawn])), [p for _, p in drawn]
    )
    for (logits, params), ours in zip(drawn, weights, strict=True):
        expected = plain_probabilities(logits, params)
        assert (ours > 0).tolist() == (expected > 0).tolist()
        np.testing.assert_allclose(ours / ours.sum(), expected / expected.sum(), rtol=1e-4)


@given(batch=batches, data=st.data())
def test_a_row_is_the_same_alone_and_in_any_order(
    batch: list[tuple[Floats, SamplingRow]], data: st.DataObject
) -> None:
    """To the last bit of its log probabilities."""
    batch = data.draw(st.permutations(batch))
    logits, rows = torch.tensor(np.array([logits for logits, _ in batch])), [asked for _, asked in batch]
    before = logits.clone()
    together = sample(logits, rows)
    for i in range(len(rows)):
        alone = sample(logits[i : i + 1], rows[i : i + 1])
        assert alone.token_ids.tolist() == [together.token_ids[i]]
        assert alone.logprobs == [together.logprobs[i]]
    assert torch.equal(logits, before)


def test_a_row_is_the_same_alone_in_a_large_vocabulary() -> None:
    """Sizes at which torch splits the work among threads and vector lanes."""
    logits = torch.randn(7, 50_257, generator=torch.Generator().manual_seed(1)) * 3
    settings: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"temperature": 0}]
    rows = [
        row(stream=i, logprobs=5, **(settings[i % 5] | ({"top_p": 0.5} if i > 4 else {}))) for i in range(7)
    ]
    with torch_threads(2):
        together = sample(logits, rows)
    for i in range(7):
        alone = sample(logits[i : i + 1], rows[i : i + 1])
        assert (alone.token_ids[0], alone.logprobs[0]) == (together.token_ids[i], together.logprobs[i])


# ---------------------------------------------------------------- single rules


def candidates(logits: torch.Tensor, **params: Any) -> list[int]:
    (weights,) = token_probabilities(logits, [SamplingParams(**params)])
    return weights.nonzero().flatten().tolist()


HALF_THREE_TENTHS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


def test_top_k_keeps_the_k_largest_and_those_equal_to_the_last() -> None:
    assert candidates(torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0]]), top_k=2) == [1, 3]
    assert candidates(torch.tensor([[0.0, 3.0, 1.0, 1.0, -1.0]]), top_k=2) == [1, 2, 3]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4), (0.9999999, 4), (1.0, 4)]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, kept: int) -> None:
    assert candidates(HALF_THREE_TENTHS, top_p=top_p) == list(range(kept))


def test_top_p_applies_to_what_min_p_and_top_k_left() -> None:
    """Of 0.5 and 0.3 the first alone has 0.625."""
    assert candidates(HALF_THREE_TENTHS, top_k=2, top_p=0.6) == [0]
    assert candidates(HALF_THREE_TENTHS, min_p=0.59, top_p=0.6) == [0]
    assert candidates(HALF_THREE_TENTHS, min_p=0.59, top_k=3) == [0, 1]


def test_min_p_is_a_fraction_of_the_most_likely_one_after_temperature() -> None:
    assert candidates(HALF_THREE_TENTHS, min_p=0.25) == [0, 1, 2]
    assert candidates(HALF_THREE_TENTHS, min_p=0.25, temperature=0.5) == [0, 1]
    assert candidates(HALF_THREE_TENTHS, min_p=1.0) == [0]


def test_top_p_one_keeps_the_whole_tail() -> None:
    """Rounding of the cumulative sum may not drop the least likely tokens of a large vocabulary."""
    logits = torch.linspace(0, -20, 50_000).expand(2, -1)
    weights = token_probabilities(logits, [SamplingParams(top_p=1.0), SamplingParams(top_p=0.5)])
    assert int(weights[0].count_nonzero()) == 50_000


def test_a_bad_word_is_banned_behind_its_beginning_only() -> None:
    """Among the outputs: the same tokens at the end of the prompt do not count."""
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0, 0.5]])

    def chosen(**history: list[int]) -> list[int]:
        return tokens(logits, [row(temperature=0, bad_words_token_ids=[[1, 3, 4]], **history)])

    assert chosen(outputs=[1, 3]) == [5]
    assert chosen(outputs=[0, 1, 3]) == [5]
    assert chosen(outputs=[3, 1]) == chosen(outputs=[3]) == chosen(prompt=[1, 3]) == [4]
    assert chosen(prompt=[1], outputs=[3]) == [4]


def test_bias_and_allowed_tokens_decide_before_penalties() -> None:
    """The biased logit is what the repetition penalty divides."""
    logits = torch.tensor([[3.0, 0.0, 2.0]])
    biased = row(temperature=0, logit_bias={1: 8.0}, repetition_penalty=4.0, prompt=[1])
    assert tokens(logits, [biased]) == [0]
    assert tokens(logits, [row(temperature=0, logit_bias={1: 8.0})]) == [1]
    assert tokens(logits, [row(temperature=0, allowed_token_ids=[1, 2], logit_bias={0: 100.0})]) == [2]


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 1e300])
def test_no_setting_makes_a_number_that_is_none(temperature: float) -> None:
    """Bias, penalty and temperature beyond the range of a float32 beside masked logits."""
    logits = torch.tensor([[30.0, -30.0, 0.0, -torch.inf]])
    extreme = row(
        temperature=temperature,
        logit_bias={1: 1e300, 2: -1e300},
        repetition_penalty=1e-300,
        min_p=1e-300,
        prompt=[0, 1, 2, 3],
    )
    (token_id,) = tokens(logits, [extreme])
    assert token_id in (0, 1)
    weights = token_probabilities(logits, [SamplingParams(temperature=temperature, min_p=1e-300)])
    assert weights.isfinite().all()
    assert weights[0, 3] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_float_type(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    rows = [row(temperature=0), row(top_p=0.9), row(repetition_penalty=2.0, prompt=[1]), row(logprobs=2)]
    assert tokens(logits, rows) == tokens(logits.float(), rows)


def test_no_rows_give_no_tokens() -> None:
    assert tokens(torch.zeros(0, 8), []) == []


# ---------------------------------------------------------------- randomness


def test_a_stream_is_named_by_the_seed_alone_or_by_engine_and_request() -> None:
    seeded, unseeded = SamplingParams(seed=7), SamplingParams()
    assert random_stream(0, "a", seeded) == random_stream(1, "b", seeded)
    names = [(0, "a"), (1, "a"), (0, "b"), (1, "0 a"), (10, "a")]
    streams = {random_stream(engine_seed, req_id, unseeded) for engine_seed, req_id in names}
    streams |= {random_stream(0, "a", SamplingParams(seed=seed)) for seed in (7, -7, 0, 2**80)}
    assert len(streams) == len(names) + 4
    assert all(0 <= stream < 2**64 for stream in streams)
    assert random_stream(0, "\ud800", unseeded) == random_stream(0, "\ud800", unseeded)


def test_noise_stays_what_it_is() -> None:
    """A run can be repeated with a later version: these numbers do not change."""
    torch.testing.assert_close(
        exponential_noise([(0, 0), (2**64 - 1, 3)], 4),
        torch.tensor(
            [
                [0.38203463, 0.092489585, 0.38308764, 0.49724182],
                [0.08235222, 0.32580706, 0.38749582, 1.1365104],
            ]
        ),
        rtol=1e-6,
        atol=0,
    )


def test_noise_is_exponential_and_its_rows_are_independent() -> None:
    """Distribution over tokens, over indices and over streams; neighbours of any kind are uncorrelated."""
    by_index = exponential_noise([(5, index) for index in range(400)], 500)
    by_stream = exponential_noise([(stream, 5) for stream in range(400)], 500)
    for noise in (by_index, by_stream):
        assert kstest(noise.flatten().numpy(), "expon").pvalue > 0.01
        assert kstest(noise[:, 17].numpy(), "expon").pvalue > 0.01
        centred = noise - 1
        for neighbours in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
            assert abs(float(neighbours.mean())) < 4 / math.sqrt(neighbours.numel())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_probabilities(temperature: float) -> None:
    """Over 2,000 places of one stream."""
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, 0.25])
    rows = [row(stream=11, temperature=temperature, outputs=[0] * index) for index in range(2000)]
    counts = np.bincount(tokens(logits.expand(2000, -1), rows), minlength=6)
    expected = (logits.double() / temperature).softmax(dim=0).numpy() * 2000
    assert chisquare(counts, expected).pvalue > 0.01


def test_restricted_draws_follow_the_probabilities_that_remain() -> None:
    """Over 2,000 streams."""
    counts = np.bincount(draws(HALF_THREE_TENTHS, times=2000, top_k=3), minlength=4)
    assert counts[3] == 0
    assert chisquare(counts[:3], np.array([0.5, 0.3, 0.15]) / 0.95 * 2000).pvalue > 0.01


def test_one_draw_says_nothing_about_the_next() -> None:
    """Neither of the same stream, nor of another one in the same place."""
    logits = torch.zeros(2000, 4)
    first, second = (
        np.array(tokens(logits, [row(stream=stream, outputs=[0] * i) for i in range(2000)]))
        for stream in (1, 2)
    )
    for left, right in ((first[1:], first[:-1]), (first, second)):
        table = np.bincount(left * 4 + right, minlength=16).reshape(4, 4)
        assert contingency.chi2_contingency(table).pvalue > 0.01


def test_tokens_of_hardly_any_probability_are_not_drawn() -> None:
    """Noise rounded to 0 for one token in ten million would draw one of 50,000 such tokens every few hundred times."""
    logits = torch.full((1, 50_000), -30.0)
    logits[0, 123] = 0.0
    assert set(draws(logits, times=200)) == {123}
    assert float(exponential_noise([(stream, 0) for stream in range(200)], 50_000).min()) > 0


def test_the_sampler_keeps_no_state() -> None:
    """The same call gives the same answer, before and after others."""
    sampler, logits = Sampler([EOS]), torch.zeros(8, 1000)
    rows = [row(stream=stream) for stream in range(8)]
    first = sampler.sample(logits, rows).token_ids.tolist()
    sampler.sample(logits, [row(stream=99)] * 8)
    assert sampler.sample(logits, rows).token_ids.tolist() == first
    assert len(set(first)) > 1


def test_a_penalty_bans_nothing() -> None:
    """However large: of the allowed tokens one must come."""
    params = {"allowed_token_ids": [5, 6], "logit_bias": {5: -1e30, 6: -1e30}, "repetition_penalty": 1e30}
    rows = [row(prompt=[5, 6], temperature=t, **params) for t in (0.0, 1.0)]
    assert set(tokens(torch.zeros(2, 10), rows)) <= {5, 6}
