"""Prompts that go on where an earlier one left off, a while later: conversations seen from outside.

`BlockTree` makes prefixes popular; here each prefix is taken up again at the distance that was observed, so that a
small cache finds as much as it did in the trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from servetwin.workloads.checks import check_between, check_count
from servetwin.workloads.lengths import IntArray
from servetwin.workloads.prompts import Columns
from servetwin.workloads.spec import WorkloadError

REACH = 128
"""How many requests beside the one at the drawn distance are looked at for one that is long enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What prompts up to some length share with earlier ones, beyond the trunk."""

    up_to_blocks: int | None
    """Whole blocks beyond the trunk of the longest prompts it holds for; None: of any length."""
    continuing: float
    """Share of prompts that go on from an earlier one, of those that come late enough for the drawn distance."""
    seen_share: tuple[float, ...]
    """How much of a prompt's whole blocks an earlier one had; drawn together with `requests_back`."""
    requests_back: tuple[int, ...]
    """How many requests ago the last of these blocks was used, 1 or more."""

    def __post_init__(self) -> None:
        if self.up_to_blocks is not None:
            check_count("up_to_blocks", self.up_to_blocks)
        check_between("continuing", self.continuing, 0, 1)
        if len(self.seen_share) != len(self.requests_back) or (self.continuing and not self.seen_share):
            raise WorkloadError(
                f"requests_back: must be as many as seen_share ({len(self.seen_share)}), at least one where prompts "
                f"continue; got {len(self.requests_back)}"
            )
        for share, back in zip(self.seen_share, self.requests_back, strict=True):
            check_between("seen_share", share, 0, 1)
            check_count("requests_back", back)


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuations:
    """Each prompt is fresh beyond the trunk, or begins as one some requests ago did and is fresh from there on.

    A part of a block at the end of a prompt is always fresh. A prompt of t tokens, its input, has
    ceil(t/block_tokens) ids. A longer draw begins with a shorter one.
    """

    by_length: tuple[Continuation, ...]
    """By rising `up_to_blocks`; the last one without a limit."""
    trunk_blocks: int = 0
    """Leading blocks that every prompt has in common, as far as it is long enough."""
    block_tokens: int = 512

    def __post_init__(self) -> None:
        check_count("trunk_blocks", self.trunk_blocks, at_least=0)
        check_count("block_tokens", self.block_tokens)
        limits = [c.up_to_blocks for c in self.by_length]
        inner = [limit for limit in limits[:-1] if limit is not None]
        if (
            not limits
            or limits[-1] is not None
            or len(inner) < len(limits) - 1
            or inner != sorted(set(inner))
        ):
            raise WorkloadError(f"by_length: up_to_blocks must rise and end with null, are {limits}")

    def attach(self, input_tokens: IntArray, rng: np.random.Generator) -> Columns:
        """Columns of requests with these input tokens, shape [n]."""
        whole, part = np.divmod(input_tokens, self.block_tokens)
        prompts = _History(self).prompts(whole, part > 0, rng.random((len(input_tokens), 2)))
        return {
            "prompt_tokens": input_tokens,
            "prefix_ids": [*prompts],
            "prefix_block_tokens": np.full(len(input_tokens), self.block_tokens),
        }


class _History:
    """The prompts so far, beyond the trunk, and when each block was used last."""

    def __init__(self, model: Continuations) -> None:
        self._model = model
        self._next_id = model.trunk_blocks
        self._tails: list[list[int]] = []
        self._used_by: dict[int, int] = {}
        """Id -> the last request that has it."""

    def prompts(
        self, whole: IntArray, has_part: Sequence[bool] | np.ndarray, draws: np.ndarray
    ) -> Iterator[list[int]]:
        trunk = self._model.trunk_blocks
        for blocks, part, (whether, which) in zip(whole.tolist(), has_part, draws.tolist(), strict=True):
            tail = self._tail(max(blocks - trunk, 0), whether, which)
            self._used_by.update(dict.fromkeys(tail, len(self._tails)))
            self._tails.append(tail)
            yield [*range(min(blocks, trunk)), *tail, *(self._fresh(1) if part else ())]

    def _tail(self, blocks: int, whether: float, which: float) -> list[int]:
        """The whole blocks after the trunk."""
        if not blocks:
            return []
        model = self._of_length(blocks)
        seen: list[int] = []
        if whether < model.continuing:
            place = int(which * len(model.seen_share))
            back, wanted = model.requests_back[place], max(1, round(model.seen_share[place] * blocks))
            if back <= len(self._tails):
                seen = self._tails[self._continued(len(self._tails) - back, wanted)][:wanted]
        return seen + [*self._fresh(blocks - len(seen))]

    def _of_length(self, blocks: int) -> Continuation:
        return next(c for c in self._model.by_length if c.up_to_blocks is None or blocks <= c.up_to_blocks)

    def _continued(self, place: int, wanted: int) -> int:
        """The request nearest to `place` whose block so far on nobody has used since; else the longest one there."""
        for distance in range(REACH):
            for near in (place - distance, place + distance):
                if 0 <= near < len(self._tails) and self._ends_at(near, wanted):
                    return near
        around = range(max(0, place - REACH), min(len(self._tails), place + REACH))
        return max(around, key=lambda near: len(self._tails[near]))

    def _ends_at(self, request: int, wanted: int) -> bool:
        tail = self._tails[request]
        return len(tail) >= wanted and self._used_by[tail[wanted - 1]] == request

    def _fresh(self, blocks: int) -> range:
        first = self._next_id
        self._next_id += blocks
        return range(first, self._next_id)
