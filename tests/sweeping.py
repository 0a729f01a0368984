"""What tests of sweeps share: a small workload, command lines, and what must be equal of two tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd

from servetwin.sim.planning.results import read_results

CONSTANT = ["--executor", "constant", "--step-time-s", "0.01"]
VOLATILE = ("wall", "path", "host", "date")
"""Parts of the names of columns that may differ between equal runs."""


def write_workload(path: Path, count: int = 20, gap_s: float = 0.02) -> Path:
    rows = [
        {
            "request_id": f"q{i}",
            "arrival_s": gap_s * i,
            "prompt_tokens": 40 + i % 5,
            "output_tokens": 5 + i % 7,
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from servetwin.sim.cli import main; main()", "sweep", *arguments]


def started(*arguments: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def lasting(out: Path) -> pd.DataFrame:
    """The columns that equal sweeps have equal."""
    frame = read_results(out).frame
    return frame[[name for name in frame.columns if not any(part in name for part in VOLATILE)]]


def assert_same_table(one: Path, other: Path) -> None:
    pd.testing.assert_frame_equal(lasting(one), lasting(other), check_exact=True)
    assert read_results(one).about == read_results(other).about
