"""Field reports 33, 36, 44 and 45 as far as the front end decides them; numbers and facts as in `reports.md`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs the extra `executor`")

from front_ends import EOS, EXTRA_EOS, ask, scripted_engine

from servetwin.sim.contract import SamplingParams


@pytest.mark.parametrize(("keep", "text"), [(False, "a"), (True, "abc")])
def test_44_stop_string_across_tokens(keep: bool, text: str) -> None:
    """It ends after the second token; the third one is never returned."""
    params = SamplingParams(stop="bc", include_stop_str_in_output=keep)
    outputs, client = ask(params, [0, 1, 2], texts=["ab", "c", "d"])
    last = outputs[-1].outputs[0]
    assert (last.text, last.token_ids) == (text, [0, 1])
    assert (last.finish_reason, last.stop_reason) == ("stop", "bc")
    assert client.aborted == ["r"]


def test_45_stop_string_before_min_tokens() -> None:
    """The first one comes too early to count."""
    outputs, _ = ask(SamplingParams(stop="e", min_tokens=3), [0, 1, 2, 1], texts=["x", "e", "y"])
    last = outputs[-1].outputs[0]
    assert (len(outputs), last.text, last.token_ids) == (4, "xey", [0, 1, 2, 1])
    assert (last.finish_reason, last.stop_reason) == ("stop", "e")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_36_all_candidates_banned_is_refused_when_submitted(temperature: float) -> None:
    """Whether the bans are given as words or as tokens; nothing is queued."""
    engine, client = scripted_engine()
    for bans in ({"bad_words": ["w5", "w6"]}, {"bad_words_token_ids": [[5], [6]]}):
        params = SamplingParams(temperature=temperature, allowed_token_ids=[5, 6], **bans)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"bad_words ban all of allowed_token_ids \[5, 6\]"):
            engine.add_request("r", [1], params)
    assert not client.requests


def test_36_a_longer_word_leaves_its_tokens() -> None:
    engine, client = scripted_engine()
    engine.add_request("r", [1], SamplingParams(allowed_token_ids=[5, 6], bad_words=["w5", "w6 w5"]))
    assert client.requests["r"].sampling_params.bad_words_token_ids == [[5], [6, 5]]


@pytest.mark.parametrize("allowed", [[EOS], [EXTRA_EOS, 9], [9]])
def test_36_min_tokens_must_leave_a_token_that_does_not_end_it(allowed: list[int]) -> None:
    engine, _ = scripted_engine()
    params = SamplingParams(allowed_token_ids=allowed, min_tokens=1, stop_token_ids=[9])
    with pytest.raises(ValueError, match=r"min_tokens 1 .* no token is left"):
        engine.add_request("r", [1], params)


def test_33_top_k_below_minus_one_is_refused_and_above_the_vocabulary_is_not() -> None:
    with pytest.raises(ValueError, match=r"top_k must be .* got -2"):
        SamplingParams(top_k=-2)
    engine, client = scripted_engine()
    for top_k in (0, -1, 1000):
        engine.add_request(f"k{top_k}", [1], SamplingParams(top_k=top_k))
    assert [r.sampling_params.top_k for r in client.requests.values()] == [0, -1, 1000]
