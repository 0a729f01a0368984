"""The probabilities that a row draws from: temperature, min-p, top-k, top-p.

As in vLLM each rule sees what the one before it left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from servetwin.executor.flat_index import float32_like
from servetwin.sim.contract import MIN_TEMPERATURE, SamplingParams


def token_probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Float32 logits `[num_rows, vocab_size]` -> weights of the same shape; 0 for tokens that are never drawn.

    The weights of a row are its probabilities up to a factor: top-p leaves them as they were before it. Every row has
    a finite logit. `logits` stays as it is.
    """
    temperature = [max(p.temperature, MIN_TEMPERATURE) for p in params]
    largest = logits.amax(dim=1, keepdim=True)
    # From the largest one down, so that no temperature makes an infinite number of it.
    scaled = (logits - largest).div_(float32_like(logits, temperature).unsqueeze(1))
    floor = _lowest_kept(logits, largest, temperature, params)
    if floor is not None:
        scaled.masked_fill_(logits < floor, -torch.inf)
    weights = scaled.softmax(dim=1)
    _apply_top_p(weights, params)
    return weights


def _lowest_kept(
    logits: torch.Tensor,
    largest: torch.Tensor,
    temperature: Sequence[float],
    params: Sequence[SamplingParams],
) -> torch.Tensor | None:
    """The smallest logit of each row that min-p and top-k let pass, `[num_rows, 1]`; None where neither is on.

    The k-th largest logit of what min-p left is the k-th of all, or nothing more is taken away. Tokens equal to the
    k-th are kept, all of them.
    """
    vocab_size = logits.shape[1]
    with_min_p = [i for i, p in enumerate(params) if p.min_p > 0]
    with_top_k = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if not with_min_p and not with_top_k:
        return None
    floor = torch.full_like(largest, -torch.inf)
    if with_min_p:
        distance = [[temperature[i] * math.log(params[i].min_p)] for i in with_min_p]
        floor[with_min_p] = largest[with_min_p] + float32_like(logits, distance)
    if with_top_k:
        top_k = [params[i].top_k for i in with_top_k]
        ranked = select_rows(logits, with_top_k).topk(max(top_k), dim=1).values
        kth = ranked.gather(1, torch.tensor(top_k, device=logits.device).unsqueeze(1) - 1)
        floor[with_top_k] = torch.maximum(floor[with_top_k], kth)
    return floor


def _apply_top_p(weights: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Sets to 0 all but the fewest most likely tokens that reach top_p; of equal ones the lowest ids stay.

    `weights` sum to 1 in each row and are edited in place.
    """
    rows = [i for i, p in enumerate(params) if p.top_p < 1]
    if not rows:
        return
    probs = select_rows(weights, rows)
    top_p = float32_like(weights, [[params[i].top_p] for i in rows])
    ranked = _largest_first(probs)
    # A token stays while those before it have not reached top_p; the first one always does.
    num_kept = (ranked.cumsum(dim=1) - ranked < top_p).sum(dim=1, keepdim=True).clamp_(min=1)
    smallest = ranked.gather(1, num_kept - 1)
    above, equal = probs > smallest, probs == smallest
    kept = above | (equal & (equal.cumsum(dim=1) <= num_kept - above.sum(dim=1, keepdim=True)))
    weights[rows] = probs * kept


def _largest_first(values: torch.Tensor) -> torch.Tensor:
    """Each row sorted. On a CPU NumPy is nine times faster than torch, which also keeps track of the places."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=1)).flip(1)
    return values.sort(dim=1, descending=True).values


def select_rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """These rows; the tensor itself, not a copy, when they are all of it. `rows` ascend."""
    return tensor if len(rows) == len(tensor) else tensor[list(rows)]
