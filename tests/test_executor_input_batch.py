"""Packing: block tables, slots, positions, and the order of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from servetwin.executor.block_table import BlockTable
from servetwin.executor.input_batch import InputBatch, build_input_batch, build_warm_up_batch, lay_out_rows
from servetwin.executor.request_state import RequestStates
from servetwin.executor.testing import PlanWriter
from servetwin.kernels import ops

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def table(rows: int = 3) -> BlockTable:
    return BlockTable(rows, max_model_len=18, block_size=BLOCK_SIZE)


def pack(states: RequestStates, plans: PlanWriter, counts: dict[str, int]) -> InputBatch:
    states.update(plans.plan(counts))
    return build_input_batch(states, lay_out_rows(states, counts))


def new_states(max_num_seqs: int = 4) -> tuple[RequestStates, PlanWriter]:
    return RequestStates(max_num_seqs, 32, BLOCK_SIZE, CPU), PlanWriter(BLOCK_SIZE, num_blocks=30)


# ---------------------------------------------------------------- block table


def test_the_table_is_as_wide_as_the_longest_request_and_no_wider() -> None:
    """Case 16: 18 tokens in blocks of 4 are 5 blocks; a sixth is refused."""
    blocks = table()
    assert blocks.table.shape == (3, 5)
    blocks.replace(0, [1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="would hold 6 blocks, allowed are 5"):
        blocks.append(0, [6])


def test_moving_a_short_row_over_a_long_one_leaves_no_stale_tail() -> None:
    """Case 26"""
    blocks = table()
    blocks.replace(0, [1, 2, 3, 4, 5])
    blocks.replace(2, [8, 9])
    blocks.move(2, 0)
    assert blocks.table[0].tolist() == [8, 9, 0, 0, 0]
    assert blocks.table[2].tolist() == [0, 0, 0, 0, 0]
    assert blocks.num_blocks.tolist() == [2, 0, 0]


def test_contents_travel_through_a_cycle_of_moves() -> None:
    """Case 28: three rows in a cycle end where they began."""
    blocks = table(rows=4)
    for row, ids in enumerate(([1, 2], [3], [4, 5, 6])):
        blocks.replace(row, ids)
    for _ in range(3):
        for source, target in ((2, 3), (1, 2), (0, 1), (3, 0)):
            blocks.move(source, target)
    assert [blocks.row(row).tolist() for row in range(3)] == [[1, 2], [3], [4, 5, 6]]


def test_slots_are_widened_before_the_product() -> None:
    """Case 47, host side: block 2**30 of 16 tokens lies beyond 2**31 slots."""
    blocks = BlockTable(1, max_model_len=16, block_size=16)
    blocks.replace(0, [2**30])
    assert blocks.slots(np.array([0]), np.array([5])).tolist() == [2**34 + 5]


# ---------------------------------------------------------------- batch


def test_a_mixed_batch_has_the_fields_of_vllm() -> None:
    """A decode row and a chunk: every field, value by value."""
    states, plans = new_states()
    plans.add("a", range(10, 15))
    pack(states, plans, {"a": 5})
    plans.requests["a"].token_ids.append(99)
    states.append_token("a", 99)
    plans.add("b", range(20, 29))
    batch = pack(states, plans, {"a": 1, "b": 6})
    assert batch.req_ids == ["a", "b"]
    assert batch.input_ids.tolist() == [99, 20, 21, 22, 23, 24, 25]
    assert batch.positions.tolist() == [5, 0, 1, 2, 3, 4, 5]
    assert batch.query_start_loc.tolist() == [0, 1, 7]
    assert batch.seq_lens.tolist() == [6, 6]
    assert batch.slot_mapping.tolist() == [2 * 4 + 1, 12, 13, 14, 15, 16, 17]
    assert batch.block_table.tolist() == [[1, 2], [3, 4]]
    assert batch.logits_indices.tolist() == [0]
    assert batch.logits_rows.tolist() == [0]
    for name in ("query_start_loc", "seq_lens", "block_table"):
        assert getattr(batch, name).dtype == torch.int32
    for name in ("input_ids", "positions", "slot_mapping", "logits_indices"):
        assert getattr(batch, name).dtype == torch.int64


def test_the_batch_does_not_change_when_the_states_do() -> None:
    states, plans = new_states()
    plans.add("a", range(4))
    batch = pack(states, plans, {"a": 4})
    states.block_table.replace(0, [7])
    assert batch.block_table.tolist() == [[1]]


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    computed=st.lists(st.integers(0, 11), min_size=4, max_size=4),
)
def test_packing_equals_a_loop_over_requests(lengths: list[int], computed: list[int]) -> None:
    """Vectorised packing against the obvious loop, for any split of prompts into two chunks."""
    states, plans = new_states()
    prompts = {f"r{i}": [100 * i + t for t in range(length)] for i, length in enumerate(lengths)}
    first = {f"r{i}": min(computed[i], length - 1) for i, length in enumerate(lengths)}
    for req_id, prompt in prompts.items():
        plans.add(req_id, prompt)
    started = {req_id: count for req_id, count in first.items() if count}
    if started:
        pack(states, plans, started)
    batch = pack(states, plans, {req_id: len(p) - first[req_id] for req_id, p in prompts.items()})
    input_ids, positions, slots, ends = [], [], [], []
    for req_id in batch.req_ids:
        for position in range(first[req_id], len(prompts[req_id])):
            input_ids.append(prompts[req_id][position])
            positions.append(position)
            block = plans.requests[req_id].block_ids[position // BLOCK_SIZE]
            slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        ends.append(len(input_ids) - 1)
    assert batch.input_ids.tolist() == input_ids
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert batch.logits_indices.tolist() == ends


def test_the_warm_up_batch_writes_nothing() -> None:
    """Case 25: padding slots leave the whole cache as it is, its last slot too."""
    batch = build_warm_up_batch([3, 5], BLOCK_SIZE, CPU)
    cache = torch.full((6, BLOCK_SIZE, 1, 8), 7.0)
    tokens = torch.ones(8, 1, 8)
    ops.reshape_and_cache(tokens, tokens, cache, cache, batch.slot_mapping)
    assert (cache == 7).all()
    assert not batch.block_table.any()
    assert batch.logits_indices.tolist() == [2, 7]
