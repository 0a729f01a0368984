"""Prompts of sessions: what a turn shares with the turn before, known by length only, piece by piece.

A prompt is a row of pieces: parts of endless streams of tokens that have names, and explicit tokens (the answers).
The next turn begins with the same pieces, cut where its context ends, so blocks that both have hash alike. A piece of
a stream is named in a block's content as its stream and its place there; explicit tokens stand there as they are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from servetwin.sim.block_hash import named_content, token_content


class Stream(NamedTuple):
    """An endless sequence of tokens."""

    name: str
    """Equal names, equal tokens; without a comma or colon."""
    key: int
    """What its tokens are derived from."""


StreamTokens = Callable[[int, int, int], list[int]]
"""(key, start, stop) -> tokens [start, stop) of that stream."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tokens: part of a stream, or the tokens themselves."""

    num_tokens: int
    source: Stream | Sequence[int]
    start: int = 0
    """Where it begins in its source."""

    def part(self, start: int, stop: int) -> Piece:
        """Tokens [start, stop) of it."""
        return Piece(stop - start, self.source, self.start + start)


class PiecesPrompt:
    """A prompt made of pieces; all of it can be shared with later turns of its session."""

    __slots__ = ("_ends", "_tokens_of", "num_tokens", "pieces")

    def __init__(self, pieces: Iterable[Piece], tokens_of: StreamTokens) -> None:
        self.pieces = tuple(piece for piece in pieces if piece.num_tokens)
        self._ends = [*accumulate(piece.num_tokens for piece in self.pieces)]
        self._tokens_of = tokens_of
        self.num_tokens = self._ends[-1]

    def named_runs(self) -> tuple[Sequence[int], int]:
        """None that are worth remembering: every turn has its own."""
        return (), 0

    def token_ids(self) -> list[int]:
        ids: list[int] = []
        for piece in self.pieces:
            if isinstance(piece.source, Stream):
                ids += self._tokens_of(piece.source.key, piece.start, piece.start + piece.num_tokens)
            else:
                ids += piece.source[piece.start : piece.start + piece.num_tokens]
        return ids

    def content(self, start: int, stop: int) -> bytes:
        content, names = b"", []
        for piece in self._between(start, stop):
            end = piece.start + piece.num_tokens
            if isinstance(piece.source, Stream):
                names.append(f"{piece.source.name}:{piece.start}-{end}")
                continue
            content += named_content(names) + token_content(piece.source[piece.start : end])
            names = []
        return content + named_content(names)

    def cut(self, num_tokens: int) -> Iterator[Piece]:
        """The pieces of its first tokens."""
        return self._between(0, min(num_tokens, self.num_tokens))

    def _between(self, start: int, stop: int) -> Iterator[Piece]:
        place = bisect_right(self._ends, start)
        while start < stop:
            piece = self.pieces[place]
            begin = self._ends[place] - piece.num_tokens
            end = min(stop, self._ends[place])
            yield piece.part(start - begin, end - begin)
            start, place = end, place + 1
