"""The points of the scheduler that an implementation gets wrong, one small case each.

The numbers in the names are those of the specification's list (vLLM 0.22.0 to the letter; `test_rules.py` has the
switches, `test_async_scheduler.py` what asynchronous scheduling adds).
"""

from __future__ import annotations

from typing import Any

import pytest
from engines import Engine, drafting, engine_config, hit_tokens, preempted, scheduled, some_tokens

from servetwin.sim.contract import SamplingParams
from servetwin.sim.records import PrefixCacheStats, WaitReason
from servetwin.sim.request import RequestStatus

EOS = 2


# ---------------------------------------------------------------- preemption


def test_01_a_preemption_closes_admission_for_the_step() -> None:
    """Neither the victim nor a small newcomer is admitted in that step, although seats, tokens and blocks are left."""
    engine = Engine(engine_config(usable_blocks=5))
    engine.add("a", 8, 9)
    engine.add("b", 9, 9)
    engine.step()
    engine.add("small", 1)
    frame = engine.schedule()
    assert preempted([frame]) == ["b"]
    assert frame.record.admitted == []
    assert (frame.record.head, frame.record.head_reason) == ("b", WaitReason.PREEMPTION)
    assert engine.pool.num_free == 2


def self_preemption() -> Engine:
    """On a full pool: b, the least urgent, needs a block in the next step, c behind it does not."""
    engine = Engine(engine_config(usable_blocks=5, policy="priority"))
    engine.add("b", 11, 9, priority=9)
    engine.step()
    engine.add("c", 5, 9, priority=0)
    assert engine.step() == {"b": 1, "c": 5}
    assert (engine.running, engine.pool.num_free) == (["b", "c"], 0)
    return engine


def test_02_requests_behind_a_self_preempted_one_idle() -> None:
    """The running pass ends with the failed allocation, although c holds enough blocks and tokens are left."""
    engine = self_preemption()
    frame = engine.schedule()
    assert preempted([frame]) == ["b"]
    assert frame.plan.num_scheduled_tokens == {}
    assert engine.running == ["c"]
    engine.complete(frame)
    assert engine.step() == {"c": 1}


def test_11_victims_of_one_step_keep_their_order_and_their_outputs() -> None:
    """FCFS takes from the end and puts each to the front; resumed, they compute prompt and outputs again."""
    engine = Engine(engine_config(usable_blocks=6))
    for name in ("a", "b", "c"):
        engine.add(name, 7, 12)
    frames = engine.run(until=lambda: len(engine.waiting) == 2)
    victims = preempted(frames)
    assert sorted(victims) == ["b", "c"]
    assert engine.waiting == ["b", "c"]
    b = engine.known["b"]
    kept = b.num_output_tokens
    assert kept > 0
    assert (b.status, b.num_computed_tokens, engine.table("b")) == (RequestStatus.PREEMPTED, 0, [])
    frames = engine.run(until=lambda: b.status == RequestStatus.RUNNING)
    assert frames[-1].plan.num_scheduled_tokens["b"] == 7 + kept
    engine.run()
    assert {r.num_output_tokens for r in engine.known.values()} == {12}


def test_11_with_caching_a_victim_finds_its_own_blocks_again() -> None:
    """Three of its four blocks survive, one of them full of generated tokens; computed restarts behind them."""
    engine = Engine(engine_config(usable_blocks=8, caching=True))
    engine.add("a", 6, 13)
    b = engine.add("b", 6, 14)
    frames = engine.run(until=lambda: b.num_preemptions == 1)
    assert (b.num_tokens, frames[-1].record.preempted[0].computed_tokens) == (17, 16)
    frames += engine.run()
    assert hit_tokens(frames, "b") == [0, 12]
    assert scheduled(frames, "b") == [6, *[1] * 10, 17 - 12, 1, 1]


def test_12_ties_in_the_queue_are_broken_by_arrival_then_by_the_id_as_text() -> None:
    """Equal priority and arrival: "r10" comes before "r9"."""
    engine = Engine(engine_config(policy="priority", max_num_seqs=1))
    for name, priority, arrival in (
        ("r9", 1, 5),
        ("r10", 1, 5),
        ("late", 1, 6),
        ("low", 2, 0),
        ("top", 0, 9),
    ):
        engine.add(name, 4, priority=priority, arrival_ns=arrival)
    assert engine.waiting == ["top", "r10", "r9", "late", "low"]
    assert [next(iter(f.plan.num_scheduled_tokens), "") for f in engine.run()] == [
        "top",
        "r10",
        "r9",
        "late",
        "low",
        "",
    ]


def test_12_the_first_of_equal_victims_goes() -> None:
    """Equal (priority, arrival): running order decides, the id does not."""
    engine = Engine(engine_config(usable_blocks=6, policy="priority"))
    engine.add("urgent", 8, 9, priority=0)
    for name in ("x", "y"):
        engine.add(name, 6, 9, priority=1, arrival_ns=7)
    engine.step()
    assert engine.running == ["urgent", "x", "y"]
    assert preempted([engine.schedule()]) == ["x"]


def test_13_a_scheduled_victim_gives_its_tokens_back() -> None:
    """d was given its token before u needed a block: it leaves every part of the plan, and nobody is skipped."""
    engine = Engine(engine_config(usable_blocks=6, policy="priority", max_num_seqs=4))
    engine.add("d", 6, 9, priority=9, arrival_ns=0)
    engine.step()
    engine.add("u", 8, 9, priority=0)
    engine.add("v", 7, 9, priority=0)
    engine.step()
    assert engine.running == ["d", "u", "v"]
    frame = engine.schedule()
    (victim,) = frame.record.preempted
    assert (victim.request_id, victim.unscheduled) == ("d", True)
    assert frame.plan.num_scheduled_tokens == {"u": 1, "v": 1}
    assert frame.plan.total_num_scheduled_tokens == 2
    assert "d" not in frame.plan.scheduled_cached_reqs.req_ids
    assert frame.plan.preempted_req_ids == {"d"}


def test_13_a_scheduled_victim_takes_its_drafts_along() -> None:
    """d was given a token and a draft before u needed a block."""
    config = engine_config(
        usable_blocks=6, policy="priority", max_num_seqs=4, speculative=drafting("ngram", 1)
    )
    engine = Engine(config)
    engine.add("d", 5, 9, priority=9, arrival_ns=0)
    engine.step()
    engine.add("u", 8, 9, priority=0)
    engine.add("v", 7, 9, priority=0)
    engine.step()
    engine.draft("d", right=1)
    frame = engine.schedule()
    assert [(p.request_id, p.unscheduled) for p in frame.record.preempted] == [("d", True)]
    assert frame.plan.scheduled_spec_decode_tokens == {}


def test_13_tokens_given_back_go_to_those_behind() -> None:
    """v, cut to the one token left of four in the first step, gets two with the token that d gives back."""
    engine = Engine(
        engine_config(
            block_size=2,
            usable_blocks=5,
            policy="priority",
            max_num_seqs=3,
            max_num_batched_tokens=4,
            long_prefill_token_threshold=2,
            scheduler_reserve_full_isl=False,
        )
    )
    d = engine.add("d", 4, 6, priority=9)
    engine.run(until=lambda: d.num_output_tokens == 1)
    engine.add("u", 8, priority=0)
    engine.add("v", 5, priority=0)
    assert engine.step() == {"d": 1, "u": 2, "v": 1}
    frame = engine.schedule()
    assert preempted([frame]) == ["d"]
    assert frame.plan.num_scheduled_tokens == {"u": 2, "v": 2}


def test_13_the_number_of_tokens_is_not_taken_anew_after_a_refund() -> None:
    """u was cut to the three tokens left of the budget; d's refund does not make them four."""
    engine = Engine(
        engine_config(
            usable_blocks=4,
            policy="priority",
            max_num_seqs=2,
            max_num_batched_tokens=4,
            scheduler_reserve_full_isl=False,
        )
    )
    d = engine.add("d", 8, 8, priority=9)
    engine.run(until=lambda: d.num_output_tokens == 1)
    engine.add("u", 15, priority=0)
    assert engine.step() == {"d": 1, "u": 3}
    frame = engine.schedule()
    (victim,) = frame.record.preempted
    assert (victim.request_id, victim.unscheduled) == ("d", True)
    assert frame.plan.num_scheduled_tokens == {"u": 3}


# ---------------------------------------------------------------- prefix cache


def test_03_a_block_is_found_in_the_step_that_fills_it() -> None:
    """Hashing happens at schedule time: the second of two equal prompts computes one token."""
    engine = Engine(engine_config(caching=True))
    tokens = some_tokens("p", 17)
    engine.add("first", tokens)
    engine.add("second", tokens)
    frame = engine.schedule()
    assert frame.plan.num_scheduled_tokens == {"first": 17, "second": 1}
    assert engine.table("first")[:4] == engine.table("second")[:4]


def test_a_block_is_its_tokens_and_everything_before_them() -> None:
    """The same four tokens at the beginning of a prompt are not the block that stood second in another."""
    engine = Engine(engine_config(caching=True))
    second = some_tokens("second", 4)
    engine.add("before", some_tokens("first", 4) + second)
    engine.run()
    engine.add("r", second + some_tokens("tail", 4))
    assert hit_tokens(engine.run(), "r") == [0]


def test_04_the_last_token_is_never_hit() -> None:
    """A prompt of two whole blocks that are both cached hits one of them."""
    engine = Engine(engine_config(caching=True))
    tokens = some_tokens("p", 8)
    for name in ("cold", "warm"):
        engine.add(name, tokens)
        frames = engine.run()
    assert hit_tokens(frames, "warm") == [4]
    assert scheduled(frames, "warm") == [4]


def test_05_the_gate_asks_for_the_whole_prompt() -> None:
    """Six blocks for a prompt whose first chunk needs two: it waits while five are free; without the gate it starts."""
    for gate, expected in ((True, {"a": 1}), (False, {"a": 1, "b": 7})):
        engine = Engine(
            engine_config(usable_blocks=8, max_num_batched_tokens=8, scheduler_reserve_full_isl=gate)
        )
        engine.add("a", 8, 9)
        engine.step()
        engine.add("b", 22)
        frame = engine.schedule()
        assert frame.plan.num_scheduled_tokens == expected
        assert frame.record.head_reason is (WaitReason.GATE if gate else None)


def test_05_the_gate_reserves_nothing() -> None:
    """Two prompts pass it although both cannot grow: preemption stays possible."""
    engine = Engine(engine_config(usable_blocks=5))
    engine.add("a", 8, 9)
    engine.add("b", 9, 9)
    assert engine.step() == {"a": 8, "b": 9}
    assert preempted(engine.run()) == ["b"]


def test_05_the_gate_counts_the_outputs_of_a_resumed_request() -> None:
    """b's prompt would fit into what is free, its prompt and outputs do not."""
    engine = Engine(engine_config(usable_blocks=6, max_num_batched_tokens=8))
    engine.add("a", 7, 16)
    b = engine.add("b", 7, 16)
    engine.run(until=lambda: b.num_preemptions == 1)
    assert b.num_tokens > 8
    frames = engine.run(until=lambda: b.status == RequestStatus.RUNNING)
    waited = [f for f in frames if f.record.head_reason is WaitReason.GATE]
    assert waited
    assert any(f.record.free_blocks >= 2 for f in waited)


def test_06_hit_blocks_that_nobody_uses_count_as_taken() -> None:
    """They leave the free queue: with two of them three blocks are too few for a prompt of four, four are enough."""
    for holder, expected in ((9, {"holder": 1}), (5, {"holder": 1, "r": 8})):
        engine = Engine(engine_config(usable_blocks=6, caching=True))
        tokens = some_tokens("p", 8)
        engine.add("first", tokens)
        engine.run()
        engine.add("holder", holder, 3)
        engine.step()
        engine.add("r", tokens + some_tokens("tail", 8))
        assert engine.step() == expected


def test_06_hit_blocks_in_use_cost_nothing() -> None:
    """The same prompt needs a block less of the free ones for each block that a running request holds."""
    engine = Engine(engine_config(usable_blocks=6, caching=True))
    tokens = some_tokens("p", 12)
    engine.add("holder", tokens, 9)
    engine.step()
    engine.add("sharer", tokens + some_tokens("tail", 6))
    frame = engine.schedule()
    # holder: 3 + 1 blocks; sharer: 3 shared, 2 new.
    assert frame.plan.num_scheduled_tokens == {"holder": 1, "sharer": 6}
    assert engine.pool.num_free == 0


def test_07_a_request_does_not_evict_its_own_hits() -> None:
    """Its hits stand at the front of the free queue; they are touched before fresh blocks are taken."""
    engine = Engine(engine_config(usable_blocks=6, caching=True))
    tokens = some_tokens("p", 8)
    engine.add("first", tokens)
    engine.run()
    engine.add("other", 16)
    engine.run()
    assert engine.pool.free_queue()[:2] == [2, 1]
    engine.add("again", tokens + some_tokens("tail", 8))
    frame = engine.schedule()
    assert engine.table("again")[:2] == [1, 2]
    assert not {1, 2} & set(engine.table("again")[2:])
    assert frame.plan.num_scheduled_tokens == {"again": 8}


def test_08_a_table_is_freed_from_its_end() -> None:
    """The end of the chain is taken before its beginning, so a shorter prefix can still be hit."""
    engine = Engine(engine_config(usable_blocks=4, caching=True))
    tokens = some_tokens("p", 13)
    engine.add("first", tokens)
    engine.run()
    assert engine.pool.free_queue() == [4, 3, 2, 1]
    engine.add("other", 7)
    engine.run()
    engine.add("again", tokens)
    assert hit_tokens(engine.run(), "again") == [8]


def test_08_requests_that_end_together_are_freed_in_scheduling_order() -> None:
    """Each table reversed, one after the other, behind what is free."""
    engine = Engine(engine_config(usable_blocks=6))
    engine.add("a", 8)
    engine.add("b", 7)
    engine.step()
    assert engine.pool.free_queue() == [5, 6, 2, 1, 4, 3]


def test_09_equal_blocks_are_kept_side_by_side() -> None:
    """Two requests come to the same blocks by decoding and keep their own; later the older ones are hit."""
    engine = Engine(engine_config(caching=True))
    tokens = some_tokens("p", 9)
    a = engine.add("a", tokens[:3], 7, answer=tokens[3:])
    engine.add("b", tokens[:3], 7, answer=tokens[3:])
    engine.run(until=lambda: a.num_computed_tokens == 8)
    assert (engine.table("a"), engine.table("b")) == ([1, 3], [2, 4])
    assert engine.pool.num_cached_hashes == 2
    engine.run()
    engine.add("c", tokens)
    engine.schedule()
    assert engine.table("c")[:2] == [1, 3]


def test_09_the_eviction_of_a_duplicate_exposes_the_next() -> None:
    """Two requests hold equal blocks side by side; the older ones are taken away, and the younger ones are hit."""
    engine = Engine(engine_config(usable_blocks=10, caching=True))
    tokens = some_tokens("p", 9)
    a = engine.add("a", tokens[:3], 7, answer=tokens[3:])
    b = engine.add("b", tokens[:3], 17, answer=tokens[3:])
    engine.run(until=lambda: a.finished)
    assert (engine.table("b")[:2], b.finished) == ([2, 4], False)
    engine.add("other", 20)
    engine.run(until=lambda: b.finished)
    assert engine.pool.hash_of(1) != engine.pool.hash_of(2)
    engine.add("c", tokens)
    engine.schedule()
    assert engine.table("c")[:2] == [2, 4]


def test_10_the_first_block_handed_out_is_block_1() -> None:
    """Block 0 is the null block."""
    engine = Engine(engine_config(usable_blocks=3))
    engine.add("r", 12 - 1)
    engine.schedule()
    assert engine.table("r") == [1, 2, 3]
    assert engine.pool.num_free == 0


# ---------------------------------------------------------------- how many tokens


def test_14_the_threshold_cuts_prompts_in_both_passes() -> None:
    """At admission and while the prompt goes on; a decode is never above it."""
    engine = Engine(engine_config(long_prefill_token_threshold=5))
    engine.add("r", 13, 3)
    assert scheduled(engine.run(), "r") == [5, 5, 3, 1, 1]


def unchunked(**options: int) -> Engine:
    """20 tokens a step, in a window of 20, without chunked prefill."""
    return Engine(
        engine_config(
            max_model_len=20,
            max_num_batched_tokens=20,
            enable_chunked_prefill=False,
            **options,  # type: ignore[arg-type]
        )
    )


def test_14_without_chunked_prefill_a_long_prompt_blocks_those_behind_it() -> None:
    """It does not fit into what is left of the step's tokens; the short one behind it is not tried."""
    engine = unchunked()
    for name, prompt in (("a", 12), ("long", 12), ("short", 2)):
        engine.add(name, prompt)
    frame = engine.schedule()
    assert frame.plan.num_scheduled_tokens == {"a": 12}
    assert (frame.record.head, frame.record.head_reason) == ("long", WaitReason.BUDGET)
    engine.complete(frame)
    assert engine.step() == {"long": 12, "short": 2}


def test_14_the_threshold_comes_before_the_test_for_whole_prompts() -> None:
    """So prompts above it are chunked although chunked prefill is off."""
    engine = unchunked(long_prefill_token_threshold=8)
    engine.add("a", 12, 2)
    engine.add("b", 13, 2)
    frames = engine.run()
    assert frames[0].plan.num_scheduled_tokens == {"a": 8, "b": 8}, "12 tokens were left, and b has 13"
    assert scheduled(frames, "a") == [8, 4, 1]
    assert scheduled(frames, "b") == [8, 5, 1]


def test_15_admission_takes_blocks_for_its_tokens_only() -> None:
    """A draft head wants three slots ahead: not at admission, also after a hit, but from the first decode on."""
    engine = Engine(engine_config(caching=True, speculative=drafting("eagle", 3)))
    tokens = some_tokens("p", 8)
    cold = engine.add("cold", tokens, 5)
    engine.schedule()
    assert len(engine.table("cold")) == 2
    engine.complete(engine.core.in_flight[0])
    engine.schedule()
    assert (cold.num_computed_tokens, len(engine.table("cold"))) == (9, 3)
    engine.complete(engine.core.in_flight[0])
    engine.add("warm", tokens + some_tokens("tail", 8))
    frame = engine.schedule()
    assert hit_tokens([frame], "warm") == [4]
    assert len(engine.table("warm")) == 4


@pytest.mark.parametrize(("method", "blocks"), [("ngram", 2), ("eagle", 3), ("draft_model", 3)])
def test_15_drafters_without_kv_need_no_slots_ahead(method: str, blocks: int) -> None:
    """The first decode computes token 7 of two blocks: only a drafter that writes KV asks for more."""
    engine = Engine(engine_config(speculative=drafting(method, 3)))
    engine.add("r", 6, 5)
    engine.step()
    engine.step()
    assert len(engine.table("r")) == blocks


def test_15_a_draft_head_gives_up_the_last_block_of_a_hit() -> None:
    """It needs the hidden state before its first token."""
    for method, hit in (("eagle", 4), ("draft_model", 8), ("ngram", 8)):
        engine = Engine(engine_config(caching=True, speculative=drafting(method, 2)))
        tokens = some_tokens("p", 12)
        for name in ("cold", "warm"):
            engine.add(name, tokens)
            frames = engine.run()
        assert hit_tokens(frames, "warm") == [hit]


def test_16_the_window_ends_a_request_before_its_max_tokens() -> None:
    """The last token of the window is sampled and never computed."""
    engine = Engine(engine_config(max_model_len=12))
    r = engine.add("r", 8, 50)
    frames = engine.run()
    assert (r.num_tokens, r.finish_reason) == (12, "length")
    assert sum(scheduled(frames, "r")) == 11


def test_16_drafts_are_cut_at_the_end_of_the_window() -> None:
    """computed + n never passes max_model_len - 1: with two tokens of room one draft of three is left."""
    engine = Engine(engine_config(max_model_len=12, speculative=drafting("ngram", 3)))
    r = engine.add("r", 9, 50)
    engine.step()
    engine.draft("r", wrong=3)
    plan = engine.schedule().plan
    assert (plan.num_scheduled_tokens, len(plan.scheduled_spec_decode_tokens["r"])) == ({"r": 2}, 1)
    assert r.num_computed_tokens == 11


def test_16_admission_knows_no_such_clamp() -> None:
    """A request that its min_tokens keep alive at the edge gets 0 tokens while it runs, and all 16 when it resumes."""
    engine = Engine(engine_config(usable_blocks=6, max_model_len=16, policy="priority"))
    stuck = engine.add("stuck", 10, 20, min_tokens=20, priority=9)
    engine.run(until=lambda: stuck.num_tokens == 16)
    assert engine.step() == {}
    engine.add("urgent", 7, 3)
    engine.run(until=lambda: stuck.num_preemptions == 1)
    frames = engine.run(until=lambda: stuck.status == RequestStatus.RUNNING)
    assert scheduled(frames, "stuck") == [16]


def test_16_a_smaller_budget_than_max_num_batched_tokens_counts() -> None:
    """`max_num_scheduled_tokens`, where set and not 0."""
    for cap, expected in ((5, [5, 5, 3]), (0, [13]), (None, [13])):
        engine = Engine(engine_config(max_num_scheduled_tokens=cap))
        engine.add("r", 13)
        assert scheduled(engine.run(), "r") == expected


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("sampling", "answer", "outputs", "reason", "stop_reason"),
    [
        ({}, [9, EOS, 9], 2, "stop", None),
        ({"min_tokens": 3}, [9, EOS, 9, 9], 4, "length", None),
        ({"min_tokens": 3}, [EOS, 5, EOS, 9], 3, "stop", None),
        ({"ignore_eos": True}, [EOS, EOS, EOS, EOS], 4, "length", None),
        ({"ignore_eos": True, "stop_token_ids": [5]}, [EOS, 5], 2, "stop", 5),
        ({"stop_token_ids": [EOS]}, [EOS], 1, "stop", None),
        ({}, [9, 9, 9, EOS], 4, "stop", None),
        ({"stop_token_ids": [5]}, [9, 9, 9, 5], 4, "stop", 5),
        ({}, [9, 9, 9, 9], 4, "length", None),
    ],
)
def test_17_the_order_of_the_stop_rules(
    sampling: dict[str, Any], answer: list[int], outputs: int, reason: str, stop_reason: int | None
) -> None:
    """min_tokens, EOS, stop ids, length; ignore_eos leaves the stop ids; EOS on the last token is a stop."""
    engine = Engine(engine_config(eos_token_id=EOS))
    r = engine.add("r", 3, 4, answer=answer, **sampling)
    engine.run()
    assert (r.num_output_tokens, r.finish_reason, r.stop_reason) == (outputs, reason, stop_reason)


def test_18_the_worker_hears_of_an_end_one_step_later() -> None:
    """Also of an aborted request that never ran; after the last end one empty step follows, and no more."""
    engine = Engine(engine_config(max_num_seqs=1))
    engine.add("a", 4, 2)
    engine.add("never", 4)
    first = engine.schedule()
    engine.complete(first)
    engine.abort("never")
    frames = engine.run()
    assert [f.plan.finished_req_ids for f in [first, *frames]] == [set(), {"never"}, {"a"}]
    assert frames[-1].plan.num_scheduled_tokens == {}
    assert engine.core.begin(0) is None


def test_19_computed_runs_ahead_of_the_execution() -> None:
    """It counts a step's tokens when the step is planned."""
    engine = Engine(engine_config())
    r = engine.add("r", 7, 3)
    frame = engine.schedule()
    assert (r.num_computed_tokens, r.num_output_tokens) == (7, 0)
    engine.complete(frame)
    assert (r.num_computed_tokens, r.num_output_tokens) == (7, 1)


def drafted(*, right: int, wrong: int) -> Engine:
    """r, with a prompt of 6 and one output, has drafts for the next step."""
    engine = Engine(engine_config(caching=True, speculative=drafting("eagle", 3)))
    engine.add("r", 6, 40)
    engine.step()
    engine.draft("r", right=right, wrong=wrong)
    return engine


def test_19_rejected_drafts_are_rolled_back_and_their_blocks_stay() -> None:
    """One of three drafts is right: two tokens come, computed goes back by two, the third block is kept."""
    engine = drafted(right=1, wrong=2)
    r, frame = engine.known["r"], engine.schedule()
    assert frame.plan.num_scheduled_tokens == {"r": 4}
    assert (r.num_computed_tokens, r.num_tokens) == (10, 7)
    engine.complete(frame)
    assert (r.num_computed_tokens, r.num_tokens) == (8, 9)
    # 10 tokens and three slots ahead took a fourth block.
    assert len(engine.table("r")) == 4
    assert engine.schedule().plan.scheduled_cached_reqs.new_block_ids == [None]


def test_19_drafts_are_never_hashed() -> None:
    """Ten tokens of the step fill two blocks, but seven are known: one block is; accepted, they are a step later."""
    engine = drafted(right=3, wrong=0)
    r, frame = engine.known["r"], engine.schedule()
    assert (r.num_computed_tokens, engine.pool.num_cached_hashes) == (10, 1)
    engine.complete(frame)
    assert (r.num_tokens, engine.pool.num_cached_hashes) == (11, 1)
    engine.schedule()
    assert engine.pool.num_cached_hashes == 2


def test_19_drafts_that_do_not_fit_the_step_are_dropped() -> None:
    """Budget for two of four tokens: one draft is verified, the others are gone."""
    engine = Engine(engine_config(max_num_batched_tokens=2, max_num_seqs=2, speculative=drafting("ngram", 3)))
    r = engine.add("r", 2, 40)
    engine.step()
    engine.draft("r", right=3)
    frame = engine.schedule()
    assert [len(d) for d in frame.plan.scheduled_spec_decode_tokens.values()] == [1]
    assert r.spec_token_ids == []
    engine.complete(frame)
    assert r.num_output_tokens == 3


def test_19_drafts_of_an_unfinished_prompt_and_of_the_dead_are_ignored() -> None:
    """The drafter knows of neither."""
    engine = Engine(engine_config(max_num_batched_tokens=8, speculative=drafting("ngram", 2)))
    r, gone = engine.add("r", 12, 4), engine.add("gone", 2, 4)
    engine.step()
    assert r.is_prefill_chunk
    engine.abort("gone")
    engine.draft("r", wrong=2)
    engine.draft("gone", wrong=2)
    assert (r.spec_token_ids, gone.spec_token_ids) == ([], [])
    assert engine.schedule().plan.scheduled_spec_decode_tokens == {}


# ---------------------------------------------------------------- what a plan says


def test_20_a_new_request_carries_its_whole_table_and_a_running_one_its_additions() -> None:
    """None where a running request got no block."""
    engine = Engine(engine_config())
    engine.add("r", 7, 9)
    plan = engine.schedule().plan
    (new,) = plan.scheduled_new_reqs
    assert (new.block_ids, new.num_computed_tokens, new.num_prompt_tokens) == (([1, 2],), 0, 7)
    assert new.sampling_params == SamplingParams(max_tokens=9)
    engine.complete(engine.core.in_flight[0])
    told = [f.plan.scheduled_cached_reqs for f in engine.run(until=lambda: len(engine.table("r")) == 3)]
    assert [c.new_block_ids for c in told] == [[None], [([3],)]]
    assert [c.num_computed_tokens for c in told] == [[7], [8]]
    assert [c.num_output_tokens for c in told] == [[1], [2]]


def test_20_a_resumed_request_carries_its_whole_table_and_all_its_tokens() -> None:
    """The worker replaces the old table; the hits come first."""
    engine = Engine(engine_config(usable_blocks=5, caching=True))
    engine.add("a", 8, 4)
    b = engine.add("b", 9, 4)
    engine.run(until=lambda: b.num_preemptions == 1)
    frames = engine.run(until=lambda: b.status == RequestStatus.RUNNING or b.finished)
    cached = frames[-1].plan.scheduled_cached_reqs
    place = cached.req_ids.index("b")
    assert cached.resumed_req_ids == {"b"}
    (blocks,) = cached.new_block_ids[place] or ([],)
    assert cached.num_computed_tokens[place] == hit_tokens(frames, "b")[0]
    assert len(blocks) == 3
    assert cached.all_token_ids["b"] == b.all_token_ids()[:10]


def test_20_a_running_request_that_sat_out_a_step_carries_all_its_tokens() -> None:
    """The worker dropped it from its batch in between."""
    engine = self_preemption()
    engine.step()
    frame = engine.schedule()
    cached = frame.plan.scheduled_cached_reqs
    assert (cached.req_ids, cached.resumed_req_ids) == (["c"], set())
    assert cached.all_token_ids == {"c": engine.known["c"].all_token_ids()}
    engine.complete(frame)
    assert engine.schedule().plan.scheduled_cached_reqs.all_token_ids == {}


def test_20_the_second_model_runner_gets_resumed_requests_as_new_ones() -> None:
    """Behind the new ones, with the whole table and all known tokens; nobody is listed as resumed."""
    engine = Engine(engine_config(usable_blocks=5, use_v2_model_runner=True))
    engine.add("a", 8, 4)
    b = engine.add("b", 9, 4)
    engine.run(until=lambda: b.num_preemptions == 1)
    plan = engine.run(until=lambda: b.status == RequestStatus.RUNNING or b.finished)[-1].plan
    (told,) = plan.scheduled_new_reqs
    assert plan.scheduled_cached_reqs.resumed_req_ids == set()
    assert (told.req_id, told.num_output_tokens, len(told.block_ids[0])) == ("b", 1, 3)
    assert told.prefill_token_ids == b.all_token_ids()[:10]
    assert told.prompt_token_ids == b.prompt.token_ids()


def test_20_lookups_are_counted_at_every_try() -> None:
    """A refused head of the queue counts again in each step."""
    engine = Engine(engine_config(usable_blocks=6, caching=True))
    tokens = some_tokens("p", 8)
    engine.add("first", tokens)
    engine.run()
    engine.add("holder", 15, 2)
    engine.step()
    engine.add("head", tokens + some_tokens("tail", 8))
    refused = engine.schedule()
    assert refused.record.head_reason is WaitReason.BLOCKS
    assert refused.record.prefix == PrefixCacheStats(requests=1, queries=16, hits=8)
    engine.complete(refused)
    admitted = engine.schedule()
    assert admitted.record.prefix == PrefixCacheStats(requests=1, queries=16, hits=8)


def test_20_lookups_of_a_preempted_request_are_counted_apart() -> None:
    """Also at every try: b finds its own two blocks, in each step until it is let in again."""
    engine = Engine(engine_config(usable_blocks=5, caching=True))
    engine.add("a", 8, 4)
    b = engine.add("b", 9, 4)
    engine.run(until=lambda: b.num_preemptions == 1)
    frames = engine.run(until=lambda: b.status == RequestStatus.RUNNING)
    assert len(frames) > 1
    for frame in frames:
        counted = PrefixCacheStats(preempted_requests=1, preempted_queries=10, preempted_hits=8)
        assert frame.record.prefix == counted


def test_common_prefix_blocks_are_those_that_every_holder_shares() -> None:
    """Counted from the front of the first running table; 0 without caching."""
    for caching, expected in ((True, 2), (False, 0)):
        engine = Engine(engine_config(caching=caching))
        shared = some_tokens("p", 8)
        engine.add("a", shared + some_tokens("a", 5))
        engine.add("b", shared + some_tokens("b", 5))
        assert engine.schedule().plan.num_common_prefix_blocks == [expected]


def test_without_seats_and_without_tokens_it_is_the_seats() -> None:
    """The last seat took the last token: more tokens alone would not let the next one in."""
    engine = Engine(engine_config(max_num_batched_tokens=8, max_num_seqs=1))
    engine.add("first", 8)
    engine.add("second", 4)
    record = engine.schedule().record
    assert (record.head, record.head_reason) == ("second", WaitReason.SEATS)


def test_whoever_finds_the_budget_spent_waits_for_tokens() -> None:
    """The first prompt takes the whole budget: the second is not even looked at, and its reason says so."""
    engine = Engine(engine_config(max_num_batched_tokens=8))
    engine.add("first", 8)
    engine.add("second", 4)
    record = engine.schedule().record
    assert (record.head, record.head_reason) == ("second", WaitReason.BUDGET)
