"""Identity of KV blocks: a chain of hashes over a request's full blocks (vLLM `hash_block_tokens`).

H_i = hash(H_{i-1}, content of block i). Equal hashes mean equal tokens from the start of the sequence up to the
end of the block. A sequence whose content cannot be shared with anybody from some block on (a prompt known by
its length only) gets private keys there instead: exact, and free of hashing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

BlockHash = bytes | tuple[str, int]
"""A digest of the chain, or (request id, block index) for private content."""

_DIGEST_BYTES = 16
MANY_HASHES = 100_000
"""Of named runs, that are worth remembering (some 10 MB)."""
NOT_TOKENS = b"\xff" * 4
"""Stands before and behind names in a content: no token id is as large as that."""
_NO_PARENT = b"\0" * _DIGEST_BYTES


class Prompt(Protocol):
    """A prompt that need not exist token by token."""

    num_tokens: int

    def named_runs(self) -> tuple[Sequence[int], int]:
        """Names of its leading runs of tokens, all whole, and the tokens of each: equal names, equal content."""
        ...

    def token_ids(self) -> list[int]:
        """All tokens of the prompt; the same on every call."""
        ...

    def content(self, start: int, stop: int) -> bytes | None:
        """What identifies tokens [start, stop): equal bytes, equal tokens. None: nobody else can have them."""
        ...


TOKEN_BYTES = 4
"""Of one token in a content."""


def token_content(token_ids: Sequence[int]) -> bytes:
    """The identity of a run of explicit tokens: as many bytes for each, so that runs join without a seam."""
    return array("I", token_ids).tobytes()


def named_content(names: Sequence[str]) -> bytes:
    """The identity of runs of tokens that are known by name only."""
    return NOT_TOKENS + ",".join(names).encode() + NOT_TOKENS if names else b""


class TokenPrompt:
    """A prompt given by its tokens."""

    __slots__ = ("_content", "_ids", "num_tokens")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = token_ids
        self._content = b""
        self.num_tokens = len(token_ids)

    def named_runs(self) -> tuple[Sequence[int], int]:
        return (), 0

    def token_ids(self) -> list[int]:
        return list(self._ids)

    def content(self, start: int, stop: int) -> bytes:
        if not self._content:
            # All at once: block after block is asked for.
            self._content = token_content(self._ids)
        return self._content[start * TOKEN_BYTES : stop * TOKEN_BYTES]


def _salted_root(cache_salt: str) -> bytes:
    """Where the chains of all requests with this salt begin; its kind is part of it, so no other key can meet it."""
    return blake2b(cache_salt.encode(), digest_size=_DIGEST_BYTES, person=b"cache_salt").digest()


class KnownRuns:
    """Hashes of the blocks of named runs of tokens, by what stands in front of them: made once for all who share them.

    It forgets all of them now and then: not many more than `MANY_HASHES` are kept.
    """

    def __init__(self) -> None:
        self._hashes: dict[tuple[BlockHash, int, int], list[BlockHash]] = {}
        self.num_hashes = 0

    def get(self, parent: BlockHash, name: int, run_tokens: int) -> list[BlockHash] | None:
        """`parent`: the hash of the block in front."""
        return self._hashes.get((parent, name, run_tokens))

    def add(self, parent: BlockHash, name: int, run_tokens: int, hashes: list[BlockHash]) -> None:
        if self.num_hashes >= MANY_HASHES:
            self._hashes.clear()
            self.num_hashes = 0
        self._hashes[parent, name, run_tokens] = hashes
        self.num_hashes += len(hashes)


class BlockHashes:
    """The block hashes of one request, made on demand as its blocks fill up."""

    __slots__ = ("_hashes", "_output", "_parent", "_prompt", "_request_id", "block_size", "private")

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        output_token_ids: list[int],
        block_size: int,
        cache_salt: str | None = None,
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._output = output_token_ids
        self.block_size = block_size
        self._hashes: list[BlockHash] = []
        self.private = False
        """From the next block on the content is nobody else's."""
        # Requests with different salts share nothing: their chains begin differently.
        self._parent: BlockHash = _NO_PARENT if cache_salt is None else _salted_root(cache_salt)

    @property
    def known(self) -> Sequence[BlockHash]:
        """Hashes made so far."""
        return self._hashes

    def prepare_runs(self, known: KnownRuns) -> None:
        """Makes those of the whole runs that the prompt begins with, as far as they are not `known`."""
        names, run_tokens = self._prompt.named_runs()
        if self._hashes or not names or run_tokens % self.block_size:
            return
        parent: BlockHash = self._parent
        for name in names:
            hashes = known.get(parent, name, run_tokens)
            if hashes is None:
                begun = len(self._hashes)
                self.prepare(begun + run_tokens // self.block_size)
                hashes = self._hashes[begun:]
                known.add(parent, name, run_tokens, hashes)
            else:
                self._hashes += hashes
                self._parent = hashes[-1]
            parent = hashes[-1]

    def prepare(self, num_blocks: int) -> None:
        """Makes the hashes of the first `num_blocks` blocks, up to the first private one."""
        hashes, size, in_prompt = self._hashes, self.block_size, self._prompt.num_tokens
        for start in range(len(hashes) * size, num_blocks * size, size):
            content: bytes | None
            if start >= in_prompt:
                content = token_content(self._output[start - in_prompt : start + size - in_prompt])
            else:
                content = self._prompt_content(start, start + size, in_prompt)
            if content is None:
                self.private = True
                return
            parent = self._parent
            assert isinstance(parent, bytes), "nothing private stands in front of what others share"
            self._parent = blake2b(parent + content, digest_size=_DIGEST_BYTES).digest()
            hashes.append(self._parent)

    def prepare_prompt(self) -> None:
        """Makes those of the prompt's full blocks, up to the first private one, which may be what follows them."""
        size, in_prompt = self.block_size, self._prompt.num_tokens
        self.prepare(in_prompt // size)
        rest = len(self._hashes) * size
        if not self.private and rest < in_prompt:
            self.private = self._prompt.content(rest, in_prompt) is None

    def upto(self, num_blocks: int) -> list[BlockHash]:
        """The hashes of at least the first `num_blocks` blocks, all of which must be full of known tokens."""
        hashes = self._hashes
        if len(hashes) < num_blocks and not self.private:
            self.prepare(num_blocks)
        while len(hashes) < num_blocks:
            hashes.append(self._private_hash(len(hashes)))
        return hashes

    def of(self, place: int) -> BlockHash:
        """The hash of one block, which must be full of known tokens."""
        if place < len(self._hashes):
            return self._hashes[place]
        return self._private_hash(place) if self.private else self.upto(place + 1)[place]

    def _private_hash(self, place: int) -> BlockHash:
        """Everything after private content is private as well: its chain contains that."""
        return self._request_id, place

    def _prompt_content(self, start: int, stop: int, in_prompt: int) -> bytes | None:
        """The content of a block that begins in the prompt."""
        if stop <= in_prompt:
            return self._prompt.content(start, stop)
        head = self._prompt.content(start, in_prompt)
        return None if head is None else head + token_content(self._output[: stop - in_prompt])
