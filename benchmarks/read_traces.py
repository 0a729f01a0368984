"""How fast traces are read, and in how much memory, beside reading the same file with Python's csv module.

    python benchmarks/read_traces.py [--rows 1000000] [--rounds 3] [-o FILE]

The file is made up: rows in the format of Azure's traces of 2023, Poisson arrivals. Each reading runs in a process of
its own, the two in turns, since the peak of memory is that of a process; figures are medians over the rounds. Target
for a million rows: below 5 s and 300 MB, imports included.
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

READERS = {
    "read_trace": "from servetwin.workloads import read_trace\nrows = len(read_trace(PATH))",
    "csv module": "import csv\nwith open(PATH, newline='') as f: rows = sum(1 for _ in csv.reader(f)) - 1",
}
CHILD = """
import sys, time
PATH = sys.argv[1]
start = time.perf_counter()
{read}
seconds = time.perf_counter() - start
# Not getrusage, whose peak a new program takes over from the one that started it.
peak_kb = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(rows, seconds, int(peak_kb) / 1024)
"""


def write_rows(path: Path, rows: int) -> None:
    """A made-up trace; times have seven digits, lines end in CRLF, as in the real ones."""
    rng = np.random.default_rng(0)
    times = np.datetime64("2023-11-16T18:00:00", "us") + rng.exponential(2e5, rows).cumsum().astype(int)
    prompts, outputs = rng.integers(1, 8000, rows), rng.integers(1, 1000, rows)
    with path.open("w", newline="") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\r\n")
        for time, prompt, output in zip(times.astype(str), prompts, outputs, strict=True):
            file.write(f"{time.replace('T', ' ')}0,{prompt},{output}\r\n")


def read(reader: str, path: Path) -> tuple[int, float, float]:
    """Rows, seconds and peak MB of one reading."""
    command = [sys.executable, "-c", CHILD.format(read=READERS[reader]), str(path)]
    rows, seconds, megabytes = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.split()
    return int(rows), float(seconds), float(megabytes)


def measure(rows: int, rounds: int) -> dict[str, Any]:
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in READERS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made_up.csv"
        write_rows(path, rows)
        for _ in range(rounds):
            for name in READERS:
                found, seconds, megabytes = read(name, path)
                assert found == rows, f"{name} read {found} of {rows} rows"
                samples[name].append((seconds, megabytes))
    return {
        name: {"seconds": statistics.median(s), "peak_mb": statistics.median(m)}
        for name, (s, m) in ((name, zip(*pairs, strict=True)) for name, pairs in samples.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, help="also write the figures there, as JSON")
    args = parser.parse_args()
    for name in ("rows", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be 1 or more")
    report: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_average_before": os.getloadavg(),
        "versions": {name: version(name) for name in ("servetwin", "pyarrow", "numpy")},
        "rows": args.rows,
        "rounds": args.rounds,
    }
    report["figures"] = measure(args.rows, args.rounds)
    report["load_average_after"] = os.getloadavg()
    for name, found in report["figures"].items():
        print(f"{name:12} {args.rows:,} rows in {found['seconds']:.2f} s, at most {found['peak_mb']:.0f} MB")
    ratio = report["figures"]["read_trace"]["seconds"] / report["figures"]["csv module"]["seconds"]
    print(f"read_trace takes {ratio:.2f} x as long as the csv module alone")
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
