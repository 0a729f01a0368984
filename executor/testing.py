"""Tools for testing an executor: tiny random models, plans written by hand, logits on record.

Used by the tests of this package, and by checks on machines that have no scheduler installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from servetwin.executor import kv_cache
from servetwin.executor.attention import ATTENTION_NAME
from servetwin.executor.attention_metadata import AttentionMetadata
from servetwin.executor.block_table import cdiv
from servetwin.executor.forward_context import ForwardContext
from servetwin.executor.model_loader import LoadedModel
from servetwin.executor.packed_model import PackedModel
from servetwin.sim.contract import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SamplingParams,
    SchedulerOutput,
)

TINY_VOCAB_SIZE = 160
TINY_POSITIONS = 256
WEIGHT_STD = 0.3
"""Wide enough that attention shapes the logits and that greedy choices are rarely close."""

_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": TINY_VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": TINY_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA_LIKE: dict[str, Any] = {
    **_LLAMA_LIKE,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 6,
}
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE,
    "qwen3": {**_LLAMA_LIKE, "head_dim": 16},
    "qwen3_moe": {
        **_LLAMA_LIKE,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
    "mistral": {**_LLAMA_LIKE, "sliding_window": 7},
    "phi3": _LLAMA_LIKE,
    "gemma2": {**_GEMMA_LIKE, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {**_GEMMA_LIKE, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {
        "vocab_size": TINY_VOCAB_SIZE,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": TINY_POSITIONS,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "opt": {
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 96,
        "max_position_embeddings": TINY_POSITIONS,
    },
}
"""Smallest useful configuration of every supported model type; windows are a few tokens wide."""
TINY_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-6-3-heads": (
        "llama",
        {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24},
    ),
    "qwen3-5-1-heads": (
        "qwen3",
        {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 24},
    ),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "opt-projected": ("opt", {"word_embed_proj_dim": 48, "do_layer_norm_before": False}),
    "gpt2-layer-scaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
}
"""Shapes and options off the usual: name -> (model type, what differs from its tiny configuration)."""


def tiny_model(name: str, *, attention: str = ATTENTION_NAME, **overrides: Any) -> PreTrainedModel:
    """A random float32 model of about 100,000 weights, the same for every `attention`.

    `name` is one of TINY_CONFIGS or of TINY_VARIANTS.
    """
    model_type, variant = TINY_VARIANTS.get(name, (name, {}))
    config = AutoConfig.for_model(model_type, **{**TINY_CONFIGS[model_type], **variant, **overrides})
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: PreTrainedModel = auto.from_config(config, attn_implementation=attention, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=WEIGHT_STD)
    model.train(False)
    return model


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Runs the block with so many torch threads: tiny models gain nothing from more, and lose on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """transformers' own forward over one sequence alone: logits `[len(token_ids), vocab_size]` on the CPU."""
    inputs = torch.tensor([list(token_ids)], device=model.device)
    logits: torch.Tensor = model(input_ids=inputs, use_cache=False).logits[0]
    return logits.cpu()


class TeacherForced:
    """Feeds given sequences to a packed model, so many tokens at a time: a batch without scheduler and sampler.

    Every sequence has its own blocks of the cache from the beginning. What was never written is NaN.
    """

    def __init__(self, loaded: LoadedModel, sequences: Sequence[Sequence[int]], block_size: int = 4) -> None:
        width = cdiv(max(map(len, sequences)), block_size)
        self.sequences = sequences
        self.num_computed_tokens = [0] * len(sequences)
        self.caches = kv_cache.allocate(
            loaded.kv_cache_spec, 1 + width * len(sequences), block_size, loaded.device
        )
        for cache in self.caches:
            cache.key.fill_(torch.nan)
            cache.value.fill_(torch.nan)
        self.block_table = 1 + torch.arange(width * len(sequences)).view(-1, width)
        self.block_size = block_size

    def step(self, model: PackedModel, counts: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """The next `counts[i]` tokens of each sequence i, packed in this order: logits of each of them."""
        starts = {i: self.num_computed_tokens[i] for i in counts}
        for i, count in counts.items():
            self.num_computed_tokens[i] += count
        positions = torch.cat([torch.arange(starts[i], self.num_computed_tokens[i]) for i in counts])
        rows = torch.tensor(list(counts)).repeat_interleave(torch.tensor(list(counts.values())))
        blocks = self.block_table[rows, positions // self.block_size]
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, *counts.values()]).cumsum(0).int(),
            seq_lens=torch.tensor([self.num_computed_tokens[i] for i in counts]).int(),
            block_table=self.block_table[list(counts)].int(),
            slot_mapping=blocks * self.block_size + positions % self.block_size,
        )
        token_ids = [t for i in counts for t in self.sequences[i][starts[i] : self.num_computed_tokens[i]]]
        context = ForwardContext(metadata, self.caches)
        logits = model.forward(torch.tensor(token_ids), positions, torch.arange(len(token_ids)), context)
        return {i: logits[rows == i] for i in counts}


@dataclass(slots=True)
class LogitsRecorder:
    """Keeps the logits behind every sampled token, per request; set it as `ModelRunner.observe_logits`."""

    rows: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def __call__(self, req_ids: list[str], logits: torch.Tensor) -> None:
        for req_id, row in zip(req_ids, logits, strict=True):
            self.rows.setdefault(req_id, []).append(row.to("cpu", copy=True))

    def of(self, req_id: str) -> torch.Tensor:
        """`[number of sampled tokens, vocab_size]`"""
        return torch.stack(self.rows[req_id])


@dataclass(slots=True)
class _Request:
    params: SamplingParams
    num_prompt_tokens: int
    token_ids: list[int]
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    introduced: bool = False
    preempted: bool = False


class PlanWriter:
    """Writes the plans for scheduling decisions made by hand; it decides nothing and checks nothing.

    Blocks are handed out in ascending order from 1 on; those given back are used again, oldest first.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.free_blocks = list(range(1, num_blocks))
        self.requests: dict[str, _Request] = {}
        self._previous: frozenset[str] = frozenset()
        self._finished: set[str] = set()

    def add(self, req_id: str, prompt: Iterable[int], params: SamplingParams | None = None) -> None:
        token_ids = list(prompt)
        self.requests[req_id] = _Request(params or SamplingParams(temperature=0), len(token_ids), token_ids)

    def finish(self, req_id: str) -> None:
        """Ends a request; the next plan reports it."""
        self._release(self.requests.pop(req_id))
        self._finished.add(req_id)

    def preempt(self, req_id: str) -> None:
        request = self.requests[req_id]
        self._release(request)
        request.num_computed_tokens, request.preempted = 0, True

    def plan(
        self, num_scheduled_tokens: Mapping[str, int], hits: Mapping[str, Sequence[int]] | None = None
    ) -> SchedulerOutput:
        """One step; `hits`: blocks found in the prefix cache, for requests that this step admits."""
        new: list[NewRequestData] = []
        cached = CachedRequestData()
        for req_id, count in num_scheduled_tokens.items():
            request = self.requests[req_id]
            shared = list((hits or {}).get(req_id, ()))
            request.block_ids += shared
            request.num_computed_tokens += len(shared) * self.block_size
            fresh = self._allocate(request, count)
            if request.introduced:
                self._continue(req_id, request, fresh, cached)
            else:
                new.append(self._introduce(req_id, request))
            request.num_computed_tokens += count
        total = sum(num_scheduled_tokens.values())
        finished, self._finished = self._finished, set()
        self._previous = frozenset(num_scheduled_tokens)
        return SchedulerOutput(new, cached, dict(num_scheduled_tokens), total, {}, [0], finished, set())

    def take(self, output: ModelRunnerOutput) -> None:
        """Appends the sampled tokens to their requests."""
        for req_id, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self.requests[req_id].token_ids += token_ids

    def output_of(self, req_id: str) -> list[int]:
        request = self.requests[req_id]
        return request.token_ids[request.num_prompt_tokens :]

    def _allocate(self, request: _Request, count: int) -> list[int]:
        needed = cdiv(request.num_computed_tokens + count, self.block_size) - len(request.block_ids)
        fresh = [self.free_blocks.pop(0) for _ in range(needed)]
        request.block_ids += fresh
        return fresh

    def _release(self, request: _Request) -> None:
        self.free_blocks += reversed(request.block_ids)
        request.block_ids = []

    def _introduce(self, req_id: str, request: _Request) -> NewRequestData:
        request.introduced = True
        return NewRequestData(
            req_id=req_id,
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
            sampling_params=request.params,
            block_ids=(list(request.block_ids),),
            num_computed_tokens=request.num_computed_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
        )

    def _continue(self, req_id: str, request: _Request, fresh: list[int], cached: CachedRequestData) -> None:
        cached.req_ids.append(req_id)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        cached.num_output_tokens.append(len(request.token_ids) - request.num_prompt_tokens)
        if req_id not in self._previous:
            cached.all_token_ids[req_id] = list(request.token_ids)
        if request.preempted:
            cached.resumed_req_ids.add(req_id)
            cached.new_block_ids.append((list(request.block_ids),))
            request.preempted = False
        else:
            cached.new_block_ids.append((fresh,) if fresh else None)
