"""Checks the kernels on a card and measures them, in one go and within a time limit.

    python benchmarks/gpu_check.py [--minutes 8] [-o gpu_check.json] [--part NAME ...]

Needs torch, triton and numpy, and transformers for whole steps. Nothing is downloaded, and the product need not be
installed: from a checkout its folders are used as they are. Parts, the most important first:

    correctness   every kernel against its definition, on fresh random data
    decode        attention of decode steps: GB/s of keys and values, % of the copy rate, beside SDPA and flex_attention
    steps         Llama-3.1-8B and Qwen3-0.6B with random weights: decode steps from CUDA graphs checked against eager
                  ones, and both measured
    prefill       attention of prompt chunks: TFLOP/s, % of the rate of a matrix product, beside SDPA; cache writes
    profile       the grid of executor/profile_grid.py: the rows that a step-time profile is made of

Each part runs in a process of its own, so that a kernel that kills the device's context ends its part and no other.
What could not be measured is listed by name. The report (JSON: device, versions, rows, left_out, targets) is whole at
every moment, and takes the place of an earlier one with its first row; a table of it is printed at the end. Exits with

    0     all checks that were asked for ran and passed, and no kernel failed
    1     a check found a difference or did not run, or a kernel failed or hung (torch's own, beside ours, may)
    2     there is nothing to run on, or an option is wrong
    130   Ctrl-C: the table so far is printed

--toy runs everything at small sizes and in one process, on a CPU too, to see that it runs; its times say nothing about
any device. On a CPU the kernels are those of the CPU backend, graphs are replaced by a stand-in, and targets are not
judged.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from gpu_checks.report import ALL_OF_IT, ALL_THAT_FOLLOWS, Report, Row
from gpu_checks.verdicts import TARGETS, failures, not_run, show

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "correctness": ("gpu_checks.correctness", "run"),
    "decode": ("gpu_checks.sweeps", "run_decode"),
    "steps": ("gpu_checks.steps", "run_steps"),
    "prefill": ("gpu_checks.sweeps", "run_prefill"),
    "profile": ("gpu_checks.steps", "run_profile"),
}
"""Name -> module and function, the most important first."""
MAX_MINUTES = 24 * 60
GRACE_S = 20.0
"""A part watches the clock itself; one that hangs is ended so long after its time."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as a shell would give it."""


def main(argv: list[str] | None = None) -> int:
    """The command line; gives the exit code."""
    # torch is imported below this, so that Ctrl-C ends its import, too, without a trace.
    try:
        args = _parser().parse_args(argv)
        return _run_as_child(args) if args.child else _run(args)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(args: argparse.Namespace) -> int:
    """Every part in a child, then the verdict."""
    header = _header(args.toy)
    if header["device_type"] == "cpu" and not args.toy:
        print(
            "gpu_check: there is no GPU here; --toy runs everything at small sizes on a CPU", file=sys.stderr
        )
        return 2
    parts = args.part or list(PARTS)
    try:
        deadline_s = time.time() + 60 * args.minutes
        for group in [parts] if args.toy else [[part] for part in parts]:
            _run_in_child(group, args.output, header, deadline_s)
    except KeyboardInterrupt:
        report = Report(args.output, header)
        if report.has_begun:
            _note(report, parts, "interrupted")
        _conclude(report, parts)
        return INTERRUPTED
    return _conclude(Report(args.output, header), parts)


def _conclude(report: Report, parts: list[str]) -> int:
    """Judges the targets, prints the table, and gives the exit code."""
    content = report.content
    judged = [] if content["toy"] else [t.judge(content["rows"], content["left_out"]) for t in TARGETS]
    report.update(targets=judged)
    report.tidy_up()
    wrong, missing = len(failures(content)), len(not_run(content, parts))
    where = f"report: {report.path}" if report.has_begun else "no report, nothing was measured"
    print(show(content))
    print(f"\n{wrong} wrong, {missing} not run; {where}")
    return 1 if wrong or missing else 0


# ---------------------------------------------------------------- options


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with an option."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"gpu_check: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=_minutes, default=8.0, help="time for everything (default 8)")
    parser.add_argument("-o", "--output", type=_output, default="gpu_check.json", help="the report")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--toy", action="store_true", help="small sizes, also on a CPU")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return parser


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes <= MAX_MINUTES:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0 and up to {MAX_MINUTES}")
    return minutes


def _output(text: str) -> Path:
    """A file that can be written, or replaced."""
    path = Path(text)
    try:
        if path.exists() and not path.is_file():
            raise argparse.ArgumentTypeError(f"{text!r} is not a file")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}")
    except OSError as e:
        raise argparse.ArgumentTypeError(f"{text!r}: {e.strerror}") from e
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: the folder {str(path.parent)!r} cannot be written to")
    return path


def _header(toy: bool) -> Row:
    """What a report begins with; `run` tells it from that of another run."""
    import torch

    gpu = torch.cuda.is_available()
    return {
        "run": secrets.token_hex(8),
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


def _run_in_child(parts: list[str], output: Path, header: Row, deadline_s: float) -> None:
    """Runs parts in a process of their own; whatever ends it early is noted."""
    left_s = deadline_s - time.time()
    if left_s <= 0:
        _note(Report(output, header), parts, "no time left")
        return
    child = json.dumps({"deadline_s": deadline_s, "header": header})
    command = [sys.executable, __file__, "-o", str(output), "--child", child]
    command += [word for part in parts for word in ("--part", part)]
    code = _exit_code(command, left_s + GRACE_S)
    if code is None:
        _note(Report(output, header), parts, "took too long and was ended", failed=True)
    elif code:
        _note(Report(output, header), parts, f"its process ended with code {code}", failed=True)


def _exit_code(command: list[str], timeout_s: float) -> int | None:
    """That of the command, which does not see Ctrl-C and is ended by us; None if it takes longer than this."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        child = subprocess.Popen(command)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        child.kill()
        child.wait()


def _note(report: Report, parts: list[str], reason: str, **more: object) -> None:
    """Lists those of the parts as left out that have not finished."""
    for part in parts:
        if part not in report.content["finished"]:
            what = {"part": part, "name": ALL_THAT_FOLLOWS, "reason": reason, **more}
            report.append("left_out", what)


def _run_as_child(args: argparse.Namespace) -> int:
    _find_product()
    header = args.child["header"]
    for part in args.part:
        report = Report(args.output, header)
        _run_part(part, report, header["toy"], args.child["deadline_s"])
        report.append("finished", part)
    return 0


def _run_part(part: str, report: Report, toy: bool, deadline_s: float) -> None:
    """In the child: imports what the part needs, and runs it."""
    from gpu_checks.session import DeviceLostError, Session

    session = Session.start(report, part, toy, deadline_s)
    module, function = PARTS[part]
    try:
        run: Callable[[Session], None] = getattr(import_module(module), function)
    except ModuleNotFoundError as e:
        session.leave_out(ALL_OF_IT, f"the package {e.name} is not installed")
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
