"""Log probabilities of one output, in the form that the front end gives them out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from servetwin.executor.outputs import Logprob
from servetwin.sim.contract import LogprobsLists


class LogprobsCollector:
    """Gathers one entry a token: token id -> Logprob, the token taken first, then the most likely ones."""

    def __init__(self, token_text: Callable[[int], str | None]) -> None:
        self.entries: list[dict[int, Logprob]] = []
        self.cumulative_logprob = 0.0
        """Sum over the tokens taken."""
        self._token_text = token_text

    def extend(self, new: LogprobsLists) -> None:
        """Takes in further tokens."""
        rows = zip(new.logprob_token_ids, new.logprobs, new.sampled_token_ranks, strict=True)
        for token_ids, logprobs, rank in rows:
            # A token that is among the most likely ones stands twice, with the same rank.
            ranks = chain((rank,), range(1, len(token_ids)))
            self.entries.append(
                {
                    token_id: Logprob(logprob, its_rank, self._token_text(token_id))
                    for token_id, logprob, its_rank in zip(token_ids, logprobs, ranks, strict=True)
                }
            )
            self.cumulative_logprob += logprobs[0]
