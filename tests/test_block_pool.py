"""The block pool: one free queue, references, and the map from content to block."""

from __future__ import annotations

from collections import deque
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from servetwin.sim.block_pool import BlockPool, Chain


def content(n: int) -> bytes:
    return n.to_bytes(16, "big")


def test_the_null_block_is_never_handed_out() -> None:
    """A pool of n blocks serves n - 1, the first of which is block 1."""
    pool = BlockPool(5)
    assert pool.num_free == 4
    assert pool.take(4, "r") == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_taking_is_from_the_front_and_release_to_the_back() -> None:
    """One queue, in the order of release."""
    pool = BlockPool(6)
    pool.take(3, "a")
    pool.release([2, 1], "a")
    assert pool.free_queue() == [4, 5, 2, 1]
    assert pool.take(3, "b") == [4, 5, 2]


def test_hashed_and_unhashed_blocks_share_one_queue() -> None:
    """Cached content earns no second life: the block at the front goes, content or not."""
    pool = BlockPool(4)
    pool.take(3, "a")
    pool.insert([2], [content(2)])
    pool.release([2, 1, 3], "a")
    assert pool.take(1, "b") == [2]
    assert pool.find(content(2)) is None
    assert pool.num_evictions == 1


def test_content_survives_release_until_its_block_is_taken() -> None:
    """A free block can still be hit."""
    pool = BlockPool(4)
    pool.take(1, "a")
    pool.insert([1], [content(1)])
    pool.release([1], "a")
    assert pool.find(content(1)) == 1
    assert pool.num_cached_free == 1
    pool.take(2, "b")
    assert pool.find(content(1)) == 1
    pool.take(1, "b")
    assert pool.find(content(1)) is None


def test_a_touched_free_block_leaves_the_middle_of_the_queue() -> None:
    """The others keep their order, and it comes back at the end."""
    pool = BlockPool(5)
    pool.take(4, "a")
    pool.insert([3], [content(3)])
    pool.release([4, 3, 2, 1], "a")
    pool.touch([3], "b")
    assert pool.free_queue() == [4, 2, 1]
    assert (pool.num_free, pool.num_cached_free, pool.references(3)) == (3, 0, 1)
    pool.release([3], "b")
    assert pool.free_queue() == [4, 2, 1, 3]
    assert pool.take(4, "c") == [4, 2, 1, 3]


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    """One reference a holder."""
    pool = BlockPool(3)
    pool.take(1, "a")
    pool.touch([1], "b")
    pool.release([1], "a")
    assert pool.free_queue() == [2]
    pool.release([1], "b")
    assert pool.free_queue() == [2, 1]


@pytest.mark.parametrize(("evicted", "left"), [(1, 2), (2, 1)])
def test_the_oldest_duplicate_is_found(evicted: int, left: int) -> None:
    """Equal content in two blocks: the older is hit; taking one exposes the other."""
    pool = BlockPool(3)
    pool.take(2, "a")
    pool.insert([1], [content(9)])
    pool.insert([2], [content(9)])
    assert pool.find(content(9)) == 1
    assert pool.num_cached_hashes == 1
    pool.release([evicted, left], "a")
    pool.take(1, "b")
    assert pool.find(content(9)) == left


def test_what_is_left_of_a_hit_when_blocks_are_taken() -> None:
    """Up to the first block that goes; unknown where an equal block would be found in its place."""
    pool = BlockPool(7)
    pool.take(4, "a")
    pool.insert([1, 2, 3, 4], [content(1), content(2), content(3), content(2)])
    pool.release([3, 1, 2], "a")
    hits = pool.find_leading([content(1), content(2), content(3)])
    assert (hits, pool.free_queue()) == ([1, 2, 3], [5, 6, 3, 1, 2])
    assert [pool.hits_after(hits, n) for n in (0, 2, 3, 4)] == [hits, hits, [1, 2], []]
    assert pool.hits_after([2, 3], 5) is None
    assert [pool.num_before(hits, most) for most in (1, 5)] == [1, 2]


def test_the_journal_tells_every_change_in_order() -> None:
    """Take, hash, release, touch; and an eviction before the take that caused it."""
    pool = BlockPool(2, journal=True)
    pool.take(1, "a")
    pool.insert([1], [content(1)])
    pool.release([1], "a")
    pool.touch([1], "b")
    pool.release([1], "b")
    pool.take(1, "c")
    assert pool.journal is not None
    told = [(c.kind, c.request_id, c.references) for c in pool.journal]
    assert told == [
        ("take", "a", 1),
        ("hash", None, 1),
        ("release", "a", 0),
        ("touch", "b", 1),
        ("release", "b", 0),
        ("evict", None, 0),
        ("take", "c", 1),
    ]


class PoolMachine(RuleBasedStateMachine):
    """The pool against the plainest model of it: a deque and dictionaries, nothing counted ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.free = deque(range(1, 8))
        self.references = dict.fromkeys(range(1, 8), 0)
        self.contents: dict[int, int] = {}
        """Block to content, in the order in which it became findable."""

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.free)))
        expected = [self.free.popleft() for _ in range(count)]
        assert self.pool.take(count, "r") == expected
        for block in expected:
            self.references[block] = 1
            self.contents.pop(block, None)

    @rule(content_id=st.integers(0, 3), data=st.data())
    def insert(self, content_id: int, data: st.DataObject) -> None:
        candidates = [b for b, n in self.references.items() if n and b not in self.contents]
        if candidates:
            block = data.draw(st.sampled_from(candidates))
            self.pool.insert([block], [content(content_id)])
            self.contents[block] = content_id

    @rule(content_id=st.integers(0, 3))
    def hit(self, content_id: int) -> None:
        expected = next((b for b, c in self.contents.items() if c == content_id), None)
        assert self.pool.find(content(content_id)) == expected
        if expected is not None:
            self.pool.touch([expected], "r")
            self.references[expected] += 1
            if expected in self.free:
                self.free.remove(expected)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        used = [b for b, n in self.references.items() if n]
        blocks = data.draw(st.lists(st.sampled_from(used), unique=True)) if used else []
        self.pool.release(blocks, "r")
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)

    @rule(count=st.integers(0, 7))
    def look_ahead(self, count: int) -> None:
        """What of a hit is left when blocks have been taken, and how many can be taken until something is gone."""
        names = [content(n) for n in range(4)]
        hits = self.pool.find_leading(names)
        assert hits == self.found_without([])
        taken = [*self.free][:count]
        left = self.pool.hits_after(hits, count)
        assert left is None or left == self.found_without(taken)
        free = self.pool.free_of(hits)
        assert free == [b for b in hits if not self.references[b]]
        if free and (before := self.pool.num_before(free, 7)):
            assert not {*free} & {*[*self.free][:before]}

    def found_without(self, taken: list[int]) -> list[int]:
        """The leading contents 0, 1, ... that are found when these blocks have lost theirs."""
        hits = []
        for wanted in range(4):
            block = next((b for b, c in self.contents.items() if c == wanted and b not in taken), None)
            if block is None:
                break
            hits.append(block)
        return hits

    @invariant()
    def agree(self) -> None:
        self.pool.check_integrity()
        assert self.pool.free_queue() == list(self.free)
        assert {b: self.pool.references(b) for b in self.references} == self.references
        assert self.pool.num_cached_free == sum(b in self.contents for b in self.free)


TestPool = PoolMachine.TestCase


def test_private_contents_are_found_by_their_request_alone() -> None:
    """In one entry as long as nobody looks; those whose block was taken meanwhile are not found."""
    pool = BlockPool(9)
    table = pool.take(4, "a")
    pool.release_own(table, Chain("a", 1, table[1:3]))
    pool.check_integrity()
    assert (pool.num_free, pool.num_cached_free, pool.num_cached_hashes) == (8, 2, 2)
    assert [pool.find(("b", 1)), pool.find(("a", 3))] == [None, None]
    assert [pool.find(("a", 1)), pool.find(("a", 2))] == table[1:3]
    pool.check_integrity()
    again = pool.take(6, "c")
    assert again[4:] == [table[3], table[2]], "the end of a table is taken first"
    assert (pool.num_evictions, pool.find(("a", 2)), pool.find(("a", 1))) == (1, None, table[1])


def test_a_private_content_in_two_blocks_is_found_in_the_older() -> None:
    """A request that lost its blocks and did not find them all again computes the others anew."""
    pool = BlockPool(9)
    first = pool.take(2, "a")
    pool.release_own(first, Chain("a", 0, first))
    second = pool.take(2, "a")
    pool.release_own(second, Chain("a", 0, second))
    assert pool.find(("a", 0)) == first[0]
    pool.check_integrity()
    assert (pool.num_cached_free, pool.num_cached_hashes) == (4, 2)
    pool.take(6, "b")
    assert (pool.find(("a", 0)), pool.find(("a", 1)), pool.num_evictions) == (second[0], second[1], 2)


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 7), st.integers(0, 9)), min_size=1, max_size=6))
def test_a_request_finds_its_own_contents_together_as_one_by_one(turns: list[tuple[int, int, int]]) -> None:
    """However often it lost its blocks, others took some of them, and it found the rest again."""
    pool = BlockPool(10)
    for blocks, kept_back, others in turns:
        hits = pool.find_own("a", 0, blocks)
        alone, looking = deepcopy(pool), []
        for place in range(blocks):
            if (found := alone.find(("a", place))) is None:
                break
            looking.append(found)
        assert hits == looking
        if blocks - len(hits) > pool.num_free - len(pool.free_of(hits)):
            continue
        pool.touch(hits, "a")
        table = hits + pool.take(blocks - len(hits), "a")
        pool.release_own(table, Chain("a", 0, table[: max(blocks - kept_back, len(hits))]))
        pool.check_integrity()
        taken = pool.take(min(others, pool.num_free), "b")
        pool.release(taken, "b")
