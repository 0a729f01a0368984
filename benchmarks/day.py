"""A day of conversations in one simulation: wall and processor time, memory, and how much of it was leapt over.

    python benchmarks/day.py [--requests 478000] [--json FILE]

`servetwin run chat` with the preset's lengths and rate (5.53 requests/s: 478,000 are a day, with some 100 million
output tokens) on one engine that can keep up with them: Llama-3.1-8B on eight H100 by the roofline, with synchronous
and with asynchronous scheduling (the default). The log is written to disk, without block residencies. Start-up is
inside the clock; that of `servetwin --help` and of a run of two requests is printed beside it. The goals are 60 s for
the day, 0.5 s and 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

MODEL = Path(__file__).parents[1] / "examples" / "llama-8b"
DAY = 478_000
SERVETWIN = str(Path(sys.executable).with_name("servetwin"))
ENGINE = ["--executor", "roofline", "--gpu", "H100", "--tensor-parallel-size", "8", "--model", str(MODEL)]


def timed(*arguments: str) -> dict[str, float]:
    """Of one command: wall and processor seconds, and the most memory that it had."""
    begun = perf_counter()
    process = subprocess.Popen([SERVETWIN, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"servetwin {' '.join(arguments)} ended with {process.returncode}")
    return {
        "wall_s": perf_counter() - begun,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_mib": used.ru_maxrss / 1024,
    }


def day(requests: int, scheduling: str) -> dict[str, Any]:
    """The run, and what its summary says."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        flags = ["--num-prompts", str(requests), "--no-log-blocks", "--out", str(out)]
        found: dict[str, Any] = timed("run", "chat", *flags, *ENGINE, scheduling)
        summary = json.loads((out / "summary.json").read_text())
    names = ("completed", "total_output_tokens", "duration", "steps", "leapt_fraction")
    figures = summary | summary["servetwin"]
    return found | {name: figures[name] for name in names}


def start_up() -> dict[str, float]:
    """Medians of five."""
    row = '{"request_id": "r%d", "arrival_s": 0, "prompt_tokens": 16, "output_tokens": 4}\n'
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "two.jsonl"
        path.write_text("".join(row % i for i in range(2)))
        flags = ["--executor", "constant", "--step-time-s", "0.01", "--out", str(Path(folder) / "run")]
        runs = [timed("run", str(path), *flags, "--overwrite")["wall_s"] for _ in range(5)]
    return {
        "help_s": statistics.median(timed("--help")["wall_s"] for _ in range(5)),
        "run_s": statistics.median(runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=DAY)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "requests": arguments.requests,
        "start_up": start_up(),
    }
    print(f"start-up: --help {report['start_up']['help_s']:.2f} s, run {report['start_up']['run_s']:.2f} s")
    for scheduling in ("--no-async-scheduling", "--async-scheduling"):
        found = report[scheduling] = day(arguments.requests, scheduling)
        print(
            f"{scheduling}: {arguments.requests:,} requests in {found['wall_s']:.1f} s ({found['cpu_s']:.1f} s of "
            f"processor time, {arguments.requests / found['cpu_s']:,.0f} requests per cpu s), peak "
            f"{found['peak_mib']:.0f} MiB, {found['steps']:,} steps, {found['leapt_fraction']:.0%} leapt"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
