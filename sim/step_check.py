"""Refuses what an executor must not return: the seam is open to anybody's."""

from __future__ import annotations

from servetwin.sim.contract import SchedulerOutput, StepResult


class StepResultError(ValueError):
    """A step's result that cannot be: the message names the executor, the field, the value and what is allowed."""


def check_result(plan: SchedulerOutput, result: StepResult) -> None:
    """Raises StepResultError for times that are no ns, a step without duration, or tokens of nobody."""
    if not isinstance(result, StepResult):
        raise StepResultError(f"the executor returned a {type(result).__name__}; allowed: a StepResult")
    check_times(result.source, result.prepare_ns, result.device_ns)
    if not plan.num_scheduled_tokens:
        return
    if result.prepare_ns + result.device_ns < 1:
        raise StepResultError(
            f"executor {result.source!r}: a step of {plan.total_num_scheduled_tokens} tokens took 0 ns; allowed: > 0"
        )
    _check_tokens(plan, result)


def check_times(source: str, prepare_ns: object, device_ns: object) -> None:
    """Raises StepResultError for times that are no ns."""
    for name, value in (("prepare_ns", prepare_ns), ("device_ns", device_ns)):
        if not isinstance(value, int) or value < 0:
            raise StepResultError(f"executor {source!r}: {name} {value!r}; allowed: whole ns, 0 or more")


def _check_tokens(plan: SchedulerOutput, result: StepResult) -> None:
    output, drafts = result.output, plan.scheduled_spec_decode_tokens
    if len(output.sampled_token_ids) != len(output.req_ids):
        raise StepResultError(
            f"executor {result.source!r}: {len(output.sampled_token_ids)} lists of sampled_token_ids for "
            f"{len(output.req_ids)} req_ids"
        )
    missing = plan.num_scheduled_tokens.keys() - output.req_id_to_index.keys()
    if missing:
        raise StepResultError(
            f"executor {result.source!r}: no output for the scheduled request {min(missing)!r}"
        )
    most = max(map(len, output.sampled_token_ids))
    if most > 1 + max(map(len, drafts.values()), default=0):
        raise StepResultError(
            f"executor {result.source!r}: {most} tokens for one request; allowed: 1, and one more for each draft"
        )
