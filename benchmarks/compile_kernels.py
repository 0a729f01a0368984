"""Compiles every Triton kernel for NVIDIA architectures without a GPU and reports what each variant costs.

    python benchmarks/compile_kernels.py [--arch sm_90 ...] [--variant NAME ...] [-o FILE]

Needs a process without TRITON_INTERPRET. Kernels are specialised through the same launch plans as on a device, with
meta tensors; registers and stack are read from the cubin by the tools in the triton wheel. Prints (and with -o
writes) a JSON list of rows:

    kernel, variant, arch, triton   what was compiled, and with which version
    registers                       per thread; 255 is the hardware's limit
    spills                          instructions that move registers to or from local memory
    stack_bytes, shared_bytes       per thread, per block; the launch fails beyond 232,448 shared bytes on sm_90
    mma                             matrix instruction: UTCHMMA (sm_100), HGMMA (sm_90), HMMA (all), or none
    async_copies                    asynchronous global-to-shared copies, present when loads are pipelined
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from servetwin.kernels import triton_paged_attention, triton_reshape_and_cache
from servetwin.kernels.triton_launch import INTERPRETED, Launch

ARCHES = ("sm_80", "sm_90", "sm_100")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
WARP_SIZE = 32
META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A variant of the attention kernel: a batch of `tokens` rows over `reqs` requests."""

    name: str
    tokens: int
    reqs: int = 8
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    block_size: int = 16
    sliding_window: int | None = None
    softcap: float | None = None

    kernel = "paged_attention"

    def launch(self) -> Launch:
        query = torch.empty(self.tokens, self.heads, self.head_dim, dtype=self.dtype, device=META)
        cache = _cache(self.block_size, self.kv_heads, self.head_dim, self.dtype)
        table = torch.empty(self.reqs, 1024, dtype=torch.int32, device=META)
        lengths = torch.empty(self.reqs, dtype=torch.int32, device=META)
        starts = torch.empty(self.reqs + 1, dtype=torch.int32, device=META)
        return triton_paged_attention.plan_launch(
            torch.empty_like(query),
            *(query, cache, cache, table, lengths, starts),
            scale=self.head_dim**-0.5,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
        )


@dataclass(frozen=True, kw_only=True)
class CacheWrite:
    """A variant of the cache write."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    kv_heads: int = 8
    block_size: int = 16

    kernel = "reshape_and_cache"

    def launch(self) -> Launch:
        key = torch.empty(64, self.kv_heads, self.head_dim, dtype=self.dtype, device=META)
        cache = _cache(self.block_size, self.kv_heads, self.head_dim, self.dtype)
        slots = torch.empty(64, dtype=torch.int64, device=META)
        return triton_reshape_and_cache.plan_launch(key, key, cache, cache, slots)


def _cache(block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(4096, block_size, kv_heads, head_dim, dtype=dtype, device=META)


DECODE, PREFILL = 8, 2048

VARIANTS: tuple[Attention | CacheWrite, ...] = (
    Attention(name="decode-bf16-d128-g4", tokens=DECODE),
    Attention(name="decode-bf16-d64-g8", tokens=DECODE, head_dim=64, heads=64),
    Attention(name="decode-bf16-d80-g1-block12", tokens=DECODE, head_dim=80, kv_heads=32, block_size=12),
    Attention(name="decode-bf16-d128-g48", tokens=DECODE, heads=48, kv_heads=1),
    Attention(name="decode-bf16-d256-g2", tokens=DECODE, head_dim=256, heads=8, kv_heads=4),
    Attention(name="decode-fp32-d128-g4", tokens=DECODE, dtype=torch.float32),
    Attention(
        name="decode-fp32-d256-g48", tokens=DECODE, dtype=torch.float32, head_dim=256, heads=48, kv_heads=1
    ),
    Attention(name="prefill-bf16-d128-g4", tokens=PREFILL),
    Attention(name="prefill-fp16-d128-g4", tokens=PREFILL, dtype=torch.float16),
    Attention(name="prefill-bf16-d64-g8", tokens=PREFILL, head_dim=64, heads=64),
    Attention(name="prefill-bf16-d96-g5-block12", tokens=PREFILL, head_dim=96, heads=40, block_size=12),
    Attention(name="prefill-bf16-d128-window-softcap", tokens=PREFILL, sliding_window=4096, softcap=50.0),
    Attention(name="prefill-bf16-d256-g2", tokens=PREFILL, head_dim=256, heads=8, kv_heads=4),
    Attention(name="prefill-bf16-d128-g48", tokens=PREFILL, heads=48, kv_heads=1),
    Attention(name="prefill-fp32-d128-g4", tokens=PREFILL, dtype=torch.float32),
    CacheWrite(name="bf16-d128"),
    CacheWrite(name="fp32-d80-block12", dtype=torch.float32, head_dim=80, block_size=12),
)


class OfflineDriver:
    """The little of a Triton driver that compilation asks for, for a GPU that is not there."""

    def __init__(self, arch: str) -> None:
        self._capability = int(arch.removeprefix("sm_"))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, WARP_SIZE)

    def get_current_device(self) -> int:
        # Compiled kernels are kept per device number, so each architecture poses as a device of its own.
        return self._capability

    def set_current_device(self, device: int) -> None:
        """There is one device."""

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return META


def compile_variant(variant: Attention | CacheWrite, arch: str) -> dict[str, Any]:
    """One row of the report."""
    triton.runtime.driver.set_active(OfflineDriver(arch))
    compiled = variant.launch().compile()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", file.name)
        assembly = _tool("nvdisasm", "-c", file.name)
    return {
        "kernel": variant.kernel,
        "variant": variant.name,
        "arch": arch,
        "triton": triton.__version__,
        "registers": _number(r"REG:(\d+)", usage),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", assembly)),
        "stack_bytes": _number(r"STACK:(\d+)", usage),
        "shared_bytes": compiled.metadata.shared,
        "mma": next((i for i in ("UTCHMMA", "HGMMA", "HMMA") if re.search(rf"\b{i}\b", assembly)), "none"),
        "async_copies": len(re.findall(r"\bLDGSTS\b", assembly)),
    }


def _tool(name: str, *args: str) -> str:
    return subprocess.run([TOOLS / name, *args], check=True, capture_output=True, text=True).stdout


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {pattern!r} in the output of cuobjdump: {text!r}")
    return int(match[1])


def rows(arches: list[str], names: list[str]) -> Iterator[dict[str, Any]]:
    """One row per architecture and variant, those of `names` only unless it is empty."""
    for arch in arches:
        for variant in VARIANTS:
            if not names or variant.name in names:
                yield compile_variant(variant, arch)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", choices=ARCHES, default=list(ARCHES), help="default: all")
    names = [v.name for v in VARIANTS]
    parser.add_argument(
        "--variant", nargs="+", choices=names, default=[], metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("-o", "--output", type=Path, help="also write the JSON to this file")
    args = parser.parse_args()
    if INTERPRETED:
        sys.exit("TRITON_INTERPRET is set: nothing can be compiled in this process")
    text = json.dumps(list(rows(args.arch, args.variant)), indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
