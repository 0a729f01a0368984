"""The executor as the engine sees it: built from options, times per step, memory that fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from servetwin.executor import kv_cache
from servetwin.executor.step_timer import TorchStepTimer, _graph_sizes, build_torch_executor
from servetwin.executor.testing import PlanWriter, tiny_model, torch_threads
from servetwin.kernels import cpu_native
from servetwin.sim.config import ExecutorOptions
from servetwin.sim.contract import SchedulerOutput, from_json, to_json
from servetwin.sim.plugins import Executor, load

SPEC = kv_cache.KVCacheSpec(num_layers=2, num_kv_heads=2, head_dim=16, dtype=torch.float32)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama", attention="eager").save_pretrained(path)
    return path


def build(folder: Path | None, **options: object) -> TorchStepTimer:
    defaults = {"block_size": 4, "num_gpu_blocks": 20, "max_model_len": 64, "max_num_seqs": 4}
    return build_torch_executor(ExecutorOptions.model_validate({"model": folder, **defaults, **options}))


def some_plans() -> list[SchedulerOutput]:
    """Two requests, one of them preempted and resumed, with the tokens that the tiny llama gives."""
    plans = PlanWriter(4, 20)
    plans.add("a", range(3, 10))
    plans.add("b", range(30, 35))
    return [plans.plan({"a": 4, "b": 5}), plans.plan({"a": 3, "b": 1}), plans.plan({"a": 1, "b": 1})]


def test_the_built_in_name_leads_here_and_gives_an_executor(folder: Path) -> None:
    """Through the entry point, as the engine finds it."""
    factory = load("servetwin.executors", "torch")
    executor: Executor = factory(
        ExecutorOptions(model=folder, block_size=4, num_gpu_blocks=20, max_model_len=64)
    )
    assert executor.model_config.name == "tiny"
    assert executor.model_config.max_model_len == 64
    assert executor.model_config.vocab_size == 160
    assert executor.model_config.eos_token_id == 2
    assert executor.num_gpu_blocks == 20
    executor.close()


def test_a_step_has_its_parts(folder: Path) -> None:
    """device = forward + sample; whole nanoseconds; where they come from."""
    executor = build(folder)
    result = executor.run(some_plans()[0])
    assert result.source == "measured"
    assert result.prepare_ns > 0
    assert result.parts["forward_ns"] > 0
    assert result.device_ns == result.parts["forward_ns"] + result.parts["sample_ns"]
    assert result.output.req_ids == ["a", "b"]
    assert [len(tokens) for tokens in result.output.sampled_token_ids] == [0, 1]


def test_drafting_is_a_part_of_the_step(folder: Path) -> None:
    """The drafts come with the result, and their time is device time; without a drafter there is neither."""
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 1}
    executor = build(folder, speculative=speculative)
    plans = PlanWriter(4, 20)
    plans.add("a", [5, 6, 7, 8] * 3)
    plans.add("b", range(30, 50))
    result = executor.run(plans.plan({"a": 12, "b": 8}))
    assert result.draft_token_ids is not None
    assert result.draft_token_ids.req_ids == ["a"]
    parts = result.parts
    assert result.device_ns == parts["forward_ns"] + parts["sample_ns"] + parts["draft_ns"]
    assert parts["draft_ns"] > 0
    plain = build(folder).run(some_plans()[0])
    assert plain.draft_token_ids is None
    assert "draft_ns" not in plain.parts


def test_a_method_that_it_cannot_draft_with_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="method 'eagle' needs a model that drafts"):
        build(folder, speculative={"method": "eagle", "num_speculative_tokens": 2})


def test_graph_sizes_mean_nothing_on_a_cpu_and_it_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without them there is nothing to say."""
    assert build(folder, cudagraph_capture_sizes=(1, 2)).runner.decode_graphs is None
    assert "no effect on a CPU" in caplog.text
    caplog.clear()
    build(folder, enforce_eager=True)
    build(folder)
    assert not caplog.records


def test_graph_sizes_that_nothing_would_use_are_named(caplog: pytest.LogCaptureFixture) -> None:
    options = ExecutorOptions(
        cudagraph_capture_sizes=(2, 4, 16, 4096), max_num_seqs=3, max_num_batched_tokens=64, model=Path()
    )
    assert _graph_sizes(options, torch.device("cuda")) == (2, 4)
    assert "sizes [16, 4096] are not captured: they are above max_num_batched_tokens (64)" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enforce_eager": True, "cudagraph_capture_sizes": (1,)}, "give no CUDA graph sizes with it"),
        ({"enforce_eager": True, "max_cudagraph_capture_size": 8}, "give no CUDA graph sizes with it"),
        ({"cudagraph_capture_sizes": ()}, "must not be empty"),
        ({"cudagraph_capture_sizes": (0,)}, "greater than 0"),
        (
            {"cudagraph_capture_sizes": (1, 4), "max_cudagraph_capture_size": 8},
            "max_cudagraph_capture_size 8 is not the largest of cudagraph_capture_sizes, 4",
        ),
    ],
)
def test_graph_sizes_that_contradict_each_other_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExecutorOptions.model_validate(options)


def test_an_empty_plan_takes_no_time(folder: Path) -> None:
    result = build(folder).run(PlanWriter(4, 20).plan({}))
    assert (result.prepare_ns, result.device_ns, result.output.req_ids) == (0, 0, [])


def test_recorded_plans_run_without_a_scheduler_and_give_the_same_tokens(folder: Path) -> None:
    """Also after a trip through JSON."""
    written = [from_json(to_json(plan)) for plan in some_plans()]

    def tokens_of(plans: list[SchedulerOutput]) -> list[list[list[int]]]:
        executor = build(folder)
        return [executor.run(plan).output.sampled_token_ids for plan in plans]

    tokens = [tokens_of(plans) for plans in (some_plans(), written)]
    assert tokens[0] == tokens[1]
    assert [len(row) for step in tokens[0] for row in step] == [0, 1, 1, 1, 1, 1]


def test_it_describes_itself(folder: Path) -> None:
    described = build(folder, dtype="bfloat16").describe()
    assert described["dtype"] == "bfloat16"
    assert described["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert described["kv_cache_bytes"] == 20 * 4 * 256
    assert described["threads"] == torch.get_num_threads()
    assert described["cpu_kernels"] == cpu_native.status()
    assert described["versions"]["torch"] == torch.__version__
    assert "note" not in described


def test_a_windowed_model_says_that_the_scheduler_does_not_model_windows(tmp_path: Path) -> None:
    tiny_model("mistral", attention="eager").save_pretrained(tmp_path)
    assert "sliding window of 7 tokens" in build(tmp_path).describe()["note"]


def test_max_model_len_follows_the_model_and_may_not_pass_it(folder: Path) -> None:
    assert build(folder, max_model_len=None, num_gpu_blocks=65).model_config.max_model_len == 256
    with pytest.raises(ValueError, match="max_model_len 257 is above the 256 positions of model 'tiny'"):
        build(folder, max_model_len=257)


def test_no_model() -> None:
    with pytest.raises(ValueError, match="--model FOLDER"):
        build(None)


def test_blocks_come_from_the_override_then_the_bytes_then_the_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = 4 * SPEC.bytes_per_token
    assert build(folder, num_gpu_blocks=18, kv_cache_memory_bytes=10**6).num_gpu_blocks == 18
    assert build(folder, num_gpu_blocks=None, kv_cache_memory_bytes=30 * block_bytes + 1).num_gpu_blocks == 30
    monkeypatch.setattr(kv_cache, "available_memory_bytes", lambda: 2 * 40 * block_bytes)
    assert build(folder, num_gpu_blocks=None).num_gpu_blocks == 40


@pytest.mark.parametrize(
    "options", [{"num_gpu_blocks": 15}, {"num_gpu_blocks": None, "kv_cache_memory_bytes": 100}]
)
def test_a_cache_that_cannot_hold_one_request_is_refused_with_the_numbers(
    folder: Path, options: dict[str, int | None]
) -> None:
    """64 tokens need 16 blocks of 4."""
    with pytest.raises(ValueError, match=r"below max_model_len 64: allow at least 16 blocks \(32768 bytes"):
        build(folder, **options)


def test_the_cache_on_a_cpu_takes_at_most_four_gib_and_half_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for available, expected in ((2 * 2**30, 2**30), (100 * 2**30, 4 * 2**30)):
        monkeypatch.setattr(kv_cache, "available_memory_bytes", lambda available=available: available)
        assert kv_cache.cpu_cache_bytes() == expected


def test_available_memory_is_read_from_linux_or_else_all_there_is(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9 kB\nMemAvailable:     1024 kB\n")
    assert kv_cache.available_memory_bytes(meminfo) == 2**20
    assert kv_cache.available_memory_bytes(tmp_path / "missing") > 2**20


def test_warming_up_leaves_no_request_behind(folder: Path) -> None:
    states = build(folder).runner.states
    assert not states.known
    assert not states.rows
