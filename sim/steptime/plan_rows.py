"""Reads plans row by row. A plan names deltas only, so somebody must remember the lengths of prompts."""

from __future__ import annotations

from typing import NamedTuple

from servetwin.sim.contract import SchedulerOutput


class PlanRow(NamedTuple):
    """One scheduled request of one plan."""

    request_id: str
    num_scheduled_tokens: int
    num_computed_tokens: int
    """Before the step."""
    num_tokens: int
    """Known tokens: prompt and outputs."""
    num_output_tokens: int

    @property
    def is_decode(self) -> bool:
        """Only the last sampled token is left to compute."""
        return self.num_output_tokens > 0 and self.num_computed_tokens >= self.num_tokens - 1

    @property
    def samples(self) -> bool:
        """The step reaches the last known token, so it produces the next one."""
        return self.num_computed_tokens + self.num_scheduled_tokens >= self.num_tokens


def num_admitted(plan: SchedulerOutput) -> int:
    """Requests that come into the running batch with this plan."""
    return len(plan.scheduled_new_reqs) + len(plan.scheduled_cached_reqs.resumed_req_ids)


class PlanReader:
    """Turns the plans of one run, in order, into rows."""

    def __init__(self) -> None:
        self._prompt_tokens: dict[str, int] = {}

    def rows(self, plan: SchedulerOutput) -> list[PlanRow]:
        """The plan's rows in the order of `num_scheduled_tokens`."""
        for request_id in plan.finished_req_ids:
            self._prompt_tokens.pop(request_id, None)
        progress: dict[str, tuple[int, int]] = {}
        for new in plan.scheduled_new_reqs:
            self._prompt_tokens[new.req_id] = new.num_prompt_tokens
            progress[new.req_id] = (new.num_computed_tokens, new.num_output_tokens)
        cached = plan.scheduled_cached_reqs
        for request_id, computed, outputs in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            progress[request_id] = (computed, outputs)
        return [
            PlanRow(r, n, progress[r][0], self._prompt_tokens[r] + progress[r][1], progress[r][1])
            for r, n in plan.num_scheduled_tokens.items()
        ]
