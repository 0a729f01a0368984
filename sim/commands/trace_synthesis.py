"""What `servetwin trace synth` does: draw, write, compare, say what was written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flag_names import flags_named, given
from servetwin.sim.commands.show import results_console, say
from servetwin.sim.commands.trace_comparison import comparison_table
from servetwin.sim.commands.trace_flags import ReadFlags, WriteFlags
from servetwin.sim.commands.trace_making import Making, finish, options_of
from servetwin.workloads import PRESETS, RequestColumns, Tolerance, WorkloadError, build_preset, read_trace
from servetwin.workloads.checks import check_above_0, check_requests, check_seed
from servetwin.workloads.fitted import FittedModel, load_model
from servetwin.workloads.opening import rate_of_sessions
from servetwin.workloads.traces.source import naming
from servetwin.workloads.two_sample import two_sample

WHOLE_PROFILE = 0.95
RATE_OFF = 0.05
"""Of the rate asked for: by how much another may come out unsaid. 1,000 Poisson arrivals deviate by 3 %."""
FIRST_TURNS = (
    "later turns stand at the start of their session: run it in a closed loop (--loop closed, the default where think "
    "times are known)"
)


@dataclass(frozen=True)
class SynthRequest:
    """One command line of `trace synth`, as typed."""

    model: str
    write: WriteFlags
    num_prompts: int | None
    rate: float | None
    seed: int
    against: Path | None
    read: ReadFlags

    def check(self) -> None:
        """Raises UsageError, WorkloadError."""
        if self.against is None and (flag := next(iter(given(self.read)), None)):
            raise UsageError(f"{flag} says how the trace of --against is read, which is not given")
        if self.rate is not None:
            check_above_0("rate_per_s", self.rate)
        if self.num_prompts is not None:
            check_requests("n", self.num_prompts)
        check_seed(self.seed)


def carry_out(request: SynthRequest) -> int:
    """Runs it and returns the exit code."""
    with flags_named(
        n="--num-prompts", rate_per_s="--rate", arrivals=f"--rate {request.rate}", seed="--seed"
    ):
        request.check()
        trace = None
        if request.against is not None:
            trace = read_trace(request.against, options_of(request.read, Tolerance.NORMAL))
        making = _drawn(request)
    if trace is None:
        return finish(making, request.write)
    report = two_sample(trace.requests, making.requests)
    making.result["against"] = {"path": str(request.against), **report.as_json()}
    code = finish(making, request.write)
    if not request.write.json:
        results_console().print(comparison_table(report, "trace", "made up"))
        for note in report.notes:
            say(note)
    return code


def _drawn(request: SynthRequest) -> Making:
    making = _from_preset(request) if _is_preset(request.model) else _from_model(request)
    making.notes += _off_the_rate(request, making.requests)
    making.result |= {"model": request.model, "seed": request.seed}
    return making


def _is_preset(model: str) -> bool:
    with naming(model):
        exists = Path(model).exists()
    if model in PRESETS and exists:
        raise WorkloadError(f"model {model!r}: is a preset and a file here; the file is ./{model}")
    if model not in PRESETS and not exists:
        raise WorkloadError(f"model {model!r}: is neither a file nor a preset ({', '.join(PRESETS)})")
    return model in PRESETS


def _from_preset(request: SynthRequest) -> Making:
    requests = build_preset(request.model, request.num_prompts, request.rate, request.seed).requests
    assert isinstance(requests, RequestColumns), "presets hold columns"
    return Making(requests, [])


def _from_model(request: SynthRequest) -> Making:
    model = load_model(request.model)
    making = Making(model.draw(request.num_prompts, request.rate, request.seed), [], list(model.notes))
    making.notes += _of_profile(model, making.requests)
    if making.requests.has("think_time_s"):
        making.arrivals = "first turns"
        making.note(FIRST_TURNS)
    if request.rate is not None and making.requests.has("session_id"):
        making.note(rate_of_sessions(making.requests))
    making.result["fitted_to"] = model.fitted_to.model_dump()
    return making


def _off_the_rate(request: SynthRequest, requests: RequestColumns) -> Iterator[str]:
    """The rate that came out, where it is far from the one asked for, and how to have exactly that one."""
    asked = request.rate
    if asked is None or math.isinf(asked):
        return
    starts_s, unit = requests.arrival_s, "requests"
    if requests.has("turn"):
        starts_s, unit = starts_s[np.array(requests.values("turn")) == 0], "sessions"
    span_s = float(starts_s[-1] - starts_s[0])
    rate = len(starts_s) / span_s if span_s else asked
    if abs(rate / asked - 1) <= RATE_OFF:
        return
    exact = (
        f"--rate {asked * asked / rate:.6g} with the same seed reaches it"
        if unit == "sessions"
        else f"`servetwin trace scale {request.write.out} --rate {asked:g}` reaches it"
    )
    yield (
        f"{len(starts_s):,} {unit} over {span_s:,.6g} s are {rate:.4g} {unit}/s, not the {asked:g} asked for: {exact}"
    )


def _of_profile(model: FittedModel, requests: RequestColumns) -> Iterator[str]:
    """That few requests see a part of a changing rate only."""
    if model.arrivals is None or len(model.arrivals.rates_per_s) == 1:
        return
    share = len(requests) / model.fitted_to.rows
    if share < WHOLE_PROFILE:
        yield (
            f"the rate follows a profile, of which {len(requests):,} requests see the first {share:.0%} or so: "
            "their own mean rate may be another"
        )
