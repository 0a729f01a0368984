"""`LLM` on real models: in a child process, and in this one where a test ends or interrupts its engine."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra `executor`")

from front_ends import save_words
from transformers import ByT5Tokenizer

from servetwin.executor import LLM, EngineArgs, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from servetwin.executor.testing import TINY_VOCAB_SIZE, tiny_model
from servetwin.executor.tokenizer import fast_tokenizer
from servetwin.sim.contract import EngineDeadError

LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_gpu_blocks_override": 60,
    "max_model_len": 128,
}
PROMPTS = ["w1 w2 w3", "w9", "w5 w6 w7 w8 w9 w10 w11 w12 w13 w14"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama; token i of its tokenizer is the word `w{i}`."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", attention="sdpa").save_pretrained(folder)
    save_words(folder, TINY_VOCAB_SIZE)
    return folder


def in_process(model: Path, **more: Any) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERVETWIN_ENABLE_MULTIPROCESSING", "0")
        return LLM(model, **{**LIMITS, **more})


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    """In a child process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SERVETWIN_ENABLE_MULTIPROCESSING", raising=False)
        with LLM(model, **LIMITS) as made:
            yield made


@pytest.fixture(scope="module")
def local(model: Path) -> Iterator[LLM]:
    """In this process."""
    with in_process(model) as made:
        yield made


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def joined_ids(deltas: Iterable[RequestOutput]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.outputs[0].token_ids]


def words(ids: list[int]) -> str:
    return "".join(f" w{i}" for i in ids)


# ---------------------------------------------------------------- generate


def test_texts_come_out_in_the_order_of_the_prompts(llm: LLM) -> None:
    """Also when the first one takes longest; each has its own parameters."""
    lengths = (12, 3, 6)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(PROMPTS, params)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(ids) for ids in token_ids(outputs)] == [*lengths]
    for output in outputs:
        made = output.outputs[0]
        assert made.text == words(made.token_ids)
        assert (made.finish_reason, made.stop_reason, output.finished) == ("length", None, True)


@pytest.mark.parametrize("prompt", [PROMPTS[0], [1, 2, 3], {"prompt_token_ids": [1, 2, 3]}])
def test_a_single_prompt_needs_no_list(llm: LLM, prompt: Any) -> None:
    assert token_ids(llm.generate(prompt, GREEDY)) == token_ids(llm.generate(PROMPTS[:1], GREEDY))


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_the_child_process_gives_what_this_process_gives(llm: LLM, local: LLM) -> None:
    seeded = SamplingParams(temperature=0.9, top_k=30, seed=5, max_tokens=12, logprobs=2, ignore_eos=True)
    for params in (GREEDY, seeded):
        there, here = llm.generate(PROMPTS, params), local.generate(PROMPTS, params)
        assert token_ids(there) == token_ids(here)
        assert [o.outputs[0].text for o in there] == [o.outputs[0].text for o in here]


def test_two_engines_in_one_process_do_not_meet(llm: LLM, local: LLM) -> None:
    """Streams of both, read in turn, with requests of the same ids."""
    expected = token_ids(llm.generate(PROMPTS[:1], GREEDY))[0]
    streams = [llm.stream(PROMPTS[0], GREEDY), local.stream(PROMPTS[0], GREEDY)]
    seen: list[list[int]] = [[], []]
    for deltas in zip(*streams, strict=False):
        for ids, delta in zip(seen, deltas, strict=True):
            ids += delta.outputs[0].token_ids
    for ids, stream in zip(seen, streams, strict=True):
        ids += joined_ids(stream)
        assert expected[: len(ids)] == ids
    assert not llm.llm_engine.has_unfinished_requests()


def test_nothing_is_queued_when_one_prompt_of_many_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompts\[2\]: prompt_token_ids\[1\] is 999: outside"):
        llm.generate([[1], [2], [3, 999]], GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sampling_params": [GREEDY]}, "sampling_params has 1 entries for 2 prompts"),
        ({"priority": [1, 2, 3]}, "priority has 3 entries for 2 prompts"),
    ],
)
def test_lists_must_be_as_long_as_the_prompts(llm: LLM, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(["w1", "w2"], **given)


def test_prompts_of_another_kind_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompts must be a prompt or a list of prompts, got 3"):
        llm.generate(3)  # type: ignore[arg-type]


def test_a_stop_string_ends_the_text_and_frees_the_blocks(llm: LLM) -> None:
    ids = token_ids(llm.generate(PROMPTS[:1], GREEDY))[0]
    stop = f"w{ids[3]} w{ids[4]}"
    (output,) = llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=100, stop=stop))
    made = output.outputs[0]
    assert (made.token_ids, made.text) == (ids[:5], words(ids[:3]) + " ")
    assert (made.finish_reason, made.stop_reason) == ("stop", stop)
    assert llm.reset_prefix_cache()


def test_log_probabilities_are_raw_and_hold_the_token_taken(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=8, seed=1, logprobs=3, ignore_eos=True))
    made = output.outputs[0]
    assert made.logprobs is not None
    assert [next(iter(entry)) for entry in made.logprobs] == made.token_ids
    for entry in made.logprobs:
        assert len(entry) in (3, 4)
        assert all(p.logprob <= 0 and p.rank >= 1 for p in entry.values())
        assert {p.rank for p in entry.values()} >= {1, 2, 3}
        assert all(p.decoded_token == f"w{token_id}" for token_id, p in entry.items())
    taken = [entry[t].logprob for entry, t in zip(made.logprobs, made.token_ids, strict=True)]
    assert made.cumulative_logprob == pytest.approx(sum(taken))


def test_n_outputs_are_those_of_seeds_counted_up(llm: LLM) -> None:
    params = {"max_tokens": 8, "ignore_eos": True}
    (output,) = llm.generate(PROMPTS[:1], SamplingParams(n=3, seed=40, **params))
    singles = [llm.generate(PROMPTS[:1], SamplingParams(seed=40 + i, **params)) for i in range(3)]
    assert [made.index for made in output.outputs] == [0, 1, 2]
    assert [made.token_ids for made in output.outputs] == [token_ids(single)[0] for single in singles]


def test_times_of_a_request_are_in_order(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[:1], GREEDY)
    stats = output.metrics
    assert 0 < stats.queued_ts <= stats.scheduled_ts <= stats.first_token_ts <= stats.last_token_ts
    assert stats.num_generation_tokens == 12


def test_progress_is_shown_on_stderr_when_wanted(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    assert capsys.readouterr() == ("", "")
    llm.generate(PROMPTS, GREEDY, use_tqdm=True)
    out, err = capsys.readouterr()
    assert (out, "3/3" in err) == ("", True)


# ---------------------------------------------------------------- stream


def test_deltas_put_together_are_the_whole_output(llm: LLM) -> None:
    whole = llm.generate(PROMPTS, GREEDY)
    parts: dict[str, list[RequestOutput]] = {}
    for output in llm.stream(PROMPTS, GREEDY):
        parts.setdefault(output.request_id, []).append(output)
    for expected, request_id in zip(whole, sorted(parts, key=int), strict=True):
        deltas = parts[request_id]
        assert len(deltas) > 1
        assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert "".join(delta.outputs[0].text for delta in deltas) == expected.outputs[0].text
        assert joined_ids(deltas) == expected.outputs[0].token_ids


def test_a_stream_can_be_cumulative(llm: LLM) -> None:
    outputs = list(llm.stream(PROMPTS[0], GREEDY, output_kind=RequestOutputKind.CUMULATIVE))
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == 12


def test_a_stream_checks_at_once_and_queues_when_it_is_read(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompts\[0\]: .* outside the vocabulary"):
        llm.stream([999])
    llm.stream(PROMPTS, GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()


def test_closing_a_stream_aborts_what_is_left(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(list(islice(stream, 2))) == 2
    stream.close()
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.reset_prefix_cache(), "an aborted request holds no block"


def test_an_open_stream_loses_nothing_to_another_call(llm: LLM) -> None:
    expected = token_ids(llm.generate(PROMPTS, GREEDY))
    stream = llm.stream(PROMPTS[0], GREEDY)
    ids = [*next(stream).outputs[0].token_ids]
    assert token_ids(llm.generate(PROMPTS[1:], GREEDY)) == expected[1:]
    ids += joined_ids(stream)
    assert ids == expected[0]


# ---------------------------------------------------------------- chat


def test_a_conversation_becomes_a_prompt_by_the_chat_template(llm: LLM) -> None:
    template = (
        "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
    )
    messages = [{"role": "system", "content": "w1 w2"}, {"role": "user", "content": "w3"}]
    one = llm.chat(messages, GREEDY, chat_template=template)
    several = llm.chat([messages, messages[:1]], GREEDY, chat_template=template, add_generation_prompt=False)
    assert one[0].prompt_token_ids == [1, 2, 3, 9]
    assert [output.prompt_token_ids for output in several] == [[1, 2, 3], [1, 2]]
    assert token_ids(one) == token_ids(llm.generate("w1 w2 w3 w9", GREEDY))


@pytest.mark.parametrize(
    ("messages", "template", "message"),
    [
        ([{"role": "user", "content": "w1"}], None, "has no chat template: give chat_template"),
        ([{"role": "user"}], "{{ 1 }}", "number 0 of conversation 0 must be a dict with role and content"),
        (["w1"], "{{ 1 }}", "must be a dict with role and content"),
        (
            [{"role": "user", "content": "w1"}],
            "{{ raise_exception('no user') }}",
            "not take these messages: no user",
        ),
    ],
)
def test_conversations_that_cannot_be_are_refused(
    llm: LLM, messages: Any, template: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, chat_template=template)


# ---------------------------------------------------------------- the engine's arguments, its end


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_num_seq", "did you mean max_num_seqs?"),
        ("swap_space", "vLLM has it, and it is not modelled here"),
        ("no_such_argument", "LLM has no argument no_such_argument$"),
    ],
)
def test_an_unknown_argument_is_refused_by_name(tmp_path: Path, name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"LLM has no argument {name}.*" if hint.endswith("$") else hint):
        LLM(tmp_path, **{name: 1})


def test_a_tokenizer_that_is_not_fast_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"tokenizer ByT5Tokenizer .* is not a fast one"):
        fast_tokenizer(ByT5Tokenizer())


def test_a_folder_without_a_tokenizer_is_refused_where_one_was_asked_for(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder with a tokenizer"):
        LLM(model, tokenizer=tmp_path)


def test_token_ids_need_no_tokenizer(model: Path, local: LLM) -> None:
    with in_process(model, skip_tokenizer_init=True) as bare:
        (output,) = bare.generate([[1, 2, 3]], GREEDY)
        assert (output.outputs[0].text, output.prompt) == ("", None)
        assert [output.outputs[0].token_ids] == token_ids(local.generate(PROMPTS[:1], GREEDY))
        with pytest.raises(ValueError, match="there is no tokenizer"):
            bare.get_tokenizer()


def test_after_its_end_an_engine_serves_nobody(model: Path) -> None:
    with in_process(model) as made:
        stream = made.stream(PROMPTS[0], GREEDY)
        next(stream)
    made.shutdown()
    for call in (lambda: made.generate("w1"), lambda: next(stream)):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()


@pytest.fixture
def no_gc_callbacks() -> Iterator[None]:
    """Hypothesis watches the garbage collector, and Python drops what is raised in such a callback."""
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks


@pytest.mark.usefixtures("no_gc_callbacks")
def test_ctrl_c_ends_the_engine_and_is_passed_on(model: Path) -> None:
    with in_process(model) as made:
        ctrl_c = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        ctrl_c.start()
        with pytest.raises(KeyboardInterrupt):
            made.generate(["w1"] * 1000, SamplingParams(max_tokens=100, ignore_eos=True))
        ctrl_c.join()
        with pytest.raises(EngineDeadError):
            made.generate("w1")


def test_an_engine_is_a_context_manager_of_its_own(model: Path) -> None:
    args = EngineArgs(model=model, **LIMITS)
    with LLMEngine.from_engine_args(args, multiprocess=False) as engine:
        assert engine.engine_config.cache.num_gpu_blocks == 60
        assert engine.get_tokenizer().encode("w7") == [7]
        engine.add_request("r", "w1 w2", SamplingParams(max_tokens=3, ignore_eos=True), priority=1)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    assert outputs[-1].finished


def test_a_trained_model_writes_text(tmp_path: Path) -> None:
    """What is streamed, put together, is what the tokenizer makes of all tokens at once."""
    pytest.importorskip("glassllm", reason="needs the extra `models`")
    from servetwin.executor.glassllm import convert

    prompt = "Once upon a time"
    with in_process(convert(tmp_path / "glass"), max_model_len=96) as made:
        params = SamplingParams(temperature=0, max_tokens=40)
        deltas = list(made.stream(prompt, params))
        text = "".join(delta.outputs[0].text for delta in deltas)
        ids = joined_ids(deltas)
        assert prompt + text == made.get_tokenizer().decode(deltas[0].prompt_token_ids + ids)
        assert "." in text
        (output,) = made.generate(prompt, SamplingParams(temperature=0, max_tokens=40, stop=["."]))
    assert output.outputs[0].text == text[: text.index(".")]
    assert output.outputs[0].stop_reason == "."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"async_scheduling": "maybe"}, "async_scheduling 'maybe'"),
        ({"performance_mode": "x"}, "performance_mode 'x'"),
        ({"max_logprobs": None}, "max_logprobs None"),
        ({"max_logprobs": -5}, "max_logprobs -5"),
        ({"speculative_config": [1]}, "speculative_config"),
        ({"scheduling_policy": None}, "scheduling_policy None"),
    ],
)
def test_values_of_another_type_are_refused_before_anything_starts(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("no/such/model", **arguments)


def test_zero_is_false_for_a_switch() -> None:
    assert EngineArgs(model="m", async_scheduling=0).async_scheduling is False  # type: ignore[arg-type]


def test_a_list_of_parameters_has_one_for_each_prompt(llm: LLM) -> None:
    with pytest.raises(ValueError, match="sampling_params has 0 entries for 1 prompts"):
        llm.generate("w1", [])


def test_arrays_and_iterators_are_lists_of_prompts(llm: LLM) -> None:
    expected = llm.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids
    for prompts in (np.array([1, 2]), [np.int64(1), np.int64(2)], iter([[1, 2]]), np.array([[1, 2]])):
        assert llm.generate(prompts, GREEDY)[0].outputs[0].token_ids == expected  # type: ignore[arg-type]


def test_arguments_of_vllm_that_change_nothing_are_taken(model: Path) -> None:
    with in_process(model, tensor_parallel_size=1, trust_remote_code=True) as made:
        assert len(made.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids) == 12
    with pytest.raises(ValueError, match="tensor_parallel_size 2 is not modelled here; allowed is 1"):
        LLM(model, tensor_parallel_size=2)


def test_threads_may_share_one(llm: LLM) -> None:
    """Each gets the outputs of its own prompts."""
    expected = {i: llm.generate([[i, i + 1]], GREEDY)[0].outputs[0].token_ids for i in range(1, 5)}
    found: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        found[i] = llm.generate([[i, i + 1]], GREEDY)[0].outputs[0].token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == expected


def test_content_in_parts_is_joined_and_other_content_refused(llm: LLM) -> None:
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    parts = [{"type": "text", "text": "w1"}, {"type": "text", "text": "w2"}]
    output = llm.chat([{"role": "user", "content": parts}], GREEDY, chat_template=template)[0]
    assert output.prompt_token_ids == [1, 2]
    for content in (None, [{"type": "image_url", "image_url": "x"}]):
        with pytest.raises(ValueError, match="content must be a text or a list of parts of type text"):
            llm.chat([{"role": "user", "content": content}], GREEDY, chat_template=template)
