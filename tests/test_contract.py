"""Plans survive every way of being sent: pickle, JSON, a file."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import numpy as np
import orjson
import pytest

from servetwin.sim.contract import RequestOutputKind, SamplingParams, from_json, to_json
from servetwin.sim.decide import ScenarioLoop
from servetwin.sim.scenario import read_scenario

GOLDEN = Path(__file__).parent / "golden"


def plans_of(name: str) -> list:  # type: ignore[type-arg]
    """The plans of a recorded scenario, as our scheduler makes them."""
    loop = ScenarioLoop(read_scenario(GOLDEN / f"{name}.scenario.json"))
    plans = []
    begin = loop.core.begin

    def recording(now: int):  # type: ignore[no-untyped-def]
        frame = begin(now)
        if frame is not None:
            plans.append(pickle.loads(pickle.dumps(frame.plan)))
        return frame

    loop.core.begin = recording  # type: ignore[method-assign]
    for _ in loop.lines():
        pass
    return plans


@pytest.mark.parametrize("name", ["s07_priority_preempt", "s11_aborts"])
def test_json_is_loss_free(name: str) -> None:
    """Preempted, resumed, aborted and starved requests included: from_json(to_json(plan)) == plan, through text."""
    plans = plans_of(name)
    with gzip.open(GOLDEN / f"{name}.expected.jsonl.gz", "rt") as f:
        assert len(plans) == sum(1 for _ in f)
    for plan in plans:
        assert from_json(orjson.loads(orjson.dumps(to_json(plan)))) == plan


def test_sets_are_written_sorted() -> None:
    """The same plan gives the same text, whatever the order of its sets."""
    plan = next(p for p in plans_of("s11_aborts") if len(p.finished_req_ids) > 1)
    written = to_json(plan)["finished_req_ids"]
    assert written == sorted(written)


@pytest.mark.parametrize(
    "damage", [{"num_scheduled_tokens": None}, {"unknown": 1}, {"scheduled_cached_reqs": {}}]
)
def test_what_is_no_plan_is_refused(damage: dict[str, object]) -> None:
    """A missing or unknown field is named."""
    data = to_json(plans_of("s05_prefix_shared")[0])
    if damage == {"num_scheduled_tokens": None}:
        del data["num_scheduled_tokens"]
    else:
        data |= damage
    with pytest.raises(
        ValueError, match=r"not a scheduler plan: .*(num_scheduled_tokens|unknown|resumed_req_ids)"
    ):
        from_json(json.loads(json.dumps(data)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("n", 0),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("presence_penalty", -2.5),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("logprobs", -2),
    ],
)
def test_sampling_values_outside_their_range_raise(field: str, value: float) -> None:
    """The message names the field and the value."""
    with pytest.raises(ValueError, match=f"{field}.*{value}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": ""}, "stop must not hold an empty string"),
        ({"stop": ["x"], "detokenize": False}, "stop strings .* need detokenize"),
        ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
        ({"logit_bias": {7: float("inf")}}, "logit_bias must hold finite numbers, got inf for token 7"),
        ({"bad_words": [""]}, "bad_words must not hold an empty word"),
        ({"bad_words_token_ids": [[]]}, "bad_words must not hold an empty word"),
        ({"n": 2, "temperature": 0.0}, "n must be 1 with greedy sampling"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens 4 is above max_tokens 3"),
    ],
)
def test_sampling_settings_that_contradict_themselves_raise(params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)  # type: ignore[arg-type]


def test_an_argument_that_sampling_has_not_got_is_named() -> None:
    with pytest.raises(TypeError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"max_tokens": True}, "max_tokens must be an integer, got True"),
        ({"logprobs": True}, "logprobs must be an integer"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"stop": 5}, "stop must be a list of texts, got 5"),
        ({"stop": ["a", 1]}, r"stop\[1\] must be a text, got 1"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, got 5"),
        ({"allowed_token_ids": [5.5]}, r"allowed_token_ids\[0\] must be an integer, got 5.5"),
        ({"bad_words": "abc"}, "bad_words must be a list of texts, got 'abc'"),
        ({"logit_bias": [1]}, "logit_bias must be a dict"),
        ({"logit_bias": {5: "a"}}, r"logit_bias\[5\] must be a number, got 'a'"),
        ({"output_kind": 5}, "output_kind must be one of CUMULATIVE"),
        ({"n": 2**20}, "n must be 1 to 16384, got 1048576"),
    ],
)
def test_sampling_values_of_another_type_raise(params: dict[str, object], message: str) -> None:
    """They would fail in the engine otherwise, at the cost of every other request."""
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)  # type: ignore[arg-type]


def test_what_means_the_same_is_taken() -> None:
    """Numbers of numpy, other kinds of lists, keys of JSON, None for nothing."""
    params = SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        stop=("a", "b"),
        stop_token_ids=None,  # type: ignore[arg-type]
        allowed_token_ids=np.array([5, 6]),  # type: ignore[arg-type]
        logit_bias={"5": 1},  # type: ignore[dict-item]
        output_kind=1,  # type: ignore[arg-type]
    )
    assert type(params.max_tokens) is int
    assert type(params.temperature) is float
    assert (params.stop_strings, params.stop_token_ids) == (["a", "b"], [])
    assert (params.allowed_token_ids, params.logit_bias) == ([5, 6], {5: 1.0})
    assert params.output_kind is RequestOutputKind.DELTA


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="x").stop_strings == ["x"]
    assert SamplingParams().stop_strings == []


def test_sampling_parameters_survive_json() -> None:
    """Keys of objects and enumerations, which JSON has not got, come back as what they were."""
    params = SamplingParams(
        logit_bias={3: 1.5},
        output_kind=RequestOutputKind.DELTA,
        stop=["a"],
        bad_words_token_ids=[[1, 2]],
        logprobs=0,
    )
    plan = plans_of("s05_prefix_shared")[0]
    plan.scheduled_new_reqs[0].sampling_params = params
    assert from_json(orjson.loads(orjson.dumps(to_json(plan)))) == plan


def test_a_tiny_temperature_is_raised_with_a_warning() -> None:
    """Report 35: dividing by it would overflow; 0 itself stays greedy."""
    with pytest.warns(UserWarning, match=r"temperature 1e-06 is raised to 0.01"):
        assert SamplingParams(temperature=1e-6).temperature == 0.01
    assert SamplingParams(temperature=0.0).greedy
