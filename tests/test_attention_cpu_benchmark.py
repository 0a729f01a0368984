"""The benchmark of CPU attention, at toy size: it runs and says what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "attention_cpu.py"


def test_it_runs_and_reports_the_ratios(tmp_path: Path) -> None:
    """Every path in both dtypes, with the machine's load; targets are named as figures are."""
    output = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--toy", "--rounds", "1", "--threads", "1", "-o", str(output)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    report = json.loads(output.read_text())
    assert report["figures"].keys() == {"float32", "bfloat16"}
    assert len(report["environment"]["load_average_before"]) == 3
    native = not report["environment"]["native"].startswith("off")
    for figures in report["figures"].values():
        assert {"decode.torch.rate_over_copy", "prefill.torch.rate_over_matmul"} <= figures.keys()
        assert ("decode.native.time_over_sdpa" in figures) == native
        assert min(figures.values()) > 0
    assert printed.count("target") == (3 if native else 0)
