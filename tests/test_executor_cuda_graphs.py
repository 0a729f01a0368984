"""Decode graphs: what is replayed at a padded size is what eager steps give, and padding touches nothing.

On a CPU a graph is a `ReplayedCall`: the same static tensors and the same padding, without a card. Rows 17 to 22, 36
and 39 of the kernels' bug list are about such graphs; the tests below name them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_engine import BLOCK_SIZE, PackedEngine, prompt
from torch._subclasses.fake_tensor import FakeTensorMode

from servetwin.executor import kv_cache
from servetwin.executor.cuda_graphs import (
    Call,
    GraphCaptureError,
    ReplayedCall,
    StaticBatch,
    capture_sizes,
)
from servetwin.executor.forward_context import ForwardContext
from servetwin.executor.fused_layers import fuse_layers
from servetwin.executor.input_batch import PADDING_SLOT, InputBatch, LogitsLayout
from servetwin.executor.model_loader import describe_model
from servetwin.executor.packed_model import PackedModel
from servetwin.executor.step_timer import TorchStepTimer
from servetwin.executor.testing import TINY_CONFIGS, PlanWriter, tiny_model, torch_threads
from servetwin.kernels import ops
from servetwin.sim.config import ModelConfig, SpeculativeConfig
from servetwin.sim.contract import SchedulerOutput

MAX_BLOCKS = 6
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


class Observed(ReplayedCall):
    """Keeps what the calls gave when they were captured, and the size at which the last step was replayed."""

    def __init__(self) -> None:
        self.captured: list[torch.Tensor] = []
        self.replayed: list[torch.Tensor] = []

    def capture(self, call: Call) -> Call:
        self.captured.append(call())

        def replay() -> torch.Tensor:
            self.replayed.append(call())
            return self.replayed[-1]

        return replay

    def take_size(self) -> int | None:
        sizes = [len(logits) for logits in self.replayed]
        self.replayed.clear()
        return sizes[-1] if sizes else None


class GraphEngine(PackedEngine):
    """A `PackedEngine` that replays decode batches at these sizes."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.observed = Observed()
        self.runner.capture_decode_graphs(sizes, self.observed)


def step_both(graphs: GraphEngine, eager: PackedEngine, counts: dict[str, int]) -> int | None:
    """One step on two engines, which must agree in tokens, logits and the whole cache; gives the padded size."""
    assert graphs.step(counts) == eager.step(counts)
    for ours, theirs in zip(graphs.runner.kv_caches, eager.runner.kv_caches, strict=True):
        # NaN where nobody has written: the null block, free blocks, the ends of last blocks.
        torch.testing.assert_close(ours.key, theirs.key, equal_nan=True)
        torch.testing.assert_close(ours.value, theirs.value, equal_nan=True)
        assert ours.key[0].isnan().all()
    for req_id in counts:
        logits, expected = graphs.recorder.rows[req_id][-1], eager.recorder.rows[req_id][-1]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    return graphs.observed.take_size()


def prefill_counts(engine: PackedEngine) -> dict[str, int]:
    """All that is known and not computed, of every request."""
    return {
        req_id: len(request.token_ids) - request.num_computed_tokens
        for req_id, request in engine.plans.requests.items()
    }


# ---------------------------------------------------------------- equal to eager


@given(
    sizes=st.sampled_from([(1, 2, 4), (3,), (1, 2, 4, 8), (8,)]),
    stretches=st.lists(
        st.tuples(st.integers(1, 7), st.integers(1, 13), st.integers(1, 3)), min_size=1, max_size=4
    ),
)
@settings(max_examples=15)
def test_random_decode_batches_give_what_eager_steps_give(
    sizes: tuple[int, ...], stretches: list[tuple[int, int, int]]
) -> None:
    """Requests come and go, contexts grow, some batches are larger than every graph: tokens, logits and cache agree.

    Rows 20 (read past the end of the last block), 21 (padding writes into slot 0) and 36 (the context length of the
    capture is replayed) of the bug list.
    """
    graphs, eager = GraphEngine(*sizes), PackedEngine()
    names = iter(f"r{i}" for i in range(40))
    for num_running, prompt_length, steps in stretches:
        running = list(graphs.plans.requests)
        for engine in (graphs, eager):
            for req_id in running[num_running:]:
                engine.plans.finish(req_id)
        for req_id in [next(names) for _ in range(num_running - len(running))]:
            for engine in (graphs, eager):
                engine.plans.add(req_id, prompt(prompt_length, start=len(req_id) + prompt_length))
        for _ in range(steps):
            counts = prefill_counts(graphs)
            decode = set(counts.values()) == {1}
            fitting = [size for size in sizes if decode and size >= len(counts)]
            assert step_both(graphs, eager, counts) == min(fitting, default=None)


def test_every_batch_runs_at_the_next_size_and_larger_ones_eagerly() -> None:
    """Sizes 2 and 4; a prompt of one token makes a decode batch, too."""
    graphs, eager = GraphEngine(2, 4), PackedEngine()
    found = []
    for count in range(1, 6):
        for engine in (graphs, eager):
            engine.plans.add(f"r{count}", [count])
        counts = prefill_counts(graphs)
        found.append(step_both(graphs, eager, counts))
    assert found == [2, 2, 4, 4, None]


def test_a_context_that_fills_the_whole_table_is_replayed() -> None:
    """Row 39: graphs and the longest contexts. The table has its full width in every graph."""
    graphs, eager = GraphEngine(1), PackedEngine()
    for engine in (graphs, eager):
        engine.plans.add("long", prompt(63))
    step_both(graphs, eager, {"long": 63})
    assert step_both(graphs, eager, {"long": 1}) == 1
    static = graphs.runner.decode_graphs.static  # type: ignore[union-attr]
    assert static.block_table.shape[1] == 64 // BLOCK_SIZE
    assert static.seq_lens.tolist() == [64]


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_other_kernels_treat_padding_alike(backend: ops.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 18, 20 and 21 for the kernels of a card (here interpreted) and for the definitions: two rows at size 4."""
    graphs, eager = GraphEngine(4), PackedEngine()
    for engine in (graphs, eager):
        engine.plans.add("a", prompt(5))
        engine.plans.add("b", prompt(3, start=50))
    step_both(graphs, eager, {"a": 5, "b": 3})
    for name in ("paged_attention", "reshape_and_cache"):
        monkeypatch.setattr(ops, name, partial(getattr(ops, name), backend=backend))
    assert step_both(graphs, eager, {"a": 1, "b": 1}) == 4


# ---------------------------------------------------------------- padding


def decode_batch(columns: int, lengths: list[int]) -> InputBatch:
    """A decode batch of requests of these lengths; no value in it is one of padding."""
    num_reqs = len(lengths)
    ids = torch.arange(1, num_reqs + 1)
    return InputBatch(
        req_ids=[f"r{i}" for i in range(num_reqs)],
        logits_layout=LogitsLayout(ids.numpy() - 1, ids.numpy() * 0, ids.numpy() - 1),
        next_draft_ids=None,
        input_ids=ids + 100,
        positions=torch.tensor(lengths) - 1,
        query_start_loc=torch.arange(num_reqs + 1, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        slot_mapping=ids + 200,
        block_table=torch.arange(1, num_reqs * columns + 1, dtype=torch.int32).view(num_reqs, columns),
        logits_indices=ids - 1,
    )


BATCHES = st.builds(
    decode_batch, st.integers(1, MAX_BLOCKS), st.lists(st.integers(2, 50), min_size=1, max_size=8)
)


@given(st.lists(BATCHES, min_size=1, max_size=6))
def test_a_batch_leaves_nothing_behind_for_the_next_one(batches: list[InputBatch]) -> None:
    """Row 19: whatever was loaded before, more rows or longer tables, the static tensors are those of a fresh load."""
    used, fresh = StaticBatch(8, MAX_BLOCKS, CPU), StaticBatch(8, MAX_BLOCKS, CPU)
    for batch in batches:
        used.load(batch)
    fresh.load(batches[-1])
    for name in ("input_ids", "positions", "slot_mapping", "seq_lens", "block_table", "query_start_loc"):
        assert torch.equal(getattr(used, name), getattr(fresh, name)), name


def test_padding_rows_write_nothing_attend_to_nothing_and_lie_on_the_null_block() -> None:
    static = StaticBatch(4, MAX_BLOCKS, CPU)
    static.load(decode_batch(2, [5, 7]))
    assert static.slot_mapping.tolist() == [201, 202, PADDING_SLOT, PADDING_SLOT]
    assert static.seq_lens.tolist() == [5, 7, 0, 0]
    assert static.block_table.tolist() == [[1, 2, 0, 0, 0, 0], [3, 4, 0, 0, 0, 0], [0] * 6, [0] * 6]
    assert static.input_ids.tolist() == [101, 102, 0, 0]
    assert static.query_start_loc.tolist() == [0, 1, 2, 3, 4]


def test_every_tensor_of_a_graph_has_its_padded_size() -> None:
    """Row 22: a slot mapping that is shorter than the keys."""
    metadata = StaticBatch(8, MAX_BLOCKS, CPU).metadata(4)
    assert (len(metadata.slot_mapping), len(metadata.seq_lens), len(metadata.query_start_loc)) == (4, 4, 5)
    assert metadata.block_table.shape == (4, MAX_BLOCKS)


def test_captures_run_on_padding_alone_from_the_largest_to_the_smallest() -> None:
    """Row 17 (lengths of a capture that reach beyond the table) and 18 (0/0 in padding): all lengths are 0, the cache
    stays as it is, and the logits of padding are finite, in a replay, too."""
    engine = GraphEngine(1, 2, 4)
    observed = engine.observed
    assert [len(logits) for logits in observed.captured] == [4, 2, 1]
    assert all(cache.key.isnan().all() for cache in engine.runner.kv_caches)
    for count in range(3):
        engine.plans.add(f"r{count}", [count + 3])
    engine.step(prefill_counts(engine))
    assert observed.replayed[0].shape[0] == 4
    assert all(logits.isfinite().all() for logits in observed.captured + observed.replayed)


# ---------------------------------------------------------------- which batches


def sizes_of(engine: PackedEngine, *plans: SchedulerOutput) -> list[int | None]:
    """The size at which the engine would run each of these plans."""
    found: list[int | None] = []
    for plan in plans:
        batch = engine.runner.prepare(plan)
        assert batch is not None
        found.append(engine.runner.graph_tokens(batch))
    return found


def test_only_rows_that_all_sample_after_one_token_are_replayed() -> None:
    """A chunk of one token that stops short of the prompt's end, and a mixed step, run eagerly."""
    engine = GraphEngine(4)
    engine.plans.add("a", prompt(6))
    assert sizes_of(engine, engine.plans.plan({"a": 1}), engine.plans.plan({"a": 2})) == [None, None]
    assert sizes_of(engine, engine.plans.plan({"a": 2}), engine.plans.plan({"a": 1})) == [None, 4]


def test_drafts_run_eagerly_also_where_no_row_has_more_than_one_token() -> None:
    """The step that verifies them has more than one token of a row."""
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    engine = PackedEngine(speculative=speculative)
    engine.runner.capture_decode_graphs((4,), ReplayedCall())
    engine.plans.add("a", prompt(5))
    engine.step({"a": 5})
    plan = engine.plans.plan({"a": 3})
    plan.scheduled_spec_decode_tokens = {"a": [7, 8]}
    assert sizes_of(engine, plan) == [None]


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 2048), (1,)),
        ((3, 2048), (1, 2, 4)),
        ((5, 2048), (1, 2, 4, 8)),
        ((20, 2048), (1, 2, 4, 8, 16, 24)),
        ((256, 2048), (1, 2, 4, *range(8, 257, 8))),
        ((1024, 8192), (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))),
        ((256, 30), (1, 2, 4, 8, 16, 24)),
        ((256, 2048, None, 6), (1, 2, 4)),
        ((256, 2048, None, 600), (1, 2, 4, *range(8, 257, 8))),
        ((1024, 2048, None, 600), (1, 2, 4, *range(8, 257, 8), *range(272, 600, 16))),
        ((64, 2048, [32, 5, 5, 4096]), (5, 32)),
        ((4, 2048, [32, 16, 8]), (8,)),
        ((4, 2048, [4096]), ()),
    ],
)
def test_sizes_follow_the_rule_of_vllm_as_far_as_decode_batches_go(
    arguments: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert capture_sizes(*arguments) == expected


# ---------------------------------------------------------------- what a capture demands of the model


@pytest.mark.parametrize("name", TINY_CONFIGS)
@pytest.mark.parametrize("prepare", [lambda model: None, fuse_layers], ids=["as it is", "fused"])
def test_no_model_reads_a_value_on_the_host(
    name: str, prepare: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture forbids it. Here tensors without values pass through the model: reading one raises."""
    for operation, shape_only in SHAPES_ONLY.items():
        monkeypatch.setattr(ops, operation, shape_only)
    loaded = describe_model(tiny_model(name).bfloat16(), name)
    prepare(loaded.model)
    caches = kv_cache.allocate(loaded.kv_cache_spec, 2, BLOCK_SIZE, CPU)
    static = StaticBatch(4, 2, CPU)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = map(mode.from_tensor, (static.input_ids, static.positions, static.logits_indices))
        logits = PackedModel(loaded.model).forward(*inputs, ForwardContext(static.metadata(4), caches))
    assert logits.shape == (4, loaded.vocab_size)


def like_first(first: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return torch.empty_like(first)


def like_normed(x: torch.Tensor, *_: object, residual: torch.Tensor | None = None, **__: object) -> Any:
    return torch.empty_like(x) if residual is None else (torch.empty_like(x), torch.empty_like(x))


SHAPES_ONLY: dict[str, Callable[..., Any]] = {
    "paged_attention": like_first,
    "rotary_and_cache": like_first,
    "reshape_and_cache": lambda *_, **__: None,
    "rms_norm": like_normed,
    "silu_and_mul": lambda gate_up, **_: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2),
}
"""The kernels, whose own tests see to it that they read nothing on the host, by the shapes that they give."""


# ---------------------------------------------------------------- beside the runner


def test_a_model_that_cannot_be_captured_is_told_with_the_way_out() -> None:
    class Failing:
        def capture(self, call: Call) -> Call:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with pytest.raises(GraphCaptureError, match=r"when stream is capturing; use --enforce-eager$"):
        PackedEngine().runner.capture_decode_graphs((1,), Failing())


def test_steps_say_at_which_size_they_ran() -> None:
    """`graph_tokens` of the result, and the sizes in the executor's description."""
    runner = GraphEngine(2, 4).runner
    executor = TorchStepTimer(runner, ModelConfig(max_model_len=64), num_gpu_blocks=40)
    plans = PlanWriter(BLOCK_SIZE, 40)
    plans.add("a", prompt(4))
    plans.add("b", prompt(5))
    found = []
    for counts in ({"a": 4, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 1}):
        result = executor.run(plans.plan(counts))
        plans.take(result.output)
        found.append(result.graph_tokens)
    assert found == [None, None, 2]
    assert executor.describe()["cudagraph_capture_sizes"] == [2, 4]
    executor.close()
    assert executor.describe()["cudagraph_capture_sizes"] == []
