"""How well `servetwin run --live` keeps its send times: what a request was late by, over a minute of load.

    python benchmarks/live_send_times.py [--model FOLDER] [--seconds 60] [--rate 4] [--json FILE]

Requests arrive at random (Poisson) and are sent on the wall clock to an engine in a child process that shares the
machine with the client. Without --model: random weights for examples/llama-10m. The run folder is then opened the way
the dashboard opens it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from servetwin.sim.runs import read_run

ROOT = Path(__file__).resolve().parent.parent
TARGET_MS = 2.0
"""At the median: part of the product's promise."""


def write_workload(path: Path, seconds: float, rate_per_s: float) -> list[float]:
    """Our JSONL; returns the arrival times."""
    random = np.random.default_rng(0)
    times_s = np.cumsum(random.exponential(1 / rate_per_s, size=int(seconds * rate_per_s * 2)))
    times_s = times_s[times_s < seconds]
    with path.open("w") as file:
        for index, time_s in enumerate(times_s.tolist()):
            row = {
                "request_id": f"r{index}",
                "arrival_s": time_s,
                "prompt_tokens": int(random.integers(10, 60)),
                "output_tokens": int(random.integers(5, 40)),
            }
            file.write(json.dumps(row) + "\n")
    return times_s.tolist()


def serve(workload: Path, out: Path, model: Path | None) -> None:
    what = (
        ["--model", str(model)]
        if model
        else ["--model", str(ROOT / "examples/llama-10m"), "--load-format", "dummy"]
    )
    engine = ["--max-model-len", "128", "--max-num-seqs", "16", "--num-gpu-blocks-override", "200"]
    command = ["run", str(workload), "--live", *what, *engine, "--out", str(out)]
    subprocess.run([Path(sys.executable).with_name("servetwin"), *command], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=4, help="requests per second")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workload, out = Path(folder) / "workload.jsonl", Path(folder) / "run"
        due_s = write_workload(workload, arguments.seconds, arguments.rate)
        serve(workload, out, arguments.model)
        run = read_run(out)
        sent_s = run.requests.set_index("request_id").arrival_s
    late_ms = np.array([(sent_s[f"r{i}"] - due) * 1e3 for i, due in enumerate(due_s)])
    p50, p90, p99 = np.percentile(late_ms, (50, 90, 99))
    print(f"{len(late_ms)} requests in {arguments.seconds:g} s, run {run.state}")
    print(f"sent later than due, ms: median {p50:.3f} (target {TARGET_MS}), p90 {p90:.3f}, p99 {p99:.3f}")
    if arguments.json:
        result = {
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "requests": len(late_ms),
            "seconds": arguments.seconds,
            "late_ms": {"p50": p50, "p90": p90, "p99": p99, "max": float(late_ms.max())},
            "target_ms": TARGET_MS,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
