"""CPU attention beside what the machine can do, as ratios measured in one run.

    python benchmarks/attention_cpu.py [--rounds 15] [--threads N] [--toy] [-o FILE]

Decode: 32 requests with a context of 1,000, 32 query and 8 kv heads of 64, blocks of 16 in random order. Its rate is
the bytes of K and V over the time, beside the rate of a copy (bytes read + written) in float32, and the time of
`scaled_dot_product_attention` over K and V that lie contiguous already. Prefill: 512 queries on a context of 2,000; its
rate is the useful operations over the time, beside a float32 matmul. Both by the C++ kernels ("native") and in plain
torch ("torch"), in float32 and bfloat16.

All measurements take turns within each round, and figures are medians over the rounds: others may use the machine too,
and then ratios say more than times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from servetwin.kernels import cpu_native, cpu_native_build, cpu_torch

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 32, 8, 64, 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TARGETS = {
    "decode.float32.native.rate_over_copy": (">=", 0.60),
    "decode.bfloat16.native.time_over_sdpa": ("<=", 1.20),
    "prefill.float32.native.rate_over_matmul": (">=", 0.75),
}


@dataclass(frozen=True)
class Sizes:
    requests: int
    context: int
    chunk: int
    prefix: int
    copy_floats: int
    matmul: tuple[int, int, int]
    """Rows, depth and columns."""


FULL = Sizes(32, 1_000, 512, 2_000, 1 << 25, (1024, 2048, 2048))
TOY = Sizes(2, 40, 20, 30, 1 << 10, (16, 32, 32))


def paged_call(attend: Callable[..., Tensor], dtype: torch.dtype, rows: list[int], lengths: list[int]) -> Any:
    """A call of `attend` on random requests of these rows and lengths, whose blocks lie in random order."""
    columns = -(-max(lengths) // BLOCK_SIZE)
    blocks = len(lengths) * columns
    shape = (blocks, BLOCK_SIZE, KV_HEADS, DIM)
    key_cache, value_cache = (torch.randn(shape).to(dtype) for _ in range(2))
    table = torch.randperm(blocks).view(len(lengths), columns).int()
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    query = torch.randn(sum(rows), HEADS, DIM).to(dtype)
    arguments = query, key_cache, value_cache, table, torch.tensor(lengths).int(), starts
    return lambda: attend(*arguments, scale=DIM**-0.5)


def contiguous_call(dtype: torch.dtype, sizes: Sizes) -> Any:
    """torch's own attention on contiguous K/V, the query heads of a kv head as rows, which is fastest there."""
    keys, values = (torch.randn(sizes.requests, KV_HEADS, sizes.context, DIM).to(dtype) for _ in range(2))
    query = torch.randn(sizes.requests, KV_HEADS, HEADS // KV_HEADS, DIM).to(dtype)
    return lambda: scaled_dot_product_attention(query, keys, values)


def yardsticks(sizes: Sizes) -> dict[str, Any]:
    source, target = torch.randn(sizes.copy_floats), torch.empty(sizes.copy_floats)
    rows, depth, columns = sizes.matmul
    a, b = torch.randn(rows, depth), torch.randn(depth, columns)
    return {"copy": lambda: target.copy_(source), "matmul": lambda: a @ b}


def calls(dtype: torch.dtype, sizes: Sizes) -> dict[str, Any]:
    """All that takes turns in one round."""
    paths = {"torch": cpu_torch.paged_attention}
    if cpu_native.available():
        paths["native"] = cpu_native.paged_attention
    ones, contexts = [1] * sizes.requests, [sizes.context] * sizes.requests
    turns = yardsticks(sizes) | {"sdpa": contiguous_call(dtype, sizes)}
    for name, attend in paths.items():
        turns[f"decode.{name}"] = paged_call(attend, dtype, ones, contexts)
        turns[f"prefill.{name}"] = paged_call(attend, dtype, [sizes.chunk], [sizes.prefix + sizes.chunk])
    return turns


def median_seconds(turns: dict[str, Any], rounds: int) -> dict[str, float]:
    for call in turns.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, call in turns.items():
            start = perf_counter()
            call()
            seconds[name].append(perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def figures(seconds: dict[str, float], dtype: torch.dtype, sizes: Sizes) -> dict[str, float]:
    """Rates in GB/s and GFLOP/s, times in ms, and the ratios."""
    kv_bytes = 2 * sizes.requests * sizes.context * KV_HEADS * DIM * dtype.itemsize
    pairs = sizes.chunk * sizes.prefix + sizes.chunk * (sizes.chunk + 1) // 2
    operations = 4 * HEADS * DIM * pairs
    rows, depth, columns = sizes.matmul
    copy = 2 * 4 * sizes.copy_floats / seconds["copy"]
    matmul = 2 * rows * depth * columns / seconds["matmul"]
    found = {"copy_gb_s": copy / 1e9, "matmul_gflop_s": matmul / 1e9, "sdpa_ms": seconds["sdpa"] * 1e3}
    for path in ("torch", "native"):
        if f"decode.{path}" not in seconds:
            continue
        decode, prefill = seconds[f"decode.{path}"], seconds[f"prefill.{path}"]
        found |= {
            f"decode.{path}_ms": decode * 1e3,
            f"decode.{path}.rate_over_copy": kv_bytes / decode / copy,
            f"decode.{path}.time_over_sdpa": decode / seconds["sdpa"],
            f"prefill.{path}_ms": prefill * 1e3,
            f"prefill.{path}.rate_over_matmul": operations / prefill / matmul,
        }
    return found


def environment() -> dict[str, Any]:
    flags = cpu_native_build.cpu_flags()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.machine(),
        "cpu_flags": sorted(flag for flag in flags if flag.startswith(("avx", "amx", "fma", "f16c"))),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "native": cpu_native.status(),
        "load_average_before": os.getloadavg(),
    }


def measure(rounds: int, sizes: Sizes) -> dict[str, Any]:
    report: dict[str, Any] = {"environment": environment(), "rounds": rounds}
    torch.manual_seed(0)
    report["figures"] = {
        name: figures(median_seconds(calls(dtype, sizes), rounds), dtype, sizes)
        for name, dtype in DTYPES.items()
    }
    report["environment"]["load_average_after"] = os.getloadavg()
    return report


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="default 0: as many as torch chooses")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("-o", "--output", type=Path, help="also write the figures there, as JSON")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: must be 1 or more")
    if options.threads < 0:
        parser.error(f"--threads {options.threads}: must be 0 (torch chooses) or more")
    if options.output and not options.output.parent.is_dir():
        parser.error(f"-o {options.output}: its folder does not exist")
    if options.threads:
        torch.set_num_threads(options.threads)
    report = measure(options.rounds, TOY if options.toy else FULL)
    for name, value in report["environment"].items():
        print(f"{name}: {value}")
    print_figures(report["figures"], {} if options.toy else TARGETS)
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")


def print_figures(found: dict[str, dict[str, float]], targets: dict[str, tuple[str, float]]) -> None:
    for dtype, rows in found.items():
        for name, value in rows.items():
            operation, _, rest = name.partition(".")
            relation, limit = targets.get(f"{operation}.{dtype}.{rest}", ("", 0.0))
            target = f"   target {relation} {limit:.2f}" if relation else ""
            print(f"{dtype:9} {name:35} {value:10.2f}{target}")


if __name__ == "__main__":
    main()
