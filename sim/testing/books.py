"""The books of a KV cache at one instant, copied so that two instants can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from servetwin.sim.block_hash import BlockHash
from servetwin.sim.kv_cache_manager import KVCacheManager
from servetwin.sim.request import Request


@dataclass(frozen=True)
class BlockBooks:
    """Who holds what, what is free in which order, and what can be hit."""

    free_queue: tuple[int, ...]
    num_free: int
    """As the pool counts it."""
    references: tuple[int, ...]
    """By block id; block 0 is the null block."""
    hashes: tuple[BlockHash | None, ...]
    """By block id: the content that can be hit."""
    num_cached_hashes: int
    """Contents in the index."""
    tables: dict[str, tuple[int, ...]]
    """Block tables that are not empty, by request."""

    @classmethod
    def of(cls, kv: KVCacheManager, requests: Iterable[Request]) -> BlockBooks:
        """A copy. `requests`: everyone who may hold blocks."""
        pool = kv.pool
        ids = range(pool.num_gpu_blocks)
        tables = {r.request_id: tuple(kv.block_ids(r)) for r in requests}
        return cls(
            tuple(pool.free_queue()),
            pool.num_free,
            tuple(pool.references(b) for b in ids),
            tuple(pool.hash_of(b) for b in ids),
            pool.num_cached_hashes,
            {request_id: table for request_id, table in tables.items() if table},
        )

    def holders(self) -> Counter[int]:
        """In how many tables each block stands."""
        return Counter(block for table in self.tables.values() for block in table)

    def difference(self, later: BlockBooks) -> str | None:
        """What is not the same any more, in words; None when everything is."""
        for name, before in vars(self).items():
            after = getattr(later, name)
            if before != after:
                return f"{name.replace('_', ' ')} was {_changed(before, after)}"
        return None


def _changed(before: Any, after: Any) -> str:
    """Two values of one kind; of long rows only the places that differ."""
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        places = [i for i, (x, y) in enumerate(zip(before, after, strict=True)) if x != y]
        return ", ".join(f"{before[i]} and is {after[i]} at {i}" for i in places)
    return f"{before} and is {after}"


def watch_allocations(
    kv: KVCacheManager, requests: Callable[[], Sequence[Request]], complain: Callable[[str], None]
) -> None:
    """From now on `complain` hears of every refused allocation that leaves the books otherwise than it found them."""
    allocate_slots = kv.allocate_slots

    def watched(request: Request, *args: Any, **options: Any) -> list[int] | None:
        before = BlockBooks.of(kv, requests())
        blocks = allocate_slots(request, *args, **options)
        if blocks is None:
            change = before.difference(BlockBooks.of(kv, requests()))
            if change is not None:
                complain(f"the refused allocation for {request.request_id} left a trace: {change}")
        return blocks

    kv.allocate_slots = watched  # type: ignore[method-assign]
