"""How many KV blocks there are: from what was asked for, or from measured memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from servetwin.executor import kv_budget, kv_cache
from servetwin.executor.kv_budget import (
    MemoryReading,
    choose_num_blocks,
    peak_growth_bytes,
    profiling_lengths,
    share_left_bytes,
)
from servetwin.executor.model_loader import LoadedModel, describe_model
from servetwin.executor.packed_model import PackedModel
from servetwin.executor.testing import tiny_model, torch_threads
from servetwin.sim.config import ExecutorOptions

MIB = 2**20
BLOCK_BYTES = 4 * 512
"""4 tokens of the tiny llama: K and V, 2 layers, 2 heads of 16 float32."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return describe_model(tiny_model("llama"), "tiny", 64)


def choose(loaded: LoadedModel, **options: object) -> int:
    given = ExecutorOptions.model_validate({"block_size": 4, "max_num_batched_tokens": 32, **options})
    return choose_num_blocks(given, loaded, PackedModel(loaded.model))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 MiB, of which 60 are used at the peak of a forward pass, which is really run."""

    def read_cpu(forward: Callable[[], None]) -> MemoryReading:
        forward()
        return MemoryReading(100 * MIB, 60 * MIB)

    monkeypatch.setattr(kv_budget, "read_cpu", read_cpu)


def test_a_block_of_the_tiny_model_has_as_many_bytes_as_the_tests_say(loaded: LoadedModel) -> None:
    assert loaded.kv_cache_spec.bytes_per_token * 4 == BLOCK_BYTES


@pytest.mark.usefixtures("memory")
def test_the_share_of_the_total_less_what_is_used_goes_to_the_cache(loaded: LoadedModel) -> None:
    """80 % of 100 MiB less 60 MiB are 20 MiB."""
    assert choose(loaded, gpu_memory_utilization=0.8) == 20 * MIB // BLOCK_BYTES


@pytest.mark.usefixtures("memory")
def test_blocks_and_bytes_that_were_given_go_first(loaded: LoadedModel) -> None:
    assert choose(loaded, gpu_memory_utilization=0.8, kv_cache_memory_bytes=30 * BLOCK_BYTES + 1) == 30
    assert choose(loaded, gpu_memory_utilization=0.8, kv_cache_memory_bytes=1, num_gpu_blocks=17) == 17


@pytest.mark.usefixtures("memory")
def test_a_share_that_leaves_nothing_is_refused_with_the_numbers(loaded: LoadedModel) -> None:
    message = (
        rf"gpu_memory_utilization 0\.6: of {100 * MIB} bytes it allows {60 * MIB}, and {60 * MIB} are used"
    )
    with pytest.raises(ValueError, match=message):
        choose(loaded, gpu_memory_utilization=0.6)


def test_a_share_that_holds_no_whole_request_is_refused_with_the_numbers(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = MemoryReading(100 * MIB, 50 * MIB - 3 * BLOCK_BYTES)
    monkeypatch.setattr(kv_budget, "read_cpu", lambda forward: reading)
    with pytest.raises(
        ValueError, match="num_gpu_blocks 3 of block_size 4 hold 12 tokens, below max_model_len 64"
    ):
        choose(loaded, gpu_memory_utilization=0.5)


def test_without_a_share_the_cache_on_a_cpu_follows_the_available_memory(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No forward pass is run for it."""
    monkeypatch.setattr(kv_cache, "available_memory_bytes", lambda: 2 * 40 * BLOCK_BYTES)
    monkeypatch.setattr(kv_budget, "profiling_forward", None)
    assert choose(loaded) == 40


def test_the_share_rule() -> None:
    assert share_left_bytes(MemoryReading(1000, 300), 0.5) == 200


def test_a_gpu_counts_the_peak_of_torch_and_all_that_torch_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 1000 bytes 600 are free and 250 are torch's: 150 belong to others."""
    for name, value in {
        "reset_peak_memory_stats": None,
        "synchronize": None,
        "mem_get_info": (600, 1000),
        "memory_reserved": 250,
        "max_memory_allocated": 300,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert kv_budget.read_gpu(torch.device("cuda"), lambda: None) == MemoryReading(1000, 450)


def test_a_cpu_counts_what_is_not_available_and_what_the_forward_adds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cache, "total_memory_bytes", lambda: 1000)
    monkeypatch.setattr(kv_cache, "available_memory_bytes", lambda: 600)
    monkeypatch.setattr(kv_budget, "peak_growth_bytes", lambda forward: 70)
    assert kv_budget.read_cpu(lambda: None) == MemoryReading(1000, 470)


def test_the_profiled_batch_is_the_largest_that_the_scheduler_may_plan() -> None:
    assert profiling_lengths(10, 3, 100) == [4, 3, 3]
    assert profiling_lengths(100, 4, 5) == [5, 5, 5, 5]
    assert profiling_lengths(3, 8, 5) == [1, 1, 1]


def test_memory_that_was_used_in_between_is_seen() -> None:
    def use_64_mib() -> None:
        np.ones(64 * MIB, dtype=np.uint8)

    assert 60 * MIB < peak_growth_bytes(use_64_mib) < 128 * MIB


def test_where_no_peak_can_be_set_back_the_peak_of_the_process_has_to_do(tmp_path: Path) -> None:
    assert peak_growth_bytes(lambda: None, tmp_path / "missing") == 0
