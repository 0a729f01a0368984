"""What preparing a batch costs: applying a plan and packing its tokens, before the model can start.

    python benchmarks/batch_preparation.py [--rounds 300] [--json FILE]

Every request decodes one token a step, as in the steady state of a busy engine; the lengths differ, so that a
sixteenth of the rows gets a new block in each step. Only `ModelRunner.prepare` is timed (wall clock): plans are
written, and tokens taken in, outside. The variants run interleaved; medians over the rounds, so that a busy moment
of the machine counts little. Preparing must not take longer with longer contexts: the ratio of two contexts says so.

Then 16 requests decode on examples/llama-10m with random weights, on whatever device there is, and the share of
preparation in a whole step is given.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from servetwin.executor.model_loader import describe_model
from servetwin.executor.model_runner import ModelRunner
from servetwin.executor.step_timer import TorchStepTimer, build_torch_executor
from servetwin.executor.testing import PlanWriter, tiny_model
from servetwin.sim.config import ExecutorOptions

BLOCK_SIZE = 16
BATCHES = (16, 256)
CONTEXTS = (64, 4_096)
TARGETS_US = {256: 150.0}
"""Part of the product's promise, by number of rows; for the others: for information."""
TARGET_RATIO = 1.15
"""Longest context against shortest; what is above 1 is noise and cache misses."""
VOCABULARY = 150
STEP_MODEL = Path(__file__).resolve().parent.parent / "examples" / "llama-10m"
STEP_BATCH, STEP_CONTEXT = 16, 64


@dataclass
class Variant:
    """A batch that decodes for ever."""

    batch: int
    context: int
    rounds: int
    times_us: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        longest = self.context + BLOCK_SIZE + self.rounds
        num_blocks = self.batch * (longest // BLOCK_SIZE + 1) + 1
        self.runner = ModelRunner(
            describe_model(tiny_model("llama", max_position_embeddings=longest), "tiny"),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=self.batch,
            max_model_len=longest,
        )
        self.plans = PlanWriter(BLOCK_SIZE, num_blocks)
        self.rows = np.arange(self.batch)
        self.counts = add_requests(self.plans, self.batch, self.context)
        self.runner.prepare(self.plans.plan(self.counts))
        self.counts = dict.fromkeys(self.counts, 1)

    def step(self) -> None:
        """One more token for everybody; nothing is computed."""
        tokens = np.full(self.batch, len(self.times_us) % VOCABULARY)
        self.runner.states.append_tokens(self.rows, np.zeros_like(self.rows), tokens)
        for request in self.plans.requests.values():
            request.token_ids.append(int(tokens[0]))
        plan = self.plans.plan(self.counts)
        start_ns = perf_counter_ns()
        self.runner.prepare(plan)
        self.times_us.append((perf_counter_ns() - start_ns) / 1_000)

    @property
    def median_us(self) -> float:
        return statistics.median(self.times_us)


def add_requests(plans: PlanWriter, batch: int, context: int) -> dict[str, int]:
    """So many requests, each a token longer than the one before it within a block; returns their lengths."""
    lengths = {f"request-{i}": context + i % BLOCK_SIZE for i in range(batch)}
    for i, (req_id, length) in enumerate(lengths.items()):
        plans.add(req_id, [(7 * i + place) % VOCABULARY for place in range(length)])
    return lengths


def measure_steps(rounds: int) -> tuple[float, float]:
    """Medians of (preparation in µs, its share of the step) on the example model."""
    executor = build_torch_executor(
        ExecutorOptions(
            model=STEP_MODEL,
            load_format="dummy",
            block_size=BLOCK_SIZE,
            num_gpu_blocks=STEP_BATCH * ((STEP_CONTEXT + rounds) // BLOCK_SIZE + 3),
            max_model_len=STEP_CONTEXT + rounds + 2 * BLOCK_SIZE,
            max_num_seqs=STEP_BATCH,
        )
    )
    plans = PlanWriter(BLOCK_SIZE, executor.num_gpu_blocks)
    lengths = add_requests(plans, STEP_BATCH, STEP_CONTEXT)
    run_step(executor, plans, lengths)
    steps = [run_step(executor, plans, dict.fromkeys(lengths, 1)) for _ in range(rounds)]
    executor.close()
    prepare_us = statistics.median(prepare_ns / 1_000 for prepare_ns, _ in steps)
    return prepare_us, statistics.median(prepare_ns / step_ns for prepare_ns, step_ns in steps)


def run_step(executor: TorchStepTimer, plans: PlanWriter, counts: dict[str, int]) -> tuple[int, int]:
    """(ns of preparation, ns of the step)."""
    result = executor.run(plans.plan(counts))
    plans.take(result.output)
    return result.prepare_ns, result.prepare_ns + result.device_ns


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=300, help="steps of each variant (default 300)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    variants = [Variant(batch, context, args.rounds) for batch in BATCHES for context in CONTEXTS]
    for _ in range(args.rounds):
        for variant in variants:
            variant.step()
    figures: dict[str, float] = {}
    for variant in variants:
        wanted = TARGETS_US.get(variant.batch)
        target = "" if wanted is None else f"  (target {wanted:g} µs)"
        print(f"{variant.batch:4} rows, context {variant.context:5}: {variant.median_us:6.1f} µs{target}")
        figures[f"prepare_us[{variant.batch}, {variant.context}]"] = variant.median_us
    for batch in BATCHES:
        short, long = (v.median_us for v in variants if v.batch == batch)
        print(
            f"{batch:4} rows, context {CONTEXTS[1]} against {CONTEXTS[0]}: {long / short:.2f} x "
            f"(target {TARGET_RATIO:g} at most)"
        )
        figures[f"ratio[{batch}]"] = long / short
    prepare_us, share = measure_steps(args.rounds)
    print(f"{STEP_BATCH:4} rows on {STEP_MODEL.name}: {prepare_us:.1f} µs, {share:.1%} of the step")
    figures |= {"step_prepare_us": prepare_us, "step_share": share}
    if args.json:
        header = {"python": sys.version.split()[0], "machine": platform.machine(), "rounds": args.rounds}
        args.json.write_text(json.dumps(header | figures, indent=1))


if __name__ == "__main__":
    main()
