"""The executor refuses to read K/V that no step has written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from servetwin.executor.kv_ledger import UnwrittenKVError
from servetwin.executor.model_loader import describe_model
from servetwin.executor.model_runner import ModelRunner
from servetwin.executor.testing import PlanWriter, tiny_model, torch_threads
from servetwin.sim.block_hash import TokenPrompt
from servetwin.sim.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from servetwin.sim.contract import SamplingParams
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.request import Request
from servetwin.sim.rules import Rules

BLOCK_SIZE = 4
NUM_BLOCKS = 20
PROMPT = list(range(3, 16))


class Arrival(NamedTuple):
    req_id: str
    prompt: range
    max_tokens: int
    step: int
    priority: int


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


class Engine:
    def __init__(self) -> None:
        self.plans = PlanWriter(BLOCK_SIZE, NUM_BLOCKS)
        self.runner = ModelRunner(
            describe_model(tiny_model("llama"), "llama"),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=4,
            max_model_len=32,
        )

    def step(self, counts: dict[str, int], hits: dict[str, list[int]] | None = None) -> None:
        self.plans.take(self.runner.execute_model(self.plans.plan(counts, hits)))


@pytest.fixture
def engine() -> Engine:
    made = Engine()
    made.plans.add("a", PROMPT)
    return made


def test_a_hit_on_written_blocks_passes(engine: Engine) -> None:
    """Also after the writer has ended, and on a block that was filled over several steps."""
    engine.step({"a": 5})
    engine.step({"a": 8})
    engine.step({"a": 1})
    engine.plans.finish("a")
    engine.plans.add("b", [*PROMPT, 99])
    engine.step({"b": 2}, hits={"b": [1, 2, 3]})


def test_a_hit_on_generated_tokens_passes(engine: Engine) -> None:
    """A resumed request finds blocks with its own outputs."""
    engine.step({"a": 13})
    for _ in range(4):
        engine.step({"a": 1})
    engine.plans.preempt("a")
    engine.step({"a": 2}, hits={"a": [1, 2, 3, 4]})


def test_a_hit_on_a_block_that_was_never_written_is_refused(engine: Engine) -> None:
    """The victim of a step had been given blocks 4 and up, which no plan ever mentioned."""
    engine.step({"a": 13})
    engine.plans.add("b", range(40, 50))
    with pytest.raises(UnwrittenKVError, match=r"'b' is admitted with 8 .* position 0 \(block 7\)"):
        engine.step({"b": 2}, hits={"b": [7, 8]})


def test_a_hit_on_what_an_earlier_owner_left_is_refused(engine: Engine) -> None:
    """Stale content of other tokens does not pass for written."""
    engine.step({"a": 13})
    engine.plans.finish("a")
    engine.plans.add("b", [*PROMPT[:4], *range(40, 50)])
    with pytest.raises(UnwrittenKVError, match=r"position 4 .*--no-enable-prefix-caching"):
        engine.step({"b": 6}, hits={"b": [1, 2]})


def test_equal_tokens_behind_another_prefix_are_refused(engine: Engine) -> None:
    """The content of a block is its tokens and everything before them."""
    engine.step({"a": 13})
    engine.plans.add("b", [*range(40, 44), *PROMPT[4:8], 1])
    engine.step({"b": 4})
    engine.plans.preempt("b")
    with pytest.raises(UnwrittenKVError, match="position 4 "):
        engine.step({"b": 1}, hits={"b": [5, 2]})


def test_a_hit_on_a_block_that_was_cleared_is_refused(engine: Engine) -> None:
    """Zeros are not the K/V of these tokens, though they once lay there."""
    engine.step({"a": 13})
    engine.plans.add("x", range(40, 42))
    plan = engine.plans.plan({"x": 2})
    plan.new_block_ids_to_zero = [2]
    engine.plans.take(engine.runner.execute_model(plan))
    engine.plans.add("b", [*PROMPT[:8], 99])
    with pytest.raises(UnwrittenKVError, match=r"position 4 \(block 2\)"):
        engine.step({"b": 1}, hits={"b": [1, 2]})


def verify_wrong_drafts(engine: Engine) -> None:
    """Fills block 4 of a request with 13 + 1 known tokens with two wrong drafts; a token follows the 14."""
    engine.step({"a": 13})
    draft = (engine.plans.output_of("a")[0] + 1) % 160
    plan = engine.plans.plan({"a": 3})
    plan.scheduled_spec_decode_tokens = {"a": [draft, draft]}
    engine.plans.take(engine.runner.execute_model(plan))
    request = engine.plans.requests["a"]
    assert len(request.token_ids) == 15
    request.num_computed_tokens = 14


def test_a_hit_on_rejected_drafts_is_refused(engine: Engine) -> None:
    verify_wrong_drafts(engine)
    engine.plans.add("b", [*engine.plans.requests["a"].token_ids, 98, 99])
    with pytest.raises(UnwrittenKVError, match=r"position 14 \(block 4\)"):
        engine.step({"b": 1}, hits={"b": [1, 2, 3, 4]})


def test_what_is_written_over_rejected_drafts_can_be_hit(engine: Engine) -> None:
    verify_wrong_drafts(engine)
    engine.step({"a": 1})
    engine.step({"a": 1})
    engine.plans.preempt("a")
    engine.step({"a": 1}, hits={"a": [1, 2, 3, 4]})


def s17(rules: Rules) -> tuple[EngineConfig, list[Arrival]]:
    """The recorded scenario in which a victim leaves blocks that no step computes."""
    config = EngineConfig(
        model=ModelConfig(max_model_len=120, vocab_size=160),
        cache=CacheConfig(block_size=8, num_gpu_blocks=16),
        scheduler=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            policy="priority",
            long_prefill_token_threshold=32,
        ),
        rules=rules,
    )
    return config, [
        Arrival("A", range(3, 115), max_tokens=6, step=0, priority=5),
        Arrival("B", range(120, 136), max_tokens=4, step=1, priority=0),
        Arrival("C", range(140, 144), max_tokens=4, step=1, priority=1),
        Arrival("D", range(3, 115), max_tokens=3, step=9, priority=6),
    ]


def test_the_hazard_of_priority_with_prefix_caching_ends_in_an_error() -> None:
    """To the letter A is admitted again with 88 hit tokens, 24 of which no step ever computed."""
    message = r"'A' is admitted with 88 cached tokens, .* position 64 .*--forget-uncomputed-blocks"
    with pytest.raises(UnwrittenKVError, match=message):
        run_to_the_end(*s17(Rules.exact()))


@pytest.mark.parametrize(
    "rules", [Rules.safe(), Rules(forget_uncomputed_blocks=True)], ids=["safe", "switch"]
)
def test_the_correction_reads_only_what_was_written(rules: Rules) -> None:
    """With NaN in every slot that nobody has written, all logits stay numbers, and A and D get the same tokens."""
    sampled = run_to_the_end(*s17(rules))
    assert {r: len(tokens) for r, tokens in sampled.items()} == {"A": 6, "B": 4, "C": 4, "D": 3}
    assert sampled["D"] == sampled["A"][:3]


def run_to_the_end(config: EngineConfig, arrivals: list[Arrival]) -> dict[str, list[int]]:
    """Every request's tokens; the cache starts as NaN, and NaN in any logits fails."""
    core = EngineCore(config)
    runner = ModelRunner(
        describe_model(tiny_model("llama"), "llama"),
        num_blocks=config.cache.num_gpu_blocks,
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=config.model.max_model_len,
    )
    for cache in runner.kv_caches:
        cache.key.fill_(torch.nan)
        cache.value.fill_(torch.nan)
    runner.observe_logits = all_numbers
    sampled: dict[str, list[int]] = {}
    for step in range(100):
        for arrival in arrivals:
            if arrival.step == step:
                core.add_request(request_of(arrival, config), step)
        frame = core.begin(step)
        if frame is not None:
            outputs = core.complete(frame, runner.execute_model(frame.plan))
            for req_id, token_ids in outputs.new_token_ids.items():
                sampled.setdefault(req_id, []).extend(token_ids)
    return sampled


def all_numbers(req_ids: list[str], logits: torch.Tensor) -> None:
    assert not logits.isnan().any(), f"{req_ids} read K/V that was never written"


def request_of(arrival: Arrival, config: EngineConfig) -> Request:
    return Request(
        arrival.req_id,
        TokenPrompt(tuple(arrival.prompt)),
        SamplingParams(temperature=0, max_tokens=arrival.max_tokens, ignore_eos=True),
        block_size=config.cache.block_size,
        max_model_len=config.model.max_model_len,
        arrival_ns=arrival.step,
        priority=arrival.priority,
    )
