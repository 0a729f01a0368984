"""Field reports about the accounting of KV blocks, as small cases with the behaviour of vLLM 0.22.0.

The numbers in the names are those of the reports.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engines import Engine, Worker, drafting, engine_config, hit_tokens, some_tokens

from servetwin.sim.block_pool import BlockPool
from servetwin.sim.records import WaitReason
from servetwin.sim.rules import FreeOrder, Rules
from servetwin.workloads import WorkloadError, open_workload


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
    """Q1 (six blocks) has to wait, with the gate and without it; Q2 (five) leaves none free."""
    engine = with_cached_prefix(gate=gate)
    engine.add("Q1", P + some_tokens("Q1", 16))
    frame = engine.schedule()
    assert (frame.record.head, frame.record.head_reason) == ("Q1", WaitReason.BLOCKS)
    assert engine.pool.num_free == 5
    engine.complete(frame)
    engine.abort("Q1")
    engine.add("Q2", P + some_tokens("Q2", 12))
    assert engine.schedule().plan.num_scheduled_tokens == {"X": 1, "Q2": 12}
    assert engine.pool.num_free == 0


@pytest.mark.parametrize(("prompt", "hit"), [(4, 0), (5, 4)])
def test_12_a_reused_block_is_not_found_under_its_old_content(prompt: int, hit: int) -> None:
    """Y takes both blocks, so X misses when it comes again, and computes all it reads; without Y it hits."""
    x = some_tokens("x", prompt)
    for between, expected in ((False, hit), (True, 0)):
        engine, worker = Engine(engine_config(usable_blocks=2, max_model_len=12, caching=True)), Worker(4)
        engine.add("X", x)
        engine.run()
        if between:
            engine.add("Y", 8)
            engine.run()
            engine.pool.check_integrity()
        engine.add("X again", x)
        frame = engine.schedule()
        assert hit_tokens([frame], "X again") == [expected]
        if between:
            worker.read(frame.plan)
            worker.execute(frame.plan)
            assert worker.unwritten("X again") == []
        engine.pool.check_integrity()


@pytest.mark.parametrize("seed", ["a", "b", "c"])
def test_13_the_end_of_a_chain_is_evicted_first(seed: str) -> None:
    """One block of three is taken for something else: it was the last of the chain, so the first two are hit."""
    engine = Engine(engine_config(usable_blocks=3, max_model_len=16, caching=True))
    prompt = some_tokens(seed, 12)
    engine.add("first", prompt)
    engine.run()
    engine.add("other", some_tokens(f"{seed}2", 4))
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


def test_15_prompts_share_blocks_within_one_salt_only() -> None:
    """The same tokens with a salt, without one, and with another one miss each other; the same salt twice hits."""
    engine = Engine(engine_config(caching=True))
    tokens = some_tokens("p", 12)
    hits = []
    for i, salt in enumerate(("x", None, "y", "x", None, "y")):
        engine.add(f"r{i}", tokens, cache_salt=salt)
        hits += hit_tokens(engine.run(), f"r{i}")
    assert hits == [0, 0, 0, 8, 8, 8]


def test_15_a_salt_is_no_prefix_of_tokens() -> None:
    """The parts of a key are told apart by their kind: a salt is not a block that another prompt could begin with."""
    engine = Engine(engine_config(caching=True))
    tokens = some_tokens("p", 8)
    engine.add("salted", tokens, cache_salt="abcd")
    engine.run()
    for name, head in (("bytes", list(b"abcd")), ("empty", [])):
        engine.add(name, head + tokens + [1])
        assert hit_tokens(engine.run(), name) == [0]


@pytest.mark.parametrize("field", ["lora_request", "adapter"])
def test_15_a_request_for_an_adapter_is_refused_by_name(field: str, tmp_path: Path) -> None:
    """Nothing here computes KV under other weights, so nothing may claim to."""
    path = tmp_path / "w.jsonl"
    row = {"request_id": "a", "arrival_s": 0, "prompt_tokens": 8, "output_tokens": 1, field: "x"}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(WorkloadError, match=f"row 1: {field} 'x'.*adapters are not modelled"):
        open_workload(str(path), None, None, 0)


def test_16_no_more_blocks_than_a_row_of_the_table_holds() -> None:
    """A window of 10 tokens is three blocks of four, up to the last token."""
    engine = Engine(engine_config(usable_blocks=10, max_model_len=10))
    r = engine.add("r", 2, 100)
    assert max(frame.record.used_blocks for frame in engine.frames()) == 3
    assert r.num_tokens == 10


@pytest.mark.parametrize("right", [0, 1, 3])
def test_16_lookahead_ends_with_the_window(right: int) -> None:
    """Three slots ahead for drafts, right or wrong: they are cut where the window ends, as are the drafts."""
    config = engine_config(usable_blocks=10, max_model_len=10, speculative=drafting("eagle", 3))
    engine = Engine(config)
    r = engine.add("r", 2, 100)
    used = []
    while not r.finished:
        frame = engine.schedule()
        used.append(frame.record.used_blocks)
        assert r.num_computed_tokens <= 10 - 1
        engine.complete(frame)
        if not r.finished:
            engine.draft("r", right=right, wrong=3 - right)
    assert max(used) == 3
    assert (r.num_tokens, r.finish_reason) == (10, "length")


def test_17_a_cache_reset_works_only_while_nobody_holds_a_block() -> None:
    """With a request in flight: False, and nothing changes. After its end: True; the prompt misses, usage is 0."""
    engine = Engine(engine_config(caching=True))
    tokens = some_tokens("p", 12)
    engine.add("r", tokens, 3)
    engine.step()
    before = pool_state(engine.pool)
    assert engine.core.reset_prefix_cache() is False
    assert pool_state(engine.pool) == before
    engine.run()
    assert engine.pool.num_cached_hashes == 3
    queue = engine.pool.free_queue()
    assert engine.core.reset_prefix_cache() is True
    assert (engine.pool.num_free, engine.pool.num_cached_free, engine.pool.num_cached_hashes) == (100, 0, 0)
    assert engine.pool.free_queue() == queue
    engine.pool.check_integrity()
    engine.add("again", tokens)
    assert hit_tokens(engine.run(), "again") == [0]


def test_18_cached_but_unreferenced_blocks_are_free() -> None:
    """All ten blocks hold content that nobody uses: usage is 0, and a new prompt evicts what it needs."""
    engine = Engine(engine_config(usable_blocks=10, max_model_len=44, caching=True))
    engine.add("first", 40)
    flush = engine.run()[-1].record
    assert (flush.used_blocks, flush.cached_free_blocks, flush.free_blocks) == (0, 10, 0)
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


def free_queue_after(rules: Rules) -> list[int]:
    """Six blocks; one request (10, 1) takes 1, 2 and (partly) 3, and ends."""
    engine = Engine(engine_config(usable_blocks=6, caching=True, rules=rules))
    engine.add("r", 10)
    frame = engine.schedule()
    assert engine.table("r") == [1, 2, 3]
    engine.complete(frame)
    engine.pool.check_integrity()
    return engine.pool.free_queue()


def test_22_the_free_queue_takes_a_table_back_from_its_end() -> None:
    """0.22.0 (exact, and safe): the unhashed last block goes first of its group, behind everything already free."""
    for rules in (Rules.exact(), Rules.safe()):
        assert free_queue_after(rules) == [4, 5, 6, 3, 2, 1]


def test_22_later_releases_take_the_unhashed_block_first() -> None:
    """A rule of its own, off by default: the partial block is the next to be taken."""
    assert free_queue_after(Rules(free_order=FreeOrder.UNHASHED_IN_FRONT)) == [3, 4, 5, 6, 2, 1]
