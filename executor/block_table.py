"""The block table of the running batch: one row of block ids per batch row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BlockIds = Sequence[int] | npt.NDArray[np.int32]


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class BlockTable:
    """Block ids of every batch row, int32 `[max_num_reqs, max_blocks]`, unused entries 0 (the null block).

    `max_blocks` is ceil(max_model_len / block_size). A row that would need more raises ValueError.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        power = block_size.bit_length() - 1
        self._shift = power if block_size == 1 << power else None
        self.max_blocks = cdiv(max_model_len, block_size)
        self.table: npt.NDArray[np.int32] = np.zeros((max_num_reqs, self.max_blocks), dtype=np.int32)
        self.num_blocks: npt.NDArray[np.int64] = np.zeros(max_num_reqs, dtype=np.int64)

    def append(self, row: int, block_ids: BlockIds) -> None:
        """Adds blocks behind those that the row already holds."""
        start = int(self.num_blocks[row])
        end = start + len(block_ids)
        if end > self.max_blocks:
            raise self._too_long(row, end)
        self.table[row, start:end] = block_ids
        self.num_blocks[row] = end

    def append_one_each(self, rows: npt.NDArray[np.int64], block_ids: BlockIds) -> None:
        """Adds one block, `[len(rows)]`, to each of different rows."""
        ends = self.num_blocks[rows]
        if ends.max() >= self.max_blocks:
            raise self._too_long(int(rows[ends.argmax()]), self.max_blocks + 1)
        self.table[rows, ends] = block_ids
        self.num_blocks[rows] = ends + 1

    def replace(self, row: int, block_ids: BlockIds) -> None:
        """Gives the row exactly these blocks."""
        self.clear(row)
        self.append(row, block_ids)

    def clear(self, row: int) -> None:
        self.table[row, : self.num_blocks[row]] = 0
        self.num_blocks[row] = 0

    def move(self, source: int, target: int) -> None:
        """Row `target` becomes what `source` was; `source` is left empty."""
        self.replace(target, self.row(source))
        self.clear(source)

    def row(self, row: int) -> npt.NDArray[np.int32]:
        """The row's block ids, `[num_blocks of the row]` (a view)."""
        return self.table[row, : self.num_blocks[row]]

    def of_rows(self, num_rows: int) -> npt.NDArray[np.int32]:
        """The first rows, `[num_rows, most blocks of any of them]` (a view)."""
        return self.table[:num_rows, : int(self.num_blocks[:num_rows].max(initial=0))]

    def slots(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Cache slot of each token: block id x block_size + offset. All arrays are `[num_tokens]`.

        Positions lie inside the blocks of their row. Widened to int64 before the product, which passes
        2**31 in large pools.
        """
        if self._shift is None:
            places, offsets = np.divmod(positions, self.block_size)
        else:
            # Division is the slowest thing that is done to every token.
            places, offsets = positions >> self._shift, positions & (self.block_size - 1)
        slots = self.table[rows, places].astype(np.int64)
        slots *= self.block_size
        slots += offsets
        return slots

    def _too_long(self, row: int, num_blocks: int) -> ValueError:
        return ValueError(
            f"block table row {row} would hold {num_blocks} blocks, allowed are {self.max_blocks}"
        )
