"""Who holds which KV blocks: block tables, prefix hits, allocation. None is the only answer to "no room".

Rules of `vllm/v1/core/kv_cache_manager.py` and `single_type_kv_cache_manager.py` 0.22.0 for one full-attention
group.
"""

from __future__ import annotations

from collections.abc import Sequence

from servetwin.sim.block_pool import BlockPool
from servetwin.sim.request import Request


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


class KVCacheManager:
    """Block tables of the running requests over one pool."""

    def __init__(
        self,
        *,
        block_size: int,
        num_gpu_blocks: int,
        max_model_len: int,
        enable_caching: bool,
        journal: bool = False,
    ) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.pool = BlockPool(num_gpu_blocks, journal=journal)
        self._max_model_len = max_model_len
        self._tables: dict[str, list[int]] = {}
        self._num_hashed: dict[str, int] = {}
        """Leading blocks of each table that are in the map already."""

    def block_ids(self, request: Request) -> list[int]:
        """A copy of the request's block table."""
        return list(self._tables.get(request.request_id, ()))

    def num_blocks(self, request: Request) -> int:
        return len(self._tables.get(request.request_id, ()))

    def get_computed_blocks(self, request: Request) -> list[int]:
        """The longest prefix hit of a waiting request, in whole blocks.

        The last known token is never part of it: a step must compute at least one token to have logits.
        """
        if not self.enable_caching:
            return []
        most = (request.num_tokens - 1) // self.block_size
        hits: list[int] = []
        for i in range(most):
            block = self.pool.find(request.block_hashes(i + 1)[i])
            if block is None:
                break
            hits.append(block)
        return hits

    def full_sequence_fits(self, request: Request, hits: Sequence[int]) -> bool:
        """The admission gate: is there room for everything the request is known to need (prompt and outputs)?"""
        whole = min(request.num_tokens, self._max_model_len)
        return self._blocks_needed(request, whole, hits) <= self.pool.num_free

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hits: Sequence[int] = ()
    ) -> list[int] | None:
        """Room for the next `num_new_tokens` tokens after the computed ones and the hit blocks.

        Returns the block ids appended now (hits not included), or None, with nothing changed, when they are not
        free. Hits are taken hold of before fresh blocks, so a request cannot evict its own hits. Blocks that the
        step will fill are findable from now on, before the model has run.
        """
        computed = min(request.num_computed_tokens + len(hits) * self.block_size, self._max_model_len)
        slots = min(computed + num_new_tokens, self._max_model_len)
        table = self._tables.get(request.request_id, [])
        new_blocks: list[int] = []
        if hits or slots > len(table) * self.block_size:
            if self._blocks_needed(request, slots, hits) > self.pool.num_free:
                return None
            table, new_blocks = self._extend(request, slots, hits)
        if self.enable_caching:
            self._hash_full_blocks(request, min(computed + num_new_tokens, request.num_tokens), table)
        return new_blocks

    def _extend(self, request: Request, slots: int, hits: Sequence[int]) -> tuple[list[int], list[int]]:
        """Adds the hits and as many fresh blocks as `slots` tokens need; returns (table, fresh blocks)."""
        table = self._tables.setdefault(request.request_id, [])
        if hits:
            self.pool.touch(hits, request.request_id)
            table += hits
            self._num_hashed[request.request_id] = len(hits)
        fresh = self.pool.take(cdiv(slots, self.block_size) - len(table), request.request_id)
        table += fresh
        return table, fresh

    def free(self, request: Request) -> None:
        """Gives the table back, last block first, so that the end of a chain is evicted before its beginning."""
        table = self._tables.pop(request.request_id, [])
        self._num_hashed.pop(request.request_id, None)
        self.pool.release(reversed(table), request.request_id)

    def num_common_prefix_blocks(self, request: Request) -> int:
        """Leading blocks of a running request that every request with a table shares."""
        if not self.enable_caching:
            return 0
        holders = len(self._tables)
        count = 0
        for block in self._tables.get(request.request_id, ()):
            if self.pool.references(block) != holders:
                break
            count += 1
        return count

    def _blocks_needed(self, request: Request, num_tokens: int, hits: Sequence[int]) -> int:
        """Free blocks it takes to hold `num_tokens` tokens; hit blocks that are free leave the queue and count."""
        held = len(self._tables.get(request.request_id, ()))
        fresh = max(cdiv(num_tokens, self.block_size) - held - len(hits), 0)
        return fresh + sum(self.pool.references(b) == 0 for b in hits)

    def _hash_full_blocks(self, request: Request, num_tokens: int, table: list[int]) -> None:
        full = num_tokens // self.block_size
        done = self._num_hashed.get(request.request_id, 0)
        if full > done:
            hashes = request.block_hashes(full)
            for i in range(done, full):
                self.pool.insert(table[i], hashes[i])
            self._num_hashed[request.request_id] = full

    def check_integrity(self) -> None:
        """Raises AssertionError when tables and reference counts disagree."""
        self.pool.check_integrity()
        references = [0] * self.pool.num_gpu_blocks
        for table in self._tables.values():
            for block in table:
                references[block] += 1
        for block, count in enumerate(references):
            held = self.pool.references(block)
            assert held == count, f"block {block}: {held} references, in {count} tables"
