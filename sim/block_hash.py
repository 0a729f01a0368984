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
NOT_TOKENS = b"\xff" * 8
"""Begins every content that is not made of token ids: no token id looks like this."""
_NO_PARENT = b"\0" * _DIGEST_BYTES


class Prompt(Protocol):
    """A prompt that need not exist token by token."""

    num_tokens: int

    def token_ids(self) -> list[int]:
        """All tokens of the prompt; the same on every call."""
        ...

    def content(self, start: int, stop: int) -> bytes | None:
        """What identifies tokens [start, stop): equal bytes, equal tokens. None: nobody else can have them."""
        ...


def token_content(token_ids: Sequence[int]) -> bytes:
    """The identity of a run of explicit tokens: 8 bytes each, so that runs join without a seam."""
    return array("Q", token_ids).tobytes()


class BlockHashes:
    """The block hashes of one request, made on demand as its blocks fill up."""

    __slots__ = ("_block_size", "_hashes", "_output", "_private", "_prompt", "_request_id")

    def __init__(self, request_id: str, prompt: Prompt, output_token_ids: list[int], block_size: int) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._output = output_token_ids
        self._block_size = block_size
        self._hashes: list[BlockHash] = []
        self._private = False

    def upto(self, num_blocks: int) -> list[BlockHash]:
        """The hashes of at least the first `num_blocks` blocks, all of which must be full of known tokens."""
        while len(self._hashes) < num_blocks:
            self._hashes.append(self._next())
        return self._hashes

    def _next(self) -> BlockHash:
        index = len(self._hashes)
        content = None if self._private else self._content(index)
        if content is None:
            # Everything after private content is private as well: the chain contains it.
            self._private = True
            return (self._request_id, index)
        parent = self._hashes[-1] if index else _NO_PARENT
        assert isinstance(parent, bytes)
        return blake2b(parent + content, digest_size=_DIGEST_BYTES).digest()

    def _content(self, index: int) -> bytes | None:
        start, stop = index * self._block_size, (index + 1) * self._block_size
        in_prompt = self._prompt.num_tokens
        if stop <= in_prompt:
            return self._prompt.content(start, stop)
        outputs = token_content(self._output[max(start - in_prompt, 0) : stop - in_prompt])
        if start >= in_prompt:
            return outputs
        head = self._prompt.content(start, in_prompt)
        return None if head is None else head + outputs
