"""Where measured whole steps come from: folders of `servetwin profile`, and run folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from servetwin.sim.runs import HEADER, Run, read_run
from servetwin.sim.steptime.measured_steps import MeasuredSteps
from servetwin.sim.steptime.profile_folder import PROFILE_HEADER, read_profile_folder

if TYPE_CHECKING:
    import pandas as pd

SAME = ("model", "num_parameters", "dtype", "device", "threads", "compiled", "cudagraph_capture_sizes")
"""What all sources of one fit must agree in (keys of an executor's description)."""


class StepSourceError(ValueError):
    """A folder that holds no measured steps, or steps of something else than the other folders."""


@dataclass(frozen=True)
class StepsSource:
    """One folder's steps."""

    kind: Literal["points", "run"]
    """Single steps measured apart, or a run."""
    path: str
    steps: MeasuredSteps
    table: pd.DataFrame | None
    """The table steps/ of a run."""
    about: dict[str, Any]
    """What the executor says of itself: model, hardware, versions."""
    engine: dict[str, Any]
    """Its limits: max_num_seqs, max_num_batched_tokens, max_model_len, num_gpu_blocks, block_size."""
    unfinished: str | None = None
    """What is missing; None: nothing."""


def is_step_folder(path: Path) -> bool:
    """A folder that this module reads."""
    return (path / PROFILE_HEADER).is_file() or (path / HEADER).is_file()


def read_sources(paths: Sequence[Path]) -> list[StepsSource]:
    """All sources in the folders, a profile's live runs among them. Raises StepSourceError, RunFolderError, ..."""
    sources = [source for path in paths for source in _sources_of(path)]
    _check_distinct(sources)
    if not any(len(source.steps) for source in sources):
        raise StepSourceError(f"{', '.join(map(str, paths))}: no step was measured there")
    for source in sources[1:]:
        _check_same(sources[0], source)
    return sources


def _sources_of(path: Path) -> list[StepsSource]:
    if not (path / PROFILE_HEADER).is_file():
        return [run_source(read_run(path))]
    profile = read_profile_folder(path)
    found = [
        StepsSource(
            "points",
            str(path),
            MeasuredSteps.of_points(profile.rows),
            None,
            profile.header["about"],
            profile.header["engine"],
            None
            if profile.header["complete"]
            else "the profile was broken off; `profile --resume` goes on with it",
        )
    ]
    return found + [run_source(read_run(path / name)) for name in profile.header["live"]]


def run_source(run: Run) -> StepsSource:
    """Raises StepSourceError for a run whose steps were not measured."""
    steps = run.steps
    busy = steps[steps["rows"] > 0]
    if run.config["engine"].get("speculative") is not None:
        raise StepSourceError(f"{run.path}: its steps verified drafts, which is no part of the fit")
    foreign = busy[busy["source"] != "measured"]
    if len(foreign):
        raise StepSourceError(
            f"{run.path}: its step times are {foreign['source'].iloc[0]!r}, nothing was measured there"
        )
    engine = run.config["engine"]
    return StepsSource(
        "run",
        str(run.path),
        MeasuredSteps.of_run(steps),
        steps,
        run.header.get("executor") or {},
        {
            "max_num_seqs": engine["scheduler"]["max_num_seqs"],
            "max_num_batched_tokens": engine["scheduler"]["max_num_batched_tokens"],
            "max_model_len": engine["model"]["max_model_len"],
            "vocab_size": engine["model"]["vocab_size"],
            "num_gpu_blocks": engine["cache"]["num_gpu_blocks"],
            "block_size": engine["cache"]["block_size"],
        },
    )


def _check_distinct(sources: Sequence[StepsSource]) -> None:
    """A run that is there twice would be left out of a fit and be in it."""
    places = [Path(source.path).resolve() for source in sources]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise StepSourceError(f"{sources[number].path}: is there twice")


def _check_same(first: StepsSource, other: StepsSource) -> None:
    for name in SAME:
        here, there = first.about.get(name), other.about.get(name)
        if here != there:
            raise StepSourceError(
                f"{other.path}: {name} is {there!r}, in {first.path} {here!r}: one profile is of one model on one "
                "machine"
            )
