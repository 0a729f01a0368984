"""Why prompt tokens were not found in the prefix cache, each under the one reason that holds for it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from servetwin.dashboard.residencies import Residencies
from servetwin.dashboard.run_columns import Numbers
from servetwin.dashboard.run_data import RunData


class HitLoss(NamedTuple):
    """Prompt tokens at the first admission of requests. The parts add up to `prompt`."""

    prompt: int
    hit: int
    new: int
    """Of blocks whose content no block had had before."""
    evicted: int
    """Of blocks whose content had been there and was evicted."""
    last_block: int
    """The whole prompt was there, but its last block is computed again: a step must compute one token at least."""
    unreachable: int
    """Of blocks whose content lay in another block when they were taken, where it could not be hit: it was being
    computed at the same time for a request with the same prompt, or an earlier block of the prompt was missing."""
    short: int
    """Behind the last full block of a prompt: less than a block cannot be found."""


def hit_loss(data: RunData, res: Residencies, block_size: int) -> HitLoss:
    """Of all requests that were admitted, from requests/ and blocks/."""
    columns = data.columns
    admitted = np.flatnonzero(~np.isnan(columns.numbers("requests", "first_scheduled_s")))
    prompts = columns.numbers("requests", "num_prompt_tokens")[admitted].astype(np.int64)
    hits = columns.numbers("requests", "cached_tokens")[admitted].astype(np.int64)
    evicted, there = _seen_before(data, res)
    # Only where everything before the last block was hit.
    rule = admitted[(prompts % block_size == 0) & (hits == prompts - block_size)]
    last_block = int(np.isin(np.unique(res.request_rows[there]), rule).sum())
    short = int((prompts % block_size).sum())
    lost = (len(evicted) + len(there)) * block_size
    return HitLoss(
        prompt=int(prompts.sum()),
        hit=int(hits.sum()),
        new=int(prompts.sum()) - int(hits.sum()) - lost - short,
        evicted=len(evicted) * block_size,
        last_block=last_block * block_size,
        unreachable=(len(there) - last_block) * block_size,
        short=short,
    )


def _seen_before(data: RunData, res: Residencies) -> tuple[Numbers, Numbers]:
    """Requests (numbers into `request_ids`, one entry for each block) that computed a prompt block whose content had
    been evicted, and those whose content lay in another block at that time.
    """
    order = np.lexsort((res.begin, res.content))
    content, request = res.content[order], res.request[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = content[1:] != content[:-1]
    counted = (content >= 0) & ~first & (~res.taken_back & _first_admission(data, res))[order]
    there = _latest_before(res.until[order], first) > res.begin[order]
    return request[counted & ~there], request[counted & there]


def _latest_before(ends: Numbers, first: Numbers) -> Numbers:
    """For each the latest end among the earlier ones of its content, -inf for the first of them."""
    import pandas as pd

    running = pd.Series(ends).groupby(np.cumsum(first)).cummax().to_numpy()
    before: Numbers = np.where(first, -np.inf, np.concatenate([[-np.inf], running[:-1]]))
    return before


def _first_admission(data: RunData, res: Residencies) -> Numbers:
    """Which were taken for a prompt the first time: before the first token and the first preemption."""
    ends = np.full(len(res.request_ids), np.inf)
    known = res.request_rows >= 0
    tokens = data.columns.numbers("requests", "first_token_s")
    ends[known] = np.nan_to_num(tokens[res.request_rows[known]], nan=np.inf)
    preempted = data.events("preempted").groupby("request_id").time_s.min()
    place = res.numbers_of(preempted.index.to_list())
    ends[place[place >= 0]] = np.minimum(ends[place], preempted.to_numpy())[place >= 0]
    return res.begin < ends[res.request]
