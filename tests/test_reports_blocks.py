"""Field reports about the accounting of KV blocks, as small cases with the behaviour of vLLM 0.22.0.

The numbers in the names are those of the reports.
"""

from __future__ import annotations

import pytest
from engines import Engine, engine_config, hit_tokens, some_tokens

from servetwin.sim.block_pool import BlockPool
from servetwin.sim.records import WaitReason


def pool_state(pool: BlockPool) -> tuple[object, ...]:
    """Everything that an allocation may change."""
    blocks = range(pool.num_gpu_blocks)
    return (
        pool.free_queue(),
        [pool.references(b) for b in blocks],
        [pool.hash_of(b) for b in blocks],
        pool.num_cached_free,
        pool.num_cached_hashes,
    )


P = some_tokens("shared", 8)
"""Two blocks of four."""


def with_cached_prefix(*, gate: bool = True) -> Engine:
    """Eight blocks: X runs on three, two of the five free ones hold P."""
    engine = Engine(engine_config(usable_blocks=8, caching=True, scheduler_reserve_full_isl=gate))
    engine.add("first", P)
    engine.run()
    engine.add("X", 9, 20)
    engine.step()
    assert (engine.pool.num_free, engine.pool.num_cached_free) == (5, 2)
    return engine


def test_11_a_failed_allocation_touches_nothing() -> None:
    """Four new blocks and two hit ones out of the free queue are more than five: the pool is as before."""
    engine = with_cached_prefix()
    q1 = engine.request("Q1", P + some_tokens("Q1", 16))
    before = pool_state(engine.pool)
    hits = engine.kv.get_computed_blocks(q1)
    assert len(hits) == 2
    assert engine.kv.allocate_slots(q1, 16, hits) is None
    assert pool_state(engine.pool) == before


@pytest.mark.parametrize("gate", [True, False])
def test_11_hit_blocks_in_the_free_queue_count_as_taken(gate: bool) -> None:
    """Q1 (six blocks) has to wait, Q2 (five) leaves none free."""
    engine = with_cached_prefix(gate=gate)
    engine.add("Q1", P + some_tokens("Q1", 16))
    frame = engine.schedule()
    assert frame.record.head_reason is (WaitReason.GATE if gate else WaitReason.BLOCKS)
    assert engine.pool.num_free == 5
    engine.complete(frame)
    engine.abort("Q1")
    engine.add("Q2", P + some_tokens("Q2", 12))
    assert engine.step() == {"X": 1, "Q2": 12}


def test_12_a_reused_block_is_not_found_under_its_old_content() -> None:
    """Y takes both blocks of X, so X misses when it comes again; without Y it hits."""
    x = some_tokens("x", 5)
    for between, expected in ((False, 4), (True, 0)):
        engine = Engine(engine_config(usable_blocks=2, caching=True))
        engine.add("X", x)
        engine.run()
        if between:
            engine.add("Y", 7)
            engine.run()
        engine.add("X again", x)
        assert hit_tokens(engine.run(), "X again") == [expected]
        engine.pool.check_integrity()


@pytest.mark.parametrize("seed", ["a", "b", "c"])
def test_13_the_end_of_a_chain_is_evicted_first(seed: str) -> None:
    """One block of three is taken for something else: it was the last of the chain, so the first two are hit."""
    engine = Engine(engine_config(usable_blocks=3, caching=True))
    prompt = some_tokens(seed, 11)
    engine.add("first", prompt)
    engine.run()
    engine.add("other", 4)
    engine.run()
    engine.add("again", prompt)
    assert hit_tokens(engine.run(), "again") == [8]


@pytest.mark.parametrize(("prompt", "hit", "computed"), [(4, 0, 4), (8, 4, 4), (9, 8, 1), (12, 8, 4)])
def test_14_a_full_hit_still_computes_the_last_token(prompt: int, hit: int, computed: int) -> None:
    """The hit ends before the last token, in whole blocks: an exact multiple recomputes a block."""
    engine = Engine(engine_config(caching=True))
    tokens = some_tokens("p", prompt)
    engine.add("cold", tokens)
    engine.run()
    engine.add("warm", tokens, answer=[7])
    frames = engine.run()
    assert hit_tokens(frames, "warm") == [hit]
    assert frames[0].plan.num_scheduled_tokens == {"warm": computed}
    assert engine.known["warm"].output_token_ids == [7]


def test_16_no_more_blocks_than_a_row_of_the_table_holds() -> None:
    """A window of 10 tokens is three blocks of four, up to the last token."""
    engine = Engine(engine_config(usable_blocks=10, max_model_len=10))
    r = engine.add("r", 2, 100)
    assert max(frame.record.used_blocks for frame in engine.frames()) == 3
    assert r.num_tokens == 10


def test_18_cached_but_unreferenced_blocks_are_free() -> None:
    """All ten blocks hold content that nobody uses: the pool is empty, and a new prompt evicts what it needs."""
    engine = Engine(engine_config(usable_blocks=10, caching=True))
    engine.add("a", 20)
    engine.add("b", 20)
    engine.run()
    assert (engine.pool.num_free, engine.pool.num_cached_free) == (10, 10)
    engine.add("r", 12)
    frame = engine.schedule()
    assert frame.plan.num_scheduled_tokens == {"r": 12}
    assert frame.record.evictions == 3
    assert (frame.record.used_blocks, frame.record.cached_free_blocks, frame.record.free_blocks) == (3, 7, 0)


def test_19_only_new_blocks_are_new() -> None:
    """C shares two hit blocks and takes one: nothing to clear for models without Mamba layers, one block taken."""
    engine = Engine(engine_config(caching=True), journal=True)
    engine.add("A", P)
    engine.run()
    engine.core.drain_block_changes()
    engine.add("C", P + some_tokens("C", 4))
    frame = engine.schedule()
    (new,) = frame.plan.scheduled_new_reqs
    assert frame.plan.new_block_ids_to_zero is None
    kinds = [(c.kind, c.block_id) for c in engine.core.drain_block_changes()]
    shared, fresh = new.block_ids[0][:2], new.block_ids[0][2]
    assert kinds == [("touch", shared[0]), ("touch", shared[1]), ("take", fresh), ("hash", fresh)]


def test_20_aborts_of_what_holds_nothing() -> None:
    """Never scheduled, twice, unknown, finished, preempted: no block moves, each known id is told once."""
    engine = Engine(engine_config(usable_blocks=6, max_num_seqs=2))
    engine.add("done", 4)
    engine.run()
    engine.add("a", 8, 9)
    engine.add("victim", 12, 9)
    engine.run(until=lambda: engine.known["victim"].num_preemptions == 1)
    for name in ("q1", "q2", "q3"):
        engine.add(name, 24 - 1)
    free = engine.pool.num_free
    assert engine.abort("q2") == ["q2"]
    assert engine.abort("q2", "never seen", "done") == []
    assert engine.abort("victim") == ["victim"]
    assert engine.pool.num_free == free
    assert engine.waiting == ["q1", "q3"]
    assert engine.schedule().plan.finished_req_ids == {"q2", "victim"}


def test_21_an_abort_between_schedule_and_update() -> None:
    """r1's token is dropped and its blocks are freed once; r2 gets its token."""
    engine = Engine(engine_config(usable_blocks=8))
    r1, r2 = engine.add("r1", 8, 4), engine.add("r2", 8, 4)
    frame = engine.schedule()
    output = engine.model_output(frame.plan)
    engine.abort("r1")
    outputs = engine.core.complete(frame, output)
    assert [o.request_id for o in outputs.outputs] == ["r2"]
    assert (r1.num_output_tokens, r2.num_output_tokens) == (0, 1)
    assert engine.pool.num_free == 8 - 2
    engine.scheduler.check_integrity()


def test_22_the_free_queue_takes_a_table_back_from_its_end() -> None:
    """The rule of 0.22.0: the unhashed last block goes first of its group, behind everything already free."""
    engine = Engine(engine_config(usable_blocks=6, caching=True))
    engine.add("r", 10)
    frame = engine.schedule()
    assert engine.table("r") == [1, 2, 3]
    engine.complete(frame)
    assert engine.pool.free_queue() == [4, 5, 6, 3, 2, 1]
