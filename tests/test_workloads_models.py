"""Shared prefixes, datasets of vLLM, block trees, synthetic workloads and presets."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from servetwin.workloads import (
    PRESETS,
    AllAtOnce,
    BenchServe,
    BlockTree,
    Empirical,
    EmpiricalPairs,
    Fixed,
    Gamma,
    Independent,
    ListWorkload,
    Lognormal,
    Poisson,
    PrefixRepetitionDataset,
    QuantileGrid,
    RandomDataset,
    SharedPrefixFamilies,
    Synthetic,
    SystemPrompts,
    Uniform,
    Workload,
    WorkloadError,
    build_preset,
)
from servetwin.workloads.streams import stream

RNG_SEED = 7


def gaps_of(times_s):
    return np.diff(times_s, prepend=0.0)


def synthetic(**changes):
    parts = {
        "arrivals": Poisson(rate_per_s=2.0),
        "input_lengths": Lognormal.from_quantiles(p50=500, p90=2000, max_tokens=8192),
        "output_lengths": QuantileGrid({0: 1, 0.5: 100, 1: 900}),
        "prefixes": SystemPrompts.zipf(3, tokens=64),
        "n": 50,
        "seed": 1,
    }
    return Synthetic(**{**parts, **changes}).requests


def column(requests, name):
    return [getattr(r, name) for r in requests]


def requests_of(prompts, n, seed=0):
    return Synthetic(arrivals=AllAtOnce(), prompts=prompts, n=n, seed=seed).requests


# ---------------------------------------------------------------- shared prefixes


def test_requests_of_one_system_prompt_share_its_ids_and_no_others():
    prompts = SystemPrompts(tokens=48, weights=(3.0, 1.0))
    assert prompts.prefix_ids(0) == (0, 1, 2)
    assert prompts.prefix_ids(1) == (3, 4, 5)


def test_popularity_follows_the_weights():
    kinds = SystemPrompts(tokens=16, weights=(3.0, 1.0)).sample(40_000, stream(RNG_SEED, "prefixes"))
    assert np.bincount(kinds) / 40_000 == pytest.approx([0.75, 0.25], abs=0.01)
    assert SystemPrompts.zipf(3, tokens=16).weights == pytest.approx((1, 1 / 2, 1 / 3))


def test_the_system_prompt_comes_on_top_of_the_input_and_only_it_is_named():
    requests = synthetic(
        input_lengths=Fixed(10), prefixes=SystemPrompts(tokens=64, weights=(1.0,), block_tokens=32)
    )
    assert {(r.prompt_tokens, r.prefix_ids, r.prefix_block_tokens) for r in requests} == {(74, (0, 1), 32)}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: SystemPrompts(tokens=20, weights=(1.0,)),
            r"tokens 20: must be a multiple of block_tokens \(16\)",
        ),
        (lambda: SystemPrompts(tokens=16, weights=()), "weights"),
        (lambda: SystemPrompts(tokens=16, weights=(1.0, 0.0)), "weights"),
        (lambda: SystemPrompts.zipf(0, tokens=16), "count 0"),
        (lambda: SystemPrompts.zipf(2, tokens=16, exponent=-1), "exponent -1"),
    ],
)
def test_prefix_parameters_out_of_range_are_refused_by_name(build, message):
    with pytest.raises(WorkloadError, match=message):
        build()


# ---------------------------------------------------------------- families of prompts


def family(turns=1):
    return SharedPrefixFamilies(
        num_system_prompts=3,
        users_per_prompt=2,
        system_prompt_len=100,
        question_lengths=Uniform(min_tokens=5, max_tokens=9),
        output_lengths=Uniform(min_tokens=20, max_tokens=30),
        turns=turns,
    )


def test_every_user_asks_once_a_round_after_the_system_prompt_of_its_family():
    requests = requests_of(family(), 12)
    for of_round in (requests[:6], requests[6:]):
        ids = [ids for (ids,) in column(of_round, "prefix_ids")]
        assert sorted(ids) == [0, 0, 1, 1, 2, 2]
    assert {r.prefix_block_tokens for r in requests} == {100}
    assert all(105 <= r.prompt_tokens <= 109 and r.session_id is None for r in requests)


def test_a_conversation_grows_by_its_answers_and_questions_and_then_another_begins():
    """Turn k+1 begins with the prompt and the answer of turn k, and adds a question of 5 to 9 tokens."""
    requests = requests_of(family(turns=2), 24)
    by_session = {}
    for request in requests:
        by_session.setdefault(request.session_id, []).append(request)
    assert len(by_session) == 12
    for first, second in by_session.values():
        assert (first.turn, first.context_tokens, second.turn) == (0, 0, 1)
        assert second.context_tokens == first.prompt_tokens + first.output_tokens
        assert 105 <= first.prompt_tokens <= 109
        assert 5 <= second.prompt_tokens - second.context_tokens <= 9
        assert first.prefix_ids == second.prefix_ids


@pytest.mark.parametrize("turns", [1, 3])
def test_more_requests_of_a_family_begin_with_the_fewer(turns):
    assert requests_of(family(turns), 100)[:31] == requests_of(family(turns), 31)


# ---------------------------------------------------------------- datasets of vllm bench serve


def test_vllm_random_draws_whole_numbers_from_floor_to_ceil_of_its_range():
    """101 tokens and r = 0.25: [75, 127]; 7 tokens: [5, 9]. Both ends occur."""
    drawn = RandomDataset(input_len=101, output_len=7, range_ratio=0.25).draw(100_000, RNG_SEED).columns
    for name, low, high in (("prompt_tokens", 75, 127), ("output_tokens", 5, 9)):
        values, counts = np.unique(drawn[name], return_counts=True)
        assert values.tolist() == [*range(low, high + 1)]
        assert counts / 100_000 == pytest.approx(np.full(len(values), 1 / len(values)), abs=0.005)


def test_vllm_random_has_its_defaults_and_an_output_of_one_token_at_least():
    drawn = RandomDataset().draw(3, 0).columns
    assert (set(drawn["prompt_tokens"]), set(drawn["output_tokens"])) == ({1024}, {128})
    assert min(RandomDataset(output_len=1, range_ratio=0.9).draw(1000, 0).columns["output_tokens"]) == 1


def test_vllm_random_puts_one_shared_prefix_on_top():
    requests = requests_of(RandomDataset(input_len=10, prefix_len=50), 4)
    assert {(r.prompt_tokens, r.prefix_ids, r.prefix_block_tokens) for r in requests} == {(60, (0,), 50)}


def test_vllm_random_spreads_only_what_special_tokens_leave():
    """(102 - 2) tokens and r = 0.25 give [75, 125]; the server adds the 2 again."""
    sizes = RandomDataset(input_len=102, range_ratio=0.25, num_special_tokens=2).draw(10_000, 0).columns
    assert (min(sizes["prompt_tokens"]), max(sizes["prompt_tokens"])) == (77, 127)


def test_vllm_random_rounds_up_what_floating_point_makes_of_its_range():
    """100 (1 + 0.1) is 110.00000000000001, of which vLLM takes the ceiling."""
    sizes = RandomDataset(input_len=100, range_ratio=0.1).draw(10_000, 0).columns["prompt_tokens"]
    assert (min(sizes), max(sizes)) == (90, 111)


def test_vllm_prefix_repetition_drops_the_remainder_and_says_so():
    """23 requests over 10 prefixes: 2 each, 3 dropped."""
    workload = Synthetic(arrivals=BenchServe(rate_per_s=4.0), prompts=PrefixRepetitionDataset(), n=23)
    assert sorted(column(workload.requests, "prefix_ids")) == sorted([(i,) for i in range(10)] * 2)
    assert {(r.prompt_tokens, r.output_tokens) for r in workload.requests} == {(512, 128)}
    assert workload.about["requests"] == 20
    assert workload.about["notes"] == [
        "prefix_repetition: 20 of 23 requests; 3 dropped, as vLLM does, to have 2 for each of 10 prefixes"
    ]
    assert workload.requests[-1].arrival_s == pytest.approx(20 / 4)


def test_vllm_prefix_repetition_is_shuffled_and_silent_when_nothing_is_dropped():
    drawn = PrefixRepetitionDataset().draw(1000, 0)
    order = [i for (i,) in drawn.columns["prefix_ids"]]
    assert order != sorted(order) and drawn.notes == ()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RandomDataset(range_ratio=1), "range_ratio 1: must be between 0 and 1"),
        (lambda: RandomDataset(input_len=1, range_ratio=0.5), "input_len 1: must be more"),
        (lambda: RandomDataset(input_len=2, num_special_tokens=2), "input_len 2: must be more"),
        (lambda: RandomDataset(prefix_len=-1), "prefix_len -1"),
        (lambda: PrefixRepetitionDataset(suffix_len=0), "suffix_len 0"),
        (
            lambda: PrefixRepetitionDataset().draw(9, 0),
            r"n 9: must be 10, the number of prefixes, or more",
        ),
        (lambda: requests_of(family(turns=0), 1), "turns 0"),
        (lambda: BlockTree(fresh_weight=0), "fresh_weight 0: must be between 1e-06 and 1e"),
        (lambda: BlockTree(fresh_weight=1, trunk_blocks=-1), "trunk_blocks -1"),
        (lambda: BlockTree(fresh_weight=1, block_tokens=0), "block_tokens 0"),
    ],
)
def test_prompt_parameters_out_of_range_are_refused_by_name(build, message):
    with pytest.raises(WorkloadError, match=message):
        build()


# ---------------------------------------------------------------- block tree


def prompts_of(tree, lengths, seed=0):
    ids = tree.attach(np.array(lengths), stream(seed, "prefixes"))["prefix_ids"]
    return [tuple(prompt.tolist()) for prompt in ids]


def shared_blocks(a, b):
    """Leading ids in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def seen_before(prompts):
    """Share of blocks whose prompt up to them was seen before, with a cache without limit."""
    seen, hits = set(), 0
    for ids in prompts:
        hits += next((i for i, block in enumerate(ids) if block not in seen), len(ids))
        seen.update(ids)
    return hits / sum(map(len, prompts))


def test_a_block_tree_names_every_begun_block_and_gives_an_id_one_parent_only():
    lengths = np.random.default_rng(1).integers(1, 5000, 500)
    prompts = prompts_of(BlockTree(fresh_weight=0.3, trunk_blocks=1, block_tokens=100), lengths)
    assert [len(ids) for ids in prompts] == [-(-tokens // 100) for tokens in lengths]
    parents = {}
    for ids in prompts:
        for parent, block in zip((None, *ids), ids, strict=False):
            assert parents.setdefault(block, parent) == parent


def test_the_part_of_a_block_at_the_end_is_never_seen_again():
    prompts = prompts_of(BlockTree(fresh_weight=1e-6, block_tokens=100), [250] * 50)
    assert len({ids[:2] for ids in prompts}) == 1
    assert len({ids[2] for ids in prompts}) == 50


def test_every_prompt_begins_with_the_trunk():
    prompts = prompts_of(BlockTree(fresh_weight=1e6, trunk_blocks=2, block_tokens=10), [5, 10, 25, 40, 40])
    assert [shared_blocks(ids, (0, 1)) for ids in prompts] == [0, 1, 2, 2, 2]
    assert shared_blocks(*prompts[3:]) == 2


@pytest.mark.parametrize("fresh_weight", [0.5, 4.0])
def test_single_blocks_are_seated_as_in_a_chinese_restaurant(fresh_weight):
    """Of n blocks, the sum of a/(a + i) over i < n are fresh on average."""
    tree = BlockTree(fresh_weight=fresh_weight, block_tokens=10)
    fresh = [len(set(prompts_of(tree, [10] * 200, seed))) for seed in range(300)]
    expected = sum(fresh_weight / (fresh_weight + i) for i in range(200))
    assert np.mean(fresh) == pytest.approx(expected, rel=0.05)


def test_a_prompt_leaves_a_path_gone_once_after_a_geometric_number_of_blocks():
    """It follows each block with probability 1/(1 + a)."""
    tree = BlockTree(fresh_weight=0.25, block_tokens=10)
    followed = [shared_blocks(*prompts_of(tree, [1000, 1000], seed)) for seed in range(4000)]
    assert np.mean(followed) == pytest.approx(1 / 0.25, rel=0.05)
    assert np.mean(np.array(followed) == 0) == pytest.approx(0.2, abs=0.02)


def test_more_prompts_of_a_tree_begin_with_the_fewer():
    tree, lengths = BlockTree(fresh_weight=0.3), [*range(500, 60_000, 700)]
    assert prompts_of(tree, lengths)[:40] == prompts_of(tree, lengths[:40])


# ---------------------------------------------------------------- synthetic


def test_same_seed_same_requests_and_another_seed_others():
    assert synthetic() == synthetic()
    assert len({tuple(column(synthetic(seed=s), "arrival_s")) for s in (1, 2, 3)}) == 3


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        ({"arrivals": Gamma(rate_per_s=9.0, cv=3.0)}, {"arrival_s"}),
        ({"output_lengths": Fixed(5)}, {"output_tokens"}),
        ({"prefixes": SystemPrompts.zipf(9, tokens=64)}, {"prefix_ids"}),
        ({"input_lengths": Empirical([5, 9])}, {"prompt_tokens"}),
    ],
    ids=["arrivals", "output_lengths", "prefixes", "input_lengths"],
)
def test_changing_one_part_leaves_the_draws_of_the_others_alone(change, moved):
    names = ["arrival_s", "prompt_tokens", "output_tokens", "prefix_ids"]
    before, after = synthetic(), synthetic(**change)
    assert {name for name in names if column(before, name) != column(after, name)} == moved


def test_named_streams_of_one_root_differ():
    draws = {name: stream(1, name).random() for name in ("arrivals", "input_lengths", "output_lengths")}
    assert len(set(draws.values())) == 3


def test_a_longer_workload_begins_with_the_shorter_one():
    assert synthetic(n=80)[:50] == synthetic(n=50)


def test_a_synthetic_workload_is_an_open_loop_of_unique_requests():
    workload = Synthetic(arrivals=AllAtOnce(), input_lengths=Fixed(3), output_lengths=Fixed(2), n=4)
    assert isinstance(workload, Workload) and isinstance(workload, ListWorkload) and workload.open_loop
    sent = list(iter(workload.next, None))
    assert column(sent, "request_id") == ["req-000000", "req-000001", "req-000002", "req-000003"]
    assert {(r.prompt_tokens, r.output_tokens, r.prefix_ids) for r in sent} == {(3, 2, None)}


def test_lengths_may_be_given_together():
    pairs = EmpiricalPairs([10, 20], [1, 2])
    workload = Synthetic(arrivals=AllAtOnce(), lengths=pairs, prefixes=SystemPrompts.zipf(1, tokens=16), n=50)
    assert {(r.prompt_tokens, r.output_tokens) for r in workload.requests} == {(26, 1), (36, 2)}
    assert workload.about["lengths"] == repr(pairs)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"input_lengths": Fixed(1)},
        {"lengths": EmpiricalPairs([1], [1]), "output_lengths": Fixed(1)},
        {"prompts": RandomDataset(), "prefixes": SystemPrompts.zipf(1, tokens=16)},
    ],
    ids=lambda parts: "+".join(parts) or "nothing",
)
def test_lengths_given_twice_or_by_half_are_refused(parts):
    with pytest.raises(WorkloadError, match="must be either prompts, or lengths, or both input_lengths and"):
        Synthetic(arrivals=AllAtOnce(), n=1, **parts)


def test_a_rate_so_low_that_times_leave_their_range_is_refused():
    with pytest.raises(
        WorkloadError, match=r"arrivals would send the last of 50 at .* s: must be at most 4e"
    ):
        synthetic(arrivals=Poisson(rate_per_s=1e-9))


def test_no_requests_is_refused():
    with pytest.raises(WorkloadError, match="n 0: must be a whole number, 1 or more"):
        synthetic(n=0)


# ---------------------------------------------------------------- presets

PUBLISHED = {
    "chat": (5.53, 1.09, (1020, 2734, 4142), 1154.7, (129, 424, 601), 211.1),
    "code": (2.57, 13.15, (1469, 5187, 7436), 2047.8, (13, 55, 251), 27.9),
    "long-context": (3.401, 1.0, (6909, 27_367, 85_400), 12_035, (350, 597, 1118), 342.6),
    "sharegpt": (10.30, 0.94, (731, 1460, 2765), None, (632, 770, 784), None),
}
"""Rate, CV (long-context: of Poisson, its own is one of ticks), p50, p90, p99 and mean of input and output."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_quantiles_exactly_and_means_within_five_percent(name):
    _, _, inputs, input_mean, outputs, output_mean = PUBLISHED[name]
    lengths = PRESETS[name].prompts.lengths
    assert isinstance(lengths, Independent)
    for model, quantiles, mean in (
        (lengths.input_lengths, inputs, input_mean),
        (lengths.output_lengths, outputs, output_mean),
    ):
        assert tuple(model.quantile(p) for p in (0.5, 0.9, 0.99)) == quantiles
        assert mean is None or model.mean_tokens == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize(
    ("name", "rate_per_s", "cv"),
    [(name, rate, cv) for name, (rate, cv, *_) in PUBLISHED.items()]
    + [
        ("agent", 1.0, 1.0),
        ("random", 4.0, 1.0),
        ("prefix-repetition", 4.0, 1.0),
        ("diurnal-chat", 0.25, 1.57),
    ],
)
def test_presets_have_the_rate_and_gap_cv_that_they_state(name, rate_per_s, cv):
    """Over a million gaps within 5 %: with a CV of 13, a thousand requests say little about either."""
    gaps = gaps_of(PRESETS[name].arrivals(PRESETS[name].rate_per_s).times_s(1_000_000))
    assert 1 / gaps.mean() == pytest.approx(rate_per_s, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_prompts_of_code_stop_at_the_cap_of_its_service():
    assert max(column(build_preset("code", n=5000).requests, "prompt_tokens")) == 7437


@pytest.mark.parametrize("name", PRESETS)
def test_presets_call_themselves_synthetic_and_say_rate_variation_lengths_and_seed(name):
    """At n=30: fewer than 10 requests have no repeated prefixes."""
    workload = build_preset(name, n=30, seed=9)
    description = PRESETS[name].description
    assert description.startswith("synthetic: ")
    assert all(word in description for word in ("requests/s", "CV", "input", "output"))
    assert (workload.about["format"], workload.about["preset"]) == ("synthetic", name)
    assert (workload.about["seed"], workload.about["requests"]) == (9, 30)


def test_long_context_shares_as_many_blocks_as_mooncakes_conversations():
    """36.6 % of 12,031 requests' blocks were seen before; every request shares block 0."""
    prompts = PRESETS["long-context"].prompts.draw(12_031, 0).columns["prefix_ids"]
    assert seen_before([tuple(ids.tolist()) for ids in prompts]) == pytest.approx(0.366, abs=0.02)
    assert np.mean([ids[0] == 0 for ids in prompts]) > 0.99


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_agents_have_nearly_all_of_their_blocks_in_common(seed):
    prompts = PRESETS["agent"].prompts.draw(1000, seed).columns["prefix_ids"]
    assert 0.75 <= seen_before([tuple(ids.tolist()) for ids in prompts]) <= 0.90


def test_a_diurnal_preset_is_a_day_with_its_peak_in_the_afternoon():
    times_s = build_preset("diurnal-chat").requests.arrival_s
    assert times_s[-1] == pytest.approx(86_400, rel=0.03)
    by_quarter = np.histogram(times_s, bins=np.arange(5) * 21_600)[0]
    assert by_quarter.argmax() == 2 and by_quarter.argmin() == 0


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "diurnal-chat"])
def test_another_rate_only_stretches_the_arrivals(name):
    slow, fast = (build_preset(name, n=40, rate_per_s=rate).requests for rate in (1.0, 4.0))
    assert [4 * t for t in column(fast, "arrival_s")] == pytest.approx(column(slow, "arrival_s"))
    assert column(fast, "prompt_tokens") == column(slow, "prompt_tokens")


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(WorkloadError, match="preset 'cha': must be one of chat, code, long-context"):
        build_preset("cha")


def test_importing_workloads_stays_light():
    heavy = "pandas", "pyarrow", "scipy", "torch"
    code = f"import sys, servetwin.workloads; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
