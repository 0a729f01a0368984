"""Every switch of the rules decides something: a small case each in which the other position has another outcome.

Which way is that of vLLM 0.22.0 is pinned by the default; the corrections make `safe` out of `exact`.
"""

from __future__ import annotations

import pytest
from engines import Engine, Worker, drafting, engine_config, hit_tokens, scheduled, some_tokens
from pydantic import ValidationError

from servetwin.sim.records import PrefixCacheStats, WaitReason
from servetwin.sim.rules import CORRECTIONS, FreeOrder, Rules, StopCheck

EOS = 2


def test_exact_is_the_default_and_has_no_correction() -> None:
    """And `safe` has all of them, and differs in nothing else."""
    assert Rules() == Rules.exact()
    assert Rules.exact().corrections == ()
    assert Rules.safe().corrections == CORRECTIONS
    assert Rules.safe().model_copy(update=dict.fromkeys(CORRECTIONS, False)) == Rules.exact()
    with pytest.raises(ValidationError, match="keep_curser"):
        Rules.model_validate({"keep_curser": True})


# ---------------------------------------------------------------- rules that another release may set otherwise


@pytest.mark.parametrize(("order", "hit"), [(FreeOrder.ALL_AT_THE_BACK, 4), (FreeOrder.UNHASHED_IN_FRONT, 8)])
def test_free_order_decides_what_is_evicted(order: FreeOrder, hit: int) -> None:
    """The partial block of a later request is taken before cached ones, or only after them."""
    engine = Engine(engine_config(usable_blocks=3, caching=True, rules=Rules(free_order=order)))
    prompt = some_tokens("p", 9)
    engine.add("first", prompt[:8])
    engine.run()
    engine.add("partial", 3)
    engine.run()
    engine.add("other", 3)
    engine.run()
    engine.add("again", prompt)
    assert hit_tokens([engine.schedule()], "again") == [hit]
    engine.scheduler.check_integrity()


def test_freed_blocks_go_to_the_front_although_they_stand_in_the_queue_as_stale() -> None:
    """Hit while it was free, a block has a dead entry further back; the queue still holds every block once."""
    engine = Engine(
        engine_config(usable_blocks=6, caching=True, rules=Rules(free_order=FreeOrder.UNHASHED_IN_FRONT))
    )
    prompt = some_tokens("p", 9)
    for name in ("cold", "warm", "warmer"):
        engine.add(name, prompt, 3)
        engine.run()
        engine.scheduler.check_integrity()
    assert engine.pool.free_queue() == [3, 4, 5, 6, 2, 1]


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ((StopCheck.EOS, StopCheck.STOP_TOKEN, StopCheck.LENGTH), "stop"),
        ((StopCheck.LENGTH, StopCheck.EOS, StopCheck.STOP_TOKEN), "length"),
    ],
)
def test_stop_order_names_the_reason_of_an_eos_on_the_last_token(
    order: tuple[StopCheck, ...], reason: str
) -> None:
    """The first that applies."""
    engine = Engine(engine_config(eos_token_id=EOS, rules=Rules(stop_order=order)))
    r = engine.add("r", 3, 4, answer=[9, 9, 9, EOS])
    engine.run()
    assert (r.num_output_tokens, r.finish_reason) == (4, reason)


def test_stop_order_tells_eos_from_a_stop_token_with_the_same_id() -> None:
    """As EOS it has no stop reason, as a stop token it is the reason."""
    for order, stop_reason in (
        ((StopCheck.EOS, StopCheck.STOP_TOKEN, StopCheck.LENGTH), None),
        ((StopCheck.STOP_TOKEN, StopCheck.EOS, StopCheck.LENGTH), EOS),
    ):
        engine = Engine(engine_config(eos_token_id=EOS, rules=Rules(stop_order=order)))
        r = engine.add("r", 3, 4, stop_token_ids=[EOS], answer=[EOS])
        engine.run()
        assert (r.finish_reason, r.stop_reason) == ("stop", stop_reason)


@pytest.mark.parametrize(("ahead", "blocks"), [(False, 2), (True, 3)])
def test_lookahead_at_admission_reserves_the_drafters_slots(ahead: bool, blocks: int) -> None:
    """Eight tokens and three slots for drafts; where that is more than there is, the request has to wait."""
    rules = Rules(lookahead_at_admission=ahead)
    engine = Engine(engine_config(speculative=drafting("eagle", 3), rules=rules))
    engine.add("r", 8, 2)
    engine.schedule()
    assert len(engine.table("r")) == blocks
    full = Engine(
        engine_config(usable_blocks=2, max_model_len=12, speculative=drafting("eagle", 3), rules=rules)
    )
    full.add("r", 8)
    assert full.schedule().record.head_reason is (WaitReason.BLOCKS if ahead else None)


@pytest.mark.parametrize(
    ("first", "expected"), [(True, {"a1": 6, "a2": 6, "b": 8}), (False, {"a1": 6, "a2": 6})]
)
def test_the_threshold_comes_before_the_question_whether_a_prompt_fits(
    first: bool, expected: dict[str, int]
) -> None:
    """Without chunked prefill: b's piece of 8 fits the 8 tokens left of 20, b's whole prompt of 13 does not."""
    config = engine_config(
        max_model_len=20,
        max_num_batched_tokens=20,
        enable_chunked_prefill=False,
        long_prefill_token_threshold=8,
        rules=Rules(threshold_before_chunk_check=first),
    )
    engine = Engine(config)
    for name in ("a1", "a2"):
        engine.add(name, 6)
    engine.add("b", 13)
    assert engine.step() == expected


@pytest.mark.parametrize("counted", [True, False])
def test_lookups_of_a_refused_head_are_counted_or_not(counted: bool) -> None:
    """A lookup that admits counts either way."""
    config = engine_config(usable_blocks=6, caching=True, rules=Rules(count_refused_lookups=counted))
    engine = Engine(config)
    engine.add("holder", 15, 2)
    engine.step()
    engine.add("head", 16)
    lookup = PrefixCacheStats(requests=1, queries=16)
    frames = [engine.schedule()]
    assert frames[0].record.head == "head"
    engine.complete(frames[0])
    frames.append(engine.schedule())
    assert scheduled(frames, "head") == [16]
    assert [f.record.prefix for f in frames] == [lookup if counted else PrefixCacheStats(), lookup]


# ---------------------------------------------------------------- corrections (the others: field reports 1, 3, 6)


def resumption_of_a_scheduled_victim(rules: Rules) -> tuple[int, list[int]]:
    """(prefix hits of d when it resumes, its positions whose slots hold something else than what belongs there).

    d has computed 16 of 23 tokens; a step gives it the other 7, which hashes its fifth block, and then, in the same
    step, takes everything from it for the more urgent u.
    """
    config = engine_config(
        usable_blocks=7, caching=True, policy="priority", long_prefill_token_threshold=8, rules=rules
    )
    engine, worker = Engine(config), Worker(4)
    engine.add("d", 23, priority=9)
    for step in range(10):
        if step == 1:
            engine.add("u", 4, 3, priority=0)
        frame = engine.schedule()
        assert [p.unscheduled for p in frame.record.preempted] == [True] * (step == 2)
        worker.read(frame.plan)
        worker.execute(frame.plan)
        for admission in frame.record.admitted:
            if admission.resumed:
                return admission.hit_tokens, worker.unwritten("d")
        worker.sampled(engine.complete(frame))
    raise AssertionError("d did not resume")


def test_forget_uncomputed_blocks_takes_them_out_of_the_cache() -> None:
    """0.22.0 hits a block that no step has computed (golden s17); corrected, d computes it."""
    assert resumption_of_a_scheduled_victim(Rules.exact()) == (20, [16, 17, 18, 19])
    assert resumption_of_a_scheduled_victim(Rules(forget_uncomputed_blocks=True)) == (16, [])
