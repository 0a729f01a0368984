"""Checks the kernels on a card and measures them, in one go and within a time limit.

    python benchmarks/gpu_check.py [--minutes 8] [-o gpu_check.json] [--part NAME ...]

Needs torch, triton and numpy; with transformers whole steps are measured, too. Nothing is downloaded, and the product
need not be installed: from a checkout its folders are used as they are. Parts, the most important first:

    correctness   every kernel against its definition, on fresh random data
    decode        attention of decode steps: GB/s of keys and values, % of the copy rate, beside SDPA and flex_attention
    steps         decode steps of Llama-3.1-8B and Qwen3-0.6B with random weights, eager and from CUDA graphs
    prefill       attention of prompt chunks: TFLOP/s, % of the rate of a matrix product, beside SDPA; cache writes
    profile       the grid of executor/profile_grid.py: the rows that a step-time profile is made of

Each part runs in a process of its own, so that a kernel that kills the device's context ends its part and no other.
What could not be measured is listed by name. The report (JSON: device, versions, rows, left_out, targets) is whole at
every moment; a table of it is printed at the end. Exits with 1 if a kernel computed something wrong or failed.

--toy runs everything at small sizes and in one process, on a CPU too, to see that it runs; its times say nothing about
any device. On a CPU the kernels are those of the CPU backend, graphs are replaced by a stand-in, and targets are not
judged.
"""

from __future__ import annotations

import argparse
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from gpu_checks.session import DeviceLostError, Report, Session
from gpu_checks.verdicts import TARGETS, failures, show

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "correctness": ("gpu_checks.correctness", "run"),
    "decode": ("gpu_checks.sweeps", "run_decode"),
    "steps": ("gpu_checks.steps", "run_steps"),
    "prefill": ("gpu_checks.sweeps", "run_prefill"),
    "profile": ("gpu_checks.steps", "run_profile"),
}
"""Name -> module and function, the most important first."""
ALL_THAT_FOLLOWS = "all that follows"
"""Name in `left_out` of the rest of a part that was cut off."""
GRACE_S = 20.0
"""A part watches the clock itself; one that hangs is ended so long after its time."""


def main(argv: list[str] | None = None) -> int:
    """The command line; gives the exit code."""
    args = _parser().parse_args(argv)
    if not torch.cuda.is_available() and not args.toy:
        print(
            "gpu_check: there is no GPU here; --toy runs everything at small sizes on a CPU", file=sys.stderr
        )
        return 2
    if args.child:
        _find_product()
        for part in args.part:
            _run_part(part, Report(args.output), args.toy, args.child)
        return 0
    args.output.unlink(missing_ok=True)
    report = Report(args.output)
    report.update(**_header(args.toy), rows=[], left_out=[])
    deadline_s = time.time() + 60 * args.minutes
    parts = args.part or list(PARTS)
    for group in [parts] if args.toy else [[part] for part in parts]:
        _run_in_child(group, args.output, args.toy, deadline_s)
    report = Report(args.output)
    rows = report.content["rows"]
    report.update(targets=[] if args.toy else [target.judge(rows) for target in TARGETS])
    print(show(report.content))
    print(f"\n{len(failures(rows))} wrong; report: {args.output}")
    return 0 if _is_correct(report.content) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything (default 8)")
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu_check.json"), help="the report")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--toy", action="store_true", help="small sizes, also on a CPU")
    parser.add_argument("--child", type=float, metavar="DEADLINE", help=argparse.SUPPRESS)
    return parser


def _header(toy: bool) -> dict[str, object]:
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine(),
        "device_type": "cuda" if gpu else "cpu",
        "toy": toy,
        "seed": secrets.randbelow(2**20),
        "versions": {name: _version(name) for name in ("torch", "triton", "transformers", "numpy")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ---------------------------------------------------------------- parts


def _run_in_child(parts: list[str], output: Path, toy: bool, deadline_s: float) -> None:
    """Runs parts in a process of their own; whatever ends it early is noted."""
    left_s = deadline_s - time.time()
    command = [sys.executable, __file__, "-o", str(output), "--child", str(deadline_s)]
    command += [word for part in parts for word in ("--part", part)] + ["--toy"] * toy
    reason = "no time left"
    if left_s > 0:
        try:
            code = subprocess.run(command, timeout=left_s + GRACE_S).returncode
        except subprocess.TimeoutExpired:
            reason = "took too long and was ended"
        else:
            reason = f"its process ended with code {code}" if code else ""
    if reason:
        what = {"part": ", ".join(parts), "name": ALL_THAT_FOLLOWS, "reason": reason}
        Report(output).append("left_out", what)


def _is_correct(content: dict[str, Any]) -> bool:
    """Whether nothing in the part `correctness` was wrong, and the part was not cut off."""
    cut = any("correctness" in row["part"] and row["name"] == ALL_THAT_FOLLOWS for row in content["left_out"])
    return not cut and not failures(content["rows"])


def _run_part(part: str, report: Report, toy: bool, deadline_s: float) -> None:
    """In the child: imports what the part needs, and runs it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    session = Session(report, part, device, toy, report.content["seed"], deadline_s)
    module, function = PARTS[part]
    try:
        run: Callable[[Session], None] = getattr(import_module(module), function)
    except ModuleNotFoundError as e:
        session.leave_out("all of it", f"the package {e.name} is not installed")
        return
    try:
        run(session)
    except DeviceLostError as e:
        session.leave_out(ALL_THAT_FOLLOWS, f"the device was lost: {e}")


def _find_product() -> None:
    """Makes the folders of this checkout importable as `servetwin`, unless it is installed."""
    if find_spec("servetwin") is None:
        package = ModuleType("servetwin")
        package.__path__ = [str(ROOT)]
        sys.modules["servetwin"] = package


if __name__ == "__main__":
    sys.exit(main())
