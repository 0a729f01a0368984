"""`servetwin plan`: how much load under which limits, on what, at what cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

from servetwin.sim.commands.cluster_flags import ClusterFlags
from servetwin.sim.commands.config_file import ConfigFile
from servetwin.sim.commands.flag_kinds import count, flag, switch
from servetwin.sim.commands.flags import EngineFlags, LoadFlags, SamplingFlags, SimulationFlags
from servetwin.sim.commands.trace_flags import TraceFlags

PLAN = Group("Plan", sort_key=-2)
SEARCH = Group("Search", sort_key=-1)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """What is asked, and how hard it is looked for."""

    ttft: Annotated[
        float | None,
        flag(
            PLAN,
            "Limit of the time to the first token, in ms (as --metric-defs defines it; fractions allowed).",
        ),
    ] = None
    tpot: Annotated[
        float | None, flag(PLAN, "Limit of the time per output token after the first, in ms, of a request.")
    ] = None
    e2e: Annotated[float | None, flag(PLAN, "Limit of the time from sending to the last token, in ms.")] = (
        None
    )
    percentile: Annotated[
        float, flag(PLAN, "Each limit is for this percentile over the requests sent in the measured window.")
    ] = 99.0
    attainment: Annotated[
        float | None,
        flag(
            PLAN,
            "Instead of a percentile of each: this share (0 to 1) of the requests is within all limits at once.",
        ),
    ] = None
    target_rate: Annotated[
        float | None,
        flag(
            PLAN,
            "Requests/s to be served: the fewest replicas (with --price the cheapest configuration) that keep the "
            "limits there. Without it: the largest rate that keeps them.",
        ),
    ] = None
    replicas_at_most: Annotated[int, count(PLAN, "With --target-rate: no more are tried.")] = 64
    vary: Annotated[
        tuple[str, ...],
        switch(
            PLAN,
            "NAME=V1,V2,...: try every value of a flag of run (its name with _; e.g. max_num_seqs=64,128); may be "
            "given several times, every combination is tried. --gpu H100,L40S is short for gpu=H100,L40S.",
        ),
    ] = ()
    price: Annotated[
        tuple[str, ...],
        switch(
            PLAN,
            "NAME=USD per GPU and hour of a card, or USD for any; may be given several times. Without a price costs "
            "are null: none is built in.",
        ),
    ] = ()
    seeds: Annotated[
        int | None,
        count(
            SEARCH,
            "Draws of the workload that a rate is tried with where one draw leaves it in doubt, the same ones at every "
            "rate, from --seed on (default: 3; 1 for a trace, which is always the same).",
        ),
    ] = None
    tolerance: Annotated[
        float, flag(SEARCH, "Width of the bracket around the limit at the end, as a part of the rate.")
    ] = 0.01
    max_simulations: Annotated[
        int | None,
        count(
            SEARCH,
            "Runs for one configuration; the answer says if they did not suffice (default: 14, and 5 more for every "
            "further seed; most searches need fewer).",
        ),
    ] = None
    step_time_error: Annotated[
        float | None,
        flag(
            SEARCH,
            "Percent by which step times may be off: the limit is found again for steps that much longer and shorter "
            "(default: what the profile's own test says, 90th percentile; a roofline has none).",
        ),
    ] = None
    json: Annotated[bool, switch(PLAN, "Print one JSON object.")] = False


# Frozen, and cyclopts shows these defaults in --help.
DEFAULTS, SIMULATION, LOAD, TRACE = PlanFlags(), SimulationFlags(), LoadFlags(), TraceFlags()
CLUSTER, ENGINE, SAMPLING = ClusterFlags(), EngineFlags(), SamplingFlags()


def plan(
    workload: Annotated[
        str | None,
        Parameter(
            help="A trace, our JSONL, a run folder, or a preset (`servetwin trace presets`); only the rate of its "
            "requests is changed."
        ),
    ] = None,
    /,
    *,
    config: ConfigFile = None,
    plan_flags: PlanFlags = DEFAULTS,
    flags: SimulationFlags = SIMULATION,
    load: LoadFlags = LOAD,
    trace: TraceFlags = TRACE,
    cluster: ClusterFlags = CLUSTER,
    engine: EngineFlags = ENGINE,
    sampling: SamplingFlags = SAMPLING,
) -> int:
    """Find the largest load that keeps its limits, or the fewest replicas for a load, and what that costs.

    WORKLOAD is simulated at several rates (all requests at once, then a bracketing search), its arrivals scaled in
    time. A rate is good if the limits are kept in the steady part of the run and the queue does not grow without bound;
    with no limits the latter alone counts. The knee is the rate served when all requests are there at once; headroom =
    knee / rate - 1. Verdicts: stable, backlogged (a queue stands that has not settled), overloaded (it grows without
    bound). Exit code 3: not feasible; the nearest feasible point is told.
    """
    del config  # `sim/cli.py` has read it.
    from servetwin.sim.commands.planning import carry_out

    groups = {
        "flags": flags,
        "load": load,
        "trace": trace,
        "cluster": cluster,
        "engine": engine,
        "sampling": sampling,
    }
    return carry_out(workload, plan_flags, groups)
