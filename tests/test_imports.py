"""Who loads what: the simulator stays free of torch, and the repository's folders collide with nobody's names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def modules_after(code: str) -> set[str]:
    """The modules loaded in a fresh process after `code`."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_simulator_loads_neither_torch_nor_the_executor() -> None:
    """Importing everything that simulates leaves torch, the executor, the kernels and the dashboard unloaded."""
    loaded = modules_after(
        "import servetwin.sim.simulation, servetwin.sim.decide, servetwin.sim.commands.running"
    )
    heavy = {"torch", "triton", "transformers", "streamlit", "plotly", "ray"}
    ours = {
        m for m in loaded if m.startswith(("servetwin.executor", "servetwin.kernels", "servetwin.dashboard"))
    }
    assert not heavy & loaded
    assert not ours


def test_help_loads_no_tables_and_no_science() -> None:
    """`servetwin --help` must stay quick: pandas, pyarrow, scipy, simpy, pydantic and torch are imported where used."""
    loaded = modules_after("from servetwin.sim.cli import run\nassert run(['--help']) == 0")
    assert not {"pandas", "pyarrow", "scipy", "numpy", "simpy", "pydantic", "torch"} & loaded


@pytest.mark.parametrize("start", [["-c"], ["-m"]])
def test_transformers_imports_from_the_root_of_the_repository(start: list[str], tmp_path: Path) -> None:
    """transformers probes for a package named `kernels`; ours, found as a folder, must not break it."""
    code = "from transformers import LlamaForCausalLM"
    (tmp_path / "probe_llama.py").write_text(code)
    command = (
        [sys.executable, "-c", code]
        if start == ["-c"]
        else [sys.executable, str(tmp_path / "probe_llama.py")]
    )
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
