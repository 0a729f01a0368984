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

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "compile_kernels.py"
MAX_REGISTERS = 255
MAX_SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448}
"""Per block, CUDA C++ Programming Guide, table of technical specifications per compute capability."""


def compile_kernels(cache_dir: Path, *arguments: str) -> list[dict[str, Any]]:
    """The report of benchmarks/compile_kernels.py, run where triton compiles rather than interprets."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(cache_dir)
    }
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], env=env, capture_output=True, text=True, check=True
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def assert_within_limits(row: dict[str, Any]) -> None:
    assert 0 < row["registers"] <= MAX_REGISTERS, row
    assert row["spills"] == row["stack_bytes"] == 0, row
    assert row["shared_bytes"] <= MAX_SHARED_BYTES[row["arch"]], row


def test_each_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """No spills; prompt chunks use Hopper's matrix unit, decode tiles the small one; loads are pipelined."""
    names = ["prefill-bf16-d128-g4", "decode-bf16-d128-g4", "bf16-d128"]
    rows = {r["variant"]: r for r in compile_kernels(tmp_path, "--arch", "sm_90", "--variant", *names)}
    assert sorted(rows) == sorted(names)
    for row in rows.values():
        assert_within_limits(row)
    assert rows["prefill-bf16-d128-g4"]["mma"] == "HGMMA"
    assert rows["decode-bf16-d128-g4"]["mma"] == "HMMA"
    assert all(rows[name]["async_copies"] > 0 for name in names[:2])


@pytest.mark.full
def test_every_variant_compiles_for_every_architecture(tmp_path: Path) -> None:
    """The whole list of variants for Ampere, Hopper and Blackwell, as in benchmarks/results."""
    rows = compile_kernels(tmp_path)
    assert {r["arch"] for r in rows} == set(MAX_SHARED_BYTES)
    for row in rows:
        assert_within_limits(row)
