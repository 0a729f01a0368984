"""`servetwin validate WORKLOAD --live`: a workload at several loads, for real and simulated."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from servetwin.sim.commands.engine import engine_options
from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flags import EngineFlags, LoadFlags, RunFlags, SamplingFlags
from servetwin.sim.commands.loading import Load
from servetwin.sim.commands.running import RunRequest
from servetwin.sim.commands.running import carry_out as run
from servetwin.sim.commands.show import print_json, results_console, say
from servetwin.sim.commands.steps_source import with_measured_limits
from servetwin.sim.commands.trace_flags import TraceFlags
from servetwin.sim.commands.validate import ValidateFlags
from servetwin.sim.commands.validate_report import TITLES, to_json
from servetwin.sim.commands.validated_times import check_steps_flags
from servetwin.sim.commands.validating import THRESHOLD_MISSED, Validation, thresholds_of, validation
from servetwin.sim.config import EngineConfig
from servetwin.sim.model_folder import read_model_config
from servetwin.sim.run_files import write_json
from servetwin.sim.runs import check_room
from servetwin.sim.steptime.profiles import load_profile
from servetwin.sim.steptime.steps_profile import StepsProfile
from servetwin.sim.validation.capacity import capacity_per_s
from servetwin.workloads import RequestSpec, open_workload
from servetwin.workloads.traces.jsonl import write_jsonl

PROBE = 500
"""Requests by which the capacity is foretold."""
JUDGED_UP_TO = 75
"""Percent of the capacity: above, 1 % in step times becomes many in TTFT, so figures are told and not judged."""


@dataclass(frozen=True)
class LiveLoad:
    """One load, served twice (or as often as asked for) and simulated."""

    percent: float
    rate_per_s: float
    found: Validation

    @property
    def missed(self) -> list[str]:
        """Metrics beyond their thresholds, where those are judged."""
        return self.found.missed if self.percent <= JUDGED_UP_TO else []


def carry_out(workload: str, flags: ValidateFlags) -> int:
    """Returns the exit code. Raises UsageError and other ValueErrors."""
    _check(flags)
    profile = load_profile(flags.profile)
    if not isinstance(profile, StepsProfile):
        raise UsageError(
            f"--live: {flags.profile} is of kernels; a machine of ours is measured with `servetwin profile`"
        )
    if (name := flags.model.resolve().name) != profile.about.get("model", name):
        raise UsageError(f"--model {flags.model}: the profile is of {profile.about['model']}")
    requests = _requests(workload, flags.seed)
    engine = _engine(flags, profile)
    config = _config(engine, flags)
    _refuse_too_long(requests, config)
    with _folder(flags) as folder:
        capacity = capacity_per_s(requests[:PROBE], config, profile.step_model(), profile.host_model())
        say(
            f"capacity by the profile: {capacity:.3g} requests/s, of the first {min(len(requests), PROBE):,} requests"
        )
        loads = list(_loads(requests, capacity, engine, folder, flags))
    if flags.json:
        shown = [
            {"percent": load.percent, "rate_per_s": load.rate_per_s, **to_json(load.found)} for load in loads
        ]
        print_json({"capacity_per_s": capacity, "judged_up_to_percent": JUDGED_UP_TO, "loads": shown})
    else:
        _show(loads, capacity, flags)
    return THRESHOLD_MISSED if any(load.missed for load in loads) else 0


def _check(flags: ValidateFlags) -> None:
    inert = {
        "--workload": flags.workload is not None,
        "--again": flags.again is not None,
        "--save-profile": flags.save_profile is not None,
    }
    for name in (n for n, given in inert.items() if given):
        raise UsageError(f"{name} goes with a run that was measured already, not with --live")
    if not flags.loads or not all(0 < load <= 100 for load in flags.loads):
        raise UsageError(f"--loads {' '.join(map(str, flags.loads))}: percentages above 0 and up to 100")
    if flags.live_runs not in (1, 2):
        raise UsageError(f"--live-runs {flags.live_runs}: allowed are 1 and 2")
    if not 0 < flags.seconds <= 86_400:
        raise UsageError(f"--seconds {flags.seconds}: must be above 0 and at most 86400")
    thresholds_of(flags)
    check_steps_flags(flags, flags.tensor_parallel_size)
    if flags.out is not None:
        check_room(flags.out, overwrite=False)


def _requests(workload: str, seed: int) -> list[RequestSpec]:
    opened = open_workload(workload, seed=seed, loop="open")
    requests = sorted(opened.requests, key=lambda spec: spec.arrival_s)
    if len(requests) < 2 or requests[-1].arrival_s <= requests[0].arrival_s:
        raise UsageError(
            f"{workload}: --live needs at least two requests at different times, to scale their rate"
        )
    return requests


def _engine(flags: ValidateFlags, profile: StepsProfile) -> EngineFlags:
    """The engine that was measured, with what is asked for."""
    asked = EngineFlags(
        model=flags.model,
        load_format=flags.load_format,
        dtype=flags.dtype,
        threads=profile.about.get("threads") if flags.threads is None else flags.threads,
        max_model_len=flags.max_model_len,
        max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        num_gpu_blocks_override=flags.num_gpu_blocks_override,
        block_size=flags.block_size or profile.engine["block_size"],
        enable_prefix_caching=flags.enable_prefix_caching is not False,
        async_scheduling=flags.async_scheduling,
    )
    return with_measured_limits(asked, profile)


@contextmanager
def _folder(flags: ValidateFlags) -> Iterator[Path]:
    """Where the runs go: kept where --out says, else thrown away."""
    if flags.out is not None:
        flags.out.mkdir(parents=True, exist_ok=True)
        yield flags.out
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


def _config(engine: EngineFlags, flags: ValidateFlags) -> EngineConfig:
    assert engine.num_gpu_blocks_override is not None, "the profile says it"
    model = read_model_config(flags.model, engine.max_model_len)
    return engine_options(engine, flags.seed).engine_config(
        model, engine.num_gpu_blocks_override, None, asynchronous=flags.async_scheduling is not False
    )


def _refuse_too_long(requests: Sequence[RequestSpec], config: EngineConfig) -> None:
    for spec in requests:
        reason = config.refusal(spec.prompt_tokens, spec.output_tokens, spec.min_tokens)
        if reason is not None:
            raise UsageError(
                f"request {spec.request_id!r}: {reason}; `servetwin trace cut` takes a part of a trace"
            )


def _loads(
    requests: Sequence[RequestSpec],
    capacity: float,
    engine: EngineFlags,
    folder: Path,
    flags: ValidateFlags,
) -> Iterator[LiveLoad]:
    """All loads are served once before any is served again: a machine's speed wanders."""
    rates = {load: load / 100 * capacity for load in flags.loads}
    files = {load: _write(requests, rate, folder / f"load-{load:g}", flags) for load, rate in rates.items()}
    for turn in range(1, flags.live_runs + 1):
        for load, file in files.items():
            say(f"load {load:g} %, {rates[load]:.3g} requests/s, live run {turn} of {flags.live_runs}")
            _serve(file, file.parent / f"live-{turn}", engine, flags)
    for load, rate in rates.items():
        runs = [folder / f"load-{load:g}" / f"live-{turn}" for turn in range(1, flags.live_runs + 1)]
        found = validation(runs[0], replace(flags, again=runs[1] if len(runs) > 1 else None))
        write_json(folder / f"load-{load:g}" / "validation.json", to_json(found))
        yield LiveLoad(load, rate, found)


def _write(requests: Sequence[RequestSpec], rate_per_s: float, folder: Path, flags: ValidateFlags) -> Path:
    """As many requests as come in the time, at that rate."""
    wanted = max(round(rate_per_s * flags.seconds), 2)
    some = requests[:wanted]
    if len(some) < wanted:
        say(
            f"{len(some):,} requests last {len(some) / rate_per_s:.3g} s of {flags.seconds:g} at {rate_per_s:.3g}/s"
        )
    first, last = some[0].arrival_s, some[-1].arrival_s
    stretch = (len(some) - 1) / rate_per_s / (last - first) if last > first else 0.0
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "workload.jsonl"
    write_jsonl(
        file, (replace(spec, arrival_s=(spec.arrival_s - first) * stretch, abort_s=None) for spec in some)
    )
    return file


def _serve(workload: Path, out: Path, engine: EngineFlags, flags: ValidateFlags) -> None:
    run(
        RunRequest(
            Load(str(workload), LoadFlags(loop="open"), TraceFlags()),
            RunFlags(executor="torch", live=True, out=out, log_blocks=False, seed=flags.seed),
            engine,
            SamplingFlags(),
            quiet=True,
        )
    )


def _show(loads: Sequence[LiveLoad], capacity: float, flags: ValidateFlags) -> None:
    console = results_console()
    for load in loads:
        console.print(_table(load))
        console.print(_words(load))
    console.print(
        f"capacity by the profile: {capacity:.3g} requests/s; thresholds up to {JUDGED_UP_TO} % of it"
    )
    if flags.out is not None:
        console.print(f"runs and validation.json of each load: {flags.out}")


def _table(load: LiveLoad) -> Table:
    found = load.found
    title = f"load {load.percent:g} %: {len(found.run.requests):,} requests at {load.rate_per_s:.3g}/s"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("simulated / live - 1, in percent", no_wrap=True)
    for name in ("mean", "P50", "P90", "P99", "second live run"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, metric in found.judged.items():
        errors = [metric.errors_percent[of] for of in ("mean", "p50", "p90", "p99")]
        again = None if found.again is None else found.again.metrics[name].errors_percent["mean"]
        table.add_row(TITLES[name], *map(_signed, [*errors, again]))
    return table


def _signed(percent: float | None) -> str:
    return "" if percent is None or not np.isfinite(percent) else f"{percent:+.1f}"


def _words(load: LiveLoad) -> Text:
    found = load.found
    lines = []
    if (everything := found.step_errors.get("all")) is not None:
        device = everything.device
        like = "" if everything.like is None else f"; like steps differ by {everything.like.mape:.1f} %"
        lines.append(f"steps: {device.mape:.1f} % off in the mean, {device.median:.1f} % at the median{like}")
    lines.append(f"beyond its threshold: {', '.join(load.missed) or 'nothing'}")
    return Text("\n".join(lines), style="red" if load.missed else "")
