"""All-reduces: what cards that share every layer exchange, from the published speed of their link.

After the attention and after the MLP of every layer each card holds one summand of every hidden state. In a ring of N
cards each sends 2 (N - 1) / N of the bytes (P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", JPDC 2009). The one of the embedding and the gathering of logits, once a step, are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LINK_EFFICIENCY = 0.85
"""What is reached of the link's bandwidth in one direction."""
LATENCY_S = 6e-6
"""Of an all-reduce among two cards; another one for every doubling."""
PER_LAYER = 2


@dataclass(frozen=True, slots=True)
class AllReduces:
    """Those of one engine of `cards` cards."""

    cards: int
    num_layers: int
    hidden_bytes: int
    """Of one token's hidden state."""
    link_bytes_per_s: float
    """In one direction, as published."""
    efficiency: float = LINK_EFFICIENCY
    latency_s: float = LATENCY_S

    def seconds(self, tokens: Floats) -> Floats:
        """Of all layers of steps with so many tokens, shape [n]; 0 with one card."""
        n = self.cards
        if n == 1:
            return tokens * 0.0
        sent = tokens * self.hidden_bytes * 2 * (n - 1) / n
        each: Floats = sent / (self.link_bytes_per_s * self.efficiency) + self.latency_s * math.log2(n)
        return PER_LAYER * self.num_layers * each
