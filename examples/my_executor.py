"""An executor of one's own: a step takes 5 ms and 40 us a token. Any object with such a `run` will do."""

from __future__ import annotations

from servetwin.sim.config import ExecutorOptions
from servetwin.sim.contract import ModelRunnerOutput, SchedulerOutput, StepResult
from servetwin.sim.steptime.plan_rows import PlanReader


class PerToken:
    """Answers token 7 to whoever has computed all its known tokens."""

    def __init__(self, options: ExecutorOptions) -> None:
        """`options` are the flags of the command line: model, block size, limits, seed."""
        self._reader = PlanReader()

    def run(self, plan: SchedulerOutput) -> StepResult:
        rows = self._reader.rows(plan)
        output = ModelRunnerOutput(
            req_ids=[row.request_id for row in rows],
            req_id_to_index={row.request_id: index for index, row in enumerate(rows)},
            # A chunk of a prompt that is not finished samples nothing.
            sampled_token_ids=[[7] if row.samples else [] for row in rows],
        )
        duration_ns = 5_000_000 + 40_000 * plan.total_num_scheduled_tokens if rows else 0
        return StepResult(prepare_ns=0, device_ns=duration_ns, output=output, source="per token")
