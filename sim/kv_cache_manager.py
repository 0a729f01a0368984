"""Who holds which KV blocks: block tables, prefix hits, allocation. None is the only answer to "no room".

Rules of `vllm/v1/core/kv_cache_manager.py` and `single_type_kv_cache_manager.py` 0.22.0 for one full-attention
group. A request carries its own table; this module alone changes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from servetwin.sim.block_hash import KnownRuns
from servetwin.sim.block_pool import BlockPool, Chain, UnsharedBlockPool
from servetwin.sim.request import Request
from servetwin.sim.rules import FreeOrder

_NO_HITS: list[int] = []


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


class KVCacheManager:
    """Block tables of the running requests over one pool.

    `speculative`: running requests may bring drafts. `drops_last_hit`: a prefix hit gives up its last block.
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_gpu_blocks: int,
        max_model_len: int,
        enable_caching: bool,
        speculative: bool = False,
        drops_last_hit: bool = False,
        free_order: FreeOrder = FreeOrder.ALL_AT_THE_BACK,
        journal: bool = False,
    ) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        counts = enable_caching or journal
        self.pool = (
            BlockPool(num_gpu_blocks, journal=journal) if counts else UnsharedBlockPool(num_gpu_blocks)
        )
        self.hides_private = enable_caching and not journal
        """Content that nobody else can have is not entered block by block (`BlockPool.release_own`)."""
        self.known_runs = KnownRuns()
        """Hashes of the prefixes that prompts name."""
        self.num_holders = 0
        """Requests that hold a table."""
        self._max_model_len = max_model_len
        self._speculative = speculative
        self._drops_last_hit = drops_last_hit
        self._free_order = free_order

    def block_ids(self, request: Request) -> list[int]:
        """A copy of the request's block table."""
        return request.block_ids.copy()

    def num_blocks(self, request: Request) -> int:
        return len(request.block_ids)

    # ------------------------------------------------------------ before admission

    def get_computed_blocks(self, request: Request) -> list[int]:
        """The longest prefix hit of a waiting request, in whole blocks.

        The last known token is never part of it: a step must compute at least one token to have logits.
        """
        if not self.enable_caching:
            return _NO_HITS
        most = (request.num_tokens - 1) // self.block_size
        known = request.known_hashes
        hits = self.pool.find_leading(known if len(known) <= most else known[:most])
        if len(hits) == len(known) and request.is_private:
            hits += self.pool.find_own(request.request_id, len(known), most - len(known))
        elif len(hits) == len(known):
            for place in range(len(known), most):
                block = self.pool.find(request.block_hash(place))
                if block is None:
                    break
                hits.append(block)
        if hits and self._drops_last_hit:
            hits.pop()
        return hits

    def blocks_for_all(self, request: Request, hits: Sequence[int]) -> int:
        """Free blocks it takes to hold all that a waiting request is known to need: prompt and outputs."""
        return self._blocks_needed(request, min(request.num_tokens, self._max_model_len), hits)

    def blocks_for(self, request: Request, num_tokens: int, hits: Sequence[int] = ()) -> int:
        """Free blocks it takes to compute so many tokens more, after its computed ones and the hits."""
        computed = request.num_computed_tokens + len(hits) * self.block_size
        return self._blocks_needed(request, min(computed + num_tokens, self._max_model_len), hits)

    # ------------------------------------------------------------ allocation

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hits: Sequence[int] = (),
        *,
        num_lookahead_tokens: int = 0,
    ) -> list[int] | None:
        """Room for the next `num_new_tokens` tokens after the computed ones and the hit blocks, and for drafts.

        Returns the block ids appended now (hits not included), or None, with nothing changed, when they are not
        free. Hits are taken hold of before fresh blocks, so a request cannot evict its own hits. Blocks that the
        step will fill are findable from now on, before the model has run; drafts are never hashed.
        """
        limit, size, table = self._max_model_len, self.block_size, request.block_ids
        computed = request.num_computed_tokens + len(hits) * size
        if computed > limit:
            computed = limit
        filled = computed + num_new_tokens
        slots = filled + num_lookahead_tokens
        if slots > limit:
            slots = limit
        fresh = -(-slots // size) - len(table) - len(hits)
        new_blocks: list[int] = []
        if hits or fresh > 0:
            if (self._blocks_needed(request, slots, hits) if hits else fresh) > self.pool.num_free:
                return None
            new_blocks = self._extend(request, fresh, hits)
        if self.enable_caching:
            self._hash_full_blocks(request, min(filled, request.num_tokens))
        if filled < request.num_tokens:
            request.quiet_until = 0
        else:
            self.note_quiet(request)
        return new_blocks

    def next_slot(self, request: Request) -> list[int] | None:
        """Room for the next token of a plain decode that has come to the end of a block (`allocate_slots`, in short).

        Returns the blocks appended (one or none). None, with nothing changed, when it is no plain decode (any more)
        or no block is free.
        """
        computed, held = request.num_computed_tokens, len(request.block_ids)
        if not request.quiet_until or computed + 1 >= request.length_limit:
            return None
        if computed + 1 > held * self.block_size and not self.pool.num_free:
            return None
        self.grow_decode(request, computed, request.num_tokens)
        self.note_quiet(request)
        return request.block_ids[held:]

    def grow_decode(self, request: Request, num_computed_tokens: int, num_tokens: int) -> None:
        """A block for the next token of a decode if it needs one, and a hash for the block that is full then.

        There is a block; so many of its tokens are computed and known (its own numbers may lag behind).
        """
        filled = num_computed_tokens + 1
        if filled > len(request.block_ids) * self.block_size:
            request.block_ids.append(self.pool.take_one(request.request_id))
        if self.enable_caching:
            place = request.num_hashed_blocks
            if min(filled, num_tokens) >= (place + 1) * self.block_size:
                if place < request.first_private or not self.hides_private:
                    self.pool.insert_one(request.block_ids[place], request.block_hash(place))
                request.num_hashed_blocks = place + 1

    def begin_blocks(self, requests: Sequence[Request]) -> None:
        """One more block for each of these decodes, in this order: without prefix caching, where there are enough."""
        for request, block in zip(requests, self.pool.take(len(requests), ""), strict=True):
            request.block_ids.append(block)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Makes the full blocks of these leading tokens findable (asynchronous scheduling: once they are known)."""
        if self.enable_caching:
            self._hash_full_blocks(request, num_computed_tokens)
            self.note_quiet(request)

    def free(self, request: Request) -> None:
        """Gives the table back, last block first, so that the end of a chain is evicted before its beginning."""
        table, hashed = request.block_ids, request.num_hashed_blocks
        if not table:
            return
        request.block_ids = []
        request.num_hashed_blocks = request.quiet_until = 0
        self.num_holders -= 1
        if self.hides_private and request.first_private < len(table):
            private = Chain(request.request_id, request.first_private, table[request.first_private : hashed])
            if self._free_order is FreeOrder.ALL_AT_THE_BACK:
                self.pool.release_own(table, private)
                return
            self.pool.enter_own(private)
        back = table[::-1]
        if self._free_order is FreeOrder.UNHASHED_IN_FRONT:
            self.pool.release_in_front([b for b in back if self.pool.hash_of(b) is None], request.request_id)
            back = [b for b in back if self.pool.hash_of(b) is not None]
        self.pool.release(back, request.request_id)

    def forget_uncomputed(self, request: Request) -> None:
        """Takes blocks out of the prefix cache that were entered for a step which will not run after all."""
        computed_blocks = request.num_computed_tokens // self.block_size
        for block in request.block_ids[computed_blocks : request.num_hashed_blocks]:
            if self.pool.hash_of(block) is not None:
                self.pool.forget(block)
        request.num_hashed_blocks = min(request.num_hashed_blocks, computed_blocks)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False, with nothing changed, while any request holds a block."""
        if self.pool.num_free < self.pool.num_gpu_blocks - 1:
            return False
        self.pool.forget_all()
        return True

    def num_common_prefix_blocks(self, request: Request) -> int:
        """Leading blocks of a running request that every request with a table shares."""
        if not self.enable_caching:
            return 0
        count = 0
        for block in request.block_ids:
            if self.pool.references(block) != self.num_holders:
                break
            count += 1
        return count

    # ------------------------------------------------------------ inside

    def _extend(self, request: Request, num_fresh: int, hits: Sequence[int]) -> list[int]:
        """Adds the hits and so many fresh blocks; returns the fresh ones."""
        table = request.block_ids
        if not table:
            self.num_holders += 1
        if hits:
            self.pool.touch(hits, request.request_id)
            table += hits
            request.num_hashed_blocks = len(hits)
        fresh = self.pool.take(num_fresh, request.request_id)
        table += fresh
        return fresh

    def _blocks_needed(self, request: Request, num_tokens: int, hits: Sequence[int]) -> int:
        """Free blocks it takes to hold `num_tokens` tokens; hit blocks that are free leave the queue and count."""
        fresh = max(cdiv(num_tokens, self.block_size) - len(request.block_ids) - len(hits), 0)
        return fresh + len(self.pool.free_of(hits)) if hits else fresh

    def _hash_full_blocks(self, request: Request, num_tokens: int) -> None:
        full, done = num_tokens // self.block_size, request.num_hashed_blocks
        if full > done:
            public = min(full, request.first_private) if self.hides_private else full
            if public > done:
                self.pool.insert(request.block_ids[done:public], request.block_hashes(public)[done:public])
            request.num_hashed_blocks = full

    def note_quiet(self, request: Request) -> None:
        """Until when a decode meets neither the end of a block nor a limit, so that nobody need be asked."""
        if self._speculative:
            # What the next step computes depends on its drafts.
            return
        quiet = len(request.block_ids) * self.block_size
        if self.enable_caching:
            quiet = min(quiet, (request.num_hashed_blocks + 1) * self.block_size - 1)
        limit = request.length_limit - 1
        request.quiet_until = quiet if quiet < limit else limit

    def check_integrity(self, holders: Iterable[Request]) -> None:
        """Raises AssertionError when the tables of the `holders` and the pool's reference counts disagree."""
        self.pool.check_integrity()
        tables = [r.block_ids for r in holders if r.block_ids]
        assert len(tables) == self.num_holders, (
            f"{len(tables)} requests hold blocks, counted {self.num_holders}"
        )
        references = [0] * self.pool.num_gpu_blocks
        for table in tables:
            for block in table:
                references[block] += 1
        for block, count in enumerate(references):
            held = self.pool.references(block)
            assert held == count, f"block {block}: {held} references, in {count} tables"
