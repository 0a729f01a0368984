"""A second measured run of the same load: how far a real engine is from itself, which no error can be told from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from servetwin.sim.validation.comparison import MetricComparison, compare_gaps, compare_metrics
from servetwin.sim.validation.measured import MeasuredRun, MeasuredRunError
from servetwin.sim.validation.plan_agreement import PlanAgreement, plan_agreement

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Again:
    """The second run beside the first."""

    run: MeasuredRun
    metrics: dict[str, MetricComparison]
    """The first one stands as measured, the second one as simulated."""
    plans: PlanAgreement | None
    """None where one of them does not say its steps."""


def measured_again(first: MeasuredRun, second: MeasuredRun) -> Again:
    """Raises MeasuredRunError where the two did not serve the same requests."""
    metrics = compare_metrics(first.requests, _in_order_of(first, second))
    plans = None
    if first.log is not None and second.log is not None:
        plans = plan_agreement(first.log, second.log, ("the first run", "the second run"))
    return Again(second, metrics | compare_gaps(first.gaps, second.gaps), plans)


def _in_order_of(first: MeasuredRun, second: MeasuredRun) -> pd.DataFrame:
    """The requests of the second run, joined by their ids, or in order of arrival where sources number them anew."""
    ours, theirs = first.requests, second.requests
    if len(ours) != len(theirs):
        raise MeasuredRunError(
            f"{second.path}: completed {len(theirs):,} requests, {first.path} {len(ours):,}: a second run of the same "
            "load has as many"
        )
    if set(ours["request_id"]) == set(theirs["request_id"]) and theirs["request_id"].is_unique:
        theirs = theirs.set_index("request_id").loc[ours["request_id"]].reset_index()
    unequal = ours["prompt_tokens"].to_numpy() != theirs["prompt_tokens"].to_numpy()
    if unequal.any():
        place = int(unequal.argmax())
        name, lengths = (
            ours["request_id"].iloc[place],
            [r["prompt_tokens"].iloc[place] for r in (ours, theirs)],
        )
        raise MeasuredRunError(
            f"{second.path}: request {name!r} has a prompt of {lengths[1]:,} tokens, in {first.path} {lengths[0]:,}: a "
            "second run of the same load has the same"
        )
    return theirs
