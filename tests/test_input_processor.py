"""What a user gives becomes a request, or is refused with the field, the value and what is allowed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra `executor`")

from front_ends import EOS, EXTRA_EOS, VOCAB_SIZE, engine_config, scripted_engine, tokenizer_of
from tokenizers import pre_tokenizers

from servetwin.sim.contract import EngineCoreRequest, SamplingParams


def add(prompt: Any, texts: Any = ("w0", "w1", "w2"), **params: Any) -> EngineCoreRequest:
    """The request that the engine gets."""
    engine, client = scripted_engine(texts)
    engine.add_request("r", prompt, SamplingParams(**params))
    return client.requests["r"]


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("w1 w2", [1, 2]),
        ({"prompt": "w1 w2"}, [1, 2]),
        ({"prompt_token_ids": [5, 6]}, [5, 6]),
        ({"prompt": "only shown", "prompt_token_ids": (5, 6)}, [5, 6]),
        ([5, 6], [5, 6]),
        (np.array([5, 6]), [5, 6]),
    ],
)
def test_a_prompt_is_a_text_or_token_ids(prompt: Any, token_ids: list[int]) -> None:
    assert add(prompt).prompt_token_ids == token_ids


def test_a_salt_goes_to_the_engine() -> None:
    assert add({"prompt_token_ids": [1], "cache_salt": "tenant"}).cache_salt == "tenant"
    assert add({"prompt_token_ids": [1], "cache_salt": None}).cache_salt is None


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt '' is empty"),
        ([], "prompt_token_ids is empty"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ([1, 64], r"prompt_token_ids\[1\] is 64: outside the vocabulary, 0 to 63"),
        ([-1], r"prompt_token_ids\[0\] is -1"),
        ([1, "2"], r"prompt_token_ids\[1\] must be an integer, got '2'"),
        ([1.5], r"prompt_token_ids\[0\] must be an integer, got 1.5"),
        (3, "prompt_token_ids must be a list of token ids, got 3"),
        ({"prompt_token_ids": "12"}, "must be a list of token ids, got '12'"),
        ({"prompt": 3}, "prompt must be a text, got int: 3"),
        ({}, "prompt needs one of the keys prompt and prompt_token_ids"),
        (
            {"prompt_token_ids": [1], "multi_modal_data": {}},
            "unknown key 'multi_modal_data'; allowed: prompt,",
        ),
        ({"prompt_token_ids": [1], "cache_salt": ""}, "cache_salt must be a text that is not empty"),
    ],
)
def test_other_prompts_are_refused(prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        add(prompt)


def test_a_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt 'w1' is a text, and there is no tokenizer"):
        add("w1", texts=None)


@pytest.mark.parametrize("num_tokens", [15, 16, 17])
def test_43_prompt_at_the_edge_of_the_window(num_tokens: int) -> None:
    """One token of room is enough; a prompt without is refused, and nothing is queued."""
    engine, client = scripted_engine(config=engine_config(max_model_len=16))
    if num_tokens == 15:
        engine.add_request("r", [1] * num_tokens, SamplingParams(max_tokens=None))
        assert client.requests["r"].sampling_params.max_tokens == 1
    else:
        with pytest.raises(ValueError, match=f"prompt of {num_tokens} tokens .* max_model_len is 16"):
            engine.add_request("r", [1] * num_tokens, SamplingParams())
        assert not client.requests


def test_what_the_pool_can_never_hold_is_refused() -> None:
    engine, _ = scripted_engine(config=engine_config(max_model_len=16, usable_blocks=3))
    engine.add_request("fits", [1] * 8, SamplingParams(max_tokens=5))
    with pytest.raises(ValueError, match="need 4 blocks; the pool has 3 usable ones"):
        engine.add_request("r", [1] * 8, SamplingParams(max_tokens=6))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"allowed_token_ids": [5, 64]}, r"allowed_token_ids\[1\] is 64: outside the vocabulary, 0 to 63"),
        ({"logit_bias": {-3: 1.0}}, "logit_bias has token id -3: outside"),
        ({"stop_token_ids": [99]}, r"stop_token_ids\[0\] is 99"),
        ({"bad_words_token_ids": [[1, 2], [70]]}, r"bad_words_token_ids\[1\]\[0\] is 70"),
        ({"bad_words": [" "]}, "bad_words: ' ' has no tokens"),
        ({"logprobs": 21}, "logprobs 21 asks for more than the engine's max_logprobs 20"),
        ({"logprobs": -1}, "logprobs -1 asks for more"),
        ({"min_tokens": 62, "max_tokens": 63}, "min_tokens 62 cannot be reached"),
        ({"bad_words_token_ids": [[i] for i in range(VOCAB_SIZE)]}, "bad_words ban the whole vocabulary"),
    ],
)
def test_sampling_parameters_that_cannot_be_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        add([1, 2, 0], **params)


@pytest.mark.parametrize("params", [{"stop": "x"}, {"bad_words": ["x"]}])
def test_texts_in_sampling_parameters_need_a_tokenizer(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(params))} \['x'\] .* tokenizer"):
        add([1], texts=None, **params)


def test_sampling_parameters_of_another_type_are_refused() -> None:
    engine, _ = scripted_engine()
    with pytest.raises(ValueError, match="must be SamplingParams, got dict"):
        engine.add_request("r", [1], {"temperature": 0})  # type: ignore[arg-type]


def test_what_policies_go_by_goes_to_the_engine_and_nothing_else_is_taken() -> None:
    engine, client = scripted_engine()
    engine.add_request("r", [1], SamplingParams(), priority=3, client_id="c", predicted_output_tokens=7)
    made = client.requests["r"]
    assert (made.priority, made.client_id, made.predicted_output_tokens) == (3, "c", 7)
    with pytest.raises(TypeError, match="prioritee"):
        engine.add_request("s", [1], SamplingParams(), prioritee=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(("max_logprobs", "logprobs"), [(20, 20), (0, 0), (-1, -1), (-1, 64), (64, -1)])
def test_as_many_logprobs_as_the_engine_gives(max_logprobs: int, logprobs: int) -> None:
    engine, client = scripted_engine(max_logprobs=max_logprobs)
    engine.add_request("r", [1], SamplingParams(logprobs=logprobs))
    assert client.requests["r"].sampling_params.logprobs == logprobs


@pytest.mark.parametrize(("ignore_eos", "stops"), [(False, [EXTRA_EOS, 9]), (True, [9])])
def test_further_end_of_sequence_tokens_stop_unless_ignored(ignore_eos: bool, stops: list[int]) -> None:
    assert EOS not in stops
    made = add([1], ignore_eos=ignore_eos, stop_token_ids=[9]).sampling_params
    assert made.stop_token_ids == stops


@pytest.mark.parametrize(
    ("pre_tokenizer", "banned"),
    [
        (pre_tokenizers.Metaspace(prepend_scheme="never"), [[3], [2]]),
        (pre_tokenizers.WhitespaceSplit(), [[3]]),
    ],
)
def test_a_bad_word_is_banned_at_the_beginning_and_behind_a_space(
    pre_tokenizer: pre_tokenizers.PreTokenizer, banned: list[list[int]]
) -> None:
    """The second one only where the space makes another token of it, as in vLLM."""
    tokenizer = tokenizer_of(["?", "ab ab", "▁ab", "ab"])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer
    engine, client = scripted_engine(tokenizer)
    engine.add_request("r", [1], SamplingParams(bad_words=[" ab"]))
    assert client.requests["r"].sampling_params.bad_words_token_ids == banned


@pytest.mark.parametrize(
    ("request_id", "options", "message"),
    [
        (5, {}, "request_id must be a text that is not empty, got 5"),
        ("", {}, "request_id must be a text"),
        ("a\ud800", {}, "request_id 'a\\\\ud800' is not valid Unicode"),
        ("r", {"priority": 1.5}, "priority must be an integer, got 1.5"),
        ("r", {"priority": 2**70}, "priority must fit into 64 bits"),
        ("r", {"client_id": 5}, "client_id must be a text"),
        ("r", {"predicted_output_tokens": 0}, "predicted_output_tokens must be 1 or more, got 0"),
        ("r", {"arrival_time": float("nan")}, "arrival_time must be seconds since the epoch, got nan"),
        ("r", {"arrival_time": "now"}, "arrival_time must be a number, got 'now'"),
    ],
)
def test_what_could_not_travel_to_the_engine_is_refused(
    request_id: Any, options: dict[str, Any], message: str
) -> None:
    """A message that the engine cannot read would end it, and every other request with it."""
    engine, client = scripted_engine()
    with pytest.raises(ValueError, match=message):
        engine.add_request(request_id, [1], SamplingParams(), **options)
    assert not client.requests
    assert not engine.has_unfinished_requests()


def test_numbers_beyond_64_bits_are_refused() -> None:
    engine, _ = scripted_engine()
    for params in ({"seed": 2**70}, {"top_k": 2**70}, {"max_tokens": 2**70}):
        with pytest.raises(ValueError, match="must fit into 64 bits"):
            engine.add_request("r", [1], SamplingParams(**params))


def test_a_request_that_cannot_be_sent_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the second of its children is the one that fails."""
    engine, client = scripted_engine()
    send = client.add_request

    def fails_at_the_second(request: EngineCoreRequest) -> None:
        if request.request_id.startswith("1_"):
            raise TypeError("cannot be encoded")
        send(request)

    monkeypatch.setattr(client, "add_request", fails_at_the_second)
    with pytest.raises(TypeError, match="cannot be encoded"):
        engine.add_request("r", [1], SamplingParams(n=3))
    assert not engine.has_unfinished_requests()
    assert "0_r" in client.aborted
    engine.add_request("r", [1], SamplingParams())
