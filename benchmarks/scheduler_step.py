"""What one scheduled row costs: schedule + update of the engine core, in µs per request-row beside a yardstick.

    python benchmarks/scheduler_step.py [--rounds 5] [--json FILE]

Workload: 2,000 requests with prompts of 900-1,100 and outputs of 150-250 tokens, all there at the start; 256 seats,
8,192 tokens a step, 40,000 blocks of 16. A request-row is one request scheduled in one step. Only `begin` and
`complete` are timed: prompts, sampled tokens and the requests themselves are made outside. The yardstick is what a
million sets and a million gets of a dict take (ns each) in the same process, so that figures of different machines
and of a busy one can be compared: a row is also given in units of one set + one get.

The variants run interleaved; medians over the rounds; processor time, so that other processes count less.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import process_time_ns

from servetwin.sim.block_hash import TokenPrompt
from servetwin.sim.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from servetwin.sim.contract import ModelRunnerOutput, SamplingParams, SchedulerOutput
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.records import Frame
from servetwin.sim.request import Request
from servetwin.sim.steptime.plan_rows import PlanReader

NUM_REQUESTS = 2_000
BLOCK_SIZE = 16
MAX_MODEL_LEN = 2_048
OPERATIONS = 1_000_000
VOCABULARY = 32_000


@dataclass(frozen=True)
class Variant:
    name: str
    caching: bool
    asynchronous: bool
    target_us: float | None
    """Part of the product's promise; None: for information."""


VARIANTS = (
    Variant("prefix caching off", caching=False, asynchronous=False, target_us=3.0),
    Variant("prefix caching on", caching=True, asynchronous=False, target_us=3.5),
    Variant("caching on, asynchronous", caching=True, asynchronous=True, target_us=None),
)


def engine(variant: Variant) -> EngineCore:
    return EngineCore(
        EngineConfig(
            model=ModelConfig(max_model_len=MAX_MODEL_LEN),
            cache=CacheConfig(
                block_size=BLOCK_SIZE, num_gpu_blocks=40_000, enable_prefix_caching=variant.caching
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=256, max_num_batched_tokens=8_192, async_scheduling=variant.asynchronous
            ),
        )
    )


def requests(seed: int) -> list[Request]:
    draw = random.Random(seed)
    return [
        Request(
            f"request-{i}",
            TokenPrompt(tuple(draw.choices(range(VOCABULARY), k=draw.randint(900, 1_100)))),
            SamplingParams(max_tokens=draw.randint(150, 250), ignore_eos=True),
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
        )
        for i in range(NUM_REQUESTS)
    ]


class Worker:
    """Gives every row that has computed its known tokens one token."""

    def __init__(self) -> None:
        self._reader = PlanReader()

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        rows = self._reader.rows(plan)
        ids = [row.request_id for row in rows]
        sampled = [[row.num_output_tokens] if row.samples else [] for row in rows]
        return ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, sampled)


def measure(variant: Variant, seed: int) -> float:
    """ns per request-row of one whole run."""
    core, worker = engine(variant), Worker()
    for request in requests(seed):
        core.add_request(request, 0)
    queue: list[tuple[Frame, ModelRunnerOutput]] = []
    rows = spent = 0
    gc.collect()
    gc.freeze()
    while True:
        start = process_time_ns()
        frame = core.begin(0)
        spent += process_time_ns() - start
        if frame is not None:
            rows += len(frame.plan.num_scheduled_tokens)
            queue.append((frame, worker.run(frame.plan)))
            if frame.plan.num_scheduled_tokens and core.has_room:
                continue
        if not queue:
            gc.unfreeze()
            return spent / rows
        done, output = queue.pop(0)
        start = process_time_ns()
        core.complete(done, output)
        spent += process_time_ns() - start


def yardstick() -> tuple[float, float]:
    """(ns of one dict set, ns of one dict get)."""
    keys = [f"key-{i}" for i in range(1_000)] * (OPERATIONS // 1_000)
    table: dict[str, int] = {}

    def sets() -> None:
        for key in keys:
            table[key] = 1

    def gets() -> None:
        for key in keys:
            table[key]

    return _time_ns(sets) / OPERATIONS, _time_ns(gets) / OPERATIONS


def _time_ns(work: Callable[[], None]) -> int:
    start = process_time_ns()
    work()
    return process_time_ns() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved repetitions (default 5)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    rows: dict[str, list[float]] = {v.name: [] for v in VARIANTS}
    sets, gets = [], []
    for seed in range(args.rounds):
        for variant in VARIANTS:
            rows[variant.name].append(measure(variant, seed))
        set_ns, get_ns = yardstick()
        sets.append(set_ns)
        gets.append(get_ns)
    set_ns, get_ns = statistics.median(sets), statistics.median(gets)
    print(f"yardstick: dict set {set_ns:.1f} ns, get {get_ns:.1f} ns (Python {platform.python_version()})")
    figures = {}
    for variant in VARIANTS:
        row_us = statistics.median(rows[variant.name]) / 1_000
        units = row_us * 1_000 / (set_ns + get_ns)
        target = "" if variant.target_us is None else f"  (target {variant.target_us} µs)"
        print(f"{variant.name:26} {row_us:6.2f} µs per request-row = {units:5.1f} x (set + get){target}")
        figures[variant.name] = {"us_per_row": row_us, "yardsticks": units, "target_us": variant.target_us}
    if args.json:
        header = {"python": sys.version.split()[0], "machine": platform.machine(), "rounds": args.rounds}
        args.json.write_text(
            json.dumps(header | {"dict_set_ns": set_ns, "dict_get_ns": get_ns, "rows": figures}, indent=1)
        )


if __name__ == "__main__":
    main()
