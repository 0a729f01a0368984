"""The batch metadata as plain Python numbers, for the backends that loop over requests on the host."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RequestSpan(NamedTuple):
    """Where one request's rows lie in the packed batch, and how much of it is in the cache."""

    query_start: int
    """First row in the packed query."""
    query_len: int
    """Rows of this step; may be 0."""
    seq_len: int
    """Tokens in the cache, those of this step included."""

    @property
    def context_len(self) -> int:
        """Tokens before this step's: the position of the first row. Negative for padding (seq_len 0)."""
        return self.seq_len - self.query_len

    @property
    def first_real_row(self) -> int:
        """Rows before this one have a negative position and see nothing."""
        return max(0, -self.context_len)


def request_spans(
    seq_lens: Tensor, query_start_loc: Tensor, *, num_tokens: int, max_seq_len: int
) -> list[RequestSpan]:
    """One span per request, from seq_lens [reqs] and query_start_loc [reqs + 1].

    num_tokens: rows of the packed query. max_seq_len: tokens that a row of the block table can hold.
    Raises ValueError for row offsets that go back or leave the batch, and for a length that the table cannot hold.
    """
    starts = query_start_loc.tolist()
    lengths = seq_lens.tolist()
    spans = []
    for req, (start, end, seq_len) in enumerate(zip(starts[:-1], starts[1:], lengths, strict=True)):
        if not 0 <= start <= end <= num_tokens:
            raise ValueError(
                f"query_start_loc: got rows {start} to {end} for request {req}, expected offsets that never fall "
                f"and stay within the {num_tokens} rows of query"
            )
        if not 0 <= seq_len <= max_seq_len:
            raise ValueError(
                f"seq_lens: got {seq_len} for request {req}, expected 0 to {max_seq_len}, the tokens that a row of "
                "block_table holds"
            )
        spans.append(RequestSpan(start, end - start, seq_len))
    return spans


def check_slots(slot_mapping: Tensor, num_slots: int) -> None:
    """Raises ValueError when a slot lies beyond a cache of `num_slots` = blocks * block_size."""
    if slot_mapping.numel() and (highest := int(slot_mapping.max())) >= num_slots:
        raise ValueError(f"slot_mapping: got slot {highest}, expected at most {num_slots - 1}")


def check_block_ids(name: str, block_ids: Tensor, num_blocks: int, lowest: int | None = None) -> None:
    """Raises ValueError when a block of the argument `name` lies beyond a cache of `num_blocks`, or below `lowest`."""
    if block_ids.numel() and (highest := int(block_ids.max())) >= num_blocks:
        raise ValueError(f"{name}: got block {highest}, expected at most {num_blocks - 1}")
    if lowest is not None and block_ids.numel() and (found := int(block_ids.min())) < lowest:
        raise ValueError(f"{name}: got block {found}, expected {lowest} to {num_blocks - 1}")
