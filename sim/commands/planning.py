"""What `servetwin plan` does: ask, tell how it goes, show the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flags import EngineFlags, LoadFlags
from servetwin.sim.commands.interrupt import StopRequest
from servetwin.sim.commands.plan import PlanFlags
from servetwin.sim.commands.plan_report import probe_line, report, told_note
from servetwin.sim.commands.show import print_json, results_console, say
from servetwin.sim.planning.answer import Question, answer, choices_of
from servetwin.sim.planning.capacity import Effort
from servetwin.sim.planning.parameters import read_parameters
from servetwin.sim.planning.prices import read_prices, unused_prices
from servetwin.sim.planning.probing import Measured
from servetwin.sim.planning.slo import Slo
from servetwin.sim.planning.spec import RunSpec

INFEASIBLE = 3
DATASET_RATE = 1.0
"""Requests/s of a dataset that is given no rate: some times are needed, to be scaled."""


def carry_out(workload: str | None, flags: PlanFlags, groups: Mapping[str, Any]) -> int:
    """Prints the answer. 0, or 3 where nothing is feasible. Raises UsageError and what `run` ends with."""
    question = question_of(workload, flags, groups)
    asked = [spec["gpu"] for _, spec in question.specs()]
    for name in unused_prices(question.prices, asked):
        say(
            f"note: the price of {name} is not used: no configuration has this card (--gpu); --price USD is for any"
        )
    told = _Progress()
    with StopRequest() as stop:

        def on_run(spec: RunSpec, run: Measured) -> None:
            stop.raise_if_asked()
            told(spec, run)

        found = answer(question, on_run)
    if flags.json:
        print_json(found.to_json())
    else:
        console = results_console()
        for part in report(found):
            console.print(part)
    return 0 if found.best is not None else INFEASIBLE


def question_of(workload: str | None, flags: PlanFlags, groups: Mapping[str, Any]) -> Question:
    """What was typed. Raises UsageError."""
    slo = Slo(
        ttft_ms=flags.ttft,
        tpot_ms=flags.tpot,
        e2e_ms=flags.e2e,
        percentile=flags.percentile,
        attainment=flags.attainment,
    )
    engine: EngineFlags = groups["engine"]
    vary = read_vary(flags.vary)
    if engine.gpu is not None and "," in engine.gpu:
        if "gpu" in vary:
            raise UsageError("--gpu with several cards cannot stand beside --vary gpu=...")
        vary = {"gpu": tuple(name.strip() for name in engine.gpu.split(","))} | vary
        engine = replace(engine, gpu=vary["gpu"][0])
    load = _with_times(groups["load"])
    spec = RunSpec.of(workload, **{**groups, "engine": engine, "load": load})
    question = Question(
        spec=spec,
        slo=slo,
        vary=vary,
        target_rate=flags.target_rate,
        replicas_at_most=flags.replicas_at_most,
        prices=read_prices(flags.price),
        effort=Effort(flags.seeds, flags.tolerance, flags.max_simulations),
        step_time_error=None if flags.step_time_error is None else flags.step_time_error / 100,
        vllm_args=groups["engine"].vllm_args,
    )
    for _, one in question.specs():
        one.check()
    return question


def read_vary(texts: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    """Field -> values. Raises UsageError."""
    try:
        return choices_of(read_parameters(texts))
    except UsageError as e:
        # The sweep's words for the same thing.
        raise UsageError(str(e).replace("--param", "--vary")) from e


def _with_times(load: LoadFlags) -> LoadFlags:
    if load.dataset_name is not None and load.request_rate is None and load.ramp_up_strategy is None:
        return replace(load, request_rate=DATASET_RATE)
    if load.request_rate is not None and load.request_rate == inf:
        raise UsageError("--request-rate inf: all at once leaves no rate to change")
    if load.max_concurrency is not None:
        raise UsageError(
            "--max-concurrency: a client that holds requests back has no rate of its own; `servetwin sweep --param "
            "max_concurrency=...` varies it"
        )
    return load


class _Progress:
    """One line on stderr for each run, with the notes that are new."""

    def __init__(self) -> None:
        self._count = 0
        self._said: set[str] = set()
        self._last: str | None = None

    def __call__(self, spec: RunSpec, run: Measured) -> None:
        for note in (n for n in run.notes if n not in self._said):
            self._said.add(note)
            say(told_note(note))
        self._count += 1
        say(f"run {self._count}: {probe_line(run)}")
