"""Fitting a synthetic model to a trace: what is recovered, what real traces give, what a model file may hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servetwin.sim.cli import run as command_line
from servetwin.sim.commands.trace_verdicts import VERDICTS
from servetwin.workloads import (
    AllAtOnce,
    BlockTree,
    Constant,
    Empirical,
    EmpiricalPairs,
    Exponential,
    Fixed,
    Gamma,
    Hyperexponential,
    Independent,
    ListWorkload,
    Lognormal,
    OnOff,
    Poisson,
    QuantileGrid,
    RankCorrelated,
    RateSteps,
    RequestColumns,
    RequestSpec,
    Superposition,
    Synthetic,
    Uniform,
    Weibull,
    WorkloadError,
    read_trace,
)
from servetwin.workloads.continuations import Continuation, Continuations
from servetwin.workloads.export import write_trace
from servetwin.workloads.fit_arrivals import fit_arrivals
from servetwin.workloads.fit_lengths import fit_lengths
from servetwin.workloads.fit_prefixes import fit_prefixes
from servetwin.workloads.fitted import FittedModel, fit_trace, load_model
from servetwin.workloads.mmpp_likelihood import log_likelihood
from servetwin.workloads.modulated import MMPP
from servetwin.workloads.quantiles import quantiles_of, values_at
from servetwin.workloads.reuse_points import prefixed_prompts, reuse_points
from servetwin.workloads.statistics.ticks import find_ticks
from servetwin.workloads.streams import stream
from servetwin.workloads.traces import Trace
from servetwin.workloads.two_sample import two_sample

N = 20_000
LENGTHS = Independent(input_lengths=Uniform(min_tokens=10, max_tokens=900), output_lengths=Fixed(20))


def times_of(process, n=N, seed=3):
    return process.times_s(n, stream(seed, "arrivals"))


def trace_of(requests, **changes) -> Trace:
    columns = requests if isinstance(requests, RequestColumns) else RequestColumns.of(requests)
    return Trace(
        requests=columns, format="made up", path="folder/made-up.jsonl", rows_read=len(columns), **changes
    )


def synthetic(n=2000, **parts):
    given = {"arrivals": Poisson(rate_per_s=2.0), "lengths": LENGTHS, "seed": 5, **parts}
    return Synthetic(n=n, **given).requests


def sessions_trace(n=4000) -> Trace:
    """Sessions of 1 to 9 turns that keep 80 % of their context, 2 s of thinking between turns."""
    rng = np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
    for session, start_s in enumerate(Poisson(rate_per_s=1.5, seed=1).times_s(n // 5)):
        before = 0
        for turn in range(int(rng.integers(1, 10))):
            context, added, answer = int(0.8 * before), int(rng.integers(50, 150)), int(rng.integers(5, 40))
            later = {"context_tokens": context, "think_time_s": float(rng.exponential(2.0))} if turn else {}
            rows.append(
                {
                    "request_id": f"{session}-{turn}",
                    "arrival_s": float(start_s),
                    "prompt_tokens": context + added,
                    "output_tokens": answer,
                    "session_id": str(session),
                    "turn": turn,
                    **later,
                }
            )
            before = context + added + answer
    return trace_of([RequestSpec(**row) for row in rows], arrivals="first turns")


# ---------------------------------------------------------------- arrivals


@pytest.mark.parametrize(
    ("process", "kind", "parameters"),
    [
        (Poisson(rate_per_s=3.0), "poisson", {}),
        (Gamma(rate_per_s=3.0, cv=2.0), "gamma", {"cv": 2.0}),
        (Gamma(rate_per_s=3.0, cv=0.4), "gamma", {"cv": 0.4}),
        (Weibull(rate_per_s=3.0, shape=0.6), "weibull", {"shape": 0.6}),
        (Hyperexponential(rate_per_s=3.0, cv=4.0), "hyperexponential", {"cv": 4.0}),
    ],
)
def test_independent_gaps_are_told_apart_and_their_parameter_found_within_3_percent(
    process, kind, parameters
):
    fitted = fit_arrivals(times_of(process))
    assert (fitted.process.kind, len(fitted.rates_per_s)) == (kind, 1)
    assert fitted.rates_per_s[0] == pytest.approx(3.0, rel=0.05)
    assert fitted.process.model_dump(exclude={"kind"}) == pytest.approx(parameters, rel=0.03)


@pytest.mark.parametrize(
    ("process", "rates", "stays_s"),
    [
        (MMPP.two_state(rates_per_s=(10.0, 1.0), leaving_per_s=(0.1, 0.02)), (10.0, 1.0), (10.0, 50.0)),
        (OnOff(rate_per_s=2.0, on_s=20.0, off_s=60.0), (8.0, 0.0), (20.0, 60.0)),
    ],
)
def test_a_switching_rate_is_recovered_with_its_stays(process, rates, stays_s):
    """Rates within 5 % (or 0.01/s), mean stays within 25 %: 20,000 requests see a hundred changes or so."""
    fitted = fit_arrivals(times_of(process))
    assert (fitted.process.kind, len(fitted.rates_per_s)) == ("mmpp2", 1)
    mean = fitted.rates_per_s[0]
    assert [r * mean for r in fitted.process.relative_rates] == pytest.approx(rates, rel=0.05, abs=0.01)
    assert [s / mean for s in fitted.process.stay_mean_gaps] == pytest.approx(stays_s, rel=0.25)


def test_the_likelihood_of_equal_rates_is_that_of_poisson():
    gaps = np.random.default_rng(0).exponential(size=1001)
    poisson = len(gaps) * np.log(1.5) - 1.5 * gaps.sum()
    assert log_likelihood(gaps, (1.5, 1.5), (0.3, 2.0)) == pytest.approx(poisson)


def test_the_likelihood_of_a_switching_rate_is_a_product_of_matrix_exponentials():
    from scipy.linalg import expm

    gaps, rates, (q1, q2) = [0.2, 3.0, 0.01, 1.1], np.diag([4.0, 0.5]), (0.7, 0.2)
    switching = np.array([[-q1, q1], [q2, -q2]])
    state = np.array([q2 * 4.0, q1 * 0.5]) / (q2 * 4.0 + q1 * 0.5)
    for gap in gaps:
        state = state @ expm((switching - rates) * gap) @ rates
    assert log_likelihood(np.array(gaps), (4.0, 0.5), (q1, q2)) == pytest.approx(np.log(state.sum()))


def test_a_rate_that_changes_becomes_a_profile_and_the_gaps_around_it_stay_poisson():
    steps = RateSteps(starts_s=(0.0, 1000.0), rates_per_s=(2.0, 6.0))
    times_s = times_of(steps)
    fitted = fit_arrivals(times_s[times_s < 2000.0])
    assert fitted.process.kind == "poisson"
    assert fitted.rates_per_s == pytest.approx((2.0, 6.0), rel=0.1)
    assert fitted.step_s == pytest.approx(1000.0, rel=0.01)


def test_a_profile_begins_anew_and_another_rate_stretches_it():
    steps = RateSteps(starts_s=(0.0, 1000.0), rates_per_s=(2.0, 6.0))
    times_s = times_of(steps)
    fitted = fit_arrivals(times_s[times_s < 2000.0])
    drawn = fitted.build().times_s(12_000)
    assert np.histogram(drawn, bins=[0, 1000, 2000, 3000])[0] == pytest.approx([2000, 6000, 2000], rel=0.1)
    assert fitted.build(8.0).times_s(12_000) == pytest.approx(drawn * fitted.build().rate_per_s / 8.0)


def test_ticks_are_recognised_and_spread_before_the_fit():
    exact = times_of(Poisson(rate_per_s=4.0))
    fitted = fit_arrivals(np.floor(exact / 3.0) * 3.0)
    assert (fitted.process.kind, fitted.spread_tick_s) == ("poisson", pytest.approx(3.0))
    assert fitted.rates_per_s[0] == pytest.approx(4.0, rel=0.03)


def test_a_clock_finer_than_the_gaps_is_left_alone():
    assert find_ticks(np.floor(times_of(Poisson(rate_per_s=4.0)) * 1000) / 1000) is None
    assert find_ticks(times_of(Poisson(rate_per_s=4.0))) is None
    assert find_ticks(np.floor(times_of(Poisson(rate_per_s=0.3)))).tick_s == pytest.approx(1.0)


def test_gaps_like_none_of_the_processes_are_taken_as_observed():
    """Two separate humps: the drawn gaps have them, too (KS below 0.02), and the CV within 10 %."""
    from scipy.stats import ks_2samp

    rng = np.random.default_rng(2)
    gaps_s = np.where(rng.random(N) < 0.3, rng.normal(0.01, 0.001, N), rng.normal(2.0, 0.2, N))
    fitted = fit_arrivals(np.cumsum(gaps_s))
    drawn = np.diff(fitted.build().times_s(N))
    assert fitted.process.kind == "observed"
    assert ks_2samp(gaps_s, drawn).statistic < 0.02
    assert drawn.std() / drawn.mean() == pytest.approx(gaps_s.std() / gaps_s.mean(), rel=0.1)


def test_a_constant_rate_stays_one():
    drawn = np.diff(fit_arrivals(times_of(Constant(rate_per_s=2.0), 1000)).build().times_s(1000))
    assert drawn.std() / drawn.mean() < 0.01


@pytest.mark.parametrize("times_s", [[0.0], [4.0, 4.0, 4.0]])
def test_times_that_are_all_the_same_have_no_process(times_s):
    assert fit_arrivals(np.array(times_s)) is None


# ---------------------------------------------------------------- lengths


@pytest.mark.parametrize("correlation", [-0.6, 0.0, 0.8])
def test_quantiles_and_rank_correlation_of_lengths_are_found(correlation):
    inputs, outputs = Lognormal(mu=6, sigma=1, max_tokens=9000), Exponential(mean_tokens=300, max_tokens=4000)
    truth = RankCorrelated(input_lengths=inputs, output_lengths=outputs, rank_correlation=correlation)
    fitted = fit_lengths(*truth.sample_pairs(N, seed=1))
    assert fitted.kind == "quantiles"
    assert fitted.rank_correlation == pytest.approx(correlation, abs=0.02)
    assert QuantileGrid(fitted.prompt_tokens).quantile(0.9) == pytest.approx(np.exp(6 + 1.2816), rel=0.05)


def test_lengths_joined_by_more_than_a_correlation_are_kept_as_pairs():
    """Short prompts and long ones get short answers, those in between long ones."""
    prompts = np.random.default_rng(0).integers(1, 1000, 10_000)
    outputs = np.where(np.abs(prompts - 500) < 200, 700, 30) + prompts % 7
    fitted = fit_lengths(prompts, outputs)
    assert (fitted.kind, len(fitted.prompt_tokens)) == ("pairs", 2000)
    drawn = fitted.build().sample_pairs(5000, seed=1)
    assert np.mean(drawn[1][np.abs(drawn[0] - 500) < 200] > 600) == 1.0


def test_quantiles_on_a_line_are_left_out_and_nothing_changes():
    values = np.arange(1, 1002)
    quantiles = quantiles_of(values)
    assert len(quantiles) == 2
    assert values_at(quantiles, np.array([0.0, 0.25, 1.0])) == pytest.approx([1, 251, 1001])


# ---------------------------------------------------------------- prefixes


@pytest.mark.parametrize(("weight", "trunk"), [(0.5, 2), (1.0, 0)])
def test_a_block_tree_is_recovered(weight, trunk):
    """The trunk exactly, the weight within 30 %, what caches find within 5 points."""
    lengths = Independent(input_lengths=Uniform(min_tokens=2000, max_tokens=9000), output_lengths=Fixed(10))
    requests = synthetic(
        lengths=lengths, prefixes=BlockTree(fresh_weight=weight, trunk_blocks=trunk, block_tokens=512)
    )
    fitted = fit_prefixes(prefixed_prompts(requests))
    assert (fitted.model.kind, fitted.model.trunk_blocks, fitted.model.block_tokens) == (
        "block tree",
        trunk,
        512,
    )
    assert fitted.model.fresh_weight == pytest.approx(weight, rel=0.3)
    assert fitted.model_hit_percent == pytest.approx(fitted.trace_hit_percent, abs=5.0)


def test_continuations_are_recovered():
    """Half of the prompts go on after 5 to 50 requests: what caches find within 4 points, the share within 10 %."""
    rng = np.random.default_rng(4)
    truth = Continuations(
        by_length=(
            Continuation(
                up_to_blocks=None,
                continuing=0.5,
                seen_share=tuple(rng.uniform(0.5, 1.0, 200).tolist()),
                requests_back=tuple(rng.integers(5, 50, 200).tolist()),
            ),
        ),
        trunk_blocks=1,
        block_tokens=64,
    )
    fitted = fit_prefixes(prefixed_prompts(synthetic(prefixes=truth)))
    assert (fitted.model.kind, fitted.model.trunk_blocks) == ("continuations", 1)
    assert fitted.model_hit_percent == pytest.approx(fitted.trace_hit_percent, abs=4.0)
    shares = [one.continuing for one in fitted.model.by_length]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.05)


def test_a_longer_draw_of_continuations_begins_with_a_shorter_one():
    model = Continuations(
        by_length=(
            Continuation(up_to_blocks=3, continuing=0.9, seen_share=(0.5, 1.0), requests_back=(1, 4)),
            Continuation(up_to_blocks=None, continuing=0.4, seen_share=(0.7,), requests_back=(2,)),
        ),
        block_tokens=16,
    )
    tokens = np.random.default_rng(0).integers(1, 200, 300)
    short, long = (model.attach(tokens[:n], stream(1, "prefixes"))["prefix_ids"] for n in (100, 300))
    assert short == long[:100]
    assert [len(ids) for ids in long] == [-(-n // 16) for n in tokens.tolist()]


def test_reuse_counts_whole_blocks_from_the_front_and_never_the_last_token():
    requests = trace_of(
        [
            spec
            for i, (tokens, ids) in enumerate([(32, (1, 2)), (32, (1, 2)), (40, (1, 2, 3)), (40, (1, 2, 3))])
            for spec in [_spec(i, tokens, ids)]
        ]
    ).requests
    points = reuse_points(prefixed_prompts(requests), sizes=(1,))
    # Found: none, block 1 (block 2 ends with the last token), both, both; the part of a block never.
    assert points.infinite_percent == pytest.approx(100 * 5 / 10)
    assert points.lru_percent[1] == pytest.approx(100 * 3 / 10)


def _spec(i, tokens, ids):
    return RequestSpec(
        request_id=str(i),
        arrival_s=float(i),
        prompt_tokens=tokens,
        output_tokens=1,
        prefix_ids=ids,
        prefix_block_tokens=16,
    )


def test_blocks_that_are_not_named_are_shared_with_nobody():
    """A system prompt of one block, then 20 tokens of one's own: three begun blocks, the first of which is found."""
    requests = trace_of([_spec(i, 36, (7,)) for i in range(4)]).requests
    assert reuse_points(prefixed_prompts(requests), sizes=()).infinite_percent == pytest.approx(100 * 3 / 12)


# ---------------------------------------------------------------- sessions


def test_turns_growth_and_pauses_of_sessions_are_recovered():
    trace = sessions_trace()
    fitted = fit_trace(trace)
    assert fitted.lengths is None and fitted.prefixes is None
    report = two_sample(trace.requests, fitted.draw(seed=2))
    for name in ("turns", "think_time_s", "prompt_tokens", "output_tokens", "gaps_s"):
        assert report[name].ks_statistic < 0.06, report[name]
    assert report["context_percent"].second == pytest.approx(report["context_percent"].first, abs=2.0)
    assert fitted.sessions.pauses.between == "end and start"
    assert values_at(fitted.sessions.context_share, np.array([0.5])) == pytest.approx([0.8], abs=0.01)


def test_sessions_wait_for_their_answers_and_keep_to_their_context():
    workload = fit_trace(sessions_trace()).build(n=500, seed=1)
    assert workload.about["loop"] == "closed"
    by_id = {(r.session_id, r.turn): r for r in workload.requests}
    for (session, turn), request in by_id.items():
        if turn:
            before = by_id[session, turn - 1]
            assert request.context_tokens <= before.prompt_tokens + before.output_tokens
            assert request.context_tokens < request.prompt_tokens


# ---------------------------------------------------------------- whole models


def test_fit_synth_fit_gives_the_same_model_again():
    """Rate and cv within 3 %, quantiles within 5 %, correlation within 0.02."""
    lengths = RankCorrelated(
        input_lengths=Lognormal(mu=6, sigma=0.8, max_tokens=9000),
        output_lengths=Exponential(mean_tokens=200, max_tokens=4000),
        rank_correlation=0.4,
    )
    trace = trace_of(synthetic(N, arrivals=Gamma(rate_per_s=2.0, cv=1.7), lengths=lengths))
    first = fit_trace(trace)
    second = fit_trace(trace_of(first.draw(seed=9)))
    assert first.arrivals.process.kind == second.arrivals.process.kind == "gamma"
    assert second.arrivals.process.cv == pytest.approx(first.arrivals.process.cv, rel=0.03)
    assert second.arrivals.build().rate_per_s == pytest.approx(first.arrivals.build().rate_per_s, rel=0.03)
    assert second.lengths.rank_correlation == pytest.approx(first.lengths.rank_correlation, abs=0.02)
    for name in ("prompt_tokens", "output_tokens"):
        grids = [QuantileGrid(getattr(m.lengths, name)) for m in (first, second)]
        for p in (0.1, 0.5, 0.9, 0.99):
            assert grids[1].quantile(p) == pytest.approx(grids[0].quantile(p), rel=0.05)


def test_a_model_survives_its_file_and_says_what_it_was_fitted_to(tmp_path):
    fitted = fit_trace(trace_of(synthetic(300, prefixes=BlockTree(fresh_weight=0.5, block_tokens=64))))
    path = tmp_path / "model.json"
    fitted.save(path)
    assert load_model(path) == fitted
    about = json.loads(path.read_text())["fitted_to"]
    assert about | {"span_s": 0} == {
        "name": "made-up.jsonl",
        "format": "made up",
        "rows": 300,
        "rows_dropped": {},
        "span_s": 0,
    }


def test_the_same_seed_gives_the_same_requests_and_another_seed_others():
    for trace in (trace_of(synthetic(400)), sessions_trace(400)):
        fitted = fit_trace(trace)
        assert fit_trace(trace) == fitted
        one, same, other = (fitted.draw(n=300, seed=seed) for seed in (1, 1, 2))
        assert one == same
        assert not np.array_equal(one.arrival_s, other.arrival_s)
        assert not np.array_equal(one.prompt_tokens, other.prompt_tokens)


def test_what_the_trace_does_not_say_stays_unknown():
    """Without times a rate must be given; without ids or sessions nothing is shared, and the notes say so."""
    trace = trace_of(synthetic(200, arrivals=AllAtOnce()), arrivals="none")
    fitted = fit_trace(trace)
    assert fitted.arrivals is None and fitted.prefixes is None and fitted.sessions is None
    assert any("no arrival times" in note for note in fitted.notes)
    assert any("prefix reuse unknown" in note for note in fitted.notes)
    with pytest.raises(WorkloadError, match="rate_per_s None: must be given"):
        fitted.draw()
    requests = fitted.draw(rate_per_s=5.0)
    assert len(requests) == 200 and not requests.has("prefix_ids")
    assert not fitted.draw(rate_per_s=float("inf")).arrival_s.any()


def test_a_workload_of_a_model_runs_as_any_other():
    workload = fit_trace(trace_of(synthetic(200))).build(n=10, rate_per_s=4.0, seed=1)
    assert isinstance(workload, ListWorkload) and len(workload) == 10
    assert (workload.about["seed"], workload.about["rate_per_s"]) == (1, 4.0)


# ---------------------------------------------------------------- two samples


def test_two_draws_of_one_workload_are_alike_and_of_another_are_not():
    first, second = (synthetic(seed=seed) for seed in (1, 2))
    assert {c.verdict for c in two_sample(first, second).comparisons} == {"alike", "unknown"}
    bursts = Superposition(parts=(OnOff(rate_per_s=2.0, on_s=5.0, off_s=40.0),))
    others = synthetic(
        arrivals=bursts,
        lengths=EmpiricalPairs([100, 5000], [10, 200]),
        prefixes=BlockTree(fresh_weight=0.1, block_tokens=16),
    )
    report = two_sample(first, others)
    for name in ("gaps_s", "gap_cv", "index_of_dispersion_1s", "prompt_tokens", "output_tokens"):
        assert report[name].verdict == "differs"
    assert report["prefix_hit_percent_infinite"].first is None


def test_a_poisson_process_has_its_figures():
    report = two_sample(requests := synthetic(N, lengths=LENGTHS), requests)
    assert report["rate_per_s"].first == pytest.approx(2.0, rel=0.03)
    assert report["gap_cv"].first == pytest.approx(1.0, abs=0.03)
    assert report["index_of_dispersion_1s"].first == pytest.approx(1.0, abs=0.05)
    assert all(c.ks_statistic in (None, 0.0) for c in report.comparisons)


# ---------------------------------------------------------------- real traces


def reported(shared_data: Path, name: str):
    trace = read_trace(shared_data / "traces" / name)
    fitted = fit_trace(trace)
    return fitted, two_sample(trace.requests, fitted.draw(seed=0))


def test_azure_conversations(shared_data):
    """Gaps within 0.04 of the distribution, lengths within 0.03, CV within 5 %."""
    fitted, report = reported(shared_data, "azure/AzureLLMInferenceTrace_conv_rows00001-10000.csv")
    assert fitted.arrivals.process.kind == "gamma"
    assert report["gap_cv"].first == pytest.approx(1.073, abs=0.001)
    assert report["gap_cv"].second == pytest.approx(1.073, rel=0.05)
    assert report["gaps_s"].ks_statistic < 0.04
    assert max(report[name].ks_statistic for name in ("prompt_tokens", "output_tokens")) < 0.03
    assert report["prefix_hit_percent_infinite"].verdict == "unknown"


def test_azure_code(shared_data):
    """Its gaps resemble no process: taken as observed, within 0.03; CV 13.15 within 25 %; bursts are shorter."""
    fitted, report = reported(shared_data, "azure/AzureLLMInferenceTrace_code.csv")
    assert fitted.arrivals.process.kind == "observed"
    assert report["gaps_s"].ks_statistic < 0.03
    assert report["gap_cv"].second == pytest.approx(13.15, rel=0.25)
    assert report["index_of_dispersion_1s"].second > 6
    assert any("short gaps follow one another more often" in note for note in report.notes)
    assert max(report[name].ks_statistic for name in ("prompt_tokens", "output_tokens")) < 0.03


@pytest.mark.parametrize(
    ("name", "tick_s", "hit_percent"),
    [
        ("mooncake/conversation_trace_rows00001-05000.jsonl.gz", 3.0, 33.30),
        ("mooncake/synthetic_trace_rows0001-2000.jsonl.gz", None, 32.74),
    ],
)
def test_mooncake(shared_data, name, tick_s, hit_percent):
    """Gaps (spread) and lengths within 0.05; an endless cache within 4 points, smaller ones within 6."""
    fitted, report = reported(shared_data, name)
    assert fitted.arrivals.process.kind == "poisson"
    assert fitted.arrivals.spread_tick_s == (None if tick_s is None else pytest.approx(tick_s, abs=0.01))
    for distribution in ("gaps_s", "prompt_tokens", "output_tokens"):
        assert report[distribution].ks_statistic < 0.05
    hits = [c for c in report.comparisons if c.name.startswith("prefix_hit_percent")]
    assert len(hits) == 4
    assert hits[0].first == pytest.approx(hit_percent, abs=0.01)
    assert hits[0].second == pytest.approx(hit_percent, abs=4.0)
    assert all(c.second == pytest.approx(c.first, abs=6.0) for c in hits)


def test_tracelab_sessions(shared_data):
    """48 sessions: turns, think times, lengths are not told apart; context within 3 points of 81.7 %."""
    fitted, report = reported(shared_data, "tracelab/multi_session_large.csv")
    assert fitted.sessions.context_of == "prompt and answer"
    assert report["context_percent"].first == pytest.approx(81.7, abs=0.1)
    names = ("turns", "think_time_s", "prompt_tokens", "output_tokens", "gaps_s", "context_percent")
    assert {report[name].verdict for name in names} == {"alike"}


def test_agents_whose_turns_are_joined_by_ids(shared_data):
    """An endless cache finds 93.6 %: within 3 points; pauses are from start to start."""
    fitted, report = reported(shared_data, "lmcache_agent/miniswe.lengths.jsonl.gz")
    assert fitted.sessions.context_of == "prompt" and fitted.sessions.pauses.between == "starts"
    hits = report["prefix_hit_percent_infinite"]
    assert hits.second == pytest.approx(hits.first, abs=3.0)
    assert report["turns"].verdict == "alike"


# ---------------------------------------------------------------- model files


@pytest.fixture(scope="module")
def model_json() -> dict[str, Any]:
    tree = BlockTree(fresh_weight=0.5, block_tokens=64)
    fitted = fit_trace(trace_of(synthetic(300, arrivals=Gamma(rate_per_s=2.0, cv=3.0), prefixes=tree)))
    return json.loads(fitted.to_json())


def changed(model: dict[str, Any], where: str, value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(model))
    *path, last = where.split(".")
    part = copy
    for name in path:
        part = part[name]
    part[last] = value
    return copy


@pytest.mark.parametrize(
    ("where", "value", "problem"),
    [
        ("version", 2, "version 2: Input should be 1"),
        ("format", "other", "is no fitted model"),
        ("arrivals.process.cv", -1.0, r"cv -1.0: Input should be greater than or equal to 0.001"),
        ("arrivals.process.kind", "pareto", "pareto"),
        ("arrivals.rates_per_s", [], r"arrivals.rates_per_s \[\]: "),
        ("arrivals.rates_per_s", [1.0, "2"], "arrivals.rates_per_s.1 '2': Input should be a valid number"),
        ("arrivals.step_s", 0, "arrivals.step_s 0"),
        ("arrivals.wrong", 1, "arrivals.wrong 1: Extra inputs are not permitted"),
        ("fitted_to.rows", 0, "fitted_to.rows 0"),
        ("lengths.prompt_tokens", {"0": 1, "0.5": 9}, "must run from probability 0 to 1"),
        ("lengths.prompt_tokens", {"0": 9, "1": 1}, "must never fall"),
        ("lengths.prompt_tokens", {"0": 0, "1": 1}, "must be 1 token or more"),
        ("lengths.rank_correlation", 1.5, "lengths.*rank_correlation 1.5"),
        ("lengths", None, "one of them must be null"),
        ("prefixes.model.trunk_blocks", -1, "trunk_blocks -1"),
    ],
)
def test_a_wrong_model_file_is_refused_with_field_and_value(tmp_path, model_json, where, value, problem):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(changed(model_json, where, value)))
    with pytest.raises(WorkloadError, match=problem) as refused:
        load_model(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "nan", '{"version": 1}', "\x00", '{"arrivals": NaN}', "[" * 5000]
)
def test_a_file_that_is_no_model_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=r"model\.json") as refused:
        load_model(path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match="cannot be read"):
        load_model(tmp_path / "none.json")


@pytest.mark.parametrize("last_rate", [0.0, 0])
def test_a_profile_that_ends_in_silence_is_refused(tmp_path, model_json, last_rate):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(changed(model_json, "arrivals.rates_per_s", [1.0, last_rate])))
    with pytest.raises(WorkloadError, match="rates_per_s"):
        load_model(path)


# ---------------------------------------------------------------- commands


@pytest.fixture
def made_up(tmp_path) -> Path:
    path = tmp_path / "made-up.jsonl"
    write_trace(
        path,
        synthetic(400, lengths=Independent(input_lengths=Empirical([10, 20, 400]), output_lengths=Fixed(8))),
    )
    return path


def test_fit_writes_a_model_and_synth_more_like_it(made_up, tmp_path, capfd):
    model = str(tmp_path / "model.json")
    assert command_line(["trace", "fit", str(made_up), "-o", model, "--check", "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed["model"]["fitted_to"]["name"] == "made-up.jsonl"
    assert {"gaps_s", "prompt_tokens"} <= {line["name"] for line in printed["check"]["comparisons"]}
    for name in ("out.jsonl", "out.jsonl.zst", "out.parquet"):
        out = str(tmp_path / name)
        command = ["trace", "synth", model, "-n", "900", "--rate", "5", "--seed", "3", "-o", out, "--json"]
        assert command_line(command) == 0
        printed = json.loads(capfd.readouterr().out)
        assert (printed["requests"], printed["seed"]) == (900, 3)
        assert printed["rate_per_s"] == pytest.approx(5.0, rel=0.15)
        drawn = load_model(model).draw(900, 5.0, 3)
        assert [replace(r, source_row=None) for r in read_trace(out).requests] == [*drawn]


def test_synth_of_a_preset_against_a_trace_prints_a_report(made_up, tmp_path, capfd):
    out = str(tmp_path / "out.jsonl")
    assert command_line(["trace", "synth", "chat", "-n", "300", "-o", out, "--against", str(made_up)]) == 0
    shown = capfd.readouterr().out
    assert "Two-sample report" in shown and "differs" in shown
    assert VERDICTS in " ".join(shown.split())
    assert len(read_trace(out)) == 300


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["fit", "TRACE", "-o", "model.txt"], "must end in .json"),
        (["fit", "TRACE", "-o", "TRACE"], "must end in .json"),
        (["fit", "nothing.csv", "-o", "model.json"], "nothing.csv"),
        (["synth", "nothing", "-o", "x.jsonl"], "is neither a file nor a preset"),
        (["synth", "TRACE", "-o", "x.jsonl"], "made-up.jsonl"),
        (["synth", "chat", "-n", "0", "-o", "x.jsonl"], "--num-prompts 0"),
        (["synth", "chat", "-o", "x.jsonl", "--rate", "-1"], "--rate -1"),
        (["synth", "chat", "-o", "x.txt"], "must end in"),
        (["synth", "chat", "-o", "x.jsonl", "--time-unit", "ms"], "--against"),
    ],
)
def test_wrong_commands_are_refused_in_one_line(made_up, tmp_path, capfd, monkeypatch, command, problem):
    monkeypatch.chdir(tmp_path)
    typed = [str(made_up) if word == "TRACE" else word for word in command]
    assert command_line(["trace", *typed]) == 2
    error = capfd.readouterr().err
    assert problem in error and error.count("\n") == 1


def test_an_existing_model_is_kept_unless_told_otherwise(made_up, tmp_path, capfd):
    model = tmp_path / "model.json"
    model.write_text("mine")
    assert command_line(["trace", "fit", str(made_up), "-o", str(model)]) == 2
    assert "--overwrite" in capfd.readouterr().err and model.read_text() == "mine"
    assert command_line(["trace", "fit", str(made_up), "-o", str(model), "--overwrite"]) == 0
    assert isinstance(load_model(model), FittedModel)


def test_a_handful_of_values_tells_nothing():
    """Two gaps are alike to any others, by a test that speaks of chance."""
    requests = [
        RequestSpec(request_id=f"{i}", arrival_s=float(i), prompt_tokens=9, output_tokens=9) for i in range(3)
    ]
    assert two_sample(requests, requests)["gaps_s"].verdict == "unknown"
