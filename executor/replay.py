"""Runs a recorded stream of plans on an executor, without any scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from servetwin.sim.contract import SchedulerOutput, StepResult, StepTimer


def execute_plans(
    plans: Iterable[SchedulerOutput], executor: StepTimer
) -> Iterator[tuple[SchedulerOutput, StepResult]]:
    """Each plan with its result, in order and one at a time: plans may come from a file larger than memory.

    The stream must begin with an executor that knows no request. The tokens fed back are those that the
    executor itself samples, except where a plan gives `all_token_ids`. Raises the executor's ValueError for a
    plan that cannot be run.
    """
    for plan in plans:
        yield plan, executor.run(plan)
