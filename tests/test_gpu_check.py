"""benchmarks/gpu_check.py at toy size: every part runs here, and nothing that a card's machine may lack is imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"
FORBIDDEN = {"simpy", "streamlit", "pyarrow", "rich", "cyclopts", "pandas", "pydantic", "orjson"}
PARTS = {"correctness", "decode", "steps", "prefill", "profile"}
PATIENCE_S = 120
HEADER = {
    "run": "1",
    "seed": 1,
    "toy": True,
    "device": "some",
    "device_type": "cpu",
    "versions": {"torch": "2"},
}
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
    assert done.stdout.endswith("\n0 wrong, 0 not run; report: report.json\n")


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
    assert [row["name"] for row in report["rows"] if "prepare_us" not in row and row["part"] == "steps"] == [
        "toy Llama built", "toy Llama capture", "toy Llama graphs against eager"
    ]  # fmt: skip
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
        "from gpu_checks.report import Report\n"
        "gpu_check._find_product()\n"
        "report = Report(Path('r.json'), {'run': '1', 'seed': 1})\n"
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


@pytest.fixture
def session(script: Callable[[str], Any], tmp_path: Path) -> Callable[..., Any]:
    """A session on the CPU that writes into `r.json`."""
    report, module = script("gpu_checks.report"), script("gpu_checks.session")

    def start(left_s: float = 1000, part: str = "decode", **more: Any) -> Any:
        found = report.Report(tmp_path / "r.json", HEADER)
        return module.Session(found, part, torch.device("cpu"), True, 1, time.time() + left_s, **more)

    return start


def test_time_that_is_up_and_errors_become_rows(session: Callable[..., Any], tmp_path: Path) -> None:
    """The report is whole at every moment; what tells a row from others stands beside errors and reasons, too."""
    assert session().measure("broken", lambda: {"x": 1 // 0}, at={"batch": 4}) is None
    assert session().measure("good", lambda: {"x": 1}, at={"batch": 5}) == {"x": 1}
    assert session(1).measure("late", lambda: {"x": 1}, at={"batch": 6}) is None
    report = json.loads((tmp_path / "r.json").read_text())
    broken, good = report["rows"]
    assert broken["error"].startswith("ZeroDivisionError: integer division")
    assert "test_gpu_check.py" in broken["error"]
    assert broken["batch"] == 4
    assert (good["name"], good["x"], good["batch"]) == ("good", 1, 5)
    assert report["left_out"] == [{"part": "decode", "name": "late", "reason": "no time left", "batch": 6}]


# ---------------------------------------------------------------- what the checks reach


def planned(case: Any) -> tuple[str, set[tuple[str, object]]]:
    """The attention kernel that a card runs for the case, and what it is given."""
    plan, split = (
        import_module(f"servetwin.kernels.triton_{name}") for name in ("attention_plan", "split_kv")
    )

    def meta(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    shape, reqs = case.shape, len(case.query_lens)
    longest = max(q + c for q, c in zip(case.query_lens, case.context_lens, strict=True))
    kv_dtype = torch.float8_e4m3fn if case.fp8 else shape.dtype
    cache = meta(4, case.block_size, shape.kv_heads, shape.head_dim, dtype=kv_dtype)
    call = plan.AttentionCall(
        query=meta(sum(case.query_lens), shape.heads, shape.head_dim, dtype=shape.dtype),
        key_cache=cache,
        value_cache=cache,
        block_table=meta(reqs, -(-longest // case.block_size)),
        seq_lens=meta(reqs),
        query_start_loc=meta(reqs + 1),
        scale=1.0,
        sliding_window=case.sliding_window,
        softcap=case.softcap,
    )
    plain = "plain decode" if call.mean_queries <= plan.MAX_DECODE_QUERIES else "plain prefill"
    kernel = "split" if split.use_split_kv(call) else plain
    return kernel, {
        ("several queries", call.mean_queries > 1),
        ("head size", shape.head_dim),
        ("group", shape.heads // shape.kv_heads),
        ("block size", case.block_size),
        ("dtype", shape.dtype),
        ("fp8", case.fp8),
        ("softcap", case.softcap is not None),
        ("window", case.sliding_window is not None),
        ("offsets past 2^31", case.cache_elements > 2**31),
    }


def test_each_attention_kernel_is_checked_with_all_that_it_can_be_given(script: Callable[[str], Any]) -> None:
    """Prompt tile, decode tile, and split with its merge, planned as on a card."""
    pytest.importorskip("triton")
    reached: dict[str, set[tuple[str, object]]] = {}
    for case in script("gpu_checks.correctness").attention_cases():
        kernel, given = planned(case)
        reached.setdefault(kernel, set()).update(given)
    assert reached.keys() == {"plain prefill", "plain decode", "split"}
    past_int32 = {("offsets past 2^31", True)}
    assert reached["plain prefill"] <= reached["split"]
    assert reached["plain prefill"] - past_int32 <= reached["plain decode"]
    for found in reached.values():
        kinds = [kind for kind, _ in found]
        assert min(kinds.count(kind) for kind in ("head size", "group", "block size")) >= 3
        dtypes = {torch.bfloat16, torch.float16, torch.float32}
        assert {("dtype", dtype) for dtype in dtypes} | {("fp8", True), ("softcap", True)} <= found


@pytest.mark.parametrize(("arch", "fp8_runs"), [(80, False), (86, False), (89, True), (90, True)])
def test_a_device_without_fp8_leaves_out_what_needs_it_by_name_and_nothing_else(
    script: Callable[[str], Any], session: Callable[..., Any], arch: int, fp8_runs: bool
) -> None:
    """What a device cannot do is no check that did not run."""
    pytest.importorskip("triton")
    started = session(part="correctness", arch=arch)
    script("gpu_checks.correctness").run(started)
    content = started.report.content
    fp8 = {name for name in content["checks"]["correctness"] if "fp8" in name}
    assert len(fp8) >= 6
    assert {"reshape_and_cache as fp8 bfloat16", "attention: fp8 mixed"} <= fp8
    ran = {row["name"] for row in content["rows"]}
    assert "reshape_and_cache bfloat16" in ran
    assert {row["name"] for row in content["left_out"]} == (set() if fp8_runs else fp8)
    assert all("compute capability 8.9" in row["reason"] for row in content["left_out"])
    verdicts = script("gpu_checks.verdicts")
    assert (verdicts.failures(content), verdicts.not_run(content, ["correctness"])) == ([], [])


def served_from_graphs(script: Callable[[str], Any], session: Any) -> Any:
    """The toy model, its decode steps from the stand-in of graphs."""
    pytest.importorskip("transformers")
    served = script("gpu_checks.models").serve(session, "toy Llama")
    served.capture(session)
    return served


def test_graphs_are_compared_below_at_and_between_their_sizes(
    script: Callable[[str], Any], session: Callable[..., Any]
) -> None:
    sizes = (1, 2, 4, *range(8, 257, 8))
    batches = script("gpu_checks.graphs").compared_batches(sizes)
    assert {1, 256} <= set(batches)
    assert len({*batches} & {*sizes}) >= 4
    assert len({*batches} - {*sizes}) >= 4
    started = session(part="steps")
    row = script("gpu_checks.graphs").compare(started, served_from_graphs(script, started))
    assert row["ok"]
    assert row["batches"] == [1, 2, 3, 4, 7, 8]
    assert row["apart"] > 10 * row["limit"]


@pytest.mark.parametrize("stale", ["seq_lens", "block_table", "slot_mapping", "input_ids", "positions"])
def test_a_graph_that_reads_a_stale_tensor_differs_from_eager(
    script: Callable[[str], Any], session: Callable[..., Any], stale: str
) -> None:
    """One row of what the graphs read is not the batch's."""
    started = session(part="steps")
    served = served_from_graphs(script, started)
    graphs = served.runner.decode_graphs
    load = graphs.static.load

    def load_all_but_one(batch: Any) -> None:
        load(batch)
        if len(batch.req_ids) == 3:
            tensor = getattr(graphs.static, stale)
            tensor[1] = tensor[0]

    graphs.static.load = load_all_but_one
    row = script("gpu_checks.graphs").compare(started, served)
    assert (row["ok"], row["worst_batch"]) == (False, 3)


def test_a_replay_is_timed_on_a_device_that_is_still_busy(script: Callable[[str], Any]) -> None:
    """The host's launch of what is measured must lie behind work that the device has not finished."""
    done: list[str] = []

    class Event:
        def __init__(self, name: str) -> None:
            self.name = name

        def record(self) -> None:
            done.append(self.name)

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 2.0

    replay, busy = partial(done.append, "replay"), partial(done.append, "busy")
    assert script("gpu_checks.timing").time_replay(replay, busy, Event("start"), Event("end")) == 2e-3
    assert done == ["busy", "replay", "start", "replay", "end", "wait"]


# ---------------------------------------------------------------- verdicts

CUT_OFF = {"part": "decode", "name": "all that follows"}


@pytest.mark.parametrize(
    ("row", "left_out", "wrong"),
    [
        ({"part": "correctness", "ok": True}, {}, 0),
        ({"part": "correctness", "ok": False}, {}, 1),
        ({"part": "steps", "ok": False}, {}, 1),
        ({"part": "correctness", "error": "e"}, {}, 1),
        ({"part": "prefill", "error": "e"}, {}, 1),
        ({"part": "decode", "error": "e", "peer": "SDPA"}, {}, 0),
        ({"part": "decode"}, CUT_OFF | {"reason": "no time left"}, 0),
        ({"part": "decode"}, CUT_OFF | {"reason": "its process ended with code -11", "failed": True}, 1),
    ],
)
def test_wrong_is_a_difference_an_error_in_any_part_and_a_process_that_died(
    script: Callable[[str], Any], row: dict[str, Any], left_out: dict[str, Any], wrong: int
) -> None:
    """What torch's own kernels do beside ours is not ours, and no time left is not wrong."""
    content = {"rows": [row], "left_out": [left_out] if left_out else []}
    assert len(script("gpu_checks.verdicts").failures(content)) == wrong


@pytest.mark.parametrize(
    ("checks", "left_out", "parts", "missing"),
    [
        ({"correctness": ["a"]}, [], ["correctness"], []),
        ({"correctness": ["a", "b", "c"]}, [{"name": "b"}], ["correctness"], ["b", "c"]),
        ({"correctness": ["a", "b"]}, [{"name": "b", "applies": False}], ["correctness"], []),
        ({"correctness": []}, [], ["correctness"], ["all of it"]),
        ({}, [{"name": "all of it"}], ["correctness"], ["all of it"]),
        ({}, [], ["decode", "prefill"], []),
    ],
)
def test_a_check_that_was_asked_for_and_has_no_result_did_not_run(
    script: Callable[[str], Any],
    checks: dict[str, list[str]],
    left_out: list[dict[str, Any]],
    parts: list[str],
    missing: list[str],
) -> None:
    content = {
        "checks": checks,
        "rows": [{"part": "correctness", "name": "a", "ok": True}, {"part": "decode", "name": "b"}],
        "left_out": [{"part": "correctness"} | row for row in left_out],
    }
    found = script("gpu_checks.verdicts").not_run(content, parts)
    assert found == [f"correctness: {name}" for name in missing]


def test_a_run_that_checked_nothing_does_not_pass(
    script: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No time for a single check: exit code 1, and the last line counts what did not run."""
    arguments = ["--toy", "--part", "correctness", "-o", str(tmp_path / "r.json"), "--minutes", "1e-9"]
    assert script("gpu_check").main(arguments) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 wrong, 1 not run; report: ")


GOOD = {"percent_of_copy": 71}


@pytest.mark.parametrize(
    ("rows", "left_out", "result", "worst"),
    [
        ([], [], "not measured", None),
        ([GOOD, {"percent_of_copy": 80}], [], "met", 71),
        ([GOOD, {"percent_of_copy": 69}], [], "missed", 69),
        ([GOOD, {"percent_of_copy": 9, "peer": "SDPA"}], [], "met", 71),
        ([GOOD, {"error": "e", "peer": "SDPA"}], [], "met", 71),
        ([{"percent_of_copy": 9, "batch": 1}], [], "not measured", None),
        ([{"error": "e"}], [], "incomplete", None),
        ([GOOD, {"error": "e"}], [], "incomplete", 71),
        ([GOOD, {"error": "e", "batch": 1}], [], "met", 71),
        ([GOOD, {"error": "e"}, {"percent_of_copy": 69}], [], "missed", 69),
        ([GOOD], [{"name": "x", "batch": 64, "context": 4096}], "incomplete", 71),
        ([GOOD], [{"name": "x", "batch": 1, "context": 4096}], "met", 71),
        ([GOOD], [{"name": "all that follows"}], "incomplete", 71),
        ([GOOD], [{"name": "all that follows", "part": "steps"}], "met", 71),
    ],
)
def test_targets_are_judged_by_the_worst_row_and_not_by_survivors_alone(
    script: Callable[[str], Any],
    rows: list[dict[str, Any]],
    left_out: list[dict[str, Any]],
    result: str,
    worst: float | None,
) -> None:
    """A row that failed or was left out leaves a target open, unless another one misses it. Peers do not count."""
    target = script("gpu_checks.verdicts").TARGETS[0]
    at = {"part": "decode", "batch": 32, "context": 1024}
    found = target.judge([at | row for row in rows], [{"part": "decode"} | row for row in left_out])
    assert (found["result"], found.get("worst")) == (result, worst)


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize("minutes", ["nan", "inf", "0", "-1", "1e9", "soon"])
def test_a_time_that_is_none_is_refused_in_one_line(
    script: Callable[[str], Any], capsys: pytest.CaptureFixture[str], minutes: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        script("gpu_check").main(["--toy", f"--minutes={minutes}"])
    assert stopped.value.code == 2
    line = f"gpu_check: argument --minutes: got '{minutes}', expected a number above 0 and up to 1440\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("output", "says"), [("missing/a.json", "there is no folder"), (".", "is not a file")]
)
def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(
    script: Callable[[str], Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    output: str,
    says: str,
) -> None:
    with pytest.raises(SystemExit) as stopped:
        script("gpu_check").main(["--toy", "-o", str(tmp_path / output)])
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_report_stays_until_there_is_a_row(script: Callable[[str], Any], tmp_path: Path) -> None:
    """And is gone on with only by the processes of the same run."""
    module, path = script("gpu_checks.report"), tmp_path / "r.json"
    path.write_text("not even JSON")
    report = module.Report(path, HEADER)
    report.update(checks={"correctness": ["a"]})
    assert path.read_text() == "not even JSON"
    report.append("rows", {"name": "a"})
    again = module.Report(path, HEADER).content
    assert (again["rows"], again["checks"]) == ([{"name": "a"}], {"correctness": ["a"]})
    assert module.Report(path, HEADER | {"run": "2"}).content["rows"] == []
    assert list(tmp_path.iterdir()) == [path]


def test_ctrl_c_prints_the_table_so_far_and_no_trace(tmp_path: Path) -> None:
    """Sent, as a terminal does, to all processes, while the first part runs, or just after it on a fast machine."""
    path = tmp_path / "r.json"
    command = [sys.executable, str(SCRIPT), "--toy", "-o", str(path)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        command,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + PATIENCE_S
        while not path.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end, "no row was written"
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, "Traceback" in err) == (130, False), err
    report = json.loads(path.read_text())
    assert {row["reason"] for row in report["left_out"]} == {"interrupted"}
    assert PARTS - {"correctness"} <= {row["part"] for row in report["left_out"]} <= PARTS
    assert f"\n  correctness  {report['rows'][0]['name']} " in out
    assert " not run; report: " in out.splitlines()[-1]
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_card_it_says_so(script: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    assert script("gpu_check").main([]) == 2
    assert "there is no GPU here" in capsys.readouterr().err
