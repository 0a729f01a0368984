"""What planning costs and how near it comes: a fleet's hour again and again, and capacities that are known.

python benchmarks/planning.py [--configurations 100] [--requests 19908] [--jobs 2] [--json FILE]

fleet      so many configurations of 8 replicas (seats x tokens a step x router), each of which serves one hour of the
           preset `chat` (Azure-like conversations, 5.53 requests/s) with the roofline of an 8B model on an H100;
           the goal is under 10 minutes on 2 cores for 100
capacity   an engine with constant steps against seats / (output tokens x step time); lognormal lengths with a limit
           of TTFT P99 against a scan of 1 % steps; simulations needed (under 15) and error (1 % and 3 %)
saturated  steps of a probe at three times the capacity over those of one at 80 % of it (at most 2)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from servetwin.sim.planning import RunSpec, Study
from servetwin.sim.planning.capacity import Effort, largest_load
from servetwin.sim.planning.probing import Prober
from servetwin.sim.planning.slo import Slo

MODEL = Path(__file__).parents[1] / "examples" / "llama-8b"
HOUR_REQUESTS = 19_908
SEATS, STEP_S, OUTPUT = 16, 0.05, 20
ANALYTIC = SEATS / (OUTPUT * STEP_S)
LIMIT_MS = 1500
GRID = {
    "max_num_seqs": [32, 64, 128, 256, 512],
    "max_num_batched_tokens": [1024, 2048, 4096, 8192],
    "router": ["round_robin", "least_requests", "power_of_two", "least_tokens", "random"],
}
WHOLE = 100
"""Points of the grid."""


def fleet(configurations: int, requests: int, jobs: int) -> dict[str, Any]:
    """Wall time of so many configurations, each of 8 replicas."""
    study = Study(
        "chat",
        executor="roofline",
        gpu="H100",
        model=MODEL,
        replicas=8,
        num_prompts=requests,
        router="round_robin",
    )
    begun = perf_counter()
    if configurations < WHOLE:
        frame = study.sweep(GRID, method="random", runs=configurations, jobs=jobs)
    else:
        frame = study.sweep(GRID, jobs=jobs)
    assert frame.error.isna().all(), frame.error
    rows = len(frame)
    wall_s = perf_counter() - begun
    return {
        "configurations": rows,
        "requests_each": requests,
        "replicas": 8,
        "jobs": jobs,
        "wall_s": wall_s,
        "wall_s_for_100": wall_s * 100 / rows,
    }


def capacity(folder: Path) -> list[dict[str, Any]]:
    """Answers against what is known without a search."""
    found = []
    rng = np.random.default_rng(0)
    n = 1500
    arrivals = {"even": np.arange(n, dtype=float), "poisson": np.cumsum(rng.exponential(1.0, n))}
    for name, times in arrivals.items():
        answer = largest_load(_engine(folder, name, times, np.full(n, OUTPUT)), Slo(), Effort())
        found.append(
            _compared(f"constant lengths, {name} arrivals", answer.rate, ANALYTIC, answer.simulations)
        )
    lengths = np.maximum(np.rint(rng.lognormal(np.log(OUTPUT) - 0.5, 1.0, n)), 1)
    spec = _engine(folder, "lognormal", arrivals["poisson"], lengths)
    answer = largest_load(spec, Slo(ttft_ms=LIMIT_MS), Effort())
    found.append(
        _compared("lognormal lengths, TTFT P99", answer.rate, _scanned(spec, answer.rate), answer.simulations)
    )
    return found


def _engine(folder: Path, name: str, times_s: np.ndarray[Any, Any], outputs: np.ndarray[Any, Any]) -> RunSpec:
    rows = [
        {"request_id": f"r{i}", "arrival_s": float(t), "prompt_tokens": 64, "output_tokens": int(o)}
        for i, (t, o) in enumerate(zip(times_s, outputs, strict=True))
    ]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunSpec.from_fields(
        path,
        executor="constant",
        step_time_s=STEP_S,
        max_num_seqs=SEATS,
        max_num_batched_tokens=8192,
        async_scheduling=False,
        enable_prefix_caching=False,
    )


def _scanned(spec: RunSpec, around: float | None) -> float:
    """The last rate of a scan from below at which TTFT P99 is kept."""
    assert around is not None
    scan = Prober(spec, Slo(ttft_ms=LIMIT_MS), watch=False)
    best = 0.0
    for rate in around * np.exp(np.arange(-0.15, 0.16, 0.01)):
        if (scan.at(float(rate)).values["ttft"] or inf) > LIMIT_MS:
            break
        best = float(rate)
    return best


def _compared(what: str, found: float | None, known: float, simulations: int) -> dict[str, Any]:
    error = None if found is None else found / known - 1
    return {"case": what, "found": found, "known": known, "error": error, "simulations": simulations}


def saturated(folder: Path) -> dict[str, Any]:
    """Simulated steps of two probes."""
    rng = np.random.default_rng(1)
    n = 2000
    lengths = np.maximum(np.rint(rng.lognormal(np.log(OUTPUT), 0.5, n)), 1)
    prober = Prober(_engine(folder, "cost", np.cumsum(rng.exponential(1.0, n)), lengths), Slo())
    seconds, steps = [], []
    for load in (0.8, 3.0):
        begun = perf_counter()
        steps.append(prober.at(load * ANALYTIC).simulated_steps)
        seconds.append(perf_counter() - begun)
    return {"steps_ratio": steps[1] / steps[0], "wall_ratio": seconds[1] / seconds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configurations", type=int, default=100)
    parser.add_argument("--requests", type=int, default=HOUR_REQUESTS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report: dict[str, Any] = {"machine": platform.machine(), "cpus": os.cpu_count()}
        report["saturated"] = saturated(folder)
        print(
            f"saturated: {report['saturated']['steps_ratio']:.2f} of the steps of a stable probe", flush=True
        )
        report["capacity"] = capacity(folder)
        for case in report["capacity"]:
            print(
                f"capacity: {case['case']}: {case['found']:.4g} against {case['known']:.4g} requests/s "
                f"({100 * case['error']:+.2f} %) in {case['simulations']} simulations",
                flush=True,
            )
    if args.configurations:
        report["fleet"] = found = fleet(args.configurations, args.requests, args.jobs)
        print(
            f"fleet: {found['configurations']} configurations of 8 replicas, {found['requests_each']:,} requests each: "
            f"{found['wall_s']:.0f} s with {found['jobs']} processes, "
            f"{found['wall_s_for_100'] / 60:.1f} minutes for 100"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
