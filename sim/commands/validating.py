"""What `servetwin validate` does: read the run, simulate it, compare, judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.show import print_json, results_console, say
from servetwin.sim.commands.validate import LIVE_FLAGS, ValidateFlags
from servetwin.sim.commands.validated_times import ValidatedTimes, validated_times
from servetwin.sim.config import ASSUMED_NUM_GPU_BLOCKS, EngineConfig, explain
from servetwin.sim.engine_options import EngineOptions
from servetwin.sim.model_folder import read_model_config
from servetwin.sim.rules import Rules
from servetwin.sim.steptime.features import StepModel
from servetwin.sim.steptime.profiles import load_profile
from servetwin.sim.validation.again import Again, measured_again
from servetwin.sim.validation.calibration import calibrate, first_half, second_half
from servetwin.sim.validation.comparison import (
    Band,
    CurveComparison,
    Load,
    MetricComparison,
    compare_curves,
    compare_gaps,
    compare_metrics,
    load_of,
    makespan_s,
    residual_bands,
    throughput_tokens_per_s,
)
from servetwin.sim.validation.measured import MeasuredRun, MeasuredRunError, gaps_of, metrics_of
from servetwin.sim.validation.plan_agreement import PlanAgreement, plan_agreement
from servetwin.sim.validation.read_measured import read_measured
from servetwin.sim.validation.replay import NoisyModel, SimulatedRun, requests_of, simulated
from servetwin.sim.validation.step_errors import StepErrors, measured_steps, step_errors
from servetwin.workloads import ReadOptions, RequestSpec, read_trace

THRESHOLD_MISSED = 4
ASSUMED_NOISE = 0.03
"""Standard deviation of a step's time from one time to the next, relative, where the run does not say it."""
ENGINE = ("block_size", "enable_prefix_caching", "max_num_seqs", "max_num_batched_tokens", "async_scheduling")
"""Settings of the engine that have a flag ..."""
OF_THE_RUN = (
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "max_num_scheduled_tokens",
    "scheduler_reserve_full_isl",
    "scheduling_policy",
)
"""... and those that are as the measured run says."""


Replay = Callable[[StepModel], SimulatedRun]
"""The measured run simulated again, with these step times."""
GRAPHS = ("enforce_eager", "cudagraph_capture_sizes", "max_cudagraph_capture_size")


@dataclass(frozen=True)
class Validation:
    """Everything that is told."""

    run: MeasuredRun
    engine: EngineConfig
    assumed: tuple[str, ...]
    metrics: dict[str, MetricComparison]
    """Of all requests, and the pooled ITL where both sides know it."""
    judged: dict[str, MetricComparison]
    """Of those that the thresholds are for: all, or the half that was not fitted to."""
    factor: float | None
    """Where one was calibrated ..."""
    factor_of: str
    """... of what."""
    noise: float
    """Standard deviation of a step's time, relative: that of like steps of the run, or ASSUMED_NOISE."""
    noise_percent: dict[str, float]
    """Standard deviation of the simulated means by chance alone."""
    curve_shift_s: float
    curves: dict[str, CurveComparison]
    bands: list[Band]
    step_errors: dict[str, StepErrors]
    """Of measured steps, by regime; nothing where the run does not say them."""
    plans: PlanAgreement | None
    again: Again | None
    load: Load
    simulated: SimulatedRun
    outside_steps: int
    thresholds: dict[str, float]

    @property
    def missed(self) -> list[str]:
        """Metrics whose mean is further off than its threshold."""
        errors = {name: self.judged[name].error_percent() for name in self.thresholds}
        return [n for n, error in errors.items() if error is not None and abs(error) > self.thresholds[n]]


def carry_out(path: Path, flags: ValidateFlags) -> int:
    """Prints the comparison. 0, or 4 where a threshold is missed. Raises UsageError and other ValueErrors."""
    from servetwin.sim.commands.validate_report import report, to_json

    found = validation(path, flags)
    if flags.json:
        print_json(to_json(found))
    else:
        console = results_console()
        for part in report(found):
            console.print(part)
    return THRESHOLD_MISSED if found.missed else 0


def validation(path: Path, flags: ValidateFlags) -> Validation:
    """Raises UsageError, MeasuredRunError, and the errors of profiles and models (all ValueErrors)."""
    thresholds = thresholds_of(flags)
    _refuse_live_flags(flags)
    _check_target(flags)
    profile = load_profile(flags.profile)
    run = read_measured(path)
    second = None if flags.again is None else measured_again(run, read_measured(flags.again))
    engine, options, assumed = engine_of(run, flags)
    times = validated_times(profile, run, options, flags)
    requests = requests_of(run, _prompts(run, path, flags.workload))
    replay = partial(simulated, requests, engine, host=times.host)
    model, factor, part = times.model, None, slice(None)
    if flags.calibrate == "first-half":
        factor = _calibrated(run, replay, times, flags)
        model, part = times.scalable.scaled(factor), second_half(run)
    of_steps = _step_errors(run, model, second)
    noise = _step_noise(of_steps)
    say(f"simulating {len(requests):,} requests")
    twin = replay(model)
    shift_s, curves = compare_curves(run, twin)
    return Validation(
        run=run,
        engine=engine,
        assumed=(*assumed, *times.notes),
        metrics=compare_metrics(run.requests, twin.requests) | compare_gaps(run.gaps, gaps_of(twin.log)),
        judged=compare_metrics(run.requests, twin.requests, part),
        factor=factor,
        factor_of=times.factor_of,
        noise=noise,
        noise_percent=_noise(replay, partial(NoisyModel, model, noise), twin, part, flags.noise_runs),
        curve_shift_s=shift_s,
        curves=curves,
        bands=residual_bands(run.requests, twin),
        step_errors=of_steps,
        plans=None if run.log is None else plan_agreement(run.log, twin.log),
        again=second,
        load=load_of(twin),
        simulated=twin,
        outside_steps=int(twin.steps["predicted_outside"].sum()),
        thresholds=thresholds,
    )


def thresholds_of(flags: ValidateFlags) -> dict[str, float]:
    """Largest errors that pass, in percent. Raises UsageError."""
    thresholds = {"ttft": flags.max_ttft_error, "tpot": flags.max_tpot_error, "e2e": flags.max_e2e_error}
    for name, percent in thresholds.items():
        if not 0 < percent < np.inf:
            raise UsageError(f"--max-{name}-error {percent}: must be above 0, in percent")
    if flags.noise_runs < 0 or flags.noise_runs == 1:
        raise UsageError(
            f"--noise-runs {flags.noise_runs}: must be 0, or 2 and more to say how far runs lie apart"
        )
    return thresholds


def _step_errors(run: MeasuredRun, model: StepModel, again: Again | None) -> dict[str, StepErrors]:
    steps = measured_steps(run.log)
    if steps is None:
        return {}
    return step_errors(steps, model, None if again is None else measured_steps(again.run.log))


def _refuse_live_flags(flags: ValidateFlags) -> None:
    """What only --live heeds."""
    if flags.live:
        return
    default = {f.name: f.default for f in fields(ValidateFlags)}
    for name in (n for n in LIVE_FLAGS if getattr(flags, n) != default[n]):
        raise UsageError(f"--{name.replace('_', '-')} goes with --live only")


def _check_target(flags: ValidateFlags) -> None:
    if flags.save_profile is None:
        return
    if flags.calibrate == "none":
        raise UsageError(
            "--save-profile goes with --calibrate first-half, which gives the factor to be saved"
        )
    if flags.save_profile.exists() or not flags.save_profile.parent.is_dir():
        raise UsageError(f"--save-profile {flags.save_profile}: must be a new file in a folder that exists")


def _calibrated(run: MeasuredRun, replay: Replay, times: ValidatedTimes, flags: ValidateFlags) -> float:
    """The factor that the first half needs. Raises UsageError."""
    if len(run.requests) < 4:
        raise UsageError(f"--calibrate first-half: the run has {len(run.requests)} requests, 4 are needed")
    factor = calibrate(run, replay, times.scalable, on_try=lambda f: say(f"simulating with factor {f:.4f}"))
    if flags.save_profile is not None:
        times.save(factor, f"mean TPOT of the first {first_half(run).stop} requests of {run.path}", flags)
        say(f"wrote {flags.save_profile}")
    return factor


def engine_of(run: MeasuredRun, flags: ValidateFlags) -> tuple[EngineConfig, EngineOptions, tuple[str, ...]]:
    """The measured engine: flags, then what the run says, then vLLM's defaults; and what had to be assumed."""
    said, assumed = dict(run.engine), []
    settings = {name: said.get(name) for name in (*ENGINE, *OF_THE_RUN)}
    settings |= {name: getattr(flags, name) for name in ENGINE if getattr(flags, name) is not None}
    given = {name: value for name, value in settings.items() if value is not None}
    if settings["max_num_seqs"] is None or settings["max_num_batched_tokens"] is None:
        assumed.append("max_num_seqs 256 and max_num_batched_tokens 2,048 where the run does not say them")
    blocks = flags.num_gpu_blocks_override or said.get("num_gpu_blocks_override")
    if blocks is None:
        blocks = ASSUMED_NUM_GPU_BLOCKS
        assumed.append(
            f"num_gpu_blocks {blocks:,}: nobody says how many the engine had (--num-gpu-blocks-override)"
        )
    if (source := said.get("simulated_by")) is not None:
        assumed.append(f"the run was no measurement: its step times are {source!r}")
    if (limit := said.get("max_concurrency")) is not None:
        assumed.append(f"the client kept {limit} requests in flight: they are sent when it sent them")
    longest = int((run.requests["prompt_tokens"] + run.requests["output_tokens"]).max())
    model = read_model_config(flags.model, flags.max_model_len or said.get("max_model_len"))
    pool = (blocks - 1) * given.get("block_size", 16)
    if (
        flags.max_model_len is None
        and said.get("max_model_len") is None
        and model.max_model_len > pool >= longest
    ):
        model = model.model_copy(update={"max_model_len": pool})
        assumed.append(f"max_model_len {pool:,}, all that the pool holds")
    try:
        options = EngineOptions(model=flags.model, **given, **{name: getattr(flags, name) for name in GRAPHS})
        asynchronous = given.get("async_scheduling", True)
        engine = options.engine_config(model, blocks, None, asynchronous=asynchronous)
        if (rules := said.get("rules")) is not None:
            engine = engine.model_copy(update={"rules": Rules.model_validate(rules)})
        return engine, options, tuple(assumed)
    except ValidationError as e:
        raise UsageError(explain(e)) from e


def _prompts(run: MeasuredRun, path: Path, workload: Path | None) -> Sequence[RequestSpec] | None:
    """The requests as they were sent, in the order of the run's."""
    if workload is None and run.source != "run folder":
        return None
    trace = read_trace(path if workload is None else workload, ReadOptions())
    requests = list(trace.requests)
    if workload is None:
        by_id = {spec.request_id: spec for spec in requests}
        return [by_id[str(name)] for name in run.requests["request_id"]]
    requests.sort(key=lambda spec: spec.source_row or 0)
    if len(requests) != len(run.requests):
        raise MeasuredRunError(
            f"--workload {workload}: has {len(requests):,} requests, the run {len(run.requests):,}; they are joined "
            "row by row"
        )
    return [requests[row] for row in run.rows]


def _step_noise(errors: dict[str, StepErrors]) -> float:
    """Of decode steps, from their mean distance to the median of like ones, as for a normal distribution."""
    decode = errors.get("decode")
    if decode is None or decode.like is None:
        return ASSUMED_NOISE
    return float(np.sqrt(np.pi / 2)) * decode.like.mape / 100


def _noise(
    replay: Replay, noisy: Callable[[int], StepModel], without: SimulatedRun, part: slice, runs: int
) -> dict[str, float]:
    """Standard deviation of each mean in percent, over runs that differ in the noise of their steps alone."""
    if runs < 2:
        return {}
    plain = {name: float(np.nanmean(values[part])) for name, values in metrics_of(without.requests).items()}
    means: dict[str, list[float]] = {name: [] for name in plain}
    for seed in range(runs):
        say(f"simulating with noise, {seed + 1} of {runs}")
        again = metrics_of(replay(noisy(seed)).requests)
        for name in means:
            means[name].append(float(np.nanmean(again[name][part])))
    return {
        name: 100 * float(np.std(of, ddof=1)) / plain[name] for name, of in means.items() if plain[name] > 0
    }


def parts_of(found: Validation) -> Iterator[tuple[str, dict[str, MetricComparison]]]:
    """(whose requests, their comparison): all, and where a number was fitted both halves."""
    yield "all requests", found.metrics
    if found.factor is not None:
        run = found.run.requests
        yield "first half (fitted to)", compare_metrics(run, found.simulated.requests, first_half(found.run))
        yield "second half (tested)", found.judged


def totals(found: Validation) -> dict[str, dict[str, Any]]:
    """Makespan and throughput of both sides."""
    pairs = {"makespan_s": makespan_s, "output_tokens_per_s": throughput_tokens_per_s}
    return {
        name: {"measured": figure(found.run.requests), "simulated": figure(found.simulated.requests)}
        for name, figure in pairs.items()
    }
