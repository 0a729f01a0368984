"""Every kernel compiles for real GPUs, without one, and within their limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parent.parent
THIS_TRITON = [sys.executable, str(ROOT / "benchmarks" / "compile_kernels.py")]
SECOND_TRITON = [str(ROOT / "scripts" / "second-triton")]
MAX_REGISTERS = 255
MAX_SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448}
"""Per block, CUDA C++ Programming Guide, table of technical specifications per compute capability."""


def compile_kernels(command: list[str], *arguments: str, cache_dir: Path) -> list[dict[str, Any]]:
    """The report of benchmarks/compile_kernels.py, run where triton compiles rather than interprets."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache_dir), "PYTHON": sys.executable}
    done = subprocess.run([*command, *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def assert_within_limits(row: dict[str, Any]) -> None:
    assert 0 < row["registers"] <= MAX_REGISTERS, row
    assert row["spills"] == row["stack_bytes"] == 0, row
    assert row["shared_bytes"] <= MAX_SHARED_BYTES[row["arch"]], row


ONE_OF_EACH = {
    "paged_attention/prefill-bf16-d128-g4": "HGMMA",
    "paged_attention/decode-bf16-d128-g4": "HMMA",
    "split_kv_decode/bf16-d128-g4": "HMMA",
    "merge_splits/bf16-d128": "none",
    "reshape_and_cache/bf16-d128": "none",
    "copy_blocks/bf16-d128": "none",
    "zero_blocks/bf16-d128": "none",
    "rms_norm/bf16-h4096-residual": "none",
    "rotary_and_cache/bf16-d128": "none",
    "silu_and_mul/bf16-n14336": "none",
}
"""A variant of each kernel, and the matrix instruction it uses: prompt chunks Hopper's own, decode the small one."""


def test_each_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """No spills, the right matrix unit, and loads that are pipelined where there is a loop over keys."""
    rows = compile_kernels(THIS_TRITON, "--arch", "sm_90", "--variant", *ONE_OF_EACH, cache_dir=tmp_path)
    by_id = {f"{r['kernel']}/{r['variant']}": r for r in rows}
    assert {i: r["mma"] for i, r in by_id.items()} == ONE_OF_EACH
    for row in rows:
        assert_within_limits(row)
        assert (row["async_copies"] > 0) == (row["mma"] != "none"), row


def assert_all_compile(rows: list[dict[str, Any]]) -> None:
    assert {r["arch"] for r in rows} == set(MAX_SHARED_BYTES)
    assert {r["kernel"] for r in rows} == {i.split("/")[0] for i in ONE_OF_EACH}
    for row in rows:
        assert_within_limits(row)


@pytest.mark.full
def test_every_variant_compiles_for_every_architecture(tmp_path: Path) -> None:
    """The whole list of variants for Ampere, Hopper and Blackwell, as in benchmarks/results."""
    assert_all_compile(compile_kernels(THIS_TRITON, cache_dir=tmp_path))


@pytest.mark.full
@pytest.mark.skipif(
    "SERVETWIN_OFFLINE" in os.environ, reason="SERVETWIN_OFFLINE: a second Triton is downloaded"
)
def test_every_variant_compiles_with_the_second_triton(tmp_path: Path) -> None:
    """The same with Triton 3.6.0, which a common set of GPU packages brings."""
    rows = compile_kernels(SECOND_TRITON, cache_dir=tmp_path)
    assert {r["triton"] for r in rows} == {"3.6.0"}
    assert_all_compile(rows)


def test_the_results_hold_both_tritons() -> None:
    """benchmarks/results has the same variants for each, within the limits of the hardware."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "compile_kernels.json").read_text())
    ids = {
        v: {(r["kernel"], r["variant"], r["arch"]) for r in rows if r["triton"] == v}
        for v in ("3.6.0", "3.7.1")
    }
    assert ids["3.6.0"] == ids["3.7.1"]
    assert_all_compile(rows)
