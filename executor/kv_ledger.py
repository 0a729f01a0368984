"""Knows what was written into every cache slot, and refuses a step that would read something else.

A scheduler may hand out prefix hits on blocks that were planned but never computed: vLLM 0.22.0 does so
under priority scheduling with prefix caching, when a request that was scheduled earlier in a step becomes the
victim later in that step (`Scheduler.schedule`, running pass). A model would silently continue from foreign
K/V.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from servetwin.executor.input_batch import PackedTokens
from servetwin.executor.request_state import PlanError, RequestStates

UInt64Array = npt.NDArray[np.uint64]
_BASE = 0x9E3779B97F4A7C15


class UnwrittenKVError(PlanError):
    """A plan that reads K/V which no step has written."""


class KVLedger:
    """One fingerprint per slot: that of all tokens up to the one whose K/V lies there.

    The fingerprint of tokens t_0 .. t_n is the sum of (t_i + 1) * BASE**(i + 1) modulo 2**64: it tells
    contents apart that differ by accident, not by intent, and is one cumulative sum over a whole batch. A slot
    written for a draft has the fingerprint with that draft in it: right if the draft is accepted, and written
    again before anything reads it if not.
    """

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self._written: UInt64Array = np.zeros(num_blocks * block_size, dtype=np.uint64)
        """[num_slots]; 0 where nothing was written."""
        self._block_size = block_size
        self._seq_lens: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """[num_reqs]: where the rows of the last step ended, ..."""
        self._ends: UInt64Array = np.zeros(0, dtype=np.uint64)
        """... and the fingerprints of all their tokens up to there."""
        self._powers: UInt64Array = np.cumprod(
            np.full(max_model_len, _BASE, dtype=np.uint64), dtype=np.uint64
        )

    def record_step(self, states: RequestStates, packed: PackedTokens) -> None:
        """Notes the slots that this step writes, then checks the prefix hits of those it admits.

        In that order, since a hit may lie on a block that an earlier row of the same step fills. Raises
        UnwrittenKVError naming the request and the position.
        """
        hits = {row: self._prefix(states, row) for row in states.admitted_rows()}
        self._write(packed, self._before(states, hits))
        for row, prefix in hits.items():
            self._check(states, row, prefix)

    def _write(self, packed: PackedTokens, before: UInt64Array) -> None:
        """`before`, `[num_reqs]`: fingerprints of each row's computed tokens."""
        layout = packed.layout
        fingerprints = self._terms(packed.token_ids, layout.positions)
        if len(fingerprints) == len(before):
            # One token each.
            fingerprints += before
            self._ends = fingerprints
        else:
            sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(fingerprints)])
            start = before - sums[layout.query_start_loc[:-1]]
            fingerprints = start[layout.rows] + sums[1:]
            self._ends = fingerprints[layout.query_start_loc[1:] - 1]
        self._seq_lens = layout.seq_lens
        self._written[packed.slots] = fingerprints

    def forget(self, block_ids: Sequence[int]) -> None:
        """Notes that these blocks were cleared."""
        self._written.reshape(-1, self._block_size)[block_ids] = 0

    def _before(self, states: RequestStates, hits: dict[int, UInt64Array]) -> UInt64Array:
        """[num_reqs]: fingerprint of each row's computed tokens."""
        computed = states.num_computed_tokens[: len(states.rows)]
        if states.continued and (computed == self._seq_lens).all():
            # Nearly always: every row goes on where the last step left it.
            return self._ends
        rows = np.flatnonzero(computed > 0)
        before = np.zeros(len(computed), dtype=np.uint64)
        before[rows] = self._written[states.block_table.slots(rows, computed[rows] - 1)]
        for row, prefix in hits.items():
            before[row] = prefix[-1] if len(prefix) else 0
        return before

    def _prefix(self, states: RequestStates, row: int) -> UInt64Array:
        """[computed tokens of the row]: the fingerprints that its hit slots must have."""
        computed = int(states.num_computed_tokens[row])
        return np.cumsum(self._terms(states.token_ids[row, :computed], np.arange(computed)))

    def _terms(self, token_ids: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]) -> UInt64Array:
        terms: UInt64Array = np.add(token_ids, 1, dtype=np.uint64, casting="unsafe")
        terms *= self._powers[positions]
        return terms

    def _check(self, states: RequestStates, row: int, prefix: UInt64Array) -> None:
        positions = np.arange(len(prefix))
        slots = states.block_table.slots(np.full(len(prefix), row), positions)
        wrong = np.flatnonzero(self._written[slots] != prefix)
        if len(wrong):
            position = int(wrong[0])
            block_id = slots[position] // states.block_table.block_size
            raise UnwrittenKVError(
                f"request {states.req_ids[row]!r} is admitted with {len(prefix)} cached tokens, but the "
                f"K/V of position {position} (block {block_id}) was never written. vLLM 0.22.0 plans such "
                "hits under priority scheduling with prefix caching: use --forget-uncomputed-blocks (a "
                "correction, part of --vllm-compat safe), --no-enable-prefix-caching or --scheduling-policy fcfs"
            )
