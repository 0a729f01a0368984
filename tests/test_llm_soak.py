"""Many random requests, with stop strings and clients that give up: nothing leaks, and an engine in a child process
says what one in this process says."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("torch", reason="needs the extra `executor`")

from front_ends import save_words

from servetwin.executor import CompletionOutput, EngineArgs, LLMEngine, SamplingParams
from servetwin.executor.sampler import Sampler, SamplingRow, random_stream
from servetwin.executor.testing import TINY_VOCAB_SIZE, reference_logits, tiny_model

IN_FLIGHT = 24
"""More than seats and blocks for all: requests wait, and running ones are preempted."""
NUDGE = 1e-3
"""Logits of the same text differ by less with the shape of the batch."""
EOS = 2
SHARED_PREFIX = list(range(10, 34))
LEAK_BYTES = 32 << 20
WARM_UP = 300
"""Requests until buffers and caches have their size."""


@dataclass(frozen=True)
class Asked:
    """A request, and after how many tokens its client gives up."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    patience_tokens: int | None


@dataclass(frozen=True)
class Answer:
    outputs: list[CompletionOutput]
    given_up: bool


def random_params(rng: random.Random) -> SamplingParams:
    """Every parameter is used now and then."""

    def now_and_then(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if rng.random() < 0.25}

    max_tokens = rng.randint(1, 24)
    token_ids = rng.sample(range(3, TINY_VOCAB_SIZE), 12)
    temperature = rng.choice([0.0, 0.0, 0.7, 1.5])
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        n=rng.choice([1, 1, 2, 3]) if temperature else 1,
        ignore_eos=rng.random() < 0.5,
        **now_and_then(
            seed=rng.randint(0, 99),
            top_k=rng.choice([-1, 1, 5, 1000]),
            top_p=rng.uniform(0.1, 1),
            min_p=rng.uniform(0, 0.3),
            presence_penalty=rng.uniform(-2, 2),
            frequency_penalty=rng.uniform(-2, 2),
            repetition_penalty=rng.uniform(0.5, 2),
            min_tokens=rng.randint(0, max_tokens),
            stop=[f"{rng.randint(0, 9)} w{rng.randint(1, 9)}", f"w{rng.randint(10, 99)}"],
            include_stop_str_in_output=True,
            stop_token_ids=token_ids[:3],
            logit_bias={token_ids[3]: 3.0, token_ids[4]: -3.0},
            bad_words=[f"w{token_ids[5]}", f"w{token_ids[6]} w{token_ids[7]}"],
            allowed_token_ids=[EOS, *range(40, 120)],
            logprobs=rng.choice([0, 3]),
        ),
    )


def random_requests(count: int, seed: int) -> list[Asked]:
    rng = random.Random(seed)
    asked = []
    for i in range(count):
        own = [rng.randrange(3, TINY_VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
        prompt = SHARED_PREFIX + own if rng.random() < 0.4 else own
        patience = rng.randint(1, 20) if rng.random() < 0.2 else None
        asked.append(Asked(f"r{i}", prompt, random_params(rng), patience))
    return asked


def serve(engine: LLMEngine, requests: Sequence[Asked]) -> dict[str, Answer]:
    """Sends requests as earlier ones end."""
    by_id = {asked.request_id: asked for asked in requests}
    answers: dict[str, Answer] = {}
    waiting = list(reversed(requests))
    while waiting or engine.has_unfinished_requests():
        while waiting and engine.get_num_unfinished_requests() < IN_FLIGHT:
            asked = waiting.pop()
            engine.add_request(asked.request_id, asked.prompt, asked.params)
        for output in engine.step():
            patience = by_id[output.request_id].patience_tokens
            num_tokens = max(len(made.token_ids) for made in output.outputs)
            gives_up = not output.finished and patience is not None and num_tokens >= patience
            if gives_up:
                engine.abort_request(output.request_id)
            answers[output.request_id] = Answer(output.outputs, gives_up)
    return answers


class Judge:
    """Compares what two engines said."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._model = tiny_model("llama", attention="eager")
        self._sampler = Sampler([EOS])
        self.num_near_ties = 0

    def compare(self, asked: Asked, one: Answer, other: Answer) -> None:
        """Raises AssertionError where they differ other than by a near-tie."""
        given_up = one.given_up or other.given_up
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert a.logprobs is None or len(a.logprobs) == len(a.token_ids)
            both = zip(a.token_ids, b.token_ids, strict=False)
            apart = next((i for i, (x, y) in enumerate(both) if x != y), None)
            if apart is not None:
                assert self._is_near_tie(asked, a.index, a.token_ids[: apart + 1], b.token_ids[apart]), asked
                self.num_near_ties += 1
            elif not given_up:
                assert a.token_ids == b.token_ids, asked
                assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)

    def _is_near_tie(self, asked: Asked, index: int, token_ids: list[int], other: int) -> bool:
        """A nudge to the logits makes the last one of `token_ids` the other token, or that one it."""
        *before, one = token_ids
        child = self._engine.prepare(asked.request_id, asked.prompt, asked.params).children()[index]
        row = SamplingRow(
            child.sampling_params,
            random_stream(0, child.request_id, child.sampling_params),
            np.array(asked.prompt, np.int32),
            np.array(before, np.int32),
        )
        logits = reference_logits(self._model, asked.prompt + before)[-1]

        def nudged_to(token_id: int, from_id: int) -> int:
            nudged = logits.clone()
            nudged[token_id] += NUDGE
            nudged[from_id] -= NUDGE
            return int(self._sampler.sample(nudged[None], [row]).token_ids[0])

        return (nudged_to(one, other), nudged_to(other, one)) == (one, other)


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> EngineArgs:
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_model("llama", attention="sdpa").save_pretrained(folder)
    save_words(folder, TINY_VOCAB_SIZE)
    return EngineArgs(
        model=folder,
        dtype="float32",
        max_num_seqs=16,
        max_num_batched_tokens=64,
        block_size=8,
        num_gpu_blocks_override=30,
        max_model_len=128,
    )


def open_things() -> tuple[int, int, int]:
    """Open files and sockets, threads and children of this process."""
    me = psutil.Process()
    return me.num_fds(), me.num_threads(), len(me.children(recursive=True))


@pytest.fixture
def settled() -> Iterator[None]:
    """After the test as many files, threads and processes are there as before."""
    before = open_things()
    yield
    assert open_things() == before


def check(args: EngineArgs, requests: Sequence[Asked]) -> Judge:
    """Both ways of running give the same, and neither keeps a block."""
    with LLMEngine.from_engine_args(args, multiprocess=True) as engine:
        there = serve(engine, requests)
        assert engine.reset_prefix_cache(), "no request holds a block"
    with LLMEngine.from_engine_args(args, multiprocess=False) as engine:
        here = serve(engine, requests)
        assert engine.reset_prefix_cache()
        judge = Judge(engine)
        for asked in requests:
            judge.compare(asked, there[asked.request_id], here[asked.request_id])
    return judge


def test_random_requests_get_the_same_from_a_child_and_from_this_process(args: EngineArgs) -> None:
    requests = random_requests(60, seed=1)
    assert any(asked.patience_tokens for asked in requests)
    assert any(asked.params.stop_strings for asked in requests)
    check(args, requests)


@pytest.mark.full
@pytest.mark.serial
def test_1000_random_requests_leave_nothing_behind(args: EngineArgs, settled: None) -> None:
    requests = random_requests(1000, seed=2)
    with LLMEngine.from_engine_args(args, multiprocess=True) as engine:
        processes = psutil.Process(), *psutil.Process().children()
        serve(engine, requests[:WARM_UP])
        before = [process.memory_info().rss for process in processes]
        serve(engine, requests[WARM_UP:])
        grown = [process.memory_info().rss - b for process, b in zip(processes, before, strict=True)]
        assert max(grown) < LEAK_BYTES, f"{grown} bytes more in front end and engine"
        assert engine.reset_prefix_cache()


@pytest.mark.full
@pytest.mark.serial
def test_1000_random_requests_get_the_same_from_a_child_and_from_this_process(args: EngineArgs) -> None:
    judge = check(args, random_requests(1000, seed=3))
    assert judge.num_near_ties < 10
