"""Drafts without a model: a request is expected to go on as it went on before (vLLM's method `ngram`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from servetwin.sim.config import SpeculativeConfig


class NgramProposer:
    """Looks the last tokens of a request up in all its tokens, and proposes what stood behind them.

    Rule of `vllm/v1/spec_decode/ngram_proposer.py` 0.22.0: the longest suffix of prompt_lookup_min to
    prompt_lookup_max tokens that occurs before (it may overlap itself), at its earliest occurrence. ValueError for
    another method than ngram.
    """

    def __init__(self, config: SpeculativeConfig, max_model_len: int) -> None:
        if config.method != "ngram":
            raise ValueError(
                f"speculative method {config.method!r} needs a model that drafts; allowed: ngram"
            )
        self.min_tokens, self.max_tokens = config.lookup_range
        self.num_speculative_tokens = config.num_speculative_tokens
        self.max_model_len = max_model_len

    def propose(self, token_ids: npt.NDArray[np.int32]) -> list[int]:
        """Drafts behind `token_ids` (prompt and outputs, `[num_tokens]`), as far as the context window reaches."""
        room = self.max_model_len - len(token_ids)
        start = self._end_of_match(token_ids)
        if start is None or room < 1:
            return []
        drafts: list[int] = token_ids[start : start + min(self.num_speculative_tokens, room)].tolist()
        return drafts

    def _end_of_match(self, token_ids: npt.NDArray[np.int32]) -> int | None:
        """Where the earliest occurrence of the longest suffix ends (exclusive); None: nothing occurs before."""
        length, longest = 0, min(self.max_tokens, len(token_ids) - 1)
        # Where an occurrence may end: everywhere but at the end itself. It grows backwards while any is left.
        ends = np.arange(1, len(token_ids))
        while length < longest:
            longer = ends[ends > length]
            longer = longer[token_ids[longer - length - 1] == token_ids[len(token_ids) - length - 1]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        return int(ends[0]) if length >= self.min_tokens else None
