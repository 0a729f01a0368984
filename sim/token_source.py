"""Where token ids come from when no model produces them, and what a prompt known by length only consists of.

Prompt ids: from the trace; else derived from its prefix ids (an equal id is an equal run of tokens, for every
block size); else unique to the request. Output ids: from the trace; else a hash of (seed, request, index).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.block_hash import Prompt, TokenPrompt, named_content
from servetwin.sim.session_prompts import Piece, PiecesPrompt, Stream
from servetwin.workloads.spec import RequestSpec

_U64 = np.uint64


def _mix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: a bijection of 64-bit words whose outputs look random."""
    with np.errstate(over="ignore"):
        keys = (keys ^ (keys >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        keys = (keys ^ (keys >> _U64(27))) * _U64(0x94D049BB133111EB)
    return keys ^ (keys >> _U64(31))


def _run_of_tokens(key: int, start: int, stop: int, vocab_size: int) -> list[int]:
    """Tokens [start, stop) of the endless random-looking stream that `key` names."""
    with np.errstate(over="ignore"):
        places = np.arange(start, stop, dtype=np.uint64) * _U64(0x9E3779B97F4A7C15)
        words = _mix(places + _mix(np.array([key & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)))
    ids: list[int] = (words % _U64(vocab_size)).tolist()
    return ids


def _key(kind: str, seed: int, name: object) -> int:
    text = f"{kind}|{seed}|{name}".encode()
    return crc32(text) << 32 | crc32(text[::-1])


class LengthPrompt:
    """A prompt given by its length and, for its leading part, by the ids of runs of tokens it shares with others."""

    __slots__ = ("_seed", "_shared", "_spec", "_vocab_size", "num_tokens")

    def __init__(self, spec: RequestSpec, vocab_size: int, seed: int) -> None:
        self.num_tokens = spec.prompt_tokens
        self._spec, self._vocab_size, self._seed = spec, vocab_size, seed
        self._shared = 0
        if spec.prefix_ids:
            self._shared = min(len(spec.prefix_ids) * (spec.prefix_block_tokens or 1), spec.prompt_tokens)

    def named_runs(self) -> tuple[Sequence[int], int]:
        names, size = self._spec.prefix_ids or (), self._spec.prefix_block_tokens or 1
        return names[: self.num_tokens // size], size

    def token_ids(self) -> list[int]:
        ids: list[int] = []
        run = self._spec.prefix_block_tokens or 1
        for i, prefix_id in enumerate(self._spec.prefix_ids or ()):
            length = min(run, self._shared - i * run)
            ids += _run_of_tokens(_key("prefix", self._seed, prefix_id), 0, length, self._vocab_size)
        own = _key("prompt", self._seed, self._spec.request_id)
        return ids + _run_of_tokens(own, self._shared, self.num_tokens, self._vocab_size)

    def content(self, start: int, stop: int) -> bytes | None:
        if stop > self._shared:
            return None
        pieces = []
        names, size = self._spec.prefix_ids or (), self._spec.prefix_block_tokens or 1
        while start < stop:
            run, offset = divmod(start, size)
            end = min(stop, (run + 1) * size)
            pieces.append(f"{names[run]}:{offset}-{end - run * size}")
            start = end
        return named_content(pieces)


def _shared_pieces(spec: RequestSpec, seed: int) -> Iterator[Piece]:
    """The part of a prompt that its prefix ids name."""
    run = spec.prefix_block_tokens or 1
    for i, prefix_id in enumerate(spec.prefix_ids or ()):
        length = min(run, spec.prompt_tokens - i * run)
        yield Piece(length, Stream(str(prefix_id), _key("prefix", seed, prefix_id)))


@dataclass(slots=True)
class _Context:
    """The last turn of a session, which the next one goes on from."""

    spec: RequestSpec
    prompt: PiecesPrompt
    answer: Sequence[int] | None = None
    """None: it has not ended."""


class TokenSource:
    """Token ids for the requests of one run.

    `vocab_size` bounds every derived id; `seed` moves all of them. A turn of a session begins with as many tokens of
    the turn before, its prompt and then its answer, as its `context_tokens` say.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._recorded: dict[str, tuple[int, ...]] = {}
        self._contexts: dict[str, _Context] = {}

    def prompt(self, spec: RequestSpec) -> Prompt:
        """What the request asks. The turns of a session must be asked for in their order."""
        if spec.prompt_token_ids is not None:
            return TokenPrompt(spec.prompt_token_ids)
        if spec.session_id is None:
            return LengthPrompt(spec, self._vocab_size, self._seed)
        kept = self._kept_pieces(spec, self._contexts.get(spec.session_id))
        known = sum(piece.num_tokens for piece in kept)
        name = blake2b(spec.request_id.encode(), digest_size=16).hexdigest()
        own = Stream(f"prompt {name}", _key("prompt", self._seed, spec.request_id))
        prompt = PiecesPrompt([*kept, Piece(spec.prompt_tokens - known, own, known)], self._tokens_of)
        self._contexts[spec.session_id] = _Context(spec, prompt)
        return prompt

    def add(self, spec: RequestSpec) -> None:
        """Remembers the recorded answer of a request, if it has one."""
        if spec.output_token_ids is not None:
            self._recorded[spec.request_id] = spec.output_token_ids

    def ended(self, spec: RequestSpec, output_token_ids: Sequence[int]) -> None:
        """Forgets a request that has got this answer, but for what the next turn of its session may begin with."""
        self._recorded.pop(spec.request_id, None)
        context = self._contexts.get(spec.session_id) if spec.session_id is not None else None
        if context is not None and context.spec.request_id == spec.request_id:
            context.answer = array("I", output_token_ids)

    def output_id(self, request_id: str, index: int) -> int:
        """Output token `index` (0 = first) of a request."""
        recorded = self._recorded.get(request_id, ())
        if index < len(recorded):
            return recorded[index]
        return crc32(f"{self._seed}|{request_id}|{index}".encode()) % self._vocab_size

    def _kept_pieces(self, spec: RequestSpec, before: _Context | None) -> list[Piece]:
        """What the prompt shares with others: with the turn before, else by its prefix ids."""
        if before is None or spec.context_tokens is None:
            return [*_shared_pieces(spec, self._seed)]
        of_answer = max(spec.context_tokens - before.prompt.num_tokens, 0)
        answer = before.answer
        if answer is None:
            # Sent before the turn before has ended (recorded times): what that will be answered, if a model does not.
            answer = [self.output_id(before.spec.request_id, i) for i in range(before.spec.output_tokens)]
        return [*before.prompt.cut(spec.context_tokens), Piece(min(of_answer, len(answer)), answer)]

    def _tokens_of(self, key: int, start: int, stop: int) -> list[int]:
        return _run_of_tokens(key, start, stop, self._vocab_size)
