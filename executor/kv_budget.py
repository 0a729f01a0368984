"""How many blocks the KV cache gets: as many as were asked for, or as many as the memory holds."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from servetwin.executor import kv_cache
from servetwin.executor.forward_context import ForwardContext
from servetwin.executor.input_batch import build_warm_up_batch
from servetwin.executor.model_loader import LoadedModel
from servetwin.executor.packed_model import PackedModel
from servetwin.sim.config import ExecutorOptions

GPU_MEMORY_UTILIZATION = 0.92
"""Part of a GPU's memory that the engine may use (vLLM's default)."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """One device's memory, without a KV cache."""

    total_bytes: int
    used_bytes: int
    """By everybody, the engine's weights included, at the peak of a forward pass."""


def choose_num_blocks(options: ExecutorOptions, loaded: LoadedModel, model: PackedModel) -> int:
    """Blocks of the cache, the null block included: as given, else what the bytes given or measured hold.

    Raises ValueError with the numbers when nothing is left, and when one request of max_model_len does not fit.
    """
    spec, block_size = loaded.kv_cache_spec, options.block_size
    num_blocks = options.num_gpu_blocks
    if num_blocks is None:
        num_blocks = kv_cache.blocks_in(_cache_bytes(options, loaded, model), spec, block_size)
    kv_cache.check_fits(num_blocks, block_size, loaded.max_model_len, spec)
    return num_blocks


def _cache_bytes(options: ExecutorOptions, loaded: LoadedModel, model: PackedModel) -> int:
    utilization = options.gpu_memory_utilization
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    if loaded.device.type == "cpu" and utilization is None:
        return kv_cache.cpu_cache_bytes()

    def forward() -> None:
        profiling_forward(options, loaded, model)

    reading = read_gpu(loaded.device, forward) if loaded.device.type == "cuda" else read_cpu(forward)
    return share_left_bytes(reading, GPU_MEMORY_UTILIZATION if utilization is None else utilization)


def share_left_bytes(reading: MemoryReading, utilization: float) -> int:
    """What is left for the cache, by vLLM's rule: the share of the total, less what is used without a cache.

    Raises ValueError with the numbers when nothing is left.
    """
    share_bytes = int(reading.total_bytes * utilization)
    left_bytes = share_bytes - reading.used_bytes
    if left_bytes <= 0:
        raise ValueError(
            f"gpu_memory_utilization {utilization:g}: of {reading.total_bytes} bytes it allows {share_bytes}, and "
            f"{reading.used_bytes} are used at the peak of a forward pass, so nothing is left for the KV cache: allow "
            "more, free memory, lower max_num_batched_tokens, or give num_gpu_blocks_override or kv_cache_memory_bytes"
        )
    return left_bytes


# ---------------------------------------------------------------- measuring


def profiling_forward(options: ExecutorOptions, loaded: LoadedModel, model: PackedModel) -> None:
    """The largest batch that the scheduler may plan, on the null block alone."""
    lengths = profiling_lengths(options.max_num_batched_tokens, options.max_num_seqs, loaded.max_model_len)
    batch = build_warm_up_batch(lengths, options.block_size, loaded.device)
    caches = kv_cache.allocate(loaded.kv_cache_spec, 1, options.block_size, loaded.device)
    context = ForwardContext(batch.attention_metadata, caches)
    model.forward(batch.input_ids, batch.positions, batch.logits_indices, context)


def profiling_lengths(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> list[int]:
    """Tokens of each request: as many requests and tokens as allowed, spread evenly."""
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    tokens = min(max_num_batched_tokens, num_seqs * max_model_len)
    return [tokens // num_seqs + (i < tokens % num_seqs) for i in range(num_seqs)]


def read_gpu(device: torch.device, forward: Callable[[], None]) -> MemoryReading:
    """torch's own peak over `forward`, and what it does not know of: other processes, the driver, libraries."""
    torch.cuda.reset_peak_memory_stats(device)
    forward()
    torch.cuda.synchronize(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    outside_torch_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
    return MemoryReading(total_bytes, torch.cuda.max_memory_allocated(device) + outside_torch_bytes)


def read_cpu(forward: Callable[[], None]) -> MemoryReading:
    """What is in use on the whole machine (all but what can be had without swapping) and what `forward` adds."""
    total_bytes = kv_cache.total_memory_bytes()
    used_bytes = total_bytes - kv_cache.available_memory_bytes()
    return MemoryReading(total_bytes, used_bytes + peak_growth_bytes(forward))


def peak_growth_bytes(run: Callable[[], None], process: Path = Path("/proc/self")) -> int:
    """How far the memory of this process rises above its present size during `run`.

    Linux keeps a peak that can be set back. Elsewhere the peak of the whole life of the process has to do, which
    sees nothing of a rise below an earlier peak.
    """
    try:
        (process / "clear_refs").write_text("5")
    except OSError:
        before_bytes = _lifetime_peak_bytes()
        run()
        return _lifetime_peak_bytes() - before_bytes
    before_bytes = kv_cache.read_kilobytes(process / "status", "VmRSS")
    run()
    return max(kv_cache.read_kilobytes(process / "status", "VmHWM") - before_bytes, 0)


def _lifetime_peak_bytes() -> int:
    # Kilobytes on Linux, bytes on macOS.
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
