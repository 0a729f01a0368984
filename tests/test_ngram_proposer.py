"""Drafts from a look-up in the request's own tokens, and which of them are kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servetwin.executor.ngram_proposer import NgramProposer
from servetwin.executor.verification import NO_DRAFT, kept_tokens
from servetwin.sim.config import SpeculativeConfig


def propose(
    token_ids: list[int], *, shortest: int = 1, longest: int = 3, count: int = 3, max_model_len: int = 100
) -> list[int]:
    config = SpeculativeConfig(
        method="ngram", num_speculative_tokens=count, prompt_lookup_min=shortest, prompt_lookup_max=longest
    )
    return NgramProposer(config, max_model_len).propose(np.array(token_ids, dtype=np.int32))


@pytest.mark.parametrize(
    ("token_ids", "drafts"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1]),
        ([5, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2]),  # (1, 2) is longer than the earlier (2)
        ([1, 2, 7, 1, 2, 8, 1, 2], [7, 1, 2]),  # of equal lengths the earliest
        ([1, 2, 3, 7, 9, 1, 2, 3, 8, 0, 1, 2, 3], [7, 9, 1]),
        ([4, 1, 2, 3, 7, 9, 4, 5, 2, 3, 8, 1, 2, 3], [7, 9, 4]),
        ([6, 6, 6], [6]),  # an occurrence may overlap the suffix
        ([1, 2, 3], []),
        ([1], []),
        ([], []),
    ],
)
def test_what_stood_behind_the_earliest_longest_match_is_proposed(
    token_ids: list[int], drafts: list[int]
) -> None:
    assert propose(token_ids) == drafts


def test_shorter_matches_than_asked_for_are_none() -> None:
    tokens = [1, 2, 7, 3, 2]
    assert propose(tokens, shortest=1) == [7, 3, 2]
    assert propose(tokens, shortest=2) == []


def test_longer_matches_than_asked_for_are_cut() -> None:
    """With prompt_lookup_max 2 the match of three tokens does not beat the earlier one of two."""
    tokens = [2, 3, 8, 1, 2, 3, 9, 1, 2, 3]
    assert propose(tokens, longest=2) == [8, 1, 2]
    assert propose(tokens, longest=3) == [9, 1, 2]


def test_drafts_end_with_the_context_window() -> None:
    """Never more than there is room for, and none once it is full."""
    tokens = [1, 2, 3, 4, 1, 2]
    assert [len(propose(tokens, max_model_len=n)) for n in (6, 7, 8, 9, 10)] == [0, 1, 2, 3, 3]


def test_a_method_that_needs_a_model_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="method 'eagle' needs a model that drafts; allowed: ngram"):
        NgramProposer(SpeculativeConfig(method="eagle", num_speculative_tokens=2), 100)


def by_search(tokens: list[int], shortest: int, longest: int, count: int, max_model_len: int) -> list[int]:
    """The rule, spelt out."""
    count = min(count, max_model_len - len(tokens))
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == tokens[-length:]:
                return tokens[start + length : start + length + count] if count > 0 else []
    return []


@given(
    tokens=st.lists(st.integers(0, 2), max_size=30),
    shortest=st.integers(1, 4),
    more=st.integers(0, 4),
    count=st.integers(1, 6),
    max_model_len=st.integers(1, 36),
)
def test_proposals_equal_a_plain_search(
    tokens: list[int], shortest: int, more: int, count: int, max_model_len: int
) -> None:
    drafts = propose(
        tokens, shortest=shortest, longest=shortest + more, count=count, max_model_len=max_model_len
    )
    assert drafts == by_search(tokens, shortest, shortest + more, count, max_model_len)


# ---------------------------------------------------------------- verification


def kept(rows: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    """Rows of (drafts, tokens sampled behind the known tokens and behind each draft) -> the tokens kept."""
    sampled = np.array([token for _, tokens in rows for token in tokens])
    drafts = np.array([draft for ids, _ in rows for draft in [*ids, NO_DRAFT]])
    before = np.array([place for ids, _ in rows for place in range(len(ids) + 1)])
    mask = kept_tokens(sampled, drafts, before)
    ends = np.cumsum([len(tokens) for _, tokens in rows])[:-1]
    parts = zip(np.split(sampled, ends), np.split(mask, ends), strict=True)
    return [tokens[keep].tolist() for tokens, keep in parts]


@pytest.mark.parametrize(
    ("drafts", "sampled", "expected"),
    [
        ([], [7], [7]),
        ([7, 8], [7, 8, 9], [7, 8, 9]),  # all accepted: one more
        ([7, 8], [7, 5, 9], [7, 5]),  # a 9 behind a wrong 8 means nothing
        ([7, 8], [5, 8, 9], [5]),  # right again behind a wrong one is wrong
    ],
)
def test_drafts_are_kept_up_to_the_first_wrong_one(
    drafts: list[int], sampled: list[int], expected: list[int]
) -> None:
    """Alone, and between other requests."""
    assert kept([(drafts, sampled)]) == [expected]
    others = ([1, 2], [1, 2, 3])
    assert kept([others, (drafts, sampled), ([], [4]), others]) == [[1, 2, 3], expected, [4], [1, 2, 3]]


@st.composite
def verified_rows(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    drafts = draw(st.lists(st.integers(0, 1), max_size=4))
    return drafts, draw(st.lists(st.integers(0, 1), min_size=len(drafts) + 1, max_size=len(drafts) + 1))


@given(rows=st.lists(verified_rows(), min_size=1, max_size=5))
def test_keeping_equals_a_loop_over_drafts(rows: list[tuple[list[int], list[int]]]) -> None:
    for (drafts, sampled), tokens in zip(rows, kept(rows), strict=True):
        right = 0
        while right < len(drafts) and drafts[right] == sampled[right]:
            right += 1
        assert tokens == sampled[: right + 1]
