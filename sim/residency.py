"""How long one content stayed in one block: from the block pool's changes to one row per residency.

A residency starts when a block is handed to a request without content, or when a later request takes cached
content back from the free queue. It ends when the block becomes free without content to keep (`freed`), when
its cached content is dropped (`evicted`), or when it is taken back from the free queue (`reused`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from servetwin.sim.records import BlockChange


@dataclass(slots=True)
class Residency:
    """One content in one block, still there when `to_ns` is None."""

    block_id: int
    request_id: str
    """Who brought the content in, or took it back from the free queue."""
    from_ns: int
    prefix_id: str | None = None
    """Identity under which the content can be hit; None while it cannot."""
    peak_references: int = 1
    shared: int = 0
    """How many requests took it beside others that held it."""
    released_ns: int | None = None
    """When the last one that held it let it go. It does not go back into use within a residency."""
    to_ns: int | None = None
    ended: str | None = None
    """"freed", "evicted", "reused", "lost" (with its engine)."""


class ResidencyTracker:
    """Turns block changes into residencies and emits each when it ends."""

    def __init__(self, emit: Callable[[Residency], None]) -> None:
        self._emit = emit
        self._open: dict[int, Residency] = {}

    def change(self, change: BlockChange, now_ns: int) -> None:
        """One change, in the pool's order. An unknown kind raises ValueError."""
        match change.kind:
            case "take":
                self._start(change, now_ns)
            case "hash":
                self._open[change.block_id].prefix_id = change.prefix_id
            case "touch":
                self._touch(change, now_ns)
            case "release":
                if change.references == 0:
                    self._release(change.block_id, now_ns)
            case "evict":
                self._end(change.block_id, "evicted", now_ns)
            case "forget":
                self._forget(change, now_ns)
            case _:
                raise ValueError(
                    f"block {change.block_id}: kind {change.kind!r}; allowed: take hash touch release evict forget"
                )

    def all_lost(self, now_ns: int) -> None:
        """The engine is gone: every residency ends, in order of beginning."""
        for residency in sorted(self._open.values(), key=lambda r: r.from_ns):
            self._end(residency.block_id, "lost", now_ns)

    def close(self) -> None:
        """The log ends: what is still in its block is emitted without an end, in order of beginning."""
        for residency in sorted(self._open.values(), key=lambda r: r.from_ns):
            self._emit(residency)
        self._open.clear()

    def _start(self, change: BlockChange, now_ns: int, prefix_id: str | None = None) -> None:
        if change.request_id is None:
            raise ValueError(f"block {change.block_id}: a {change.kind!r} needs the request_id it is for")
        self._open[change.block_id] = Residency(change.block_id, change.request_id, now_ns, prefix_id)

    def _release(self, block_id: int, now_ns: int) -> None:
        """Nobody holds it any more; it stays where it is for as long as it can be hit."""
        residency = self._open[block_id]
        residency.released_ns = now_ns
        if residency.prefix_id is None:
            self._end(block_id, "freed", now_ns)

    def _forget(self, change: BlockChange, now_ns: int) -> None:
        """A free block has nothing left to keep; one in use goes on without being findable."""
        if change.references == 0:
            self._end(change.block_id, "evicted", now_ns)
        else:
            self._open[change.block_id].prefix_id = None

    def _touch(self, change: BlockChange, now_ns: int) -> None:
        residency = self._open[change.block_id]
        if change.references == 1:
            self._end(change.block_id, "reused", now_ns)
            self._start(change, now_ns, residency.prefix_id)
        else:
            residency.shared += 1
            residency.peak_references = max(residency.peak_references, change.references)

    def _end(self, block_id: int, ended: str, now_ns: int) -> None:
        residency = self._open.pop(block_id)
        residency.to_ns, residency.ended = now_ns, ended
        self._emit(residency)
