"""What `servetwin validate` says of the steps of a run folder: each foretold, and how far the plans agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from servetwin.sim.commands.validating import Validation
from servetwin.sim.steptime.errors import Errors
from servetwin.sim.validation.like_steps import IN_WORDS
from servetwin.sim.validation.plan_agreement import PlanAgreement
from servetwin.sim.validation.step_errors import StepErrors


def steps_json(found: Validation) -> dict[str, Any]:
    """Keys of the JSON object; null where the run does not say its steps."""
    steps, decode = found.step_errors, found.step_errors.get("decode")
    noise = None if decode is None or decode.like is None else decode.like.mape
    return {
        "steps_by_regime": {name: errors.to_json() for name, errors in steps.items()} or None,
        "step_noise_percent": noise,
        "plans": None if found.plans is None else found.plans.to_json(),
    }


def steps_report(found: Validation) -> Iterator[RenderableType]:
    """For people; nothing where the run does not say its steps."""
    if found.step_errors:
        second = found.again is not None and found.again.run.log is not None
        yield _table(found.step_errors, second)
        yield Text(_meaning(second), style="dim")
    if found.plans is not None:
        yield Text(plans_in_words(found.plans))
    if found.again is not None and found.again.plans is not None:
        yield Text(f"the two measured runs: {plans_in_words(found.again.plans)}")


def plans_in_words(plans: PlanAgreement) -> str:
    """One sentence on how far they agree and why they part, one on time."""
    total, drift, parting = max(plans.steps), plans.drift, plans.parting
    if parting is None:
        said = f"plans agree in all {total:,} steps"
    else:
        said = (
            f"plans agree for the first {plans.agreeing:,} of {total:,} steps ({plans.in_order_percent:.0f} % of all "
            f"have a like one in the same order); they part in step {parting.step:,}: {parting.words}"
        )
    if drift is not None:
        said += (
            f"\nuntil then the clocks drifted {drift.last_ms:+.3g} ms apart ({drift.percent:+.2f} % of "
            f"{drift.busy_s:.3g} s busy; {drift.largest_ms:+.3g} ms at most)"
        )
    return said


def _table(steps: dict[str, StepErrors], second: bool) -> Table:
    table = Table(
        title="Steps, one by one (the measured batch, foretold): errors in %",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        collapse_padding=True,
    )
    table.add_column("", no_wrap=True)
    more = ("second\nrun",) if second else ()
    for name in ("steps", "mean", "median", "P90", "P99", "bias", "of the\nsum", "like\nsteps", *more):
        table.add_column(name, justify="right", no_wrap=True)
    for regime, errors in steps.items():
        like = "" if errors.like is None else f"{errors.like.mape:.2f}"
        again = "" if errors.again is None else f"{errors.again.bias:+.2f}"
        row = [*_figures(errors.device), f"{errors.total_percent:+.2f}", like, again]
        table.add_row(regime, *row[: len(table.columns) - 1])
        if errors.prepare is not None:
            table.add_row("  host", *_figures(errors.prepare))
    return table


def _figures(errors: Errors) -> tuple[str, ...]:
    figures = (errors.mape, errors.median, errors.p90, errors.p99)
    return (f"{errors.n:,}", *(f"{figure:.2f}" for figure in figures), f"{errors.bias:+.2f}")


def _meaning(second: bool) -> str:
    lines = [
        "mean, median, P90, P99: of absolute errors of device time (host: of the time before the device starts)",
        "bias: mean signed error; of the sum: error of the time of all; outside: beyond what the model was measured in",
        f"like steps: mean distance from their own median, which no model beats ({IN_WORDS})",
    ]
    if second:
        lines.append("second run: bias of the like steps of the second run, put in the place of a model")
    return "\n".join(lines)
