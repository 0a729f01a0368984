"""Log probabilities of the tokens taken and of the most likely ones, for rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from servetwin.executor.distribution import select_rows


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Of one row of logits as the model gave them: before bias, masks, penalties and temperature (vLLM's default)."""

    token_ids: list[int]
    """The token taken, then the most likely ones, likeliest first and the lowest id among equals. A token taken that
    is one of them stands twice."""
    logprobs: list[float]
    """Natural logarithms, 0 or less, in the order of `token_ids`."""
    rank: int
    """1 + number of tokens more likely than the one taken."""


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int | None]
) -> list[RowLogprobs | None]:
    """One entry a row, None where `counts` is None.

    Raw float32 logits `[num_rows, vocab_size]`, the tokens taken `[num_rows]`, and how many most likely tokens each
    row wants: `SamplingParams.logprobs`, -1 or more than there are for the whole vocabulary.
    """
    entries: list[RowLogprobs | None] = [None] * len(counts)
    rows = [i for i, count in enumerate(counts) if count is not None]
    if not rows:
        return entries
    logprobs = select_rows(logits, rows).log_softmax(dim=1)
    taken_ids = select_rows(token_ids, rows).unsqueeze(1)
    taken = logprobs.gather(1, taken_ids)
    ranks = (logprobs > taken).sum(dim=1) + 1
    top = _most_likely(logprobs, [count for count in counts if count is not None])
    columns = zip(rows, taken_ids[:, 0].tolist(), taken[:, 0].tolist(), ranks.tolist(), top, strict=True)
    for row, token_id, logprob, rank, (top_ids, top_logprobs) in columns:
        entries[row] = RowLogprobs([token_id, *top_ids], [logprob, *top_logprobs], rank)
    return entries


def _most_likely(logprobs: torch.Tensor, counts: Sequence[int]) -> list[tuple[list[int], list[float]]]:
    """Ids and values of the `counts[i]` largest of each row, in order; of equal ones the lowest ids.

    `topk` promises no order of equals, so it only says how large the smallest one is.
    """
    vocab_size = logprobs.shape[1]
    wanted = [vocab_size if count == -1 else min(count, vocab_size) for count in counts]
    row_of, token_ids = (logprobs >= _smallest_wanted(logprobs, wanted)).nonzero(as_tuple=True)
    values = logprobs[row_of, token_ids].cpu().numpy()
    rows, ids = row_of.cpu().numpy(), token_ids.cpu().numpy()
    order = np.lexsort((-values, rows))
    starts = np.searchsorted(rows, np.arange(len(wanted)))
    picked = [order[start : start + count] for start, count in zip(starts, wanted, strict=True)]
    return [(ids[places].tolist(), values[places].tolist()) for places in picked]


def _smallest_wanted(logprobs: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
    """The `wanted[i]`-th largest of each row, `[num_rows, 1]`; -inf for all of them, inf for none."""
    vocab_size = logprobs.shape[1]
    smallest = logprobs.new_tensor([[-torch.inf if count == vocab_size else torch.inf] for count in wanted])
    some = [i for i, count in enumerate(wanted) if 0 < count < vocab_size]
    if some:
        largest = select_rows(logprobs, some).topk(max(wanted[i] for i in some), dim=1).values
        place = torch.tensor([[wanted[i] - 1] for i in some], device=logprobs.device)
        smallest[some] = largest.gather(1, place)
    return smallest
