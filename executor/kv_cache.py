"""The paged KV cache: how many blocks there are, and their memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

CPU_CACHE_BYTES = 4 * 2**30
"""The cache on a CPU takes at most this much, and at most half of what is available."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of the K/V that one token leaves behind, equal in all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """K and V of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVCache:
    """One layer's cache."""

    key: torch.Tensor
    """[num_blocks, block_size, kv_heads, head_dim]"""
    value: torch.Tensor
    """[num_blocks, block_size, kv_heads, head_dim]"""


def allocate(spec: KVCacheSpec, num_blocks: int, block_size: int, device: torch.device) -> list[KVCache]:
    """One cache per layer, not initialised: no kernel reads a slot before it was written."""
    shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)

    def empty() -> torch.Tensor:
        return torch.empty(shape, dtype=spec.dtype, device=device)

    return [KVCache(empty(), empty()) for _ in range(spec.num_layers)]


def blocks_in(cache_bytes: int, spec: KVCacheSpec, block_size: int) -> int:
    """Whole blocks that fit into `cache_bytes`, the null block included."""
    return cache_bytes // (spec.bytes_per_token * block_size)


def check_fits(num_blocks: int, block_size: int, max_model_len: int, spec: KVCacheSpec) -> None:
    """ValueError when one request of `max_model_len` tokens does not fit.

    As in vLLM 0.22.0 the null block counts here, although no request can use it.
    """
    tokens = num_blocks * block_size
    if tokens < max_model_len:
        needed = -(-max_model_len // block_size)
        raise ValueError(
            f"num_gpu_blocks {num_blocks} of block_size {block_size} hold {tokens} "
            f"tokens, below max_model_len {max_model_len}: allow at least {needed} blocks "
            f"({needed * block_size * spec.bytes_per_token} bytes at {spec.bytes_per_token} bytes per token) "
            f"or lower max_model_len to at most {tokens}"
        )


def cpu_cache_bytes() -> int:
    """Memory for the cache on a CPU: the smaller of 4 GiB and half of the available memory."""
    return min(CPU_CACHE_BYTES, available_memory_bytes() // 2)


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that can be had without swapping; where Linux does not tell, all physical memory."""
    return read_kilobytes(meminfo, "MemAvailable") if meminfo.is_file() else total_memory_bytes()


def total_memory_bytes() -> int:
    """Physical memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_kilobytes(path: Path, key: str) -> int:
    """The line `KEY:  123 kB` of a file under /proc, in bytes. KeyError when there is none."""
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise KeyError(f"{path} has no line {key}")
