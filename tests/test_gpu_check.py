"""benchmarks/gpu_check.py at toy size: every part runs here, and nothing that a card's machine may lack is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"
FORBIDDEN = {"simpy", "streamlit", "pyarrow", "rich", "cyclopts", "pandas", "pydantic", "orjson"}
PARTS = {"correctness", "decode", "steps", "prefill", "profile"}
RUN = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"


def run_python(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """With the kernels of a CPU instead of Triton's interpreter, and every import listed on stderr."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPROFILEIMPORTTIME": "1"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The whole script, once: its process, and the report that it wrote."""
    folder = tmp_path_factory.mktemp("gpu_check")
    done = run_python(SCRIPT, "--toy", "-o", "report.json", folder=folder)
    assert (folder / "report.json").exists(), done.stderr
    return done, json.loads((folder / "report.json").read_text())


def test_every_part_runs_at_toy_size_and_everything_is_right(
    toy: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    done, report = toy
    assert [row for row in report["rows"] if "error" in row] == []
    assert report["left_out"] == []
    assert {row["part"] for row in report["rows"]} == PARTS
    assert all(row["ok"] for row in report["rows"] if row["part"] == "correctness")
    assert done.returncode == 0, done.stderr
    assert "0 wrong; report: report.json" in done.stdout


def test_it_never_claims_a_figure_of_a_gpu(
    toy: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    """The report says what it ran on, and judges no target at toy size."""
    done, report = toy
    if report["device_type"] != "cuda":
        assert "(cpu)" in done.stdout.splitlines()[0]
    assert report["toy"] is True
    assert report["targets"] == []


def test_steps_run_eagerly_and_from_graphs_and_profile_rows_have_their_format(
    toy: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    _, report = toy
    steps = {(row["mode"], row["batch"]): row["graph_tokens"] for row in report["rows"] if "mode" in row}
    assert steps == {("eager", 1): None, ("eager", 3): None, ("graphs", 1): 1, ("graphs", 3): 4}
    profiled = [row for row in report["rows"] if "query_lens" in row]
    assert len(profiled) == 4
    assert all(row["num_tokens"] == sum(row["query_lens"]) for row in profiled)


def test_nothing_is_imported_that_a_machine_with_a_card_may_lack(
    toy: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    """By the whole run: Python lists its imports on stderr."""
    lines = [line for line in toy[0].stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert {"torch", "transformers", "servetwin", "gpu_checks"} <= imported
    assert not imported & FORBIDDEN


def test_a_checkout_will_do_and_without_transformers_the_steps_are_left_out_by_name(tmp_path: Path) -> None:
    """Where the product is not installed, the folders of the checkout become `servetwin`."""
    code = RUN + (
        "from pathlib import Path\n"
        "sys.path = [p for p in sys.path if not (Path(p) / 'servetwin').is_dir()]\n"
        "sys.modules['transformers'] = None\n"
        "import gpu_check\n"
        "from gpu_checks.session import Report\n"
        "gpu_check._find_product()\n"
        "report = Report(Path('r.json'))\n"
        "report.update(seed=1, rows=[], left_out=[])\n"
        "for part in ('steps', 'profile'):\n"
        "    gpu_check._run_part(part, report, True, 2e9)\n"
        "import servetwin.kernels.ops; print(servetwin.kernels.ops.__file__)\n"
    )
    done = run_python("-c", code, folder=tmp_path)
    assert done.stdout == f"{ROOT / 'kernels' / 'ops.py'}\n", done.stderr
    reason = "the package transformers is not installed"
    left_out = json.loads((tmp_path / "r.json").read_text())["left_out"]
    assert [(row["part"], row["reason"]) for row in left_out] == [("steps", reason), ("profile", reason)]


# ---------------------------------------------------------------- parts of the script, in this process


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module that lies beside the script."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return import_module


def test_time_that_is_up_and_errors_become_rows(script: Callable[[str], Any], tmp_path: Path) -> None:
    """The report is whole at every moment; an error is named with its place, and the rest goes on."""
    module = script("gpu_checks.session")

    def session(left_s: float) -> Any:
        report = module.Report(tmp_path / "r.json")
        return module.Session(report, "decode", torch.device("cpu"), True, 1, time.time() + left_s)

    assert session(100).measure("broken", lambda: {"x": 1 // 0}) is None
    assert session(100).measure("good", lambda: {"x": 1}) == {"x": 1}
    assert session(1).measure("late", lambda: {"x": 1}) is None
    report = json.loads((tmp_path / "r.json").read_text())
    broken, good = report["rows"]
    assert broken["error"].startswith("ZeroDivisionError: integer division")
    assert "test_gpu_check.py" in broken["error"]
    assert (good["name"], good["x"]) == ("good", 1)
    assert report["left_out"] == [{"part": "decode", "name": "late", "reason": "no time left"}]


@pytest.mark.parametrize(
    ("row", "left_out", "correct"),
    [
        ({"part": "correctness", "ok": True}, [], True),
        ({"part": "correctness", "ok": False}, [], False),
        ({"part": "correctness", "error": "e"}, [], False),
        ({"part": "correctness", "ok": True}, [("correctness", "all that follows")], False),
        (
            {"part": "correctness", "ok": True},
            [("correctness", "one case"), ("decode", "all that follows")],
            True,
        ),
        ({"part": "decode", "error": "e"}, [], True),
    ],
)
def test_the_exit_code_is_about_the_kernels_being_right(
    script: Callable[[str], Any], row: dict[str, Any], left_out: list[tuple[str, str]], correct: bool
) -> None:
    """Wrong is a difference, an error among the checks, and a part that was cut off; not an error elsewhere."""
    content = {"rows": [row], "left_out": [{"part": part, "name": name} for part, name in left_out]}
    assert script("gpu_check")._is_correct(content) is correct


@pytest.mark.parametrize(
    ("rows", "result", "worst"),
    [
        ([], "not measured", None),
        ([{"percent_of_copy": 71}, {"percent_of_copy": 80}], "met", 71),
        ([{"percent_of_copy": 71}, {"percent_of_copy": 69}], "missed", 69),
        ([{"percent_of_copy": 71}, {"percent_of_copy": 9, "peer": "SDPA"}], "met", 71),
        ([{"percent_of_copy": 9, "batch": 1}], "not measured", None),
        ([{"error": "e"}], "not measured", None),
    ],
)
def test_targets_are_judged_by_the_worst_row_and_peers_do_not_count(
    script: Callable[[str], Any], rows: list[dict[str, Any]], result: str, worst: float | None
) -> None:
    target = script("gpu_checks.verdicts").TARGETS[0]
    found = target.judge({"part": "decode", "batch": 32, "context": 1024} | row for row in rows)
    assert (found["result"], found.get("worst")) == (result, worst)


def test_without_a_card_it_says_so(script: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    assert script("gpu_check").main([]) == 2
    assert "there is no GPU here" in capsys.readouterr().err
