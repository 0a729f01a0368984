"""Prompts as ids of blocks of any size: equal ids where the tokens up to there are known to be equal.

A trace may say what its prompts share in ids of blocks of another size, as tokens, or as a session's context. Each
prompt is taken as a row of pieces of streams, which are numbered; a new block is named by the pieces it is made of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.spec import RequestSpec

Pieces = NDArray[np.int64]
"""Shape [pieces, 3]: a stream of tokens, and from where to where in it."""


@dataclass
class PromptBlocks:
    """Names the blocks of prompts, asked for in order of arrival. Ids count from 0 on, as they are first needed.

    A turn begins with its context where the turn before is known, else with its prefix ids, as in a simulated run.
    """

    block_tokens: int
    _ids: defaultdict[Hashable, int] = field(default_factory=lambda: defaultdict(count().__next__))
    """Content of a block -> its id."""
    _streams: dict[int, defaultdict[int, int]] = field(default_factory=dict)
    """Tokens of a block of the trace -> its id -> its number as a stream."""
    _turn_before: dict[str, Pieces] = field(default_factory=dict)
    """Session -> its last prompt and answer."""
    _new_streams: count[int] = field(default_factory=count)

    def ids(self, spec: RequestSpec) -> list[int]:
        """One id for each block that the prompt begins; what nothing is known of is shared with no other prompt."""
        if spec.prompt_token_ids is not None:
            pieces = self._new_stream(0, spec.prompt_tokens)
            keys: Iterable[Hashable] = self._token_blocks(spec.prompt_token_ids)
        else:
            pieces = self._pieces(spec)
            keys = _blocks(pieces, self.block_tokens)
        if spec.session_id is not None:
            answer = self._new_stream(0, spec.output_tokens)
            self._turn_before[spec.session_id] = np.concatenate((pieces, answer))
        if spec.cache_salt is not None:
            keys = ((spec.cache_salt, key) for key in keys)
        return [*map(self._ids.__getitem__, keys)]

    def _pieces(self, spec: RequestSpec) -> Pieces:
        before = self._turn_before.get(spec.session_id) if spec.session_id is not None else None
        if before is None or spec.context_tokens is None:
            pieces = self._pieces_of_ids(spec)
        else:
            pieces = _first_tokens(before, spec.context_tokens)
        known = int(_lengths(pieces).sum())
        if known == spec.prompt_tokens:
            return pieces
        return np.concatenate((pieces, self._new_stream(known, spec.prompt_tokens)))

    def _pieces_of_ids(self, spec: RequestSpec) -> Pieces:
        block, ids = spec.prefix_block_tokens, spec.prefix_ids
        if ids is None or block is None:
            return np.empty((0, 3), dtype=np.int64)
        streams = self._streams.setdefault(block, defaultdict(self._new_streams.__next__))
        pieces = np.zeros((len(ids), 3), dtype=np.int64)
        pieces[:, 0] = [streams[id_] for id_ in ids]
        pieces[:, 2] = np.minimum(block, spec.prompt_tokens - block * np.arange(len(ids)))
        return pieces

    def _token_blocks(self, tokens: tuple[int, ...]) -> Iterator[Hashable]:
        # Behind a word, so that no row of tokens is taken for a row of pieces.
        for start in range(0, len(tokens), self.block_tokens):
            yield "tokens", tokens[start : start + self.block_tokens]

    def _new_stream(self, start: int, stop: int) -> Pieces:
        return np.array([(next(self._new_streams), start, stop)])


def _blocks(pieces: Pieces, block_tokens: int) -> Iterator[bytes]:
    """What each block of `block_tokens` tokens, the last one perhaps shorter, is made of.

    Packed, for there may be millions of them.
    """
    ends = _lengths(pieces).cumsum()
    edges = np.append(np.arange(block_tokens, ends[-1], block_tokens), ends[-1])
    cuts = np.sort(np.concatenate((ends, edges)))
    cuts = cuts[np.diff(cuts, prepend=0) > 0]
    of_piece = np.searchsorted(ends, cuts)
    cut = pieces[of_piece]
    cut[:, 2] -= ends[of_piece] - cuts
    cut[:, 1] = cut[:, 2] - np.diff(cuts, prepend=0)
    packed, width = cut.tobytes(), cut.itemsize * cut.shape[1]
    bounds = (np.append(0, np.searchsorted(cuts, edges) + 1) * width).tolist()
    return (packed[start:stop] for start, stop in pairwise(bounds))


def _first_tokens(pieces: Pieces, num_tokens: int) -> Pieces:
    """Those of the first `num_tokens` tokens, which may be more than there are."""
    beyond = np.maximum(_lengths(pieces).cumsum() - num_tokens, 0)
    first = pieces.copy()
    first[:, 2] -= beyond
    return first[_lengths(first) > 0]


def _lengths(pieces: Pieces) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = pieces[:, 2] - pieces[:, 1]
    return lengths
