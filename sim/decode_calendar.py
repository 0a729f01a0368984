"""Plain decodes by what they will need and when, so that a step touches only the few that need something.

A decode far from every limit computes one token in each step. So it is enough to know when it joined: in step D it has
`base + D` computed tokens. What it needs comes round every `block_size` steps, and its last step is known from the
start. Nothing is written to a request while it is here, but for its blocks.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator, Sequence
from operator import attrgetter

from servetwin.sim.request import Request

_in_order = attrgetter("place")
_WORTH_CLEARING = 64
"""Entries of rows that are gone, beyond a few for each row that is there."""


class DecodeCalendar:
    """The sleeping rows of one engine, in running order wherever order matters.

    Steps are numbered as the engine's schedule calls are. A row's `base` is its computed tokens before step 0, as if it
    had decoded from there; `last_step` the step that computes its last token but one.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.phases: list[list[Request]] = [[] for _ in range(block_size)]
        """By the steps (modulo the block size) in which a row begins a block."""
        self.num_rows = 0
        self.num_filling = 0
        """Of them, those that fill blocks (`Request.fills_blocks`)."""
        self._base_sum = 0
        self.ends: dict[int, list[Request]] = {}
        """By the last step of the rows."""
        self._end_steps: list[int] = []
        self._longest: list[tuple[int, int, Request]] = []

    def add(self, request: Request) -> None:
        """A row whose `base`, `last_step` and `place` are set."""
        request.asleep = request.counted = True
        self.num_rows += 1
        self.num_filling += request.fills_blocks
        base, last_step = request.base, request.last_step
        self._base_sum += base
        _insert(self.phases[-base % self._block_size], request)
        ends = self.ends.get(last_step)
        if ends is None:
            self.ends[last_step] = [request]
            heapq.heappush(self._end_steps, last_step)
            if len(self._end_steps) > 4 * len(self.ends) + _WORTH_CLEARING:
                self._end_steps = sorted(self.ends)
        else:
            _insert(ends, request)
        if len(self._longest) > 4 * self.num_rows + _WORTH_CLEARING:
            self._longest = [
                (-row.base, row.place, row) for row in self if row.counted and row is not request
            ]
            heapq.heapify(self._longest)
        heapq.heappush(self._longest, (-base, request.place, request))

    def remove(self, request: Request) -> None:
        """A row that takes part in no further step."""
        request.asleep = False
        self.leave(request)
        ends = self.ends[request.last_step]
        ends.remove(request)
        if not ends:
            del self.ends[request.last_step]

    def leave_batch(self, step: int) -> None:
        """Rows whose last step was before `step` wait for its token: they keep their seat, and are in no step."""
        for request in self.ends.get(step - 1, ()):
            self.leave(request)

    def leave(self, request: Request) -> None:
        """A row that is in no further step."""
        if not request.counted:
            return
        request.counted = False
        self.num_rows -= 1
        self.num_filling -= request.fills_blocks
        self._base_sum -= request.base
        self.phases[-request.base % self._block_size].remove(request)

    def ending(self, step: int) -> Sequence[Request]:
        """The rows whose last step this is, in running order."""
        return self.ends.get(step, ())

    def forget(self, step: int) -> None:
        """The rows that ended with this step."""
        del self.ends[step]

    def take_ending(self, step: int) -> list[Request]:
        """The same, and they are in no further step; they have to be put back where `ending` is asked for them."""
        rows = self.ends.pop(step, None)
        if rows is None:
            return []
        for request in rows:
            self.leave(request)
        return rows

    def put_back(self, step: int, rows: list[Request]) -> None:
        """Undoes `take_ending`, but for their leaving."""
        if rows:
            self.ends[step] = rows
            heapq.heappush(self._end_steps, step)

    def next_end(self) -> int:
        """The first step that is some row's last. There must be a row."""
        while self._end_steps[0] not in self.ends:
            heapq.heappop(self._end_steps)
        return self._end_steps[0]

    def beginning_block(self, step: int) -> list[Request]:
        """The rows whose token of this step is the first of a block, in running order (not to be changed)."""
        return self.phases[step % self._block_size]

    def filling_block(self, step: int) -> list[Request]:
        """Rows whose token of this step is the last of a block that they fill, in running order (not to be changed)."""
        if not self.num_filling:
            return []
        rows = self.phases[(step + 1) % self._block_size]
        return rows if self.num_filling == self.num_rows else [row for row in rows if row.fills_blocks]

    def context(self, step: int) -> tuple[int, int]:
        """Tokens that the attention of this step reads, its new ones included: of all rows, and of the longest row."""
        if not self.num_rows:
            return 0, 0
        longest = self._longest
        while True:
            negative_base, _, request = longest[0]
            # It is still there, and has not joined anew since.
            if request.counted and request.base == -negative_base:
                return self._base_sum + self.num_rows * (step + 1), step + 1 - negative_base
            heapq.heappop(longest)

    def __iter__(self) -> Iterator[Request]:
        """All rows, those that have left the batch included, in no order."""
        for ends in self.ends.values():
            yield from ends


def _insert(rows: list[Request], request: Request) -> None:
    """In running order: nearly always at the end."""
    if not rows or rows[-1].place < request.place:
        rows.append(request)
    else:
        insort(rows, request, key=_in_order)
