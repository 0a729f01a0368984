"""Text of tokens that come one by one, and the strings that end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs the extra `executor`")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from servetwin.executor.detokenizer import (
    DetokenizationError,
    IncrementalDetokenizer,
    Stopped,
    find_stop_string,
)
from servetwin.sim.contract import SamplingParams


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i (as GPT-2 spells it), and 256 is a special token."""
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def fused(*texts: str) -> Tokenizer:
    """Token i has the i-th text."""
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token=texts[0]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def detokenizer(tokenizer: Tokenizer, prompt: Sequence[int] = (), **params: Any) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(tokenizer, prompt, SamplingParams(max_tokens=None, **params))


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\N{REPLACEMENT CHARACTER}"), min_size=1)


@given(TEXTS, TEXTS)
def test_pieces_put_together_are_the_whole_text(text: str, prompt: str) -> None:
    """Whatever the bytes of a character are split into, the text is what decoding everything at once gives."""
    tokenizer = byte_tokenizer()
    made = detokenizer(tokenizer, tokenizer.encode(prompt).ids)
    for token_id in tokenizer.encode(text).ids:
        made.update([token_id], stopped=False)
        assert text.startswith(made.text)
    assert made.text == text


def test_a_character_that_is_not_whole_is_held_back() -> None:
    tokenizer = byte_tokenizer()
    made = detokenizer(tokenizer)
    texts = []
    for token_id in tokenizer.encode("a\N{SNOWMAN}b").ids:
        made.update([token_id], stopped=False)
        texts.append(made.text)
    assert texts == ["a", "a", "a", "a\N{SNOWMAN}", "a\N{SNOWMAN}b"]


def test_a_character_begun_in_the_prompt_is_finished_in_the_output() -> None:
    tokenizer = byte_tokenizer()
    *begun, last = tokenizer.encode("many words and \N{SNOWMAN}").ids
    made = detokenizer(tokenizer, begun)
    made.update([last], stopped=False)
    assert made.text == "\N{SNOWMAN}"


def test_the_first_piece_keeps_its_leading_space() -> None:
    """Decoders of this kind drop the space of the first token they see: that is one of the prompt's."""
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    tokenizer.decoder = decoders.Metaspace()
    behind, alone = detokenizer(tokenizer, [0]), detokenizer(tokenizer)
    for made in (behind, alone):
        made.update([1, 1], stopped=False)
    assert (behind.text, alone.text) == (" b b", "b b")


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<end>b")])
def test_special_tokens_are_left_out_if_wanted(skip: bool, text: str) -> None:
    tokenizer = byte_tokenizer()
    made = detokenizer(tokenizer, skip_special_tokens=skip)
    a, b = tokenizer.encode("ab").ids
    made.update([a, 256, b], stopped=False)
    assert made.text == text


@pytest.mark.parametrize(("keep", "text"), [(False, "ab"), (True, "abc")])
def test_the_text_of_the_token_that_stops_is_left_out_unless_stop_strings_are_kept(
    keep: bool, text: str
) -> None:
    made = detokenizer(fused("a", "b", "c"), include_stop_str_in_output=keep)
    made.update([0], stopped=False)
    assert made.update([1, 2], stopped=True) is None
    assert made.text == text


@pytest.mark.parametrize(
    ("text", "num_new", "stops", "found"),
    [
        ("abc", 1, ["bc"], ("bc", 3)),
        ("abc", 1, ["ab"], None),
        ("abc", 2, ["ab"], ("ab", 2)),
        ("abcd", 4, ["d", "bc"], ("bc", 3)),
        ("abcd", 4, ["cd", "bcd"], ("cd", 4)),
        ("a", 1, ["abc"], None),
        ("abc", 0, ["bc"], None),
        ("abc", 3, [], None),
    ],
)
def test_a_stop_string_is_looked_for_where_it_ends_in_new_text(
    text: str, num_new: int, stops: list[str], found: tuple[str, int] | None
) -> None:
    """The one that ends first counts, of equal ones the first in the list."""
    match = find_stop_string(text, num_new, stops)
    assert (match and (match.stop_string, match.end)) == found


@given(
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.lists(st.integers(1, 4), min_size=1, max_size=12),
    st.booleans(),
    st.integers(0, 3),
)
def test_the_end_does_not_depend_on_how_many_tokens_come_at_once(
    stops: list[str], token_ids: list[int], sizes: list[int], keep: bool, min_tokens: int
) -> None:
    """One by one or several in a step: the same text, the same number of tokens, the same stop string."""
    tokenizer = fused("a", "b", "ab", "c")
    params: dict[str, Any] = {"stop": stops, "include_stop_str_in_output": keep, "min_tokens": min_tokens}

    def run(pieces: list[list[int]]) -> tuple[str, int, str | None]:
        made, num_tokens = detokenizer(tokenizer, **params), 0
        for piece in pieces:
            if stopped := made.update(piece, stopped=False):
                return made.text, num_tokens + stopped.num_tokens, stopped.stop_string
            num_tokens += len(piece)
        return made.text, num_tokens, None

    pieces, rest = [], token_ids
    for size in [*sizes, len(token_ids)]:
        pieces.append(rest[:size])
        rest = rest[size:]
    assert run(pieces) == run([[t] for t in token_ids])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.text("abc", min_size=1), max_size=3))
def test_text_once_shown_is_never_taken_back(token_ids: list[int], stops: list[str]) -> None:
    """What may still become a stop string is held back from those who read along."""
    made = detokenizer(fused("a", "b", "ab", "c"), stop=stops)
    shown = ""
    for token_id in token_ids:
        stopped = made.update([token_id], stopped=False)
        settled = made.settled_text(finished=stopped is not None)
        assert settled.startswith(shown)
        shown = settled
        if stopped:
            break
    assert made.settled_text(finished=True).startswith(shown)


def test_a_decoder_that_rewrites_its_text_goes_on_with_what_follows() -> None:
    tokenizer = fused("a", "b", "c")
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "xyz")])
    made = detokenizer(tokenizer)
    made.update([0, 1, 2], stopped=False)
    assert made.text == "abc"


def test_a_token_that_cannot_be_decoded_is_an_error_of_its_request() -> None:
    made = detokenizer(fused("a", "b"))
    with pytest.raises(DetokenizationError, match="token -1 cannot be decoded"):
        made.update([-1], stopped=False)


def test_how_a_stop_string_ended_it_is_told() -> None:
    made = detokenizer(fused("ab", "c", "d"), stop="bc")
    assert made.update([0, 1, 2], stopped=False) == Stopped("bc", 2)
    assert made.text == "a"
