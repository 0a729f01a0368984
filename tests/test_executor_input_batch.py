"""Packing: block tables, slots, positions, and the order of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from servetwin.executor.block_table import BlockTable
from servetwin.executor.input_batch import InputBatch, build_input_batch, build_warm_up_batch, pack_rows
from servetwin.executor.request_state import RequestStates
from servetwin.executor.testing import PlanWriter
from servetwin.executor.verification import NO_DRAFT
from servetwin.kernels import ops
from servetwin.sim.contract import CachedRequestData, NewRequestData, SamplingParams, SchedulerOutput

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def table(rows: int = 3) -> BlockTable:
    return BlockTable(rows, max_model_len=18, block_size=BLOCK_SIZE)


def pack(states: RequestStates, plans: PlanWriter, counts: dict[str, int]) -> InputBatch:
    states.update(plans.plan(counts))
    return build_input_batch(states, pack_rows(states))


def new_states(max_num_seqs: int = 4) -> tuple[RequestStates, PlanWriter]:
    return RequestStates(max_num_seqs, 32, BLOCK_SIZE, CPU), PlanWriter(BLOCK_SIZE, num_blocks=30)


def new(req_id: str, prompt_token_ids: list[int], block_ids: list[int]) -> NewRequestData:
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=prompt_token_ids,
        sampling_params=SamplingParams(),
        block_ids=(block_ids,),
        num_computed_tokens=0,
        num_prompt_tokens=len(prompt_token_ids),
    )


def plan_of(
    new_requests: list[NewRequestData], counts: dict[str, int], cached: CachedRequestData | None = None
) -> SchedulerOutput:
    total = sum(counts.values())
    return SchedulerOutput(
        new_requests, cached or CachedRequestData(), counts, total, {}, [0], finished_req_ids=set()
    )


# ---------------------------------------------------------------- block table


def test_the_table_is_as_wide_as_the_longest_request_and_no_wider() -> None:
    """Case 16: 18 tokens in blocks of 4 are 5 blocks; a sixth is refused."""
    blocks = table()
    assert blocks.table.shape == (3, 5)
    blocks.replace(0, [1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="row 0 would hold 6 blocks, allowed are 5"):
        blocks.append(0, [6])
    with pytest.raises(ValueError, match="row 0 would hold 6 blocks, allowed are 5"):
        blocks.append_one_each(np.array([1, 0]), [6, 7])


def test_one_block_each_is_what_appending_one_by_one_gives() -> None:
    blocks = table()
    blocks.replace(0, [1, 2, 3])
    blocks.replace(2, [8])
    blocks.append_one_each(np.array([2, 1, 0]), [4, 5, 6])
    assert [blocks.row(row).tolist() for row in range(3)] == [[1, 2, 3, 6], [5], [8, 4]]


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
    states.append_tokens(np.array([0]), np.array([0]), np.array([99]))
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
    assert batch.logits_layout.rows.tolist() == [0]
    for name in ("query_start_loc", "seq_lens", "block_table"):
        assert getattr(batch, name).dtype == torch.int32
    for name in ("input_ids", "positions", "slot_mapping", "logits_indices"):
        assert getattr(batch, name).dtype == torch.int64


def test_on_a_cpu_the_batch_reads_the_persistent_block_table() -> None:
    """Nothing is copied, so that preparing a step does not take longer with longer contexts."""
    states, plans = new_states()
    plans.add("a", range(6))
    batch = pack(states, plans, {"a": 6})
    assert batch.block_table.data_ptr() == states.block_table.table.ctypes.data
    assert batch.block_table.tolist() == [[1, 2]]


def test_a_chunk_and_two_decodes_packed_by_hand() -> None:
    """A computes 4 tokens of its prompt of 10; B and C decode at positions 50 and 30; blocks of 16."""
    states = RequestStates(3, 64, 16, CPU)
    b, c = list(range(100, 150)), list(range(200, 230))
    states.update(plan_of([new("B", b, [7, 2, 9, 4]), new("C", c, [5, 11])], {"B": 50, "C": 30}))
    states.update(plan_of([], {}))
    decodes = CachedRequestData(
        req_ids=["B", "C"],
        all_token_ids={"B": [*b, 51], "C": [*c, 31]},
        new_block_ids=[None, None],
        num_computed_tokens=[50, 30],
        num_output_tokens=[1, 1],
    )
    states.update(plan_of([new("A", list(range(10)), [3])], {"B": 1, "C": 1, "A": 4}, decodes))
    batch = build_input_batch(states, pack_rows(states))
    assert batch.req_ids == ["A", "B", "C"]
    assert states.num_scheduled_tokens.tolist() == [4, 1, 1]
    assert batch.input_ids.tolist() == [0, 1, 2, 3, 51, 31]
    assert batch.positions.tolist() == [0, 1, 2, 3, 50, 30]
    assert batch.query_start_loc.tolist() == [0, 4, 5, 6]
    assert batch.seq_lens.tolist() == [4, 51, 31]
    assert batch.slot_mapping.tolist() == [48, 49, 50, 51, 4 * 16 + 2, 11 * 16 + 14]
    assert batch.block_table.tolist() == [[3, 0, 0, 0], [7, 2, 9, 4], [5, 11, 0, 0]]
    assert batch.logits_layout.rows.tolist() == [1, 2], "A has more of its prompt to compute"
    assert batch.logits_indices.tolist() == [4, 5]


def test_drafts_are_inputs_and_each_has_logits_behind_it() -> None:
    """A row with two drafts between a plain decode and a chunk that samples."""
    states, plans = new_states()
    for req_id, length in {"a": 3, "b": 5}.items():
        plans.add(req_id, range(10, 10 + length))
    pack(states, plans, {"a": 3, "b": 5})
    states.append_tokens(np.array([0, 1]), np.array([0, 0]), np.array([71, 72]))
    for req_id in "ab":
        plans.requests[req_id].token_ids.append(70)
    plans.add("c", range(20, 24))
    plan = plans.plan({"a": 1, "b": 3, "c": 4})
    plan.scheduled_spec_decode_tokens = {"b": [81, 82]}
    states.update(plan)
    batch = build_input_batch(states, pack_rows(states))
    assert batch.input_ids.tolist() == [71, 72, 81, 82, 20, 21, 22, 23]
    assert batch.positions.tolist() == [3, 5, 6, 7, 0, 1, 2, 3]
    assert batch.seq_lens.tolist() == [4, 8, 4]
    assert batch.logits_indices.tolist() == [0, 1, 2, 3, 7]
    assert batch.logits_layout.rows.tolist() == [0, 1, 1, 1, 2]
    assert batch.logits_layout.num_drafts_before.tolist() == [0, 0, 1, 2, 0]
    assert batch.next_draft_ids is not None
    assert batch.next_draft_ids.tolist() == [NO_DRAFT, 81, 82, NO_DRAFT, NO_DRAFT]
    assert states.num_tokens[:3].tolist() == [4, 6, 4], "a draft is not known"


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
    """Its padding slots leave the whole cache as it is, its last slot too."""
    batch = build_warm_up_batch([3, 5], BLOCK_SIZE, CPU)
    cache = torch.full((6, BLOCK_SIZE, 1, 8), 7.0)
    tokens = torch.ones(8, 1, 8)
    ops.reshape_and_cache(tokens, tokens, cache, cache, batch.slot_mapping)
    assert (cache == 7).all()
    assert not batch.block_table.any()
    assert batch.logits_indices.tolist() == [2, 7]
