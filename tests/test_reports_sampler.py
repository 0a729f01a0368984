"""Field reports about the sampler, as small cases with the behaviour of vLLM 0.22.0.

The numbers in the names are those of the reports.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling import EOS, INF, draws, row, sample, tokens

from servetwin.executor.distribution import token_probabilities
from servetwin.executor.penalties import apply_penalties
from servetwin.executor.request_state import RequestStates
from servetwin.executor.sampler import SamplingRow
from servetwin.executor.testing import PlanWriter, torch_threads
from servetwin.sim.contract import SamplingParams


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def test_33_disabled_top_k_beside_enabled_top_k() -> None:
    """0, -1 and more than the vocabulary mean all of it, in one batch with other settings."""
    logits = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    rows = [row(temperature=0), row(top_k=64, top_p=0.95), row(top_k=-1), row(top_k=1000), row(top_k=0)]
    chosen = tokens(logits, rows)
    assert chosen[0] == logits[0].argmax()
    assert all(0 <= token_id < 128 for token_id in chosen)
    candidates = token_probabilities(logits[1:], [r.params for r in rows[1:]]).count_nonzero(dim=1).tolist()
    assert 1 < candidates[0] <= 64
    assert candidates[1:] == [128, 128, 128]


def test_33_top_k_below_minus_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"top_k must be 0 or -1 \(off\) or at least 1, got -2"):
        SamplingParams(top_k=-2)


def test_34_greedy_row_with_masked_logits_beside_a_random_one() -> None:
    """-inf stays -inf in both."""
    logits = torch.tensor([[-INF, 1.0, -INF, 3.0], [0.0, -INF, 1.0, 2.0]])
    for stream in range(50):
        greedy, drawn = tokens(logits, [row(temperature=0), row(temperature=0.8, stream=stream)])
        assert greedy == 3
        assert drawn != 1
    weights = token_probabilities(logits, [SamplingParams(temperature=0.8)] * 2)
    assert weights.isfinite().all()


@pytest.mark.filterwarnings("ignore:temperature .* is raised")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("temperature", [1e-12, 1e-6, 1e-5, 1e-4, 1e-3, 0.01])
def test_35_very_small_temperatures_take_the_largest_logit(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([[-30.0, 30.0, 28.0, 0.0]], dtype=dtype)
    params = SamplingParams(temperature=temperature)
    assert token_probabilities(logits.float(), [params]).isfinite().all()
    assert set(draws(logits, temperature=temperature)) == {1}
    assert set(draws(logits, temperature=temperature, top_p=1e-6)) == {1}


def test_35_small_temperatures_are_raised_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="temperature 0.001 is raised to 0.01"):
        assert SamplingParams(temperature=0.001).temperature == 0.01


@pytest.mark.parametrize("logits", [[0.0, 0.1, 0.2, 0.1], [0.0, 0.1, 0.2, 0.2]])
def test_35_a_tiny_top_p_keeps_one_token_and_none_is_refused(logits: list[float]) -> None:
    """Also where two are equally likely."""
    assert set(draws(torch.tensor([logits]), top_p=1e-6)) == {2}
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 0"):
        SamplingParams(top_p=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_36_banned_words_that_cover_the_allowed_tokens(temperature: float) -> None:
    """Never a token outside the allowed set; a word that is banned elsewhere stays banned there."""
    logits = torch.tensor([[9.0, 8.0, 7.0, 0.0, 0.0, 1.0, 2.0, 0.0]]).expand(100, -1)
    words = {"temperature": temperature, "bad_words_token_ids": [[5], [6]]}
    rows = [row(stream=s, allowed_token_ids=[5, 6] if s % 2 else None, **words) for s in range(100)]
    chosen = tokens(logits, rows)
    assert set(chosen[1::2]) <= {5, 6}
    assert not set(chosen[::2]) & {5, 6}


def test_37_ties_under_greedy_go_to_the_lowest_id() -> None:
    """Alone and beside a random row; also where a long row is reduced in pieces."""
    tied = torch.tensor([[1.0, 1.0, 0.0]])
    assert tokens(tied, [row(temperature=0)]) == [0]
    for stream in range(20):
        assert tokens(tied.expand(2, -1), [row(temperature=0), row(stream=stream)])[0] == 0
    long = torch.zeros(1, 50_000)
    long[0, [777, 31_000, 49_999]] = 5.0
    assert tokens(long, [row(temperature=0)]) == [777]


@given(position=st.integers(0, 4), others=st.lists(st.sampled_from(["greedy", "drawn", "equal"]), max_size=4))
def test_38_neighbours_do_not_change_a_draw(position: int, others: list[str]) -> None:
    """Equal logits and an equal stream give equal draws in any company and place, however often."""
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(3))
    kinds = {"greedy": row(temperature=0), "drawn": row(stream=7), "equal": row(stream=42)}
    seeded = row(stream=42, temperature=0.8, outputs=[1, 2])
    rows = [kinds[name] for name in others]
    rows.insert(position, seeded)
    place = rows.index(seeded)
    alone = tokens(logits, [seeded])
    assert [tokens(logits.expand(len(rows), -1), rows)[place] for _ in range(3)] == alone * 3


def penalised_logits(seen: SamplingRow) -> list[float]:
    """Where ten logits of 2 end up."""
    logits = torch.full((1, 10), 2.0)
    apply_penalties(logits, [(0, seen)])
    return logits[0].tolist()


def test_39_which_tokens_a_penalty_sees() -> None:
    """Presence and frequency count outputs only; repetition covers prompt and outputs; also after a resumption."""
    params = SamplingParams(presence_penalty=1, frequency_penalty=1, repetition_penalty=2)
    writer = PlanWriter(block_size=4, num_blocks=10)
    states = RequestStates(2, 16, 4, torch.device("cpu"), 0)
    writer.add("r", [7, 7, 9], params)
    states.update(writer.plan({"r": 3}))
    assert penalised_logits(states.sampling_row(0, 0)) == [2, 2, 2, 2, 2, 2, 2, 1, 2, 1]
    with_output = [2, 2, 2, -1, 2, 2, 2, 1, 2, 1]
    writer.requests["r"].token_ids.append(3)
    states.update(writer.plan({}))
    writer.preempt("r")
    states.update(writer.plan({"r": 4}))
    resumed = states.sampling_row(0, 0)
    assert (resumed.prompt_token_ids.tolist(), resumed.output_token_ids.tolist()) == ([7, 7, 9], [3])
    unbroken = row(
        prompt=[7, 7, 9], outputs=[3], presence_penalty=1, frequency_penalty=1, repetition_penalty=2
    )
    assert penalised_logits(resumed) == penalised_logits(unbroken) == with_output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("min_tokens", "produced"), [(4, 5), (0, 1)])
def test_40_min_tokens_are_followed_by_eos_at_once(
    temperature: float, min_tokens: int, produced: int
) -> None:
    """A bias forces EOS whenever it is allowed: exactly min_tokens others come first."""
    outputs: list[int] = []
    while EOS not in outputs and len(outputs) < 32:
        asked = row(
            temperature=temperature,
            min_tokens=min_tokens,
            max_tokens=32,
            logit_bias={EOS: 1000.0},
            outputs=outputs,
        )
        outputs += tokens(torch.zeros(1, 8), [asked])
    assert len(outputs) == produced


def test_40_min_tokens_hold_back_every_token_that_could_end_the_request() -> None:
    """EOS, also where it is ignored, and stop tokens; those outside the vocabulary are none."""
    logits = torch.tensor([[0.0, 1.0, 9.0, 8.0]])
    for ignore_eos in (False, True):
        for outputs in ([], [1], [1, 1], [1, 1, 1]):
            held = row(min_tokens=4, stop_token_ids=[3, 4000], ignore_eos=ignore_eos, outputs=outputs)
            assert tokens(logits, [held])[0] in (0, 1)
    assert tokens(logits, [row(temperature=0, min_tokens=4, outputs=[1] * 4)]) == [EOS]


def test_41_logprobs_are_raw_and_hold_the_token_taken() -> None:
    """At temperature 2 with top_k 2 they are those of the model; the second of two has rank 2 and stands first."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    rows = [row(stream=s, temperature=2, top_k=2, logprobs=1, presence_penalty=1) for s in range(50)]
    second = [entry for entry in sample(logits.expand(50, -1), rows).logprobs if entry and entry.rank == 2]
    assert second
    for entry in second:
        assert entry.token_ids == [1, 0]
        assert entry.logprobs == pytest.approx(logits[0, [1, 0]].tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_41_logprobs_are_finite_and_not_above_zero(temperature: float) -> None:
    """Also of a token that bias and masks chose against the model, with its true rank."""
    logits = torch.tensor([[30.0, -30.0, 0.0, 5.0]])
    forced = row(temperature=temperature, allowed_token_ids=[1], logprobs=2)
    (entry,) = sample(logits, [forced]).logprobs
    assert entry is not None
    assert (entry.token_ids, entry.rank) == ([1, 0, 3], 4)
    assert entry.logprobs == pytest.approx([-60.0, 0.0, -25.0])
    assert max(entry.logprobs) <= 0
