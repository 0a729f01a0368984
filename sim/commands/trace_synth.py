"""`servetwin trace synth`: made-up requests from a fitted model or a preset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from servetwin.sim.commands.flag_kinds import count, flag
from servetwin.sim.commands.trace_flags import READ, WRITING, ReadFlags, WriteFlags


def synth(
    model: Annotated[
        str, Parameter(help="A model file of `servetwin trace fit`, or a preset (`servetwin trace presets`).")
    ],
    /,
    *,
    write: WriteFlags,
    num_prompts: Annotated[
        int | None,
        count(
            WRITING,
            "Requests to make (default: as many as the model was fitted to, a preset's own number).",
            "--num-prompts",
            "-n",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        flag(
            WRITING,
            "Mean requests/s (of a model with sessions: beginnings of sessions/s) instead of its own; time is "
            "stretched. inf: all at once. What came out is told where it is another, and what makes it exact.",
        ),
    ] = None,
    seed: Annotated[int, count(WRITING, "Root of everything that is drawn.")] = 0,
    against: Annotated[
        Path | None, flag(WRITING, "Compare what was made with this trace, line by line.")
    ] = None,
    read: ReadFlags = READ,
) -> int:
    """Make requests like those of a trace: from a model that was fitted to it, or from a preset.

    The same model, number, rate and seed give the same file. How the trace of --against is read, the flags under Trace
    say.
    """
    from servetwin.sim.commands.trace_synthesis import SynthRequest, carry_out

    return carry_out(SynthRequest(model, write, num_prompts, rate, seed, against, read))
