"""Live against simulated on this machine: profile, fit, then loads and configurations that the fit has not seen.

    python benchmarks/validate_live.py [--model FOLDER] [--threads N] [--seconds 90] [--work FOLDER] [-o FILE]

First how steady the machine is by itself; then:

1. `servetwin profile` and `servetwin fit`, with the time they take.
2. `servetwin validate --live`: a workload of other lengths and arrivals than the profile's at 30, 60 and 90 % of the
   capacity that the profile foretells, twice live and once simulated. The difference between the two live runs stands
   beside each error: what the machine is off by from itself.
3. Ten configurations (seats, token budget, chunk threshold, blocks) under one load: Kendall's tau between the mean E2E
   that was foretold and that of a live run.

Takes about half an hour; nothing else should run meanwhile. Random weights for examples/llama-44m by default. What is
in the folder of --work already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from servetwin.sim.runs import read_run
from servetwin.workloads import Gamma, Lognormal, RequestSpec, Synthetic
from servetwin.workloads.traces.jsonl import to_jsonl

ROOT = Path(__file__).resolve().parent.parent
SERVETWIN = Path(sys.executable).with_name("servetwin")
TARGETS = {"ttft": 8.0, "tpot": 5.0, "e2e": 5.0}
"""Percent, of the mean, at 30 and 60 % load."""
ENGINE = {
    "max_model_len": 2048,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 1024,
    "num_gpu_blocks_override": 2000,
}
CONFIGURATIONS: tuple[dict[str, int], ...] = (
    {},
    {"max_num_seqs": 1},
    {"max_num_seqs": 2},
    {"max_num_seqs": 3},
    {"max_num_seqs": 4},
    {"max_num_seqs": 16, "max_num_batched_tokens": 16},
    {"max_num_seqs": 20, "max_num_batched_tokens": 20},
    {"long_prefill_token_threshold": 4},
    {"long_prefill_token_threshold": 8},
    {"max_model_len": 1232, "num_gpu_blocks_override": 78},
)
"""What differs from ENGINE: enough to make a difference where a machine's speed wanders by a fifth."""
RANKED_LOAD = 70
"""Percent of the capacity of ENGINE, for the configurations."""
RANKED_SECONDS = 0.4
"""Of the length of a live run, for each configuration."""


class Bench:
    """Runs commands of servetwin with one model and one place to work."""

    def __init__(self, model: Path, threads: int, work: Path) -> None:
        self._threads, self.work = threads, work
        self.model = ["--model", str(model)]

    def call(self, *arguments: str) -> Any:
        """The JSON that a command prints; its progress goes to stderr. Exit code 4 (threshold missed) is an answer."""
        done = subprocess.run(
            [str(SERVETWIN), *arguments, "--json"],
            stdout=subprocess.PIPE,
            check=False,
        )
        if done.returncode not in (0, 4):
            raise SystemExit(f"servetwin {' '.join(arguments)}: exit code {done.returncode}")
        return json.loads(done.stdout)

    def engine(self, **changes: int) -> list[str]:
        """Flags of an engine of the model."""
        flags = ENGINE | changes
        said = [text for name, value in flags.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        return [*self.model, *said]

    @property
    def real(self) -> list[str]:
        """Flags of an engine that runs the model."""
        return ["--load-format", "dummy", "--threads", str(self._threads)]


def steadiness(seconds: float = 30.0) -> dict[str, float]:
    """How steady the machine is by itself: one and the same Python loop over and over, in ms."""
    took, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        began, total = time.perf_counter(), 0
        for number in range(200_000):
            total += number * number
        took.append(1e3 * (time.perf_counter() - began))
        time.sleep(0.2)
    p10, p50, p90 = np.percentile(took, (10, 50, 90)).tolist()
    return {"p10_ms": p10, "p50_ms": p50, "p90_ms": p90}


def profile_and_fit(bench: Bench) -> dict[str, Any]:
    """With the seconds that each takes."""
    folder, file, kept = (bench.work / name for name in ("profile", "profile.json", "profile-times.json"))
    if kept.is_file():
        found: dict[str, Any] = json.loads(kept.read_bytes())
        return found
    began = time.monotonic()
    profiled = bench.call("profile", *bench.engine(), *bench.real, "--out", str(folder))
    fit_began = time.monotonic()
    fitted = bench.call("fit", str(folder), "--out", str(file), "--overwrite")
    ended = time.monotonic()
    found = {
        "profile_s": fit_began - began,
        "fit_s": ended - fit_began,
        "measured": profiled["measured"],
        "about": profiled["about"],
        "errors": fitted["errors"],
        "untested": fitted["untested"],
    }
    kept.write_text(json.dumps(found))
    return found


def requests(rate_per_s: float, seconds: float, seed: int) -> list[RequestSpec]:
    """Prompts and answers of lognormal lengths, bursty arrivals (CV 1.3): nothing that a profile runs."""
    made = Synthetic(
        arrivals=Gamma(rate_per_s=rate_per_s, cv=1.3),
        n=max(round(rate_per_s * seconds), 4),
        input_lengths=Lognormal(mu=math.log(110), sigma=0.8, max_tokens=900, min_tokens=4),
        output_lengths=Lognormal(mu=math.log(40), sigma=0.7, max_tokens=300, min_tokens=2),
        seed=seed,
    )
    return list(made.requests)


def write(path: Path, some: list[RequestSpec]) -> str:
    path.write_text("".join(json.dumps(to_jsonl(spec)) + "\n" for spec in some))
    return str(path)


def serve_live(bench: Bench, workload: str, name: str, **changes: int) -> dict[str, Any]:
    out = bench.work / name
    if out.is_dir() and read_run(out).state == "complete":
        return read_run(out).summary
    summary: dict[str, Any] = bench.call(
        *(
            "run",
            workload,
            "--live",
            "--executor",
            "torch",
            "--no-log-blocks",
            "--out",
            str(out),
            "--overwrite",
        ),
        *bench.engine(**changes),
        *bench.real,
    )
    return summary


def loads(bench: Bench, seconds: float) -> dict[str, Any]:
    """What `servetwin validate --live` finds."""
    kept = bench.work / "loads.json"
    if not kept.is_file():
        workload = write(bench.work / "unseen.jsonl", requests(1.0, 2000, seed=9))
        flags = ["--profile", str(bench.work / "profile.json"), "--seconds", str(seconds)]
        flags += ["--out", str(bench.work / "loads")]
        kept.write_text(
            json.dumps(bench.call("validate", workload, "--live", *flags, *bench.model, *bench.real))
        )
    found: dict[str, Any] = json.loads(kept.read_bytes())
    return {**found, "loads": [kept_of(bench, load) for load in found["loads"]]}


def kept_of(bench: Bench, load: dict[str, Any]) -> dict[str, Any]:
    """Of one load; also with one factor of the device times that the first half of the requests was fitted to."""
    folder = bench.work / "loads" / f"load-{load['percent']:g}"
    flags = ["--profile", str(bench.work / "profile.json"), *bench.model, "--noise-runs", "0"]
    calibrated = bench.call("validate", str(folder / "live-1"), *flags, "--calibrate", "first-half")
    names = (
        "percent",
        "rate_per_s",
        "requests",
        "steps_by_regime",
        "step_noise_percent",
        "plans",
        "load",
        "totals",
    )
    return {
        **{name: load[name] for name in (*names, "noise_percent")},
        "errors_percent": errors_of(load["metrics"]),
        "live_runs_differ_by_percent": load["again"]["difference_percent"],
        "calibrated": calibrated["calibrated"],
        "calibrated_errors_percent": errors_of(calibrated["parts"]["second half (tested)"]),
    }


def errors_of(metrics: dict[str, Any]) -> dict[str, Any]:
    """By metric and statistic, in percent."""
    return {name: metric["error_percent"] for name, metric in metrics.items()}


def ranking(bench: Bench, capacity: float, seconds: float) -> dict[str, Any]:
    """Foretold and live mean E2E of every configuration, and how alike they rank."""
    rate = RANKED_LOAD / 100 * capacity
    workload = write(bench.work / "ranked.jsonl", requests(rate, RANKED_SECONDS * seconds, seed=77))
    rows = []
    for number, changes in enumerate(CONFIGURATIONS):
        live = serve_live(bench, workload, f"ranked-{number}", **changes)
        foretold = bench.call(
            "run", workload, "--executor", str(bench.work / "profile.json"), *bench.engine(**changes)
        )
        rows.append(
            {"changes": changes, "live_ms": live["mean_e2el_ms"], "foretold_ms": foretold["mean_e2el_ms"]}
        )
        print(
            f"{changes or 'default'}: live {rows[-1]['live_ms']:.0f} ms, foretold {rows[-1]['foretold_ms']:.0f} ms"
        )
    tau = kendalltau([row["live_ms"] for row in rows], [row["foretold_ms"] for row in rows]).statistic
    return {"kendall_tau": float(tau), "configurations": rows}


def show(found: dict[str, Any]) -> None:
    steady = found["steadiness"]
    print(
        f"one and the same loop took {steady['p50_ms']:.1f} ms at the median, {steady['p10_ms']:.1f} at P10, "
        f"{steady['p90_ms']:.1f} at P90: so much the machine wanders by itself"
    )
    made = found["profile"]
    print(f"profile {made['profile_s']:.0f} s + fit {made['fit_s']:.0f} s (wanted: under 600 s together)")
    for row in found["loads"]:
        steps = row["steps_by_regime"]["all"]
        like = steps["like_steps"]
        floor = "unknown" if like is None else f"{like['median_percent']:.1f} / {like['mape_percent']:.1f} %"
        print(
            f"\nload {row['percent']:g} %: {row['requests']} requests; steps: median {steps['median_percent']:.1f}, "
            f"mean {steps['mape_percent']:.1f} % off (wanted 5, 10); like steps of the run from each other {floor}"
        )
        for name, errors in row["errors_percent"].items():
            if errors["mean"] is None:
                continue
            wanted = f" (wanted {TARGETS[name]:g} at 30 and 60 %)" if name in TARGETS else ""
            again = row["live_runs_differ_by_percent"].get(name, {}).get("mean")
            beside = "" if again is None else f"; the live runs differ by {again:+.1f} %"
            print(f"  {name}: mean {errors['mean']:+.1f} %{wanted}{beside}")
        tested = row["calibrated_errors_percent"]
        said = ", ".join(f"{name} {tested[name]['mean']:+.1f} %" for name in TARGETS)
        print(
            f"  device times x {row['calibrated']['value']:.3f}, by the first half; means of the second half: {said}"
        )
    ranked = found["ranking"]
    print(f"\nten configurations: Kendall's tau {ranked['kendall_tau']:.2f} (wanted 0.8)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "llama-44m")
    parser.add_argument("--threads", type=int, default=1, help="that torch computes with")
    parser.add_argument("--seconds", type=float, default=90, help="length of a live run")
    parser.add_argument("--work", type=Path, help="folder for profile and runs (default: a temporary one)")
    parser.add_argument("-o", "--out", type=Path, help="write everything as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(given.model, given.threads, given.work or Path(temporary))
        found: dict[str, Any] = {
            "date": datetime.now(UTC).date().isoformat(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "steadiness": steadiness(),
            "profile": profile_and_fit(bench),
        }
        found |= loads(bench, given.seconds)
        found["ranking"] = ranking(bench, found["capacity_per_s"], given.seconds)
    show(found)
    if given.out is not None:
        # Folders by their places in the one that was worked in.
        given.out.write_text(json.dumps(found, indent=1).replace(f"{bench.work}/", "") + "\n")


if __name__ == "__main__":
    main()
