"""Runs for the tests of exports: small pools with preemptions, requests that are given up or refused, prefix hits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servetwin.sim.cli import run
from servetwin.sim.runs import Run, read_run

POOL = ["--max-num-seqs", "12", "--num-gpu-blocks-override", "45", "--max-model-len", "400"]
CONSTANT = ["--executor", "constant", "--step-time-s", "0.0123"]


def mixed_rows(count: int = 60) -> list[dict[str, Any]]:
    """Requests of two prefixes; every 11th is given up, one can never run."""
    rows = [
        {
            "request_id": f"q{i}",
            "arrival_s": 2 + 0.04 * i,
            "prompt_tokens": 40 + 17 * (i % 5),
            "output_tokens": 1 + 30 * (i % 4),
            "prefix_ids": [i % 2, 100 + i],
            "prefix_block_tokens": 32,
        }
        for i in range(count)
    ]
    for row in rows[5::11]:
        row["abort_s"] = row["arrival_s"] + 0.3
    rows[7] |= {"prompt_tokens": 900, "prefix_ids": list(range(200, 228))}
    return rows


def mixed_run(
    folder: Path,
    *flags: str,
    rows: list[dict[str, Any]] | None = None,
    executor: Sequence[str] = CONSTANT,
) -> Run:
    """Those served, with constant steps by default, written to the folder."""
    workload = folder.with_suffix(".jsonl")
    workload.write_text("".join(json.dumps(row) + "\n" for row in rows or mixed_rows()))
    assert run(["run", str(workload), *executor, *POOL, "--out", str(folder), *flags]) == 0
    return read_run(folder)
