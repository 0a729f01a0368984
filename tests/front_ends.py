"""A front end for tests: an engine core that answers from a script, and a tokenizer whose tokens are given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from servetwin.executor.engine_args import EngineArgs
from servetwin.executor.engine_core_client import EngineCoreClient
from servetwin.executor.llm_engine import LLMEngine
from servetwin.executor.outputs import RequestOutput
from servetwin.sim.config import CacheConfig, EngineConfig, ModelConfig
from servetwin.sim.contract import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreRequest,
    LogprobsLists,
    SamplingParams,
)

VOCAB_SIZE = 64
EOS = 2
EXTRA_EOS = 3
WORDS = [f"w{i}" for i in range(VOCAB_SIZE)]


def tokenizer_of(texts: Sequence[str], **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with these tokens, which are put together without anything between them.

    A text is encoded only by whole tokens between spaces.
    """
    words = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token=texts[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, **options)  # type: ignore[no-untyped-call]


def save_words(folder: Path, vocab_size: int) -> None:
    """Puts a tokenizer into a model folder: token i is the word `w{i}`, with spaces between."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder)


def engine_config(*, max_model_len: int = 64, usable_blocks: int = 32) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_id=EOS,
            extra_eos_token_ids=(EXTRA_EOS,),
        ),
        cache=CacheConfig(block_size=4, num_gpu_blocks=usable_blocks + 1),
    )


class ScriptedClient(EngineCoreClient):
    """An engine core that says what it is told to, one batch for every call of `get_outputs`."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or engine_config()
        self.described: dict[str, Any] = {}
        self.requests: dict[str, EngineCoreRequest] = {}
        self.aborted: list[str] = []
        self.is_shut_down = False
        self._due: list[list[EngineCoreOutput]] = []

    def say(self, *outputs: EngineCoreOutput) -> None:
        """What the next call of `get_outputs` gives."""
        self._due.append(list(outputs))

    def add_request(self, request: EngineCoreRequest) -> None:
        self.requests[request.request_id] = request

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids

    def get_outputs(self, timeout_s: float | None = None) -> list[EngineCoreOutput]:
        return self._due.pop(0) if self._due else []

    def reset_prefix_cache(self) -> bool:
        return True

    def shutdown(self) -> None:
        self.is_shut_down = True


def first(request_id: str, token_ids: Iterable[int], **more: Any) -> EngineCoreOutput:
    """The first output of a request, which tells when it was queued and scheduled."""
    now_ns = time.monotonic_ns()
    events = [EngineCoreEvent("queued", now_ns), EngineCoreEvent("scheduled", now_ns)]
    return EngineCoreOutput(request_id, list(token_ids), events=events, **more)


def later(request_id: str, token_ids: Iterable[int], **more: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, list(token_ids), **more)


def logprobs_of(token_ids: Sequence[int]) -> LogprobsLists:
    """Log probabilities of these tokens, each the second most likely behind token 0."""
    return LogprobsLists(
        [[t, 0] for t in token_ids], [[-2.0, -1.0] for _ in token_ids], [2 for _ in token_ids]
    )


def scripted_engine(
    words: Sequence[str] | PreTrainedTokenizerBase | None = WORDS,
    config: EngineConfig | None = None,
    **args: Any,
) -> tuple[LLMEngine, ScriptedClient]:
    """A front end on a script, with a tokenizer or the texts of its tokens, or with none."""
    client = ScriptedClient(config)
    tokenizer = tokenizer_of(words) if isinstance(words, Sequence) else words
    return LLMEngine(EngineArgs(model="scripted", **args), client, tokenizer), client


def ask(
    params: SamplingParams, token_ids: Sequence[int], texts: Sequence[str] = WORDS
) -> tuple[list[RequestOutput], ScriptedClient]:
    """What a request gives whose engine says one token a step, and never ends it by itself."""
    engine, client = scripted_engine(texts)
    engine.add_request("r", [1], params)
    outputs: list[RequestOutput] = []
    say: Callable[..., EngineCoreOutput] = first
    for token_id in token_ids:
        client.say(say("r", [token_id]))
        outputs += engine.step(timeout_s=0)
        say = later
    return outputs, client
