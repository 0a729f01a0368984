"""Measures single steps, and a grid of them (`servetwin profile` has a design of its own, `profile_design.py`).

A profile is a list of rows, one per measured step, as JSON objects:

    kind            "prefill" (chunks only), "decode" (one token a request) or "mixed" (a chunk beside decode rows)
    num_tokens      tokens computed in the step, the sum of query_lens
    num_reqs        requests in the step
    query_lens      per request: tokens computed in this step
    context_lens    per request: tokens in the cache before it
    graph_tokens    padded size where a captured graph ran, null where the step ran eagerly
    device_us       forward and sampling on the device, the median of the repetitions (wall time on a CPU) ...
    device_us_p10   ... and its 10th ...
    device_us_p90   ... and 90th percentile
    forward_us      the forward pass alone, the median; the rest of device_us is sampling
    prepare_us      host time to update the states and pack the batch, the median

Every request samples in every step, as decode rows and last chunks of a prompt do. Times are in microseconds.

A context of any length is put into place without computing it: a plan that computes it is prepared, so that the states
and the ledger know it, but never run. Attention then reads whatever the cache holds, which takes as long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from servetwin.executor.block_table import cdiv
from servetwin.executor.model_runner import ModelRunner
from servetwin.executor.stopwatch import stopwatch_for
from servetwin.sim.contract import CachedRequestData, NewRequestData, SamplingParams, SchedulerOutput

CHUNKS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)
PREFILL_CONTEXTS = (0, 1024, 4096, 16_384)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODE_CONTEXTS = (16, 128, 1024, 4096, 8192, 32_768)
SKEW = 8
"""In a skewed batch one request has so many times the mean context, the others share the rest."""
MIXED_CHUNKS = (128, 512, 2048)
MIXED_BATCHES = (8, 64)
MIXED_CONTEXT = 1024
WARM_UPS = 2
_Timed = tuple[tuple[int, int, int], int | None]


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One step; the fields are those of a row."""

    kind: Literal["prefill", "decode", "mixed"]
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Per request: tokens in the cache after the step."""
        return tuple(q + c for q, c in zip(self.query_lens, self.context_lens, strict=True))


@dataclass(frozen=True, slots=True)
class GridLimits:
    """What an engine can run in one step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    """The null block, which no request gets, included."""
    block_size: int

    @classmethod
    def of(cls, runner: ModelRunner, max_num_batched_tokens: int) -> GridLimits:
        """Those of a runner."""
        states, cache = runner.states, runner.kv_caches[0].key
        num_blocks, block_size = cache.shape[:2]
        return cls(states.max_num_seqs, max_num_batched_tokens, states.max_model_len, num_blocks, block_size)

    def allow(self, point: GridPoint) -> bool:
        """Whether the step fits into the seats, the token budget, the context window and the pool."""
        blocks = sum(cdiv(length, self.block_size) for length in point.seq_lens)
        return (
            len(point.query_lens) <= self.max_num_seqs
            and sum(point.query_lens) <= self.max_num_batched_tokens
            and max(point.seq_lens) <= self.max_model_len
            and blocks < self.num_blocks
        )


def profile_grid(limits: GridLimits) -> list[GridPoint]:
    """All points of the grid that the engine can run: prompt chunks, then decode batches, then mixed steps."""
    return [point for point in _all_points() if limits.allow(point)]


def _all_points() -> Iterator[GridPoint]:
    for chunk in CHUNKS:
        for context in PREFILL_CONTEXTS:
            yield GridPoint("prefill", (chunk,), (context,))
    for batch in BATCHES:
        for context in DECODE_CONTEXTS:
            yield GridPoint("decode", (1,) * batch, (context,) * batch)
            if batch > SKEW and context > SKEW:
                yield GridPoint("decode", (1,) * batch, _skewed(batch, context))
    for chunk in MIXED_CHUNKS:
        for batch in MIXED_BATCHES:
            yield GridPoint("mixed", (1,) * batch + (chunk,), (MIXED_CONTEXT,) * batch + (0,))


def _skewed(batch: int, mean: int) -> tuple[int, ...]:
    """Contexts of the same sum as `batch` times `mean`, up to rounding, of which one is SKEW times the mean."""
    return (SKEW * mean,) + ((batch - SKEW) * mean // (batch - 1),) * (batch - 1)


def measure_point(
    runner: ModelRunner, point: GridPoint, repetitions: int, budget_s: float = math.inf
) -> dict[str, Any]:
    """Runs the step `repetitions` times after a warm-up; gives its row. The runner must hold no request.

    `budget_s`: a step that takes long is repeated less often, but once. Raises PlanError for a point that the runner
    cannot run (see `GridLimits.allow`).
    """
    block_size = runner.states.block_table.block_size
    req_ids = [f"profiled {i}" for i in range(len(point.query_lens))]
    runner.prepare(_admission(req_ids, point, block_size))
    step = _step(req_ids, point)
    try:
        timed = _repeated(runner, step, repetitions, budget_s)
    finally:
        runner.prepare(_farewell(req_ids))
    prepare, forward, device = np.array([times_ns for times_ns, _ in timed]).T / 1e3
    p10, median, p90 = (round(float(us), 3) for us in np.percentile(device, (10, 50, 90)))
    return {
        "kind": point.kind,
        "num_tokens": sum(point.query_lens),
        "num_reqs": len(req_ids),
        "query_lens": list(point.query_lens),
        "context_lens": list(point.context_lens),
        "graph_tokens": timed[0][1],
        "device_us": median,
        "device_us_p10": p10,
        "device_us_p90": p90,
        "forward_us": round(float(np.median(forward)), 3),
        "prepare_us": round(float(np.median(prepare)), 3),
    }


def _repeated(runner: ModelRunner, plan: SchedulerOutput, repetitions: int, budget_s: float) -> list[_Timed]:
    timed: list[_Timed] = []
    deadline = time.perf_counter() + budget_s
    while len(timed) < WARM_UPS + repetitions and (len(timed) < 2 or time.perf_counter() < deadline):
        timed.append(_timed(runner, plan))
    return timed[min(WARM_UPS, len(timed) - 1) :]


def _timed(runner: ModelRunner, plan: SchedulerOutput) -> _Timed:
    """((prepare, forward, forward and sampling) in ns, graph_tokens) of one repetition; its tokens are thrown away."""
    clock = stopwatch_for(runner.loaded.device, num_marks=3)
    start_ns = time.perf_counter_ns()
    batch = runner.prepare(plan)
    prepare_ns = time.perf_counter_ns() - start_ns
    if batch is None:
        raise ValueError("a point of the grid must schedule tokens")
    clock.mark(0)
    logits = runner.forward(batch)
    clock.mark(1)
    sampled = runner.sample(batch, logits)
    clock.mark(2)
    # Waits for the device, as a step does.
    sampled.token_ids.cpu()
    return (prepare_ns, clock.between_ns(0, 1), clock.between_ns(0, 2)), runner.graph_tokens(batch)


def _admission(req_ids: list[str], point: GridPoint, block_size: int) -> SchedulerOutput:
    """Everything of every request in one plan, with blocks from 1 on."""
    new, next_block = [], 1
    for req_id, length in zip(req_ids, point.seq_lens, strict=True):
        end = next_block + cdiv(length, block_size)
        new.append(
            NewRequestData(
                req_id=req_id,
                prompt_token_ids=[0] * length,
                sampling_params=SamplingParams(temperature=0),
                block_ids=(list(range(next_block, end)),),
                num_computed_tokens=0,
                num_prompt_tokens=length,
            )
        )
        next_block = end
    return _plan(new, CachedRequestData(), dict(zip(req_ids, point.seq_lens, strict=True)))


def _step(req_ids: list[str], point: GridPoint) -> SchedulerOutput:
    """The step itself. It can be run again and again, since no token is ever appended."""
    cached = CachedRequestData(
        req_ids=req_ids,
        new_block_ids=[None] * len(req_ids),
        num_computed_tokens=list(point.context_lens),
        num_output_tokens=[0] * len(req_ids),
    )
    return _plan([], cached, dict(zip(req_ids, point.query_lens, strict=True)))


def _farewell(req_ids: list[str]) -> SchedulerOutput:
    return _plan([], CachedRequestData(), {}, finished=set(req_ids))


def _plan(
    new: list[NewRequestData],
    cached: CachedRequestData,
    counts: dict[str, int],
    finished: set[str] | None = None,
) -> SchedulerOutput:
    return SchedulerOutput(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens={},
        num_common_prefix_blocks=[0],
        finished_req_ids=finished or set(),
    )
