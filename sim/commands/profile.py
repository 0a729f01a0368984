"""`servetwin profile`: measure steps of a model on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from servetwin.sim.commands.flag_kinds import count, flag, switch
from servetwin.sim.commands.flags import EngineFlags

PROFILE = Group("Profile", sort_key=0)
ENGINE = EngineFlags()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ProfileFlags:
    """What is measured, and where it goes."""

    out: Annotated[Path, flag(PROFILE, "Folder to write the profile to.", "--out", "-o")]
    points: Annotated[
        int, count(PROFILE, "Steps to measure one by one, spread over everything the engine can run.")
    ] = 120
    passes: Annotated[
        int,
        count(
            PROFILE, "Times that all of them are gone through, since a machine's speed wanders over minutes."
        ),
    ] = 3
    repetitions: Annotated[
        int, count(PROFILE, "Times that each is run in a pass after a warm-up; its time is the median.")
    ] = 3
    point_seconds: Annotated[
        float,
        flag(PROFILE, "A step that takes long is repeated less often, so that it ends after about this."),
    ] = 2.0
    minutes: Annotated[
        float,
        flag(
            PROFILE,
            "After so long the design is left where it is, which any first part of it fills evenly.",
        ),
    ] = 5.0
    live_seconds: Annotated[
        float,
        flag(
            PROFILE,
            "Length of each of three live runs of different made-up loads, from nearly idle to saturated: they measure "
            "the host between steps, and test the fit. 0: none.",
        ),
    ] = 40.0
    resume: Annotated[
        bool, switch(PROFILE, "Go on with the profile in the folder of --out, or begin it.")
    ] = False
    seed: Annotated[int, count(PROFILE, "Of the design, of random weights and of the loads.")] = 0
    json: Annotated[bool, switch(PROFILE, "Print what was measured as one JSON object.")] = False


def profile(*, flags: ProfileFlags, engine: EngineFlags = ENGINE) -> int:
    """Measure steps of a model on this machine, for `servetwin fit`.

    Real scheduler outputs are run on the executor: decode batches with equal and unequal contexts, prompt chunks with
    and without history, both together, and sizes of captured graphs; device and worker are timed apart. Then three live
    runs show what steps take while requests are served, and what the host takes between them. Nothing else should run
    on the machine meanwhile.
    """
    from servetwin.sim.commands.profiling import carry_out

    return carry_out(flags, engine)
