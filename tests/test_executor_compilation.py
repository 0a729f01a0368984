"""The compiled model: one graph for batches of every size, the same tokens, writes before reads."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from transformers import AttentionInterface

from servetwin.executor import attention
from servetwin.executor.compilation import CompileError, compile_model
from servetwin.executor.forward_context import get_forward_context
from servetwin.executor.model_loader import SUPPORTED_MODEL_TYPES, LoadedModel, describe_model
from servetwin.executor.model_runner import ModelRunner
from servetwin.executor.packed_model import PackedModel
from servetwin.executor.step_timer import build_torch_executor
from servetwin.executor.testing import PlanWriter, TeacherForced, tiny_model, torch_threads
from servetwin.kernels import ops
from servetwin.sim.config import ExecutorOptions

SEQUENCES = [[(13 * i + 29 * row) % 150 + 3 for i in range(40)] for row in range(5)]
Step = dict[int, int]
Event = tuple[str, int]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def random_steps(count: int) -> list[Step]:
    """Which sequences run and how many tokens each: one token alone, decode batches, chunks, mixtures."""
    rng = random.Random(5)
    left = {row: len(tokens) for row, tokens in enumerate(SEQUENCES)}
    steps: list[Step] = [{0: 1}, {0: 2}, {0: 1, 1: 1}]
    while len(steps) < count:
        rows = rng.sample(sorted(left), rng.randint(1, len(left)))
        steps.append({row: rng.choice([1, 1, 1, 2, 3]) for row in rows})
    used = {row: sum(step.get(row, 0) for step in steps) for row in left}
    assert all(used[row] <= left[row] for row in left)
    return steps


class CountingBackend:
    """aot_eager, which does all that a compiler does with a graph but generate code; counts the graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
        return compiled


@pytest.fixture
def cache_events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """("write" or "read", address of the layer's cache), in the order in which the kernels run."""
    events: list[Event] = []

    def record(name: str, cache_argument: int, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            events.append((name, args[cache_argument].data_ptr()))
            return kernel(*args, **kwargs)

        return recorded

    monkeypatch.setattr(ops, "reshape_and_cache", record("write", 2, ops.reshape_and_cache))
    monkeypatch.setattr(ops, "paged_attention", record("read", 1, ops.paged_attention))
    return events


def check_order(driver: TeacherForced, events: list[Event]) -> None:
    """Layer by layer: write, then read."""
    expected = [(name, cache.key.data_ptr()) for cache in driver.caches for name in ("write", "read")]
    assert events == expected


def tiny(name: str) -> LoadedModel:
    return describe_model(tiny_model(name), name)


def check_equal_to_eager(loaded: LoadedModel, backend: CountingBackend, events: list[Event]) -> None:
    """20 steps of random shapes through both models, each with a cache of its own."""
    compiled, eager = compile_model(loaded, backend=backend), PackedModel(loaded.model)
    drivers = [TeacherForced(loaded, SEQUENCES) for _ in range(2)]
    for step in random_steps(20):
        events.clear()
        actual = drivers[0].step(compiled, step)
        check_order(drivers[0], events)
        expected = drivers[1].step(eager, step)
        for row in step:
            torch.testing.assert_close(actual[row], expected[row], rtol=1e-4, atol=1e-4)
            assert actual[row].argmax(-1).tolist() == expected[row].argmax(-1).tolist()


def check_one_graph(name: str, cache_events: list[Event]) -> None:
    backend = CountingBackend()
    check_equal_to_eager(tiny(name), backend, cache_events)
    assert backend.graphs == 1
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not counters["recompiles"]


def test_twenty_steps_of_random_shapes_are_one_graph_with_eager_tokens(cache_events: list[Event]) -> None:
    """No graph break, no recompilation; K/V of a layer is written before it is read."""
    check_one_graph("llama", cache_events)


def test_the_runner_compiles_nothing_anew() -> None:
    """It runs in inference mode, where padding must not make tensors of another kind than those that were traced: a
    compilation within a step would be measured as its time."""
    loaded, backend = tiny("llama"), CountingBackend()
    compiled = compile_model(loaded, backend=backend)
    runner = ModelRunner(
        loaded, num_blocks=20, block_size=4, max_num_seqs=2, max_model_len=40, model=compiled
    )
    plans = PlanWriter(4, 20)
    plans.add("a", [5])
    plans.add("b", [6, 7, 8])
    for counts in ({"a": 1}, {"a": 1}, {"a": 1, "b": 3}, {"b": 1}):
        plans.take(runner.execute_model(plans.plan(counts)))
    assert backend.graphs == 1
    assert not counters["recompiles"]


@pytest.mark.full
@pytest.mark.parametrize("name", sorted({*SUPPORTED_MODEL_TYPES} - {"llama"}))
def test_every_other_model_is_one_graph_too(name: str, cache_events: list[Event]) -> None:
    check_one_graph(name, cache_events)


@torch.library.custom_op("servetwin_test::attend_without_dummy", mutates_args=())
def attend_without_dummy(query: torch.Tensor, layer_index: int, scale: float) -> torch.Tensor:
    """`attend` without the argument that joins it to `write_kv`."""
    context = get_forward_context()
    metadata, cache = context.attention_metadata, context.kv_caches[layer_index]
    where = metadata.block_table, metadata.seq_lens, metadata.query_start_loc
    return ops.paged_attention(query, cache.key, cache.value, *where, scale=scale)


@attend_without_dummy.register_fake
def _(query: torch.Tensor, layer_index: int, scale: float) -> torch.Tensor:
    return torch.empty_like(query)


def unjoined_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    layer_index: Any = module.layer_idx
    attention.write_kv(attention._packed(key), attention._packed(value), layer_index)
    output = attend_without_dummy(attention._packed(query), layer_index, options["scaling"])
    return output.unsqueeze(0), None


def test_without_the_dummy_argument_the_compiler_breaks_the_order(cache_events: list[Event]) -> None:
    """Eagerly the variant is right; compiled, nobody needs its write, which is left out: the check above sees it."""
    AttentionInterface.register("servetwin_unjoined", unjoined_forward)
    loaded = describe_model(tiny_model("llama", attention="servetwin_unjoined"), "unjoined")
    driver = TeacherForced(loaded, SEQUENCES)
    driver.step(PackedModel(loaded.model), {0: 3, 1: 2})
    check_order(driver, cache_events)
    compiled = compile_model(loaded, backend=CountingBackend())
    cache_events.clear()
    driver.step(compiled, {0: 3, 1: 2})
    with pytest.raises(AssertionError):
        check_order(driver, cache_events)
    assert {name for name, _ in cache_events} == {"read"}


def test_a_model_that_is_not_one_graph_is_refused_by_name() -> None:
    """Eager experts branch on the data."""
    loaded = tiny("qwen3_moe")
    loaded.model.set_experts_implementation("eager")
    with pytest.raises(CompileError, match="compile: model_type 'qwen3_moe' is not one graph: "):
        compile_model(loaded, backend="eager")


def test_a_backend_that_fails_is_told_with_its_reason() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        raise OSError("no space left")

    with pytest.raises(CompileError, match="compile: no code was generated: OSError: no space left"):
        compile_model(tiny("llama"), backend=backend)


def test_without_a_cpp_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        CompileError, match=r"needs a C\+\+ compiler, and 'no-such-compiler' is not on the PATH"
    ):
        compile_model(tiny("llama"))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # inside torch
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
def test_the_option_compiles_and_gives_the_tokens_of_eager(tmp_path: Path) -> None:
    """Generated code, through the executor as the engine builds it."""
    tiny_model("llama", attention="eager").save_pretrained(tmp_path)

    def tokens(compiled: bool) -> list[list[list[int]]]:
        options = {"model": tmp_path, "block_size": 4, "num_gpu_blocks": 70, "compile": compiled}
        executor = build_torch_executor(ExecutorOptions.model_validate(options))
        plans = PlanWriter(4, 70)
        plans.add("a", range(3, 10))
        plans.add("b", range(30, 35))
        outputs = []
        for step in ({"a": 4, "b": 5}, {"a": 3, "b": 1}, {"a": 1}, *[{"a": 1, "b": 1}] * 5):
            output = executor.run(plans.plan(step)).output
            plans.take(output)
            outputs.append(output.sampled_token_ids)
        return outputs

    assert tokens(compiled=True) == tokens(compiled=False)
