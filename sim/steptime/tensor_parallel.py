"""Tensor parallelism for step times from kernels that were measured on fewer cards. A rule, not a measurement.

On each of N cards an operator has 1 / N of its width. What its time has above a launch, which no width shortens, is
taken to shrink with the width; all-reduces come on top. A launch takes as long as the shortest operator of the tables
(2.4 us on the RTX PRO 6000), for attention the shortest call (7.7 us).

How well that holds: LLMServingSim publishes tables of that card for half of Llama-3.1-8B, too. What the rule makes of
the full ones is 0 to 11 % too short for the sharded operators of a layer together (at 1 to 2,048 tokens; halves fill
the card's tiles less well), off by up to 7 % for the head, and by -26 to +24 % in 30 attention calls, in those above
100 us mostly by less than 8 %.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from servetwin.sim.cards import Card
from servetwin.sim.kv_bytes import kv_bytes
from servetwin.sim.kv_sizing import running_dtype
from servetwin.sim.model_shape import DTYPE_BYTES, ModelShape
from servetwin.sim.steptime.all_reduce import AllReduces
from servetwin.sim.steptime.kernel_tables import KernelTables

if TYPE_CHECKING:
    import pandas as pd

OF_HEADS = ("qkv_proj", "rotary_emb")
"""Operators over query, key and value heads; the latter are repeated where there are more cards than KV heads."""
OF_WIDTH = ("o_proj", "gate_up_proj", "act_fn", "down_proj", "lm_head")
"""Operators that cards divide evenly. Every card runs all of the others: embedding, norms, sampler."""


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """`cards` cards that share every layer of the model; kernels were measured at the width of `measured_cards`.

    Raises ValueError where heads cannot be divided among the cards.
    """

    shape: ModelShape
    cards: int
    measured_cards: int
    link: Card
    """Whose link to its neighbours counts."""

    def __post_init__(self) -> None:
        self._attention_share()

    def sharded(self, tables: KernelTables) -> KernelTables:
        """The tables as one of the cards would show them."""
        operators = (*tables.dense.values(), *tables.per_sequence.values())
        launch_us = min(float(rows["time_us"].min()) for rows in operators)
        shares = dict.fromkeys(OF_HEADS, self._heads_share())
        shares |= dict.fromkeys(OF_WIDTH, self.measured_cards / self.cards)

        def shrunk(name: str, rows: pd.DataFrame) -> pd.DataFrame:
            return _shrunk(rows, shares.get(name, 1.0), launch_us)

        attention_launch_us = float(tables.attention["time_us"].min())
        return replace(
            tables,
            attention=_shrunk(tables.attention, self._attention_share(), attention_launch_us),
            dense={name: shrunk(name, rows) for name, rows in tables.dense.items()},
            per_sequence={name: shrunk(name, rows) for name, rows in tables.per_sequence.items()},
        )

    def all_reduces(self) -> AllReduces:
        return AllReduces(
            cards=self.cards,
            num_layers=self.shape.num_layers,
            hidden_bytes=self.shape.hidden_size * DTYPE_BYTES[self._dtype],
            link_bytes_per_s=self.link.link_bytes_per_s,
        )

    def describe(self) -> str:
        """In words, with the figures that it rests on."""
        reduces = self.all_reduces()
        kernels = f"what {self.cards} cards exchange was not measured"
        if self.cards > self.measured_cards:
            kernels = (
                f"of {self.cards} cards nothing was measured: what kernels take beyond a launch is divided"
            )
        return (
            f"estimate: {kernels}; all-reduces are added over the link of a {self.link.name} "
            f"({reduces.link_bytes_per_s / 1e9:g} GB/s x {reduces.efficiency:g}, {reduces.latency_s * 1e6:g} us)"
        )

    @property
    def _dtype(self) -> str:
        return running_dtype(self.shape, "auto")

    def _attention_share(self) -> float:
        """By the K and V that a card holds. (Query heads are divided further where KV heads are repeated.)"""
        return self._kv_width(self.cards) / self._kv_width(self.measured_cards)

    def _heads_share(self) -> float:
        widths = [
            self.shape.num_heads * self.shape.head_dim / cards + self._kv_width(cards)
            for cards in (self.cards, self.measured_cards)
        ]
        return widths[0] / widths[1]

    def _kv_width(self, cards: int) -> int:
        return kv_bytes(self.shape, self._dtype, "auto", cards).width


def _shrunk(rows: pd.DataFrame, share: float, launch_us: float) -> pd.DataFrame:
    return rows.assign(time_us=launch_us + share * (rows["time_us"] - launch_us))
