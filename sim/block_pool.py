"""The pool of KV blocks: one free queue, reference counts, and the map from content to block.

Rules of `vllm/v1/core/block_pool.py` 0.22.0: block 0 is the null block and never handed out; allocation takes
from the front of the free queue, freed blocks go to its back, hashed or not; a hash survives until its block is
taken for something else; equal content may lie in several blocks, of which the oldest is found.
"""

from __future__ import annotations

from collections.abc import Sequence

from servetwin.sim.block_hash import BlockHash
from servetwin.sim.records import BlockChange

_COMPACT_ABOVE = 4096
"""Dead entries at the front of the free list that are worth cutting off."""


class Chain:
    """The private contents of one request, beginning with its block number `first`, in one entry.

    A block has such a content as long as the pool says so.
    """

    __slots__ = ("blocks", "first", "num_valid", "request_id")

    def __init__(self, request_id: str, first: int, blocks: list[int]) -> None:
        self.request_id, self.first, self.blocks = request_id, first, blocks
        self.num_valid = 0

    def hash_of(self, block: int) -> BlockHash:
        return self.request_id, self.first + self.blocks.index(block)

    def block_at(self, place: int) -> int | None:
        """The block number `place` of the request."""
        i = place - self.first
        return self.blocks[i] if 0 <= i < len(self.blocks) else None


class BlockPool:
    """Blocks 1 .. num_gpu_blocks - 1.

    The free queue is a flat list with a head index. A block that is hit while free is not searched for in the
    list: its entry is counted as stale and skipped when it reaches the front (stale entries of a block always lie
    before its valid one, so counting is exact).
    """

    def __init__(self, num_gpu_blocks: int, *, journal: bool = False) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.num_free = num_gpu_blocks - 1
        self.num_cached_free = 0
        """Free blocks whose content can still be hit."""
        self.num_evictions = 0
        """Cached contents dropped since the start."""
        self.journal: list[BlockChange] | None = [] if journal else None
        self._queue = list(range(1, num_gpu_blocks))
        self._head = 0
        self._stale: dict[int, int] = {}
        self._references = [0] * num_gpu_blocks
        self._hash_of: list[BlockHash | Chain | None] = [None] * num_gpu_blocks
        self._chains: dict[str, Chain] = {}
        self._blocks_of: dict[BlockHash, int | dict[int, None]] = {}
        self._counted_at = (-1, -1)

    # ------------------------------------------------------------ questions

    @property
    def num_cached_hashes(self) -> int:
        """Distinct contents that can be hit (private ones of running requests not counted)."""
        return len({*self._blocks_of, *filter(None, map(self.hash_of, range(self.num_gpu_blocks)))})

    def references(self, block: int) -> int:
        return self._references[block]

    def hash_of(self, block: int) -> BlockHash | None:
        content = self._hash_of[block]
        return content.hash_of(block) if isinstance(content, Chain) else content

    def find(self, block_hash: BlockHash) -> int | None:
        """The oldest block with this content. Looking does not change the order of eviction."""
        found = self._blocks_of.get(block_hash)
        if found is None and self._chains and isinstance(block_hash, tuple) and block_hash[0] in self._chains:
            self._enter_each(self._chains[block_hash[0]])
            found = self._blocks_of.get(block_hash)
        if isinstance(found, dict):
            return next(iter(found))
        return found

    def find_leading(self, hashes: Sequence[BlockHash]) -> list[int]:
        """`find` for each of them, up to the first that is not there."""
        blocks: list[int] = []
        get = self._blocks_of.get
        for block_hash in hashes:
            found = get(block_hash)
            if not isinstance(found, int):
                found = self.find(block_hash)
                if found is None:
                    break
            blocks.append(found)
        return blocks

    def find_own(self, request_id: str, first: int, most: int) -> list[int]:
        """`find_leading` for the private contents of one request, so many at most from its block `first` on."""
        blocks: list[int] = []
        chain, get, hash_of = self._chains.get(request_id), self._blocks_of.get, self._hash_of
        for place in range(first, first + most):
            found = get((request_id, place))
            if found is None:
                found = None if chain is None else chain.block_at(place)
                if found is None or hash_of[found] is not chain:
                    break
            elif isinstance(found, dict):
                found = next(iter(found))
            blocks.append(found)
        return blocks

    def free_of(self, blocks: Sequence[int]) -> list[int]:
        """Those of them that nobody holds."""
        references = self._references
        return [block for block in blocks if not references[block]]

    def free_queue(self) -> list[int]:
        """The free blocks, next to be taken first."""
        stale = dict(self._stale)
        blocks = []
        for block in self._queue[self._head :]:
            if stale.get(block):
                stale[block] -= 1
            else:
                blocks.append(block)
        return blocks

    # ------------------------------------------------------------ changes

    def take(self, count: int, request_id: str) -> list[int]:
        """The first `count` free blocks, without content. The caller has checked `num_free`."""
        assert count <= self.num_free, "checked by the KV-cache manager"
        blocks = self._pop_front(count)
        self.num_free -= count
        if self.journal is not None:
            self._note_taken(self.journal, blocks, request_id)
        references, hash_of, evictions = self._references, self._hash_of, 0
        for block in blocks:
            references[block] = 1
            content = hash_of[block]
            if content is None:
                continue
            evictions += 1
            if type(content) is Chain and content.num_valid > 1:
                hash_of[block] = None
                content.num_valid -= 1
            else:
                self._drop_content(block)
        self.num_evictions += evictions
        self.num_cached_free -= evictions
        return blocks

    @property
    def is_in_order(self) -> bool:
        """No block stands in the queue that was hit while it was free: `next_blocks` knows which come next."""
        return not self._stale

    @property
    def contents(self) -> Sequence[object]:
        """Of each block; None without."""
        return self._hash_of

    def num_before(self, blocks: Sequence[int], most: int) -> int:
        """How many blocks, at most so many, can be taken before one of these is; 0 where that is not easily said."""
        if self._stale:
            return 0
        for count, block in enumerate(self.next_blocks(most)):
            if block in blocks:
                return count
        return most

    def hits_after(self, hits: list[int], count: int) -> list[int] | None:
        """What is left of a prefix hit when so many blocks more have been taken; None where that is not easily said."""
        if self._stale:
            return None
        taken = self._queue[self._head : self._head + count]
        for place, block in enumerate(hits):
            if block in taken:
                content = self._hash_of[block]
                # An equal block beside it would be found instead.
                if content is None or isinstance(content, Chain):
                    return hits[:place]
                return hits[:place] if isinstance(self._blocks_of[content], int) else None
        return hits

    def next_blocks(self, most: int) -> list[int]:
        """The free blocks in front, so many or all; they stay free. Only while the queue `is_in_order`."""
        return self._queue[self._head : self._head + most]

    def take_next(self, count: int) -> None:
        """So many of them are taken."""
        self.take(count, "")

    def take_one(self, request_id: str) -> int:
        """The first free block, without content; `take` for one."""
        compacts = self._head > _COMPACT_ABOVE and self._head * 2 > len(self._queue)
        if compacts or self._stale or self.journal is not None:
            return self.take(1, request_id)[0]
        block = self._queue[self._head]
        self._head += 1
        self.num_free -= 1
        self._references[block] = 1
        if self._hash_of[block] is not None:
            self._evict(block)
        return block

    def _evict(self, block: int) -> None:
        """The content of a block that was free is dropped."""
        self._drop_content(block)
        self.num_evictions += 1
        self.num_cached_free -= 1

    def _note_taken(self, journal: list[BlockChange], blocks: list[int], request_id: str) -> None:
        cached = [(b, h) for b in blocks if (h := self.hash_of(b)) is not None]
        journal += [BlockChange(b, "evict", prefix_id=_text(h)) for b, h in cached]
        journal += [BlockChange(b, "take", request_id, references=1) for b in blocks]

    def _keep_others(self, holders: int | dict[int, None], block: int, block_hash: BlockHash) -> None:
        """An equal block beside the one that lost its content is found from now on."""
        assert isinstance(holders, dict), "a content in one block lies in the block that says so"
        del holders[block]
        if holders:
            self._blocks_of[block_hash] = holders

    def touch(self, blocks: Sequence[int], request_id: str) -> None:
        """One reference more on each block of a prefix hit; free ones leave the free queue."""
        for block in blocks:
            if self._references[block] == 0:
                self._stale[block] = self._stale.get(block, 0) + 1
                self.num_free -= 1
                self.num_cached_free -= 1
            self._references[block] += 1
            if self.journal is not None:
                self.journal.append(
                    BlockChange(block, "touch", request_id, references=self._references[block])
                )

    def release(self, blocks: Sequence[int], request_id: str) -> None:
        """One reference less on each block, in this order; those with none left go to the back of the free queue."""
        references, hash_of = self._references, self._hash_of
        for block in blocks:
            references[block] -= 1
        freed = [b for b in blocks if not references[b]]
        self._queue += freed
        self.num_free += len(freed)
        self.num_cached_free += sum(hash_of[b] is not None for b in freed)
        if self.journal is not None:
            self.journal += [BlockChange(b, "release", request_id, references=references[b]) for b in blocks]

    def release_own(self, table: list[int], private: Chain) -> None:
        """Gives a table back, last block first, whose private contents are these; nobody else holds those blocks."""
        first = private.first
        self.enter_own(private)
        own = table[first:]
        references = self._references
        for block in own:
            references[block] = 0
        own.reverse()
        self._queue += own
        self.num_free += len(own)
        self.num_cached_free += len(private.blocks)
        if first:
            self.release(table[first - 1 :: -1], private.request_id)

    def enter_own(self, private: Chain) -> None:
        """Private contents become findable, by their request alone (or another of the same name later on)."""
        hash_of, count = self._hash_of, 0
        for block in private.blocks:
            # Hits of its own have been entered before.
            if hash_of[block] is None:
                hash_of[block] = private
                count += 1
        private.num_valid = count
        if older := self._chains.get(private.request_id):
            self._enter_each(older)
        if count:
            self._chains[private.request_id] = private

    def _enter_each(self, chain: Chain) -> None:
        """Somebody looks for private contents: from now on they are like others."""
        del self._chains[chain.request_id]
        for place, block in enumerate(chain.blocks, chain.first):
            if self._hash_of[block] is chain:
                self._enter(block, (chain.request_id, place))

    def release_in_front(self, blocks: Sequence[int], request_id: str) -> None:
        """As `release`, but those with no reference left are the next to be taken, in this order."""
        if not self._stale.keys().isdisjoint(blocks):
            # A stale entry must not lie behind the valid one.
            self._queue, self._head, self._stale = self.free_queue(), 0, {}
        end = len(self._queue)
        self.release(blocks, request_id)
        freed = self._queue[end:]
        del self._queue[end:]
        self._queue[self._head : self._head] = freed

    def forget(self, block: int) -> None:
        """Takes the content of one block in use out of the prefix cache."""
        self._drop_content(block)
        if self.journal is not None:
            self.journal.append(BlockChange(block, "forget", references=self._references[block]))

    def forget_all(self) -> None:
        """Takes the content of every free block out of the prefix cache; the order of the queue stays."""
        for block in self.free_queue():
            if self._hash_of[block] is not None:
                self._drop_content(block)
                if self.journal is not None:
                    self.journal.append(BlockChange(block, "forget"))
        self.num_cached_free = 0

    def insert(self, blocks: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Makes the contents of blocks in use findable, beside older blocks with the same content."""
        for block, block_hash in zip(blocks, hashes, strict=True):
            self._enter(block, block_hash)
        if self.journal is not None:
            self.journal += [
                BlockChange(b, "hash", prefix_id=_text(h), references=self._references[b])
                for b, h in zip(blocks, hashes, strict=True)
            ]

    def insert_one(self, block: int, block_hash: BlockHash) -> None:
        """`insert` for one."""
        if self.journal is not None:
            self.insert((block,), (block_hash,))
        else:
            self._enter(block, block_hash)

    def _enter(self, block: int, block_hash: BlockHash) -> None:
        self._hash_of[block] = block_hash
        present = self._blocks_of.setdefault(block_hash, block)
        if present != block:
            self._insert_beside(present, block, block_hash)

    def _insert_beside(self, present: int | dict[int, None], block: int, block_hash: BlockHash) -> None:
        if isinstance(present, dict):
            present[block] = None
        else:
            self._blocks_of[block_hash] = {present: None, block: None}

    def _pop_front(self, count: int) -> list[int]:
        if not self._stale:
            blocks = self._queue[self._head : self._head + count]
            self._head += count
        else:
            blocks = [self._pop_valid() for _ in range(count)]
        if self._head > _COMPACT_ABOVE and self._head * 2 > len(self._queue):
            del self._queue[: self._head]
            self._head = 0
        return blocks

    def _pop_valid(self) -> int:
        while True:
            block = self._queue[self._head]
            self._head += 1
            left = self._stale.get(block)
            if left is None:
                return block
            if left == 1:
                del self._stale[block]
            else:
                self._stale[block] = left - 1

    def _drop_content(self, block: int) -> None:
        """Nothing finds this block any more."""
        block_hash = self._hash_of[block]
        assert block_hash is not None
        self._hash_of[block] = None
        if isinstance(block_hash, Chain):
            block_hash.num_valid -= 1
            if not block_hash.num_valid:
                del self._chains[block_hash.request_id]
            return
        holders = self._blocks_of.pop(block_hash)
        if holders != block:
            self._keep_others(holders, block, block_hash)

    # ------------------------------------------------------------ the books

    def check_integrity(self) -> None:
        """Raises AssertionError when the pool's books do not balance."""
        free = self.free_queue()
        assert len(free) == len(set(free)) == self.num_free, (
            f"free queue {free} against num_free {self.num_free}"
        )
        assert 0 not in free, "the null block is in the free queue"
        in_use = [b for b in range(1, self.num_gpu_blocks) if self._references[b] > 0]
        assert sorted(free + in_use) == list(range(1, self.num_gpu_blocks)), "a block is lost or twice there"
        cached_free = sum(self._hash_of[b] is not None for b in free)
        assert cached_free == self.num_cached_free, (
            f"{cached_free} cached free blocks, counted {self.num_cached_free}"
        )
        hashed = {b: h for b, h in enumerate(self._hash_of) if h is not None and not isinstance(h, Chain)}
        listed = {
            b: h
            for h, holders in self._blocks_of.items()
            for b in ([holders] if isinstance(holders, int) else holders)
        }
        for chain in self._chains.values():
            valid = [b for b in chain.blocks if self._hash_of[b] is chain]
            assert len(valid) == chain.num_valid > 0, (
                f"{chain.request_id}: {valid}, counted {chain.num_valid}"
            )
        assert hashed == listed, "the map from content to block differs from the blocks' own hashes"


class UnsharedBlockPool(BlockPool):
    """The same pool without prefix caching: a block has one holder at most, and no content, so nothing is counted."""

    def take(self, count: int, request_id: str) -> list[int]:
        assert count <= self.num_free, "checked by the KV-cache manager"
        blocks = self._queue[self._head : self._head + count]
        self.take_next(count)
        return blocks

    def take_one(self, request_id: str) -> int:
        return self.take(1, request_id)[0]

    def take_next(self, count: int) -> None:
        """So many of them are taken."""
        self.num_free -= count
        end = self._head = self._head + count
        if end > _COMPACT_ABOVE and end * 2 > len(self._queue):
            del self._queue[:end]
            self._head = 0

    def release(self, blocks: Sequence[int], request_id: str) -> None:
        self._queue += blocks
        self.num_free += len(blocks)

    def references(self, block: int) -> int:
        self._count_references()
        return self._references[block]

    def check_integrity(self) -> None:
        """Raises AssertionError when the free queue is no queue of free blocks; who holds the others is in tables."""
        self._count_references()
        super().check_integrity()

    def _count_references(self) -> None:
        """Whatever is not free is held."""
        if self._counted_at == (self._head, len(self._queue)):
            return
        self._counted_at = (self._head, len(self._queue))
        free = set(self.free_queue())
        self._references = [0, *(int(block not in free) for block in range(1, self.num_gpu_blocks))]


def _text(block_hash: BlockHash) -> str:
    """A hash as text for the log."""
    if isinstance(block_hash, bytes):
        return block_hash.hex()
    return f"{block_hash[0]}#{block_hash[1]}"
