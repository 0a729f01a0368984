"""Makes tokens less likely that were there before: repetition, frequency and presence penalties.

As in vLLM: repetition looks at prompt and outputs, the other two at outputs only; repetition comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from servetwin.executor.flat_index import FLOAT32_MAX, FLOAT32_TINY, flat_index, float32_like
from servetwin.executor.sampling_row import NumberedRow
from servetwin.sim.contract import SamplingParams


def is_penalised(params: SamplingParams) -> bool:
    """Whether `apply_penalties` could change a row with these parameters."""
    return params.repetition_penalty != 1 or _counts_outputs(params)


def apply_penalties(logits: torch.Tensor, rows: Sequence[NumberedRow]) -> None:
    """Edits float32 logits `[num_rows, vocab_size]` of the given rows in place."""
    _apply_repetition(logits, rows)
    _apply_frequency_and_presence(logits, rows)


def _counts_outputs(params: SamplingParams) -> bool:
    return params.frequency_penalty != 0 or params.presence_penalty != 0


def _apply_repetition(logits: torch.Tensor, rows: Iterable[NumberedRow]) -> None:
    """A logit above 0 is divided by the penalty, one below multiplied."""
    penalised = [(i, row) for i, row in rows if row.params.repetition_penalty != 1]
    if not penalised:
        return
    known = [(i, np.concatenate((row.prompt_token_ids, row.output_token_ids))) for i, row in penalised]
    index = torch.from_numpy(flat_index(known, logits.shape[1])).to(logits.device)
    # Not 0 in float32 either: the logits of masked tokens are -inf.
    factors = np.maximum([row.params.repetition_penalty for _, row in penalised], FLOAT32_TINY)
    factor = float32_like(logits, np.repeat(factors, [len(ids) for _, ids in known]))
    # A token that occurs several times is read before any is written, so each writes the same value.
    value = logits.view(-1)[index]
    changed = torch.where(value > 0, value / factor, value * factor).clamp_(-FLOAT32_MAX, FLOAT32_MAX)
    # A penalty bans nothing: what was possible stays so, and what was masked stays masked.
    logits.view(-1)[index] = torch.where(value == -torch.inf, value, changed)


def _apply_frequency_and_presence(logits: torch.Tensor, rows: Iterable[NumberedRow]) -> None:
    """Takes off the frequency penalty for every occurrence, and the presence penalty once."""
    penalised = [(i, row) for i, row in rows if _counts_outputs(row.params)]
    if not penalised:
        return
    vocab_size = logits.shape[1]
    places, counts = np.unique(
        flat_index([(i, row.output_token_ids) for i, row in penalised], vocab_size), return_counts=True
    )
    frequency, presence = np.zeros(len(logits)), np.zeros(len(logits))
    for i, row in penalised:
        frequency[i], presence[i] = row.params.frequency_penalty, row.params.presence_penalty
    row_of_place = places // vocab_size
    taken_off = counts * frequency[row_of_place] + presence[row_of_place]
    index = torch.from_numpy(places).to(logits.device)
    logits.view(-1).index_add_(0, index, float32_like(logits, -taken_off))
