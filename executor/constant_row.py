"""The requests whose tokens are all chosen in one way, whatever came before."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from servetwin.executor.sampler import SamplingRow
from servetwin.sim.contract import SamplingParams

TokenIds = npt.NDArray[np.int32]


def looks_back(params: SamplingParams) -> bool:
    """Whether the choice of a token depends on the tokens before it, or on their number."""
    return (
        not params.greedy
        or params.min_tokens > 0
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
        or bool(params.bad_words_token_ids)
    )


def constant_sampling_row(params: SamplingParams, stream: int) -> SamplingRow | None:
    """The one row that serves all tokens of a request, where none of them depends on those before it.

    It carries no tokens, so that it can be made once: most requests of a greedy batch need nothing else.
    """
    if looks_back(params):
        return None
    nothing: TokenIds = np.zeros(0, dtype=np.int32)
    return SamplingRow(params, stream, nothing, nothing)
