"""Chooses the next token of each row from its logits.

Order of the rules, as in vLLM: stop tokens masked below min_tokens, temperature, top-k, top-p, draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from servetwin.sim.contract import MIN_TEMPERATURE, SamplingParams

MIN_NOISE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row of logits is sampled."""

    params: SamplingParams
    generator: torch.Generator | None = None
    """Own random stream; None draws from the sampler's."""
    num_output_tokens: int = 0
    """Tokens generated before this one."""


class Sampler:
    """Samples a batch. Rows do not influence each other, except that rows without a seed share one stream."""

    def __init__(self, eos_token_ids: Sequence[int], seed: int, device: torch.device) -> None:
        self.eos_token_ids = tuple(eos_token_ids)
        self.generator = torch.Generator(device).manual_seed(seed)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Logits `[num_rows, vocab_size]` of any float type -> token ids `[num_rows]` int64.

        Greedy rows take the largest logit, the lowest token id among equals.
        """
        logits = self._mask_stop_tokens(logits.float(), rows)
        token_ids = logits.argmax(dim=-1)
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
        if drawn:
            token_ids[drawn] = self._draw(logits[drawn], [rows[i] for i in drawn])
        return token_ids

    def _mask_stop_tokens(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """-inf for whatever could end a request that has not reached min_tokens."""
        masked = [
            (i, token_id)
            for i, row in enumerate(rows)
            if row.num_output_tokens < row.params.min_tokens
            for token_id in (*self.eos_token_ids, *row.params.stop_token_ids)
            if 0 <= token_id < logits.shape[-1]
        ]
        if not masked:
            return logits
        row_index, token_index = torch.tensor(masked, device=logits.device).unbind(dim=1)
        return logits.index_put((row_index, token_index), logits.new_tensor(-torch.inf))

    def _draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        temperature = logits.new_tensor([max(row.params.temperature, MIN_TEMPERATURE) for row in rows])
        scaled = restrict(logits / temperature.unsqueeze(1), [row.params for row in rows])
        # argmax(p / Exp(1)) draws from p, and each row's noise can come from a generator of its own.
        return (scaled.softmax(dim=-1) / self._noise(scaled, rows)).argmax(dim=-1)

    def _noise(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        noise = torch.empty_like(logits)
        unseeded = [i for i, row in enumerate(rows) if row.generator is None]
        if unseeded:
            shared = noise.new_empty(len(unseeded), noise.shape[1])
            noise[unseeded] = shared.exponential_(generator=self.generator)
        for i, row in enumerate(rows):
            if row.generator is not None:
                noise[i].exponential_(generator=row.generator)
        return noise.clamp_min_(MIN_NOISE)


def restrict(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """-inf for all but each row's top_k tokens and, of those, the fewest that reach top_p (at least one).

    Logits `[num_rows, vocab_size]`. Tokens equal to the k-th largest are all kept.
    """
    vocab_size = logits.shape[-1]
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    top_p = [p.top_p for p in params]
    if min(top_k) == vocab_size and min(top_p) == 1:
        return logits
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    kth_index = torch.tensor(top_k, device=logits.device).unsqueeze(1) - 1
    values = values.masked_fill(values < values.gather(1, kth_index), -torch.inf)
    probs = values.softmax(dim=-1)
    limit = logits.new_tensor(top_p).unsqueeze(1)
    # Mass before the token: a token stays while those before it have not reached top_p. 1 is off, so that
    # rounding of the sum cannot drop the tail.
    reached = (probs.cumsum(dim=-1) - probs >= limit) & (limit < 1)
    reached[:, 0] = False
    return torch.full_like(logits, -torch.inf).scatter(1, order, values.masked_fill(reached, -torch.inf))
