"""What `servetwin profile` does: single steps first, then live runs, all into one folder that can be gone on with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import fields, replace
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from servetwin.sim.commands.compat import rules_of
from servetwin.sim.commands.engine import engine_options
from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flag_names import spelled
from servetwin.sim.commands.flags import EngineFlags
from servetwin.sim.commands.interrupt import StopRequest
from servetwin.sim.commands.profile import ProfileFlags
from servetwin.sim.commands.profile_loads import run_live_loads
from servetwin.sim.commands.roofline_source import refuse_card_flags
from servetwin.sim.commands.show import PointProgress, print_json, results_console, say
from servetwin.sim.config import ExecutorOptions
from servetwin.sim.model_folder import read_model_config
from servetwin.sim.plugins import load
from servetwin.sim.policy import load_policy
from servetwin.sim.profiler import StepProfiler
from servetwin.sim.steptime.measured_steps import MeasuredSteps
from servetwin.sim.steptime.profile_folder import (
    PROFILE_HEADER,
    ProfileFolderError,
    ProfileWriter,
    read_profile_folder,
)
from servetwin.sim.steptime.step_fit import coverage

PART = 20
"""Points that are written at a time."""


def carry_out(flags: ProfileFlags, engine: EngineFlags) -> int:
    """Returns the exit code. Raises UsageError and other ValueErrors, KeyboardInterrupt with everything written."""
    _check(flags, engine)
    begun = read_profile_folder(flags.out) if (flags.out / PROFILE_HEADER).is_file() else None
    if begun is not None and engine.num_gpu_blocks_override is None:
        # A pool sized from memory is another at every start.
        engine = replace(engine, num_gpu_blocks_override=begun.header["engine"]["num_gpu_blocks"])
    if begun is not None and begun.header["design_complete"]:
        _check_same_engine(begun.header, flags, engine)
        say("all steps of the design are measured already")
        header = begun.header
        writer = ProfileWriter.resume(
            flags.out, about=header["about"], engine=header["engine"], design=_design(flags)
        )
    else:
        writer = _measured(flags, engine)
    if flags.live_seconds:
        run_live_loads(writer, engine, flags)
    rows = read_profile_folder(flags.out).rows
    writer.end(coverage(MeasuredSteps.of_points(rows).features))
    _show(flags, writer, rows)
    return 0


def _check(flags: ProfileFlags, engine: EngineFlags) -> None:
    """Raises UsageError and other ValueErrors before anything is loaded."""
    for name in ("points", "passes", "repetitions"):
        if getattr(flags, name) < 1:
            raise UsageError(f"--{name} {getattr(flags, name)}: must be 1 or more")
    for name in ("point_seconds", "minutes", "live_seconds"):
        value = getattr(flags, name)
        least = 0 if name == "live_seconds" else 1e-6
        if not least <= value <= 86_400:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be from {least:g} to 86400")
    if engine.model is None:
        raise UsageError("profile needs --model: a local Hugging Face folder")
    refuse_card_flags(engine, "torch")
    for name in ("speculative_config", "draft_acceptance_rate"):
        if getattr(engine, name) is not None:
            raise UsageError(f"{spelled(name)}: steps are profiled without drafts")
    if engine.vllm_args is not None:
        raise UsageError("--vllm-args: give profile its own flags")
    load_policy(engine.scheduling_policy)
    rules_of(engine.vllm_compat)
    if not flags.live_seconds and (idle := next(_of_the_scheduler(engine), None)):
        raise UsageError(f"{spelled(idle)} has no effect with --live-seconds 0: nothing is scheduled then")
    if (flags.out / PROFILE_HEADER).is_file() and not flags.resume:
        raise ProfileFolderError(f"{flags.out}: holds a profile; --resume goes on with it")
    read_model_config(engine.model, engine.max_model_len)


def _of_the_scheduler(engine: EngineFlags) -> Iterator[str]:
    """Flags given that only a scheduler heeds."""
    default = EngineFlags()
    executor = {*ExecutorOptions.model_fields, "num_gpu_blocks_override"}
    for field in fields(EngineFlags):
        if field.name not in executor and getattr(engine, field.name) != getattr(default, field.name):
            yield field.name


def _measured(flags: ProfileFlags, engine: EngineFlags) -> ProfileWriter:
    """Measures the points that are not there yet."""
    assert engine.model is not None, "checked"
    options = engine_options(engine, flags.seed)
    seqs, tokens = options.limits(read_model_config(engine.model, engine.max_model_len).max_model_len)
    limited = options.executor_options().model_copy(
        update={"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    )
    say(f"loading {engine.model}")
    profiler: StepProfiler = load("servetwin.profilers", "torch")(limited)
    with StopRequest() as stop, closing(profiler):
        writer = _writer(flags, profiler)
        _measure(profiler, writer, flags, stop)
    return writer


def _check_same_engine(header: dict[str, Any], flags: ProfileFlags, engine: EngineFlags) -> None:
    """Without loading the model: what a profile that needs no more steps can be compared by."""
    assert engine.model is not None, "checked"
    model = read_model_config(engine.model, engine.max_model_len)
    seqs, tokens = engine_options(engine, flags.seed).limits(model.max_model_len)
    ours = {
        "model": (engine.model.resolve().name, header["about"].get("model")),
        "max_model_len": (model.max_model_len, header["engine"]["max_model_len"]),
        "max_num_seqs": (seqs, header["engine"]["max_num_seqs"]),
        "max_num_batched_tokens": (tokens, header["engine"]["max_num_batched_tokens"]),
        "block_size": (engine.block_size, header["engine"]["block_size"]),
    }
    if engine.dtype != "auto":
        ours["dtype"] = (engine.dtype, header["about"].get("dtype"))
    if engine.threads is not None:
        ours["threads"] = (engine.threads, header["about"].get("threads"))
    for name, (here, there) in ours.items():
        if here != there:
            raise ProfileFolderError(
                f"{flags.out}: its {name} is {there!r}, here it is {here!r}: a profile goes on as it was begun"
            )


def _design(flags: ProfileFlags) -> dict[str, Any]:
    return {name: getattr(flags, name) for name in ("points", "passes", "repetitions", "seed")}


def _writer(flags: ProfileFlags, profiler: StepProfiler) -> ProfileWriter:
    limits = dict(profiler.limits)
    parts: dict[str, dict[str, Any]] = {
        "about": {**profiler.describe(), "date": date.today().isoformat()},
        "engine": {
            "num_gpu_blocks": limits.pop("num_blocks"),
            **limits,
            "vocab_size": profiler.model_config.vocab_size,
        },
        "design": _design(flags),
    }
    begun = (flags.out / PROFILE_HEADER).is_file()
    return (ProfileWriter.resume if begun else ProfileWriter.begin)(flags.out, **parts)


def _measure(profiler: StepProfiler, writer: ProfileWriter, flags: ProfileFlags, stop: StopRequest) -> None:
    """The points that are not there yet."""
    points = profiler.design(flags.points, flags.seed)
    if len(points) < flags.points:
        say(f"the engine can run {len(points)} different steps of the design")
    order = [point for _ in range(flags.passes) for point in points]
    deadline = time.monotonic() + 60 * flags.minutes
    if writer.measured:
        say(f"{writer.measured} of {len(order)} measurements are there already")
    rows: list[dict[str, Any]] = []
    with PointProgress(len(order), writer.measured) as progress:
        try:
            for point in order[writer.measured :]:
                rows.append(profiler.measure(point, flags.repetitions, flags.point_seconds))
                progress.advance(point.kind)
                if len(rows) == PART:
                    rows = _written(writer, rows)
                stop.raise_if_asked()
                if time.monotonic() > deadline:
                    break
        except KeyboardInterrupt:
            _written(writer, rows)
            say(f"{writer.measured} of {len(order)} measurements are kept in {flags.out}; --resume goes on")
            raise
        _written(writer, rows)
    if writer.measured < len(order):
        measured = f"{writer.measured} of {len(order)} measurements"
        say(f"left after {flags.minutes:g} minutes with {measured}; --resume goes on")
    else:
        writer.end_design()


def _written(writer: ProfileWriter, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if rows:
        writer.add(rows)
    return []


def _show(flags: ProfileFlags, writer: ProfileWriter, rows: Sequence[dict[str, Any]]) -> None:
    header = read_profile_folder(flags.out).header
    if flags.json:
        print_json({"profile": str(flags.out), **{k: v for k, v in header.items() if k != "parts"}})
        return
    console = results_console()
    kinds = [row["kind"] for row in rows]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    console.print(
        f"{len(rows):,} measurements of steps one by one ({counts}) on {header['about'].get('device')}"
    )
    for name, (least, most) in header["coverage"].items():
        console.print(f"  {name.replace('_', ' ')}: {least:,} to {most:,}")
    if writer.live:
        console.print(f"live runs: {', '.join(writer.live)}")
    Console().print(f"next: servetwin fit {flags.out} -o {_file_of(flags.out)}", soft_wrap=True)


def _file_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".json")
