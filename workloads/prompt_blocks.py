"""Prompts as ids of blocks of any size: equal ids where the tokens up to there are known to be equal.

A trace may say what its prompts share in ids of blocks of another size, as tokens, or as a session's context. Each
prompt is taken as a row of pieces of streams, which are numbered; a new block is named by the pieces it is made of.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from servetwin.workloads.spec import RequestSpec

Piece = tuple[int, int, int]
"""A stream of tokens, and from where to where in it."""
PLACE_BITS = 30
"""Of a place in a stream: prompts have at most 10^9 tokens."""


@dataclass
class PromptBlocks:
    """Names the blocks of prompts, asked for in order of arrival. Ids count from 0 on, as they are first needed.

    A turn begins with its context where the turn before is known, else with its prefix ids, as in a simulated run.
    """

    block_tokens: int
    _ids: dict[Hashable, int] = field(default_factory=dict)
    """Content of a block, as `_key` has it -> its id."""
    _streams: dict[tuple[int, int], int] = field(default_factory=dict)
    """A block of the trace (tokens, id) -> its number as a stream."""
    _turn_before: dict[str, list[Piece]] = field(default_factory=dict)
    """Session -> pieces of its last prompt and answer."""
    _num_streams: int = 0

    def ids(self, spec: RequestSpec) -> list[int]:
        """One id for each block that the prompt begins; what nothing is known of is shared with no other prompt."""
        if spec.prompt_token_ids is not None:
            pieces = [(self._new_stream(), 0, spec.prompt_tokens)]
            keys: Iterator[Hashable] = self._token_blocks(spec.prompt_token_ids)
        else:
            pieces = self._pieces(spec)
            keys = map(_key, _split(pieces, self.block_tokens))
        if spec.session_id is not None:
            answer = (self._new_stream(), 0, spec.output_tokens)
            self._turn_before[spec.session_id] = [*pieces, answer]
        if spec.cache_salt is not None:
            keys = ((spec.cache_salt, key) for key in keys)
        return [self._ids.setdefault(key, len(self._ids)) for key in keys]

    def _pieces(self, spec: RequestSpec) -> list[Piece]:
        before = self._turn_before.get(spec.session_id) if spec.session_id is not None else None
        if before is None or spec.context_tokens is None:
            pieces = list(self._pieces_of_ids(spec))
        else:
            pieces = next(_split(before, spec.context_tokens), []) if spec.context_tokens else []
        known = sum(stop - start for _, start, stop in pieces)
        if known < spec.prompt_tokens:
            pieces.append((self._new_stream(), known, spec.prompt_tokens))
        return pieces

    def _pieces_of_ids(self, spec: RequestSpec) -> Iterator[Piece]:
        block = spec.prefix_block_tokens
        if spec.prefix_ids is None or block is None:
            return
        for place, id_ in enumerate(spec.prefix_ids):
            stream = self._streams.get((block, id_))
            if stream is None:
                stream = self._streams[block, id_] = self._new_stream()
            yield stream, 0, min(block, spec.prompt_tokens - place * block)

    def _token_blocks(self, tokens: tuple[int, ...]) -> Iterator[Hashable]:
        # Behind a word, so that no row of tokens is taken for a row of pieces.
        for start in range(0, len(tokens), self.block_tokens):
            yield "tokens", tokens[start : start + self.block_tokens]

    def _new_stream(self) -> int:
        self._num_streams += 1
        return self._num_streams


def _key(run: list[Piece]) -> Hashable:
    """What a block is made of, packed: there may be millions of them."""
    packed = [(stream << PLACE_BITS | start) << PLACE_BITS | stop for stream, start, stop in run]
    return packed[0] if len(packed) == 1 else tuple(packed)


def _split(pieces: list[Piece], num_tokens: int) -> Iterator[list[Piece]]:
    """Runs of `num_tokens` tokens, the last one perhaps shorter."""
    run: list[Piece] = []
    room = num_tokens
    for stream, start, stop in pieces:
        while start < stop:
            end = min(stop, start + room)
            run.append((stream, start, end))
            room -= end - start
            start = end
            if not room:
                yield run
                run, room = [], num_tokens
    if run:
        yield run
