"""How many requests of a mix of lengths a pool holds at once.

A request holds its prompt all its life, and one token more with every step. With equal steps, a request of P prompt
and O output tokens holds ceil(t / block) blocks at t = P, ..., P + O - 1, which is P + (O - 1) / 2 tokens in the mean;
of the requests found running, each kind has a share in proportion to its O (Little's law). The pool then holds

    usable blocks x sum(O) / sum over requests of sum over t of ceil(t / block)

of them. No prefix is shared, and chunked prefill is taken to be short beside decoding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FORMULA = "(num_gpu_blocks - 1) / mean blocks held, each request weighted by its output tokens"


@dataclass(frozen=True, slots=True)
class MeanHolding:
    """What a running request of the mix holds in the mean."""

    blocks: float
    tokens: float
    requests: int
    """Requests in the mix."""

    def concurrency(self, num_gpu_blocks: int) -> float:
        """Requests in flight when the pool, less the null block, is full."""
        return (num_gpu_blocks - 1) / self.blocks


def mean_holding(lengths: Iterable[tuple[int, int]], block_size: int) -> MeanHolding:
    """Over (prompt tokens, output tokens) of every request. Raises ValueError when no request has output."""
    steps = blocks = tokens = requests = 0
    for prompt, output in lengths:
        requests += 1
        steps += output
        last = prompt + output - 1
        blocks += _blocks_up_to(last, block_size) - _blocks_up_to(prompt - 1, block_size)
        tokens += output * prompt + output * (output - 1) // 2
    if steps == 0:
        raise ValueError("no request of the mix has output tokens, so none is ever found running")
    return MeanHolding(blocks / steps, tokens / steps, requests)


def _blocks_up_to(tokens: int, block_size: int) -> int:
    """Sum of ceil(t / block_size) for t = 1 ... tokens."""
    whole, rest = divmod(tokens, block_size)
    return block_size * whole * (whole + 1) // 2 + rest * (whole + 1)
