"""The output of a step that nobody ran: its tokens come from a TokenSource, or from a model of drafts."""

from __future__ import annotations

from collections.abc import Sequence

from servetwin.sim.contract import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from servetwin.sim.steptime.drafting import DraftModel
from servetwin.sim.steptime.plan_rows import PlanRow
from servetwin.sim.token_source import TokenSource


def sampled_output(
    plan: SchedulerOutput, rows: Sequence[PlanRow], tokens: TokenSource, drafts: DraftModel | None
) -> tuple[ModelRunnerOutput, DraftTokenIds | None]:
    """What a worker would send back for `plan`, whose rows are `rows`."""
    if drafts is not None:
        return drafts.run(plan, list(rows))
    output = ModelRunnerOutput(
        req_ids=[r.request_id for r in rows],
        req_id_to_index={r.request_id: i for i, r in enumerate(rows)},
        sampled_token_ids=[
            [tokens.output_id(r.request_id, r.num_output_tokens)] if r.samples else [] for r in rows
        ],
    )
    return output, None
