"""The live part of a profile: three made-up loads, each from nearly idle to saturated, as run folders."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from servetwin.sim.commands.engine import engine_options
from servetwin.sim.commands.flags import EngineFlags, LoadFlags, RunFlags, SamplingFlags
from servetwin.sim.commands.loading import Load
from servetwin.sim.commands.profile import ProfileFlags
from servetwin.sim.commands.running import RunRequest
from servetwin.sim.commands.running import carry_out as run
from servetwin.sim.commands.show import say
from servetwin.sim.commands.trace_flags import TraceFlags
from servetwin.sim.config import ModelConfig
from servetwin.sim.steptime.measured_steps import MeasuredSteps
from servetwin.sim.steptime.profile_folder import ProfileWriter, read_profile_folder
from servetwin.sim.steptime.step_regression import StepRegression
from servetwin.sim.validation.capacity import capacity_per_s

LIVE = "live"
FIRST, LAST = 0.15, 1.0
"""Of the engine's capacity: rates that a load begins and ends with."""
RANGE = 0.8
"""Lengths from 0.2 to 1.8 times the mean."""
SHORTEST_PROMPT, SHORTEST_ANSWER = 6, 2
"""Means of which the shortest draw is still a token."""
PROBE = 100
"""Requests by which the capacity is foretold."""


@dataclass(frozen=True)
class LoadShape:
    """One load; lengths as means in tokens."""

    name: str
    input_tokens: int
    output_tokens: int


def load_shapes(longest: int) -> tuple[LoadShape, ...]:
    """For an engine that takes requests of `longest` tokens: a balanced load, one of prompts, one of answers."""
    unit = int(np.clip(longest // 32, 1, 128))
    wanted = {
        "balanced": (2 * unit, unit),
        "prompts": (4 * unit, unit // 8),
        "answers": (unit // 2, 2 * unit),
    }
    return tuple(
        LoadShape(name, max(prompt, SHORTEST_PROMPT), max(answer, SHORTEST_ANSWER))
        for name, (prompt, answer) in wanted.items()
    )


def run_live_loads(writer: ProfileWriter, engine: EngineFlags, flags: ProfileFlags) -> None:
    """Those that are not there yet."""
    profile = read_profile_folder(writer.path)
    model = StepRegression.fit([MeasuredSteps.of_points(profile.rows)], corrected=False)
    limits = profile.header["engine"]
    engine = replace(engine, num_gpu_blocks_override=limits["num_gpu_blocks"], kv_cache_memory_bytes=None)
    engine = replace(engine, gpu_memory_utilization=None)
    longest = min(limits["max_model_len"], (limits["num_gpu_blocks"] - 1) * limits["block_size"])
    for shape in load_shapes(longest):
        name = f"{LIVE}/{shape.name}"
        if name in writer.live:
            continue
        capacity = _capacity(shape, engine, limits, model, flags.seed)
        say(
            f"live run {name}: mean prompt {shape.input_tokens}, mean answer {shape.output_tokens} tokens, from "
            f"{FIRST * capacity:.2g} to {LAST * capacity:.2g} requests/s, about {flags.live_seconds:g} s"
        )
        _run(writer.path / name, shape, capacity, engine, flags)
        writer.add_live(name)


def _capacity(
    shape: LoadShape, engine: EngineFlags, limits: dict[str, int], model: StepRegression, seed: int
) -> float:
    """Requests/s that the engine ends when it is never idle, by the points measured so far."""
    config = engine_options(engine, seed).engine_config(
        ModelConfig(max_model_len=limits["max_model_len"]), limits["num_gpu_blocks"], None, asynchronous=True
    )
    load = replace(_load(shape), num_prompts=max(PROBE, 3 * limits["max_num_seqs"]), request_rate=math.inf)
    workload = Load(None, load, TraceFlags()).open(seed)
    return capacity_per_s(list(workload.requests), config, model)


def _load(shape: LoadShape) -> LoadFlags:
    """Its lengths; how many and when is left open."""
    return LoadFlags(
        dataset_name="random",
        random_input_len=shape.input_tokens,
        random_output_len=shape.output_tokens,
        random_range_ratio=RANGE,
    )


def _run(out: Path, shape: LoadShape, capacity: float, engine: EngineFlags, flags: ProfileFlags) -> None:
    load = replace(
        _load(shape),
        num_prompts=max(round((FIRST + LAST) / 2 * capacity * flags.live_seconds), 3),
        ramp_up_strategy="linear",
        ramp_up_start_rps=FIRST * capacity,
        ramp_up_end_rps=LAST * capacity,
    )
    run(
        RunRequest(
            Load(None, load, TraceFlags()),
            RunFlags(executor="torch", live=True, out=out, overwrite=True, log_blocks=False, seed=flags.seed),
            engine,
            SamplingFlags(),
            quiet=True,
        )
    )
