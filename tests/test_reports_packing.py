"""Field reports about packing a batch and reusing its memory, as small cases on a real model.

The numbers in the names are those of the reports.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from packed_engine import PackedEngine, poison, prompt

from servetwin.executor.block_table import BlockTable
from servetwin.executor.model_loader import SUPPORTED_MODEL_TYPES, describe_model
from servetwin.executor.model_runner import ModelRunner
from servetwin.executor.request_state import RequestStates
from servetwin.executor.testing import LogitsRecorder, PlanWriter, tiny_model, torch_threads
from servetwin.kernels import ops
from servetwin.sim.block_hash import TokenPrompt
from servetwin.sim.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from servetwin.sim.contract import LogprobsLists, SamplingParams
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.records import Frame
from servetwin.sim.request import Request

EVERY_TYPE = pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)
IMPOSSIBLE_BLOCK = 2**30


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


class Coupled:
    """The real scheduler over the real runner, step by step; blocks of 4."""

    def __init__(
        self,
        *,
        usable_blocks: int,
        policy: str = "fcfs",
        chunk: int = 0,
        caching: bool = False,
        zero_fresh_blocks: bool = False,
    ) -> None:
        config = EngineConfig(
            model=ModelConfig(max_model_len=16, vocab_size=160),
            cache=CacheConfig(
                block_size=4,
                num_gpu_blocks=usable_blocks + 1,
                enable_prefix_caching=caching,
                zero_fresh_blocks=zero_fresh_blocks,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=4, max_num_batched_tokens=32, long_prefill_token_threshold=chunk, policy=policy
            ),
        )
        self.core = EngineCore(config)
        self.runner = ModelRunner(
            describe_model(tiny_model("llama"), "llama"),
            num_blocks=usable_blocks + 1,
            block_size=4,
            max_num_seqs=4,
            max_model_len=16,
        )
        poison(self.runner)
        self.logits = LogitsRecorder()
        self.runner.observe_logits = self.logits
        self.tokens: dict[str, list[int]] = {}

    def add(self, req_id: str, token_ids: list[int], max_tokens: int, priority: int = 0) -> None:
        request = Request(
            req_id,
            TokenPrompt(tuple(token_ids)),
            SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            block_size=4,
            max_model_len=16,
            arrival_ns=len(self.tokens),
            priority=priority,
        )
        self.tokens[req_id] = []
        self.core.add_request(request, 0)

    def step(self) -> Frame | None:
        frame = self.core.begin(0)
        if frame is not None:
            output = self.runner.execute_model(frame.plan)
            self.check_tables(frame)
            for req_id, token_ids in self.core.complete(frame, output).new_token_ids.items():
                self.tokens[req_id] += token_ids
        return frame

    def run(self) -> list[Frame]:
        return [frame for frame in iter(self.step, None) if frame is not None]

    def check_tables(self, frame: Frame) -> None:
        scheduler, states = self.core.scheduler, self.runner.states
        for req_id in frame.plan.num_scheduled_tokens:
            row = states.block_table.row(states.row_of[req_id]).tolist()
            assert row == scheduler.kv.block_ids(scheduler.requests[req_id])


def zeroed(frames: list[Frame]) -> list[int]:
    return [block for frame in frames for block in frame.plan.new_block_ids_to_zero or []]


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("fill", [torch.nan, 0.0])
def test_19_only_new_blocks_are_cleared_and_each_once(fill: float) -> None:
    """C hits the two blocks that A left, so that the list for its prompt holds its third block and no other.

    On a pool full of NaN the numbers are those of a pool full of zeros.
    """
    engine = Coupled(usable_blocks=8, caching=True, zero_fresh_blocks=True)
    for cache in engine.runner.kv_caches:
        cache.key.fill_(fill)
        cache.value.fill_(fill)
    engine.add("A", prompt(8), max_tokens=1)
    of_a = zeroed(engine.run())
    engine.add("C", prompt(12), max_tokens=4)
    frames = engine.run()
    assert frames[0].plan.num_scheduled_tokens == {"C": 4}
    table = frames[0].plan.scheduled_new_reqs[0].block_ids[0]
    assert table[:2] == of_a
    assert frames[0].plan.new_block_ids_to_zero == table[2:]
    everything = of_a + zeroed(frames)
    assert len(everything) == len(set(everything)) == 4
    for cache in engine.runner.kv_caches:
        # Nothing but what was never used is still as it was; the last block holds 3 of 4 tokens.
        assert not cache.key[everything].isnan().any()
        assert (cache.key[everything[-1], 3:] == 0).all()
    assert engine.logits.of("C").isfinite().all()
    plain = Coupled(usable_blocks=8)
    plain.add("C", prompt(12), max_tokens=4)
    plain.run()
    assert engine.tokens["C"] == plain.tokens["C"]
    torch.testing.assert_close(engine.logits.of("C"), plain.logits.of("C"), atol=1e-5, rtol=0)


def test_24_a_block_granted_and_taken_back_in_one_step_reaches_no_table() -> None:
    """D gets its third block, and is the victim of H later in the same step; its table is right when it resumes."""
    engine = Coupled(usable_blocks=4, policy="priority", chunk=4)
    engine.add("D", prompt(8), max_tokens=6, priority=5)
    engine.step()
    engine.add("H", prompt(4, start=9), max_tokens=3)
    frames = engine.run()
    victims = [victim for frame in frames for victim in frame.record.preempted]
    assert [(victim.request_id, victim.unscheduled) for victim in victims] == [("D", True)]
    alone = Coupled(usable_blocks=4)
    alone.add("D", prompt(8), max_tokens=6)
    alone.run()
    assert engine.tokens["D"] == alone.tokens["D"]


def test_25_padding_slots_write_nothing() -> None:
    """Three tokens padded to eight: three slots change, and the last slot of the last block is not one of them."""
    cache = torch.full((6, 4, 1, 8), 7.0)
    slots = torch.tensor([4, 5, 6] + [-1] * 5)
    tokens = torch.ones(8, 1, 8)
    ops.reshape_and_cache(tokens, tokens, cache, cache, slots)
    changed = (cache != 7).flatten(0, 1).all(dim=(1, 2)).nonzero().flatten()
    assert changed.tolist() == [4, 5, 6]


# ---------------------------------------------------------------- rows


@EVERY_TYPE
def test_23_resuming_is_a_prefill_over_prompt_and_outputs(model_type: str) -> None:
    """3 prompt tokens and 5 outputs come back as 8 inputs, and the next token is output number 6."""
    engine = PackedEngine(model_type)
    engine.plans.add("a", prompt(3))
    engine.step({"a": 3})
    engine.decode("a", 4)
    engine.plans.preempt("a")
    plan = engine.plans.plan({"a": 8})
    batch = engine.runner.prepare(plan)
    assert batch is not None
    assert batch.input_ids.tolist() == engine.plans.requests["a"].token_ids
    assert batch.positions.tolist() == list(range(8))
    assert batch.seq_lens.tolist() == [8]
    assert batch.logits_indices.tolist() == [7]
    logits = engine.runner.forward(batch)
    engine.plans.take(engine.runner.finish(batch, engine.runner.sample(batch, logits)))
    engine.decode("a", 3)
    assert len(engine.plans.output_of("a")) == 9
    engine.check("a")


def test_27_the_order_of_the_plan_changes_nothing() -> None:
    """Outputs belong to request ids, however num_scheduled_tokens was filled."""
    outputs = []
    for order in (["a", "b", "c"], ["c", "a", "b"]):
        engine = PackedEngine()
        for req_id in "abc":
            engine.plans.add(req_id, prompt(4 + ord(req_id) % 5, start=ord(req_id)))
        engine.step({r: len(engine.plans.requests[r].token_ids) for r in "abc"})
        for _ in range(3):
            engine.step(dict.fromkeys(order, 1))
        outputs.append({r: engine.plans.output_of(r) for r in "abc"})
    assert outputs[0] == outputs[1]


def test_29_a_seed_does_not_depend_on_chunking() -> None:
    """A chunk that stops short of the last known token draws nothing from the generator."""
    outputs = []
    for chunks in ([10], [4, 4, 2]):
        engine = PackedEngine()
        engine.plans.add("a", prompt(10), SamplingParams(temperature=1, seed=7))
        for chunk in chunks:
            engine.step({"a": chunk})
        engine.decode("a", 5)
        outputs.append(engine.plans.output_of("a"))
        assert len(engine.recorder.rows["a"]) == 6
    assert outputs[0] == outputs[1]


def test_30_all_rows_of_finished_requests_are_free_for_the_next_step() -> None:
    """Four requests end together, four more take their rows."""
    engine = PackedEngine(max_num_seqs=4)
    for i in range(8):
        engine.plans.add(f"r{i}", prompt(5, start=i + 1))
    engine.step({f"r{i}": 5 for i in range(4)})
    for i in range(4):
        engine.plans.finish(f"r{i}")
    engine.step({f"r{i}": 5 for i in range(4, 8)})
    assert set(engine.runner.states.known) == {"r4", "r5", "r6", "r7"}
    for i in range(4, 8):
        engine.check(f"r{i}")


def test_26_rows_that_move_keep_their_requests_apart() -> None:
    """Several requests end in one step, short rows move over long ones."""
    engine = PackedEngine(max_num_seqs=4)
    lengths = {"r1": 20, "r2": 3, "r3": 6, "r4": 2}
    for req_id, length in lengths.items():
        engine.plans.add(req_id, prompt(length, start=length))
    engine.step(lengths)
    engine.step(dict.fromkeys(lengths, 1))
    engine.plans.finish("r1")
    engine.plans.finish("r2")
    engine.plans.add("r5", prompt(7, start=50))
    engine.step({"r3": 1, "r4": 1, "r5": 7})
    states = engine.runner.states
    assert [state.req_id for state in states.rows] == ["r3", "r4", "r5"]
    for row in range(3):
        assert not states.block_table.table[row, states.block_table.num_blocks[row] :].any()
    for _ in range(4):
        engine.step({"r5": 1, "r3": 1, "r4": 1})
    for req_id in ("r3", "r4", "r5"):
        engine.check(req_id)


def test_26_a_short_row_in_the_place_of_a_long_one_has_no_stale_tail() -> None:
    blocks = BlockTable(3, max_model_len=18, block_size=4)
    blocks.replace(0, [1, 2, 3, 4, 5])
    blocks.replace(2, [8, 9])
    blocks.move(2, 0)
    assert blocks.table[0].tolist() == [8, 9, 0, 0, 0]
    assert blocks.table[2].tolist() == [0, 0, 0, 0, 0]
    assert blocks.num_blocks.tolist() == [2, 0, 0]


@EVERY_TYPE
def test_26_nobody_reads_behind_the_blocks_of_a_row(model_type: str) -> None:
    """Unused columns of the table hold an impossible block while the model runs."""
    engine = PackedEngine(model_type)
    table = engine.runner.states.block_table
    for req_id, length in {"a": 19, "b": 2}.items():
        engine.plans.add(req_id, prompt(length, start=length))
    engine.step({"a": 19, "b": 2})
    for _ in range(3):
        batch = engine.runner.prepare(engine.plans.plan({"a": 1, "b": 1}))
        assert batch is not None
        unused = np.arange(table.max_blocks) >= table.num_blocks[:, None]
        table.table[unused] = IMPOSSIBLE_BLOCK
        logits = engine.runner.forward(batch)
        table.table[unused] = 0
        engine.plans.take(engine.runner.finish(batch, engine.runner.sample(batch, logits)))
    engine.check("a")
    engine.check("b")


def test_27_rows_and_plan_in_different_orders_with_unequal_counts() -> None:
    """Rows stand as r3, r1, r2 while the plan names r1, r2, r3, one of them with a longer chunk."""
    engine = PackedEngine(max_num_seqs=4)
    lengths = {"x": 2, "r1": 9, "r2": 4, "r3": 7}
    for req_id, length in lengths.items():
        engine.plans.add(req_id, prompt(length, start=length))
    engine.step({"x": 2, "r1": 3, "r2": 4, "r3": 7})
    engine.plans.finish("x")
    engine.step({"r1": 4, "r2": 1, "r3": 1})
    assert engine.runner.states.req_ids == ["r3", "r1", "r2"]
    for counts in ({"r1": 2, "r2": 1, "r3": 1}, {"r2": 1, "r3": 1, "r1": 1}):
        engine.step(counts)
    for req_id in ("r1", "r2", "r3"):
        engine.check(req_id)


def test_28_blocks_travel_through_a_cycle_of_moves() -> None:
    """Three rows in a cycle end where they began."""
    blocks = BlockTable(4, max_model_len=18, block_size=4)
    for row, ids in enumerate(([1, 2], [3], [4, 5, 6])):
        blocks.replace(row, ids)
    for _ in range(3):
        for source, target in ((2, 3), (1, 2), (0, 1), (3, 0)):
            blocks.move(source, target)
    assert [blocks.row(row).tolist() for row in range(3)] == [[1, 2], [3], [4, 5, 6]]


def test_28_every_buffer_travels_with_its_request() -> None:
    """Each step leaves one of three out, so that their rows go round; all that a row holds is its request's."""
    states, plans = RequestStates(3, 32, 4, torch.device("cpu")), PlanWriter(4, num_blocks=30)
    for req_id, length in {"a": 3, "b": 9, "c": 14}.items():
        plans.add(req_id, prompt(length, start=length))
    orders = set()
    for left_out in (None, "a", "b", "c", "a", "c", "b"):
        counts = {req_id: 1 for req_id in "abc" if req_id != left_out}
        computed = {req_id: plans.requests[req_id].num_computed_tokens for req_id in counts}
        states.update(plans.plan(counts))
        orders.add(tuple(states.req_ids))
        for req_id in counts:
            row, request = states.row_of[req_id], plans.requests[req_id]
            assert states.rows[row].req_id == states.req_ids[row] == req_id
            assert states.known_tokens(row).tolist() == request.token_ids
            assert states.block_table.row(row).tolist() == request.block_ids
            assert states.num_computed_tokens[row] == computed[req_id]
    assert len(orders) > 3, "the rows hardly moved"


# ---------------------------------------------------------------- outputs


@pytest.mark.parametrize("preempt", [False, True])
def test_31_logprobs_have_one_entry_a_token_after_a_preemption(preempt: bool) -> None:
    """Preempted after 4 outputs, ended with 10: as many entries as tokens, those of a run without preemption."""
    tokens, logprobs = run_with_logprobs(preempt)
    assert len(tokens) == 10
    for entries in (logprobs.logprob_token_ids, logprobs.logprobs, logprobs.sampled_token_ranks):
        assert len(entries) == 10
    assert [ids[0] for ids in logprobs.logprob_token_ids] == tokens
    plain_tokens, plain = run_with_logprobs(preempt=False)
    assert (tokens, logprobs.logprob_token_ids) == (plain_tokens, plain.logprob_token_ids)
    assert logprobs.sampled_token_ranks == plain.sampled_token_ranks
    np.testing.assert_allclose(logprobs.logprobs, plain.logprobs, atol=1e-4)


def run_with_logprobs(preempt: bool) -> tuple[list[int], LogprobsLists]:
    engine, found = PackedEngine(), LogprobsLists()
    engine.plans.add("a", prompt(5), SamplingParams(temperature=0, logprobs=2))

    def step(count: int) -> None:
        output = engine.execute(engine.plans.plan({"a": count}))
        if output.sampled_token_ids == [[]]:
            assert output.logprobs is None, "a chunk that ends early has none"
            return
        assert output.logprobs is not None
        found.logprob_token_ids += output.logprobs["a"].logprob_token_ids
        found.logprobs += output.logprobs["a"].logprobs
        found.sampled_token_ranks += output.logprobs["a"].sampled_token_ranks

    for count in (3, 2, 1, 1, 1):
        step(count)
    if preempt:
        engine.plans.preempt("a")
        step(6)
        step(3)
    for _ in range(5 if preempt else 6):
        step(1)
    return engine.plans.output_of("a"), found
