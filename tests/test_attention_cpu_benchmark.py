"""The benchmark of CPU attention, at toy size: it runs and says what it promises."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "attention_cpu.py"


def benchmark() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("attention_cpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["attention_cpu"] = module
    spec.loader.exec_module(module)
    return module


def test_it_runs_and_reports_the_ratios(tmp_path: Path) -> None:
    """Every path in both dtypes, with the machine's load."""
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
    # Of tiny sizes no target is judged; each is named as a figure is.
    assert "target" not in printed
    targets = [name.split(".", 2) for name in benchmark().TARGETS]
    names = {f"{operation}.{rest}" for operation, _, rest in targets}
    assert not native or names <= report["figures"]["float32"].keys()
