"""What the engine core says (tokens) becomes what the user gets (RequestOutput)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra `executor`")

from front_ends import EOS, ask, first, later, logprobs_of, scripted_engine

from servetwin.executor.outputs import Logprob, RequestOutput
from servetwin.sim.contract import EngineCoreEvent, RequestOutputKind, SamplingParams

DELTA, CUMULATIVE, FINAL_ONLY = (
    RequestOutputKind.DELTA,
    RequestOutputKind.CUMULATIVE,
    RequestOutputKind.FINAL_ONLY,
)


def params(kind: RequestOutputKind = CUMULATIVE, **given: Any) -> SamplingParams:
    return SamplingParams(output_kind=kind, max_tokens=None, **given)


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_cumulative_outputs_hold_everything_so_far() -> None:
    outputs, _ = ask(params(), [4, 5, 6])
    assert texts(outputs) == ["w4", "w4w5", "w4w5w6"]
    assert [output.outputs[0].token_ids for output in outputs] == [[4], [4, 5], [4, 5, 6]]
    assert not any(output.finished for output in outputs)


def test_deltas_hold_what_is_new() -> None:
    outputs, _ = ask(params(DELTA), [4, 5, 6])
    assert texts(outputs) == ["w4", "w5", "w6"]
    assert [output.outputs[0].token_ids for output in outputs] == [[4], [5], [6]]


def test_final_only_says_everything_once() -> None:
    engine, client = scripted_engine()
    engine.add_request("r", [1], params(FINAL_ONLY))
    client.say(first("r", [4]))
    client.say(later("r", [5], finish_reason="length"))
    assert engine.step() == []
    (output,) = engine.step()
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.finished) == (
        "w4w5",
        "length",
        True,
    )
    assert not engine.has_unfinished_requests()


def test_outputs_of_several_steps_taken_at_once_make_one_output_for_each_request() -> None:
    engine, client = scripted_engine()
    for request_id in ("a", "b"):
        engine.add_request(request_id, [1], params(DELTA))
    client.say(first("a", [4]), first("b", [5]), later("a", [6]))
    made = engine.step()
    assert [(output.request_id, output.outputs[0].token_ids) for output in made] == [
        ("a", [4, 6]),
        ("b", [5]),
    ]


def test_a_delta_without_text_still_has_its_tokens() -> None:
    """Text that may become a stop string is held back; the last delta gives it out."""
    engine, client = scripted_engine()
    engine.add_request("r", [1], params(DELTA, stop="w5w6x"))
    client.say(first("r", [4]))
    client.say(later("r", [5]))
    client.say(later("r", [7], finish_reason="length"))
    made = [engine.step()[0].outputs[0] for _ in range(3)]
    assert [output.token_ids for output in made] == [[4], [5], [7]]
    assert [output.text for output in made] == ["", "", "w4w5w7"]


def test_a_stop_string_ends_the_request_here_and_in_the_engine() -> None:
    outputs, client = ask(params(stop=["w5"]), [4, 5, 6, 7])
    last = outputs[-1]
    assert (len(outputs), last.finished) == (2, True)
    assert (last.outputs[0].text, last.outputs[0].token_ids) == ("w4", [4, 5])
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", "w5")
    assert client.aborted == ["r"]


def test_a_stop_string_in_the_very_last_token_outranks_length_and_aborts_nothing() -> None:
    engine, client = scripted_engine()
    engine.add_request("r", [1], params(stop=["w5"]))
    client.say(first("r", [5], finish_reason="length"))
    (output,) = engine.step()
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "w5")
    assert client.aborted == []


@pytest.mark.parametrize(("keep", "text"), [(False, "w4"), (True, "w4w2")])
def test_the_end_of_sequence_token_counts_and_is_not_shown(keep: bool, text: str) -> None:
    engine, client = scripted_engine()
    engine.add_request("r", [1], params(include_stop_str_in_output=keep))
    client.say(first("r", [4, EOS], finish_reason="stop"))
    (output,) = engine.step()
    made = output.outputs[0]
    assert (made.text, made.token_ids, made.finish_reason, made.stop_reason) == (
        text,
        [4, EOS],
        "stop",
        None,
    )


def test_a_stop_token_is_the_stop_reason() -> None:
    engine, client = scripted_engine()
    engine.add_request("r", [1], params(stop_token_ids=[9]))
    client.say(first("r", [4, 9], finish_reason="stop", stop_reason=9))
    assert engine.step()[0].outputs[0].stop_reason == 9


def test_a_token_has_its_log_probabilities_and_their_sum_is_kept() -> None:
    engine, client = scripted_engine()
    engine.add_request("r", [1], params(logprobs=1))
    client.say(first("r", [4, 0], logprobs=logprobs_of([4, 0])))
    made = engine.step()[0].outputs[0]
    assert made.cumulative_logprob == -4.0
    assert made.logprobs is not None
    assert made.logprobs[0] == {4: Logprob(-2.0, 2, "w4"), 0: Logprob(-1.0, 1, "w0")}


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_31_side_lists_are_as_long_as_the_tokens(kind: RequestOutputKind) -> None:
    """Also where a stop string cuts the tokens of a step."""
    engine, client = scripted_engine()
    engine.add_request("r", [1], params(kind, logprobs=0, stop="w6"))
    client.say(first("r", [4], logprobs=logprobs_of([4])))
    client.say(later("r", [5, 6, 7], logprobs=logprobs_of([5, 6, 7])))
    for output in engine.step() + engine.step():
        made = output.outputs[0]
        assert made.logprobs is not None
        assert [next(iter(entry)) for entry in made.logprobs] == made.token_ids
    assert made.token_ids[-2:] == [5, 6]


def test_without_a_tokenizer_there_is_no_text() -> None:
    engine, client = scripted_engine(None)
    engine.add_request("r", [1], params(logprobs=0))
    client.say(first("r", [4], logprobs=logprobs_of([4]), finish_reason="length"))
    made = engine.step()[0].outputs[0]
    assert (made.text, made.token_ids) == ("", [4])
    assert made.logprobs is not None
    assert made.logprobs[0][4].decoded_token is None


def test_detokenize_false_makes_no_text() -> None:
    outputs, _ = ask(params(detokenize=False), [4, 5])
    assert texts(outputs) == ["", ""]


# ---------------------------------------------------------------- n outputs


def test_n_outputs_are_gathered_in_order_of_their_index() -> None:
    engine, client = scripted_engine()
    engine.add_request("r", [1], params(FINAL_ONLY, n=3, seed=7))
    assert [r.sampling_params.seed for r in client.requests.values()] == [7, 8, 9]
    assert {r.sampling_params.n for r in client.requests.values()} == {1}
    client.say(first("2_r", [6], finish_reason="length"), first("0_r", [4]), first("1_r", [5]))
    client.say(later("1_r", [5], finish_reason="length"), later("0_r", [4], finish_reason="stop"))
    assert engine.step() == []
    assert engine.get_num_unfinished_requests() == 1
    (output,) = engine.step()
    assert [(made.index, made.token_ids) for made in output.outputs] == [(0, [4, 4]), (1, [5, 5]), (2, [6])]
    assert output.metrics.num_generation_tokens == 5


def test_deltas_of_n_outputs_hold_those_that_have_news() -> None:
    engine, client = scripted_engine()
    engine.add_request("r", [1], params(DELTA, n=2))
    client.say(first("1_r", [6], finish_reason="length"))
    client.say(first("0_r", [4], finish_reason="length"))
    made = engine.step() + engine.step()
    assert [[output.index for output in one.outputs] for one in made] == [[1], [0]]
    assert [one.finished for one in made] == [False, True]


def test_outputs_without_a_seed_have_streams_of_their_own() -> None:
    """Each is named by its id."""
    engine, client = scripted_engine()
    engine.add_request("r", [1], params(n=2))
    assert [r.sampling_params.seed for r in client.requests.values()] == [None, None]
    assert list(client.requests) == ["0_r", "1_r"]


# ---------------------------------------------------------------- ids, aborts, errors


def test_an_id_in_use_is_refused() -> None:
    engine, _ = scripted_engine()
    engine.add_request("r", [1], params(n=2))
    for taken in ("r", "1_r"):
        with pytest.raises(ValueError, match=f"request_id '{taken}' is in use"):
            engine.add_request(taken, [1], params())


def test_an_aborted_request_says_nothing_more() -> None:
    engine, client = scripted_engine()
    engine.add_request("a", [1], params(n=2))
    engine.add_request("b", [1], params())
    client.say(first("0_a", [4], finish_reason="length"), first("b", [5]))
    engine.step()
    engine.abort_request(["a", "a", "nobody"])
    assert client.aborted == ["1_a"]
    client.say(later("1_a", [6]), later("b", [7]))
    assert [output.request_id for output in engine.step()] == ["b"]


def test_what_was_on_its_way_when_an_id_came_back_belongs_to_the_request_before() -> None:
    engine, client = scripted_engine()
    engine.add_request("r", [1], params())
    old = first("r", [4]), later("r", [5], finish_reason="length")
    engine.abort_request("r")
    engine.add_request("r", [1], params())
    client.say(*old, first("r", [6], finish_reason="length"))
    assert engine.step()[0].outputs[0].token_ids == [6]


def test_what_the_engine_refuses_ends_with_its_reason() -> None:
    engine, client = scripted_engine()
    engine.add_request("r", [1], params())
    client.say(later("r", [], finish_reason="error", error="too large"))
    (output,) = engine.step()
    assert (output.outputs[0].finish_reason, output.error, output.finished) == ("error", "too large", True)


def test_a_tokenizer_that_fails_ends_only_the_request_it_failed_on() -> None:
    engine, client = scripted_engine()
    for request_id in ("bad", "good"):
        engine.add_request(request_id, [1], params())
    client.say(first("bad", [-1]), first("good", [4]))
    bad, good = engine.step()
    assert bad.finished
    assert bad.outputs[0].finish_reason == "error"
    assert "token -1 cannot be decoded" in (bad.error or "")
    assert good.outputs[0].text == "w4"
    assert client.aborted == ["bad"]


# ---------------------------------------------------------------- times and counts


def test_times_and_counts_come_from_the_events_of_the_engine() -> None:
    engine, client = scripted_engine()
    engine.add_request("r", "w1 w2", params(FINAL_ONLY), arrival_time=1e9)
    (request,) = client.requests.values()
    told = first("r", [4], num_cached_tokens=1)
    told.events.append(EngineCoreEvent("preempted", told.events[0].timestamp_ns + 5))
    client.say(told)
    client.say(later("r", [5], finish_reason="length", num_cached_tokens=9))
    engine.step()
    (output,) = engine.step()
    stats = output.metrics
    assert stats.arrival_time == 1e9
    assert request.arrival_ns < told.events[0].timestamp_ns
    assert stats.queued_ts == stats.scheduled_ts == told.events[0].timestamp_ns / 1e9
    assert stats.queued_ts <= stats.first_token_ts <= stats.last_token_ts
    assert stats.first_token_latency > 0
    assert (stats.num_generation_tokens, stats.num_preemptions) == (2, 1)
    assert output.num_cached_tokens == 1
    assert (output.prompt, output.prompt_token_ids) == ("w1 w2", [1, 2])


def test_an_engine_with_nothing_left_to_do_while_requests_wait_is_an_error() -> None:
    engine, _ = scripted_engine()
    assert engine.step() == []
    engine.add_request("r", [1], params())
    assert engine.step(timeout_s=0) == []
    with pytest.raises(RuntimeError, match=r"nothing left to do.*'r'"):
        engine.step()
