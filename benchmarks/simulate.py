"""How fast a simulation with modelled step times is: requests/s of wall and of processor time, with and without leaps.

    python benchmarks/simulate.py [--requests 4000 20000] [--rounds 3] [--only NAME ...] [--json FILE]

One engine of 128 seats, 4,096 tokens a step and 20,000 usable blocks of 16 unless said otherwise; a step takes 8 ms
+ 50 us per prompt token + 20 us per decode row + 200 ns per context token of a decode row. The figure that counts is
prefix caching off, log written to disk, start-up excluded; block residencies are not logged.

    W4, W16            512 + 128 tokens, Poisson arrivals at 4/s and 16/s, synchronous scheduling
    ... caching        the same with prefix caching
    ... memory         the same with the log kept in memory
    ... async          the same with asynchronous scheduling
    azure              log-normal lengths (means about 1,200 and 200), 5.5/s
    mooncake           prompts of 4 to 40 blocks of 512 tokens, leading ones shared by families of requests, 1/s
    tight              16/s, 8 shared prefixes, 212-812 and 1-256 tokens, 1,200 blocks, caching on
    saturated          30/s, 512 + 128 tokens, 3,000 blocks, no full-sequence gate: preemptions

Every figure comes from a process of its own; variants run in turn, medians over the rounds. The requests are made as
they are needed, as from a trace that is read while it is served. A second line of each says by how much the memory of
the process grew for each request, and the most that it had. At last: what a finished request keeps in memory while its
log is not written. Other simulators: benchmarks/peers.py.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from servetwin.sim.config import CacheConfig, EngineConfig, ModelConfig, RunConfig, SchedulerConfig
from servetwin.sim.events import EventLog, MemorySink
from servetwin.sim.leaping_process import OnProgress
from servetwin.sim.runs import RunWriter
from servetwin.sim.simulation import simulate
from servetwin.sim.steptime.modelled import LinearStepModel, ModelledStepTimer
from servetwin.sim.token_source import TokenSource
from servetwin.workloads.spec import RequestSpec

MODEL = LinearStepModel(8_000_000, prefill_token_ns=50_000, decode_row_ns=20_000, context_ns=200)
CHUNK = 4096
"""Requests whose random numbers are drawn at a time."""
TARGETS = {"W4": 30_000, "W16": 40_000, "tight": 20_000, "W4 stepped": 12_000, "W16 stepped": 40_000}
"""Requests/s of the figure that counts."""


@dataclass(frozen=True)
class Variant:
    """One measurement."""

    name: str
    workload: str = "fixed"
    rate_per_s: float = 4.0
    caching: bool = False
    to_disk: bool = True
    asynchronous: bool = False
    blocks: int = 20_000
    gate: bool = True


VARIANTS = (
    Variant("W4"),
    Variant("W16", rate_per_s=16),
    Variant("W4 caching", caching=True),
    Variant("W16 caching", rate_per_s=16, caching=True),
    Variant("W4 memory", to_disk=False),
    Variant("W16 memory", rate_per_s=16, to_disk=False),
    Variant("W4 async", asynchronous=True),
    Variant("W16 async", rate_per_s=16, asynchronous=True),
    Variant("azure", "azure", rate_per_s=5.5),
    Variant("mooncake", "mooncake", rate_per_s=1, caching=True),
    Variant("tight", "tight", rate_per_s=16, caching=True, blocks=1_200),
    Variant("saturated", rate_per_s=30, blocks=3_000, gate=False),
)


class Stream:
    """An open loop of requests made as they are needed."""

    open_loop = True

    def __init__(self, variant: Variant, count: int) -> None:
        self._variant, self._count = variant, count
        self._requests = self._made()

    def next(self) -> RequestSpec | None:
        return next(self._requests, None)

    def finished(self, request_id: str, now_ns: int) -> None:
        """Nothing depends on it."""

    def _made(self) -> Iterator[RequestSpec]:
        rng, now_s, made = np.random.default_rng(42), 0.0, 0
        while made < self._count:
            count = min(CHUNK, self._count - made)
            times = now_s + np.cumsum(rng.exponential(1 / self._variant.rate_per_s, count))
            for i, (arrival_s, shape) in enumerate(
                zip(times.tolist(), self._shapes(rng, count), strict=True)
            ):
                yield RequestSpec(request_id=f"r{made + i}", arrival_s=arrival_s, **shape)
            now_s, made = float(times[-1]), made + count

    def _shapes(self, rng: np.random.Generator, count: int) -> Iterator[dict[str, object]]:
        match self._variant.workload:
            case "azure":
                prompts = np.clip(rng.lognormal(6.8, 0.8, count), 1, 8000).astype(int).tolist()
                outputs = np.clip(rng.lognormal(5.0, 0.75, count), 1, 1500).astype(int).tolist()
                for prompt, output in zip(prompts, outputs, strict=True):
                    yield {"prompt_tokens": prompt, "output_tokens": output}
            case "mooncake":
                for _ in range(count):
                    family, shared, own = (int(rng.integers(n)) for n in (200, 20, 20))
                    ids = tuple(family * 1000 + i for i in range(2 + shared))
                    prompt = (2 + shared + 2 + own) * 512
                    yield {
                        "prompt_tokens": prompt,
                        "output_tokens": int(rng.integers(1, 400)),
                        "prefix_ids": ids,
                        "prefix_block_tokens": 512,
                    }
            case "tight":
                for _ in range(count):
                    prompt, output, prefix = (
                        int(rng.integers(a, b)) for a, b in ((212, 813), (1, 257), (0, 8))
                    )
                    ids = tuple(prefix * 100 + i for i in range(8))
                    yield {
                        "prompt_tokens": prompt,
                        "output_tokens": output,
                        "prefix_ids": ids,
                        "prefix_block_tokens": 16,
                    }
            case _:
                for _ in range(count):
                    yield {"prompt_tokens": 512, "output_tokens": 128}


def engine(variant: Variant) -> EngineConfig:
    pool_tokens = variant.blocks * 16
    return EngineConfig(
        model=ModelConfig(max_model_len=min(32_768, pool_tokens)),
        cache=CacheConfig(num_gpu_blocks=variant.blocks + 1, enable_prefix_caching=variant.caching),
        scheduler=SchedulerConfig(
            max_num_seqs=128,
            max_num_batched_tokens=4096,
            async_scheduling=variant.asynchronous,
            scheduler_reserve_full_isl=variant.gate,
        ),
    )


def measure(variant: Variant, count: int, *, leaps: bool) -> dict[str, float]:
    """One simulation in this process; imports and a first small run come before the clock."""
    _serve(variant, min(count, 300), leaps=leaps)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = perf_counter(), process_time()
    leapt, steps = _serve(variant, count, leaps=leaps)
    wall, cpu = perf_counter() - wall, process_time() - cpu
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "requests_per_s": count / wall,
        "requests_per_cpu_s": count / cpu,
        "steps_per_s": steps / wall,
        "steps_per_request": steps / count,
        "leapt_fraction": leapt / steps,
        "peak_mib": peak_kib / 1024,
        "bytes_per_request": (peak_kib - before_kib) * 1024 / count,
    }


def _serve(variant: Variant, count: int, *, leaps: bool) -> tuple[int, int]:
    """Steps that were leapt over, and all steps."""
    with tempfile.TemporaryDirectory() as folder:
        sink = RunWriter.create(Path(folder) / "run", {"config": {}}) if variant.to_disk else MemorySink()
        log = EventLog(sink, log_blocks=False)
        counted = [0, 0]

        def on_progress(num_steps: int, num_ended: int, now_ns: int) -> None:
            counted[0] += num_steps if num_steps > 1 else 0
            counted[1] += num_steps

        _simulate(variant, count, log, on_progress, leaps=leaps)
        return counted[0], counted[1]


def _simulate(
    variant: Variant, count: int, log: EventLog, on_progress: OnProgress, *, leaps: bool = True
) -> None:
    tokens = TokenSource(32_000)
    simulate(
        RunConfig(engine=engine(variant), executor="linear"),
        Stream(variant, count),
        ModelledStepTimer(MODEL, tokens, "linear"),
        log,
        tokens=tokens,
        plan_tokens=False,
        log_blocks=False,
        leaps=leaps,
        on_progress=on_progress,
    )


def buffered_bytes(variant: Variant, first: int = 4096, last: int = 12_288) -> float:
    """By how much what is kept grows with a finished request while nothing is written to disk."""
    kept: dict[int, int] = {}
    ended = 0
    log = EventLog(MemorySink(), log_blocks=False)
    log.flush_at_rows(10**9)

    def on_progress(num_steps: int, num_ended: int, now_ns: int) -> None:
        nonlocal ended
        for count in (first, last):
            if ended < count <= ended + num_ended:
                kept[count] = tracemalloc.get_traced_memory()[0]
        ended += num_ended

    tracemalloc.start()
    try:
        _simulate(variant, last + 1, log, on_progress)
    finally:
        tracemalloc.stop()
    return (kept[last] - kept[first]) / (last - first)


def in_a_process(variant: Variant, count: int, *, leaps: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", variant.name, str(count), str(int(leaps))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def medians(measured: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(m[name] for m in measured) for name in measured[0]}


def start_up_s() -> float:
    """`servetwin run` on two requests, whole process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "two.jsonl"
        row = '{"request_id": "r%d", "arrival_s": 0, "prompt_tokens": 16, "output_tokens": 4}\n'
        path.write_text("".join(row % i for i in range(2)))
        command = [str(Path(sys.executable).with_name("servetwin")), "run", str(path)]
        command += ["--executor", "constant", "--step-time-s", "0.01", "--out", str(Path(folder) / "run")]
        begun = perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        return perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[4000, 20_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[v.name for v in VARIANTS])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    by_name = {v.name: v for v in VARIANTS}
    if arguments.one:
        name, count, leaps = arguments.one
        print(json.dumps(measure(by_name[name], int(count), leaps=bool(int(leaps)))))
        return
    report = _report(arguments, [v for v in VARIANTS if not arguments.only or v.name in arguments.only])
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def _report(arguments: argparse.Namespace, variants: list[Variant]) -> dict[str, object]:
    rows = []
    for count in arguments.requests:
        runs = {(v.name, leaps): [] for v in variants for leaps in (True, False)}
        for _ in range(arguments.rounds):
            for v in variants:
                for leaps in (True, False):
                    runs[v.name, leaps].append(in_a_process(v, count, leaps=leaps))
        for v in variants:
            found = {leaps: medians(runs[v.name, leaps]) for leaps in (True, False)}
            rows.append({**asdict(v), "requests": count, "leaping": found[True], "stepping": found[False]})
            _show(v, count, found)
    start_up = statistics.median(start_up_s() for _ in range(3))
    print(f"start-up: `servetwin run` on two requests takes {start_up:.2f} s")
    buffered = {v.name: buffered_bytes(v) for v in VARIANTS if v.name in ("W4", "W16")}
    told = ", ".join(f"{name} {size:,.0f}" for name, size in buffered.items())
    print(f"buffered log, bytes for each finished request: {told} (wanted: at most 600)")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rounds": arguments.rounds,
        "start_up_s": start_up,
        "buffered_bytes_per_request": buffered,
        "rows": rows,
    }


def _show(variant: Variant, count: int, found: dict[bool, dict[str, float]]) -> None:
    leaping, stepping = found[True], found[False]
    wanted = [f"{TARGETS[n]:,}" for n in (variant.name, f"{variant.name} stepped") if n in TARGETS]
    print(
        f"{variant.name:<12} {count:>9,}  leaping {leaping['requests_per_s']:>8,.0f}/s "
        f"({leaping['requests_per_cpu_s']:,.0f} per cpu s), {leaping['steps_per_s']:>9,.0f} steps/s, "
        f"stepping {stepping['requests_per_s']:>8,.0f}/s, ratio "
        f"{leaping['requests_per_s'] / stepping['requests_per_s']:.1f}"
        + (f"  (wanted {' and '.join(wanted)})" if wanted else "")
        + f"\n{'':<12} {leaping['steps_per_request']:.1f} steps/request, {leaping['leapt_fraction']:.0%} leapt, "
        f"{leaping['bytes_per_request']:,.0f} B/request, peak {leaping['peak_mib']:.0f} MiB"
    )


if __name__ == "__main__":
    main()
