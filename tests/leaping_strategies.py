"""Random engines and workloads for runs with and without leaps: small pools, and instants that meet on purpose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from servetwin.sim.config import CacheConfig, EngineConfig, ModelConfig, RunConfig, SchedulerConfig
from servetwin.sim.events import EventLog, MemorySink
from servetwin.sim.host_model import LinearHostModel
from servetwin.sim.progress_guard import StalledError
from servetwin.sim.rules import Rules
from servetwin.sim.simulation import simulate
from servetwin.sim.steptime.features import Bools, Ints, StepFeatures, StepModel
from servetwin.sim.steptime.modelled import ConstantStepModel, LinearStepModel, ModelledStepTimer
from servetwin.sim.token_source import TokenSource
from servetwin.workloads import ListWorkload, RequestSpec

Draw = st.DrawFn
ONE_IN_THREE = st.sampled_from([False, False, True])
MS = 1_000_000


@dataclass(frozen=True)
class UnevenModel:
    """A StepModel with no even growth, which says more of a step than its duration."""

    even: LinearStepModel
    trusted_tokens: int

    def durations_ns(self, features: StepFeatures) -> Ints:
        return self.even.durations_ns(features) + features.decode_context_max_tokens % 5

    def outside(self, features: StepFeatures) -> Bools:
        return features.decode_context_tokens > self.trusted_tokens

    def prepare_ns(self, features: StepFeatures) -> Ints:
        return 3 + features.rows // 2

    def graph_tokens(self, features: StepFeatures) -> Ints:
        return np.where(features.prefill_tokens > 0, 0, -(-features.new_tokens // 4) * 4)


@dataclass(frozen=True)
class Case:
    """One simulation."""

    engine: EngineConfig
    requests: list[RequestSpec]
    model: StepModel
    host: LinearHostModel | None
    log_blocks: bool
    cache_resets_ns: list[int]
    max_concurrency: int | None
    turnaround_ns: int
    rows_per_part: int

    def run(self, **how: bool) -> tuple[MemorySink, str | None]:
        """The log, and what the run ended with if it did not end well; `how` as for `simulate`."""
        tokens, sink = TokenSource(50), MemorySink()
        log = EventLog(sink, log_blocks=self.log_blocks)
        log.flush_at_rows(self.rows_per_part)
        timer = ModelledStepTimer(self.model, tokens, "model")
        timer.overlaps_preparation = self.turnaround_ns == 0
        timer.turnaround_ns = self.turnaround_ns
        try:
            simulate(
                RunConfig(engine=self.engine, executor="model"),
                ListWorkload(self.requests),
                timer,
                log,
                tokens=tokens,
                plan_tokens=False,
                log_blocks=self.log_blocks,
                host=self.host,
                cache_resets_ns=self.cache_resets_ns,
                max_concurrency=self.max_concurrency,
                **how,
            )
        except StalledError as e:
            return sink, str(e)
        return sink, None


@st.composite
def cases(draw: Draw) -> Case:
    """Up to 25 requests on an engine of up to 8 seats.

    In a third of them arrivals, aborts and step times are whole milliseconds, so that they meet.
    """
    tick = draw(st.sampled_from([1, 1000, MS]))
    engine = draw(_engines())
    requests = draw(st.lists(_requests(engine, tick), min_size=1, max_size=25))
    arrival, specs = 0, []
    for i, (gap, abort_after, fields) in enumerate(requests):
        arrival += gap
        abort = None if abort_after is None else (arrival + abort_after) / 1e9
        specs.append(RequestSpec(request_id=f"r{i}", arrival_s=arrival / 1e9, abort_s=abort, **fields))
    return Case(
        engine,
        specs,
        draw(_models(tick)),
        draw(st.none() | st.none() | _hosts(tick)),
        draw(st.booleans()),
        draw(st.lists(st.integers(0, 60).map(lambda n: n * tick), max_size=2)),
        draw(st.none() | st.none() | st.integers(1, 4)),
        draw(st.sampled_from([0, 0, 0, tick])),
        draw(st.sampled_from([5, 40, 1000])),
    )


def plain_cases(*, async_scheduling: bool) -> st.SearchStrategy[Case]:
    """Those that go a short way (`sim/plain_way.py`): of requests that end by length, with a host that is free."""
    return cases().map(lambda case: _plain(case, async_scheduling))


def _plain(case: Case, async_scheduling: bool) -> Case:
    engine = case.engine
    engine = engine.model_copy(
        update={
            "model": engine.model.model_copy(update={"eos_token_id": None}),
            "scheduler": engine.scheduler.model_copy(update={"async_scheduling": async_scheduling}),
        }
    )
    nobody_asks: dict[str, Any] = {
        "stop_token_ids": (),
        "prompt_token_ids": None,
        "session_id": None,
        "context_tokens": None,
    }
    requests = [replace(request, **nobody_asks) for request in case.requests]
    model = case.model.even if isinstance(case.model, UnevenModel) else case.model
    changes: dict[str, Any] = {"host": None, "log_blocks": False, "turnaround_ns": 0}
    return replace(case, engine=engine, requests=requests, model=model, **changes)


@st.composite
def _engines(draw: Draw) -> EngineConfig:
    block_size, length = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([24, 64]))
    budget = draw(st.sampled_from([8, 16, 64]))
    whole = -(-length // block_size)
    return EngineConfig(
        model=ModelConfig(max_model_len=length, eos_token_id=draw(st.sampled_from([None, 3]))),
        cache=CacheConfig(
            block_size=block_size,
            num_gpu_blocks=whole + 1 + draw(st.sampled_from([0, 1, 3, whole, 20 * whole])),
            enable_prefix_caching=draw(st.booleans()),
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=draw(st.integers(1, 8)),
            max_num_batched_tokens=budget,
            enable_chunked_prefill=budget < length or draw(st.booleans()),
            long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3])),
            policy=draw(st.sampled_from(["fcfs", "fcfs", "priority", "sjf", "fair"])),
            scheduler_reserve_full_isl=draw(st.booleans()),
            async_scheduling=draw(st.booleans()),
            use_v2_model_runner=draw(st.booleans()),
        ),
        rules=draw(st.sampled_from([Rules.exact(), Rules.exact(), Rules.safe()])),
    )


@st.composite
def _requests(draw: Draw, engine: EngineConfig, tick: int) -> tuple[int, int | None, dict[str, Any]]:
    """Ticks since the one before, ticks until it is given up, and the rest of it."""
    length = engine.model.max_model_len
    prompt = draw(st.integers(1, length - 1))
    fields: dict[str, Any] = {
        "prompt_tokens": prompt,
        "output_tokens": draw(st.integers(1, 40)),
        "priority": draw(st.integers(0, 2)),
        "client_id": draw(st.sampled_from([None, "x", "y"])),
        "ignore_eos": draw(st.sampled_from([True, True, True, False])),
        "stop_token_ids": draw(st.sampled_from([(), (), (), (5, 7)])),
        "cache_salt": draw(st.sampled_from([None, None, "salt"])),
    }
    if draw(ONE_IN_THREE):
        fields["min_tokens"] = min(draw(st.integers(0, 3)), fields["output_tokens"], length - prompt)
    kind = draw(st.sampled_from(["alone", "shared", "same", "turns"]))
    if kind == "shared":
        size = draw(st.sampled_from([2, 8]))
        stream = draw(st.integers(0, 1))
        count = draw(st.integers(0, (prompt - 1) // size))
        fields |= {"prefix_ids": tuple(100 * stream + i for i in range(count)), "prefix_block_tokens": size}
    elif kind == "same":
        fields["prompt_token_ids"] = tuple(i % 7 for i in range(prompt))
    elif kind == "turns":
        fields |= {"session_id": draw(st.sampled_from("st")), "context_tokens": draw(st.integers(0, prompt))}
    gap = draw(st.sampled_from([0, 1, 2, 10, 60]))
    abort_after = draw(st.integers(0, 80)) if draw(st.integers(0, 7)) == 0 else None
    return gap * tick, None if abort_after is None else abort_after * tick, fields


@st.composite
def _models(draw: Draw, tick: int) -> StepModel:
    if draw(st.booleans()):
        return ConstantStepModel(draw(st.sampled_from([1, 2])) * tick)
    parts = st.sampled_from([0, 1, 7])
    even = LinearStepModel(draw(st.sampled_from([1, 3])) * tick, draw(parts), draw(parts), draw(parts))
    return even if draw(st.booleans()) else UnevenModel(even, draw(st.sampled_from([10, 100])))


def _hosts(tick: int) -> st.SearchStrategy[LinearHostModel]:
    parts = st.sampled_from([0, 1, tick])
    return st.builds(
        LinearHostModel,
        schedule_base_ns=parts,
        schedule_per_row_ns=st.integers(0, 2),
        schedule_per_new_ns=st.integers(0, 2),
        update_base_ns=parts,
        update_per_row_ns=st.integers(0, 2),
    )
