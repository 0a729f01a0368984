"""Requests/s of other simulators beside ours, on the same load, in turn, each in a process of its own.

    python benchmarks/peers.py [--peer-python PYTHON] [--requests 4000] [--rounds 5] [--json FILE]

The load is W4 and W16 of benchmarks/simulate.py (512 + 128 tokens, Poisson, 128 seats, 4,096 tokens a step, 20,000
blocks, prefix caching off). PYTHON is an interpreter that has the others (default: this one); what it lacks is said.

    dynamo       the offline replay of `ai-dynamo` (a core in Rust); its own step times (it takes no constants)
    sched-sim    `sched-sim` (chunked prefill); our step times, in the place of its roofline

Ours writes its log to disk. Theirs keep what they keep. Start-up and imports are outside the clock, and so is a first
small run; of ours so is nothing else. Vidur is not run: its step times come from profiles and a fit of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

SIMULATE = Path(__file__).with_name("simulate.py")
RATES = {"W4": 4.0, "W16": 16.0}

CLOCK = """
import json, sys
from importlib.metadata import version
from time import perf_counter, process_time
rate, count = float(sys.argv[1]), int(sys.argv[2])
def timed(serve):
    serve(200)
    wall, cpu = perf_counter(), process_time()
    steps = serve(count)
    wall, cpu = perf_counter() - wall, process_time() - cpu
    return {"requests_per_s": count / wall, "requests_per_cpu_s": count / cpu, "steps": steps}
"""

DYNAMO = (
    CLOCK
    + """
from dynamo.replay import run_synthetic_trace_replay
engine = dict(num_gpu_blocks=20000, block_size=16, max_num_seqs=128, max_num_batched_tokens=4096,
              enable_prefix_caching=False)
def serve(count):
    report = run_synthetic_trace_replay(512, 128, count, extra_engine_args={"engine": engine}, request_rate=rate,
                                        arrival_seed=42)
    assert report.summary["completed_requests"] == count
print(json.dumps(timed(serve) | {"version": version("ai-dynamo")}))
"""
)

SCHED_SIM = (
    CLOCK
    + """
import random
from sched_sim.core.event_engine import Simulator
from sched_sim.core.request import Request
from sched_sim.hardware.profile import HardwareProfile
from sched_sim.schedulers.factory import create_scheduler
class Times:
    def __init__(self, hardware):
        self.hardware = hardware
    def compute_mixed_step_time(self, prefill, decode, context):
        return (8_000_000 + 50_000 * prefill + 20_000 * decode + 200 * context) / 1e9
    def compute_prefill_step_time(self, prefill):
        return self.compute_mixed_step_time(prefill, 0, 0)
    def compute_decode_step_time(self, decode, context):
        return self.compute_mixed_step_time(0, decode, context)
def serve(count):
    drawn, now, requests = random.Random(42), 0.0, []
    for i in range(count):
        now += drawn.expovariate(rate)
        requests.append(Request(request_id=f"r{i}", arrived_at=now, prompt_tokens=512, output_tokens=128))
    hardware = HardwareProfile(vram_gb=80.0)
    scheduler = create_scheduler("chunked", hardware, token_budget=4096, max_batch_size=128)
    scheduler.latency_model = Times(hardware)
    simulator = Simulator(hardware, scheduler)
    simulator.submit_workload(requests)
    simulator.run()
    return len(simulator.iteration_records)
print(json.dumps(timed(serve) | {"version": version("sched-sim")}))
"""
)

PEERS = {"dynamo": DYNAMO, "sched-sim": SCHED_SIM}


def of_ours(workload: str, count: int) -> dict[str, float]:
    command = [sys.executable, str(SIMULATE), "--one", workload, str(count), "1"]
    found: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


def of_a_peer(python: str, name: str, workload: str, count: int) -> dict[str, float] | str:
    """What it measured, or why it could not, in words."""
    command = [python, "-c", PEERS[name], str(RATES[workload]), str(count)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [row for workload in RATES for row in _compared(arguments, workload)]
    if arguments.json:
        about = {
            "date": datetime.now(UTC).date().isoformat(),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "requests": arguments.requests,
            "rounds": arguments.rounds,
        }
        arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def _compared(arguments: argparse.Namespace, workload: str) -> list[dict[str, object]]:
    """One workload: all in turn, then the medians and our ratio to each."""
    found: dict[str, list[dict[str, float]]] = {"servetwin": []}
    missing: dict[str, str] = {}
    for _ in range(arguments.rounds):
        found["servetwin"].append(of_ours(workload, arguments.requests))
        for name in PEERS.keys() - missing.keys():
            measured = of_a_peer(arguments.peer_python, name, workload, arguments.requests)
            if isinstance(measured, str):
                missing[name] = measured
            else:
                found.setdefault(name, []).append(measured)
    for name, reason in missing.items():
        print(f"{workload}: {name} is not compared: {reason}")
    ours = _median(found["servetwin"], "requests_per_cpu_s")
    rows = []
    for name, measured in found.items():
        wall, cpu = _median(measured, "requests_per_s"), _median(measured, "requests_per_cpu_s")
        about = {"workload": workload, "simulator": name, "version": str(measured[0].get("version", ""))}
        rows.append(
            {**about, "requests_per_s": wall, "requests_per_cpu_s": cpu, "ours_by_theirs": ours / cpu}
        )
        print(
            f"{workload:<4} {name:<10} {wall:>8,.0f}/s, {cpu:>8,.0f} per cpu s, ours / theirs {ours / cpu:.2f}"
        )
    return rows


def _median(measured: list[dict[str, float]], name: str) -> float:
    return statistics.median(m[name] for m in measured)


if __name__ == "__main__":
    main()
