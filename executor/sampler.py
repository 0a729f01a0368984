"""Chooses the next token of each row of logits.

Order of the rules, as in vLLM: raw log probabilities, bias and masks (`constraints.py`), penalties (`penalties.py`),
then the largest logit of a greedy row; of the others temperature, min-p, top-k, top-p (`distribution.py`) and a draw
with noise that is a function of the request and the place of the token (`noise.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from servetwin.executor.constraints import apply_constraints, is_constrained
from servetwin.executor.distribution import select_rows, token_probabilities
from servetwin.executor.logprobs import RowLogprobs, gather_logprobs
from servetwin.executor.noise import exponential_noise
from servetwin.executor.penalties import apply_penalties, is_penalised
from servetwin.executor.sampling_row import SamplingRow, random_stream

__all__ = ["RowLogprobs", "Sampler", "SamplerOutput", "SamplingRow", "random_stream"]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What came out for a batch of rows."""

    token_ids: torch.Tensor
    """[num_rows] int64, on the device of the logits."""
    logprobs: list[RowLogprobs | None]
    """One entry a row, None for those that did not ask."""


class Sampler:
    """Samples a batch. It keeps no state, and a row's token and log probabilities depend on that row alone."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_ids = tuple(eos_token_ids)
        """All tokens that end a text of this model."""

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """Logits `[num_rows, vocab_size]` of any float type, left as they are.

        Greedy rows take the largest logit, the lowest token id among equals. Logits may be -inf, but not all of a row.
        """
        raw = logits.float()
        edited = self._edit(raw, rows)
        token_ids = _choose(edited, rows)
        return SamplerOutput(
            token_ids, gather_logprobs(raw, token_ids, [row.params.logprobs for row in rows])
        )

    def _edit(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Bias, masks and penalties, on a copy where any row has them."""
        constrained = [(i, row) for i, row in enumerate(rows) if is_constrained(row)]
        penalised = [(i, row) for i, row in enumerate(rows) if is_penalised(row.params)]
        if not constrained and not penalised:
            return logits
        edited = logits.clone(memory_format=torch.contiguous_format)
        apply_constraints(edited, constrained, self.eos_token_ids)
        apply_penalties(edited, penalised)
        return edited


def _choose(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    greedy = [i for i, row in enumerate(rows) if row.params.greedy]
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    if greedy:
        token_ids[greedy] = select_rows(logits, greedy).argmax(dim=1)
    if drawn:
        token_ids[drawn] = _draw(select_rows(logits, drawn), [rows[i] for i in drawn])
    return token_ids


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """The token of the smallest Exp(1) / p, of all with p > 0, comes up with probability p."""
    weights = token_probabilities(logits, [row.params for row in rows])
    draws = [(row.stream, row.num_output_tokens) for row in rows]
    return weights.div_(exponential_noise(draws, logits.shape[1], logits.device)).argmax(dim=1)
