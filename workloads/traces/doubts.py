"""What requests say that cannot be replayed as said, counted for the notes of their trace."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from servetwin.workloads.columns import RequestColumns
from servetwin.workloads.session_turns import session_turns


def doubts(requests: RequestColumns) -> Iterator[str]:
    """Sentences about requests in order of arrival."""
    if requests.has("context_tokens"):
        turns = session_turns(requests, None)
        if too_long := int((turns.context_tokens > turns.context_limit).sum()):
            yield (
                f"context_tokens of {too_long:,} turns are more than the prompt and answer of the turn before: "
                "what is beyond them is taken as new"
            )
    if requests.has("abort_s"):
        abort_s = np.array(requests.values("abort_s"), dtype=np.float64)
        if early := int((abort_s < requests.arrival_s).sum()):
            yield f"abort_s of {early:,} requests is before their arrival_s: they give up as soon as they are sent"
