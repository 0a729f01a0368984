"""Field reports about metrics, time and replay, as small cases; then every metric of every definition set by hand.

The numbers in the names are those of the reports.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from engines import drafting, engine_config, serve, spec
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from stories import four_tokens_a_step, preempted_once

from servetwin.sim.cli import run
from servetwin.sim.commands.show import results, results_console
from servetwin.sim.definitions import DEFINITIONS, RATES
from servetwin.sim.events import MemorySink
from servetwin.sim.metrics import Distribution, summarize
from servetwin.sim.runs import read_run, tables_equal
from servetwin.sim.steptime.drafting import DraftModel
from servetwin.sim.steptime.features import StepFeatures
from servetwin.sim.steptime.modelled import ConstantStepModel, ModelledStepTimer
from servetwin.sim.token_source import TokenSource

S = 1_000_000_000
MS = 1_000_000


class PrefillAndDecode:
    """A step model: one time for steps that prefill, another for those that only decode."""

    def __init__(self, prefill_ms: int, decode_ms: int) -> None:
        self._prefill_ns, self._decode_ns = prefill_ms * MS, decode_ms * MS

    def durations_ns(self, features: StepFeatures) -> NDArray[np.int64]:
        return np.where(features.prefill_tokens > 0, self._prefill_ns, self._decode_ns)

    def timer(self) -> ModelledStepTimer:
        return ModelledStepTimer(self, TokenSource(1000), "prefill and decode")


def latency(log: MemorySink, name: str, metric_defs: str = "vllm-bench") -> dict[str, Any]:
    """The statistics of one latency, in ms."""
    statistics: dict[str, Any] = summarize(log, metric_defs)["servetwin"]["latency"][f"{name}_ms"]
    return statistics


# ---------------------------------------------------------------- the cases


@pytest.mark.parametrize("metric_defs", DEFINITIONS)
def test_53_no_first_token_is_no_ttft(metric_defs: str) -> None:
    """One of ten gives up before its first token: nine samples, none of them 0 or negative."""
    requests = [spec(f"r{i}", 4, 2) for i in range(9)] + [spec("gone", 4, 2, abort_s=1.5)]
    log = serve(requests, engine_config(max_num_seqs=2))
    assert log.requests.set_index("request_id").first_token_s.isna().to_dict()["gone"]
    for name in ("ttft", "e2el", "tpot", "queue", "prefill"):
        assert latency(log, name, metric_defs)["count"] == 9
    assert latency(log, "ttft", metric_defs)["mean"] == 1000 * mean([1, 1, 3, 3, 5, 5, 7, 7, 9])


def test_54_intervals_under_preemption() -> None:
    """Queue, TTFT and prefill end before the preemption; its wait is one long gap between two tokens."""
    log = preempted_once()
    means = {
        name: latency(log, name)["mean"] for name in ("queue", "ttft", "prefill", "decode", "tpot", "e2el")
    }
    assert means == {"queue": 2e3, "ttft": 3e3, "prefill": 1e3, "decode": 9e3, "tpot": 9e3 / 4, "e2el": 12e3}
    itl = latency(log, "itl")
    assert (itl["count"], itl["max"], itl["mean"]) == (4, 6000, 9000 / 4)
    assert means["e2el"] == means["ttft"] + itl["count"] * itl["mean"]
    assert summarize(log)["servetwin"]["preemptions"] == 1


@pytest.mark.parametrize("metric_defs", ["vllm-server", "vllm-bench", "inference-perf"])
def test_55_itl_with_several_tokens_a_step(metric_defs: str) -> None:
    """Eight tokens in two outputs after the first: 0.25 s a token, 1 s between outputs, under different names."""
    log = four_tokens_a_step()
    assert latency(log, "tpot", metric_defs)["mean"] == 250
    itl = latency(log, "itl", metric_defs)
    assert (itl["count"], itl["mean"]) == (2, 1000)
    formulas = summarize(log, metric_defs)["servetwin"]["formulas"]
    assert "output_tokens" in formulas["tpot"]
    assert "outputs of a request, pooled" in formulas["itl"]


def test_56_the_first_token_is_no_interval() -> None:
    """One token a step: a gap fewer than there are tokens, and none as long as the prefill."""
    log = serve([spec("r", 4, 6)], engine_config(), timer=PrefillAndDecode(4000, 1000).timer())
    itl = latency(log, "itl")
    assert (itl["count"], itl["max"], itl["mean"]) == (5, 1000, 1000)
    assert latency(log, "ttft")["mean"] == 4000


def test_57_recomputation_is_no_prefix_hit() -> None:
    """Prompts that share nothing: hit rate 0, although a victim finds its own blocks again; those are counted apart."""
    config = engine_config(usable_blocks=12, max_model_len=40, caching=True)
    log = serve([spec(f"r{i}", 8, 16) for i in range(4)], config)
    own = summarize(log)["servetwin"]
    assert own["preemptions"] > 0
    assert (own["prefix_hit_rate"], own["prefix_hit_tokens"], own["cached_prompt_tokens"]) == (0, 0, 0)
    assert own["preempted_query_tokens"] > 0
    assert own["preempted_hit_tokens"] > 0


def test_58_failed_requests_are_not_in_the_averages() -> None:
    """Eight are served, two give up with five tokens each: latencies over eight, rates without the ten tokens."""
    good = [spec(f"good{i}", 4, 2) for i in range(8)]
    bad = [spec(f"bad{i}", 4, 100, abort_s=61.0) for i in range(2)]
    log = serve(good + bad, engine_config(max_num_seqs=10, max_model_len=200), step_ns=12 * S)
    assert log.requests.num_output_tokens.tolist() == [2] * 8 + [5] * 2
    summary = summarize(log)
    assert {latency(log, name)["count"] for name in ("ttft", "tpot", "e2el")} == {8}
    assert (summary["p99_e2el_ms"], summary["duration"]) == (24_000, 24)
    assert (summary["completed"], summary["failed"]) == (8, 2)
    assert summary["output_throughput"] == 16 / 24
    assert RATES.items() <= summary["servetwin"]["formulas"].items()


def test_58_the_failures_stand_beside_the_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    """What people see says how many failed, and that their tokens do not count."""
    log = serve([spec("good", 4, 2), spec("bad", 4, 20, abort_s=3.5)], engine_config())
    results_console().print(*results(summarize(log)))
    shown = capsys.readouterr().out
    assert "1 abort, 1 length" in shown
    assert "output throughput = output tokens of completed requests / duration" in shown


def test_59_percentiles_of_few_samples() -> None:
    """[30, 10, 20]: p50 is 20, p99 29.8 (linear); one sample gives itself; none gives no data."""
    d = Distribution.of(np.array([30.0, 10.0, 20.0]))
    assert d.percentile(50) == 20
    assert d.percentile(99) == pytest.approx(29.8)
    assert Distribution.of(np.array([7.0])).percentile(99) == 7
    nothing = Distribution.of(np.array([np.nan]))
    assert (nothing.count, nothing.mean, nothing.std, nothing.max, nothing.percentile(50)) == (0, *[None] * 4)


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=20))
def test_59_percentiles_are_in_order(samples: list[float]) -> None:
    """p50 <= p90 <= p95 <= p99 <= max, for any samples."""
    d = Distribution.of(np.array(samples))
    figures = [d.percentile(p) for p in (50, 90, 95, 99)] + [d.max]
    assert all(a is not None and b is not None and a <= b for a, b in pairwise(figures))


@pytest.mark.parametrize(("prompt", "blocks"), [(17, 2), (128, 8)])
def test_60_kv_usage_leaves_the_null_block_out(prompt: int, blocks: int) -> None:
    """Nine blocks, eight usable: 17 tokens are 25 %, all of them 100 %, and at the end nothing."""
    config = engine_config(block_size=16, usable_blocks=8, max_model_len=129)
    log = serve([spec("r", prompt, 1)], config)
    assert summarize(log)["servetwin"]["kv_peak_used_fraction"] == blocks / 8
    assert log.steps.used_blocks.tolist()[-1] == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_61_ttft_includes_the_queue(async_scheduling: bool) -> None:
    """One seat, a prefill of 4 s, three requests at once: 4, 8 and 12 s."""
    timer = PrefillAndDecode(4000, 1000).timer()
    config = engine_config(max_num_seqs=1, async_scheduling=async_scheduling)
    log = serve([spec(f"r{i}", 4, 1) for i in range(3)], config, timer=timer)
    assert log.requests.first_token_s.tolist() == [4, 8, 12]
    ttft = latency(log, "ttft")
    assert (ttft["count"], ttft["mean"], ttft["p50"], ttft["max"]) == (3, 8000, 8000, 12_000)


@pytest.mark.parametrize("rate", [20, 60])
def test_64_a_replay_is_the_run_it_replays(rate: int, tmp_path: Path) -> None:
    """200 requests, exported as a trace of ours, served with the same settings: the same times and counts."""
    settings = ["--executor", "constant", "--step-time-s", "0.01", "--max-num-seqs", "16", "--json"]
    load = ["--dataset-name", "random", "--random-input-len", "200", "--random-output-len", "20"]
    first, trace, again = (str(tmp_path / name) for name in ("first", "trace.jsonl", "again"))
    assert (
        run(["run", *load, "--num-prompts", "200", "--request-rate", str(rate), *settings, "--out", first])
        == 0
    )
    assert run(["trace", "convert", first, "-o", trace]) == 0
    assert run(["run", trace, *settings, "--out", again]) == 0
    assert len(read_run(first).requests) == 200
    assert tables_equal(read_run(first), read_run(again))
    assert read_run(first).summary == read_run(again).summary


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_69_a_token_is_out_when_its_time_is_spent(async_scheduling: bool) -> None:
    """Prefill 100 ms, decode 10 ms: the first token at 100 ms, the second at 110 ms."""
    timer = PrefillAndDecode(100, 10).timer()
    config = engine_config(async_scheduling=async_scheduling)
    log = serve([spec("r", 4, 2)], config, timer=timer, save_tokens=True)
    assert log.tokens.time_s.tolist() == [0.1, 0.11]


# ---------------------------------------------------------------- every metric of every definition set

# Steps of 1 s. `b` is preempted at 5 s and resumed; steps bring up to three tokens; `gone` gives up with one token and
# `big` is refused, so neither counts. All times in seconds.
SENT = {"a": 0.0, "b": 0.0, "one": 1.5}
OUTPUTS = {"a": [1, 2, 3, 4, 5], "b": [1, 2, 3, 4, 6, 7], "one": [6]}
TOKENS = {"a": 7, "b": 8, "one": 1}

TTFT = [1 - 0.0, 1 - 0.0, 6 - 1.5]
MEAN_GAP = [(5 - 1) / 6, (7 - 1) / 7]
PER_TOKEN = [5 / 7, 7 / 8, 4.5 / 1]
E2E = [5 - 0.0, 7 - 0.0, 6 - 1.5]
GAPS = [1, 1, 1, 1] + [1, 1, 1, 2, 1]
SAMPLES_S: dict[str, dict[str, list[float]]] = {
    "vllm-server": {"ttft": TTFT, "tpot": [*MEAN_GAP, 0], "itl": GAPS, "e2el": E2E},
    "vllm-bench": {"ttft": TTFT, "tpot": MEAN_GAP, "itl": GAPS, "e2el": E2E},
    "guidellm": {"ttft": TTFT, "tpot": PER_TOKEN, "itl": MEAN_GAP, "e2el": E2E},
    "inference-perf": {"ttft": TTFT, "tpot": MEAN_GAP, "itl": GAPS, "e2el": E2E, "ntpot": PER_TOKEN},
}
"""What each set means by its names, worked out from the lines above."""
ENGINE_S = {
    "queue": [0, 0, 5 - 2],
    "prefill": [1 - 0, 1 - 0, 6 - 5],
    "decode": [5 - 1, 7 - 1, 6 - 6],
    "inference": [5 - 0, 7 - 0, 6 - 5],
}
"""The engine's own intervals; `one` came in at the step boundary at 2 s and was scheduled at 5 s."""


@pytest.fixture(scope="module")
def eventful() -> MemorySink:
    """A preemption, several tokens a step, an abort, a refusal and a request of one token."""
    config = engine_config(
        usable_blocks=7, max_model_len=24, max_num_seqs=3, speculative=drafting("ngram", 2)
    )
    tokens = TokenSource(1000)
    drafts = DraftModel(tokens, num_speculative_tokens=2, acceptance_rate=0.5, reports_drafts=True)
    timer = ModelledStepTimer(ConstantStepModel(S), tokens, "constant", drafts)
    requests = [
        spec("a", 6, 7),
        spec("b", 6, 8),
        spec("gone", 4, 9, 0.5, abort_s=4.5),
        spec("one", 3, 1, 1.5),
        spec("big", 30, 4, 2.0),
    ]
    return serve(requests, config, timer=timer, save_tokens=True)


def test_the_raw_timestamps(eventful: MemorySink) -> None:
    """The run that the figures below are worked out from is the one that was served."""
    requests = eventful.requests.set_index("request_id")
    assert requests.finish_reason.to_dict() == {
        "a": "length",
        "b": "length",
        "gone": "abort",
        "one": "length",
        "big": "refused",
    }
    assert requests.preemptions["b"] == 1
    assert requests.sent_s[[*SENT]].to_dict() == SENT
    assert requests.num_output_tokens[[*TOKENS]].to_dict() == TOKENS
    times = eventful.tokens.groupby("request_id").time_s.unique()
    assert {name: times[name].tolist() for name in OUTPUTS} == OUTPUTS


@pytest.mark.parametrize("metric_defs", DEFINITIONS)
def test_every_metric_from_raw_timestamps(eventful: MemorySink, metric_defs: str) -> None:
    """Each latency of each set has the samples worked out by hand, and numpy's statistics of them."""
    latencies = summarize(eventful, metric_defs)["servetwin"]["latency"]
    expected = SAMPLES_S[metric_defs] | ENGINE_S
    assert {name.removesuffix("_ms") for name in latencies} == expected.keys()
    for name, samples_s in expected.items():
        ms = np.array(samples_s) * 1e3
        assert latencies[f"{name}_ms"] == pytest.approx(
            {
                "count": len(ms),
                "mean": ms.mean(),
                "std": ms.std(),
                **{f"p{p}": np.percentile(ms, p) for p in (50, 90, 95, 99)},
                "max": ms.max(),
            },
            abs=1e-6,
        ), name


@pytest.mark.parametrize("metric_defs", DEFINITIONS)
def test_the_keys_of_vllm_bench_hold_the_chosen_definitions(eventful: MemorySink, metric_defs: str) -> None:
    """mean, median, std and p99 at the top are those of the set; keys that vLLM does not have are ours."""
    summary = summarize(eventful, metric_defs)
    for name in ("ttft", "tpot", "itl", "e2el"):
        ms = np.array(SAMPLES_S[metric_defs][name]) * 1e3
        figures = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std(), "p99": np.percentile(ms, 99)}
        assert {f: summary[f"{f}_{name}_ms"] for f in figures} == pytest.approx(figures, abs=1e-6)
    assert "mean_ntpot_ms" not in summary


def test_counts_and_rates_from_raw_timestamps(eventful: MemorySink) -> None:
    """Three completed of five: 15 prompt and 16 output tokens in 7 s; goodput needs all limits."""
    summary = summarize(eventful, goodput_ms={"ttft": 2000, "tpot": 800})
    assert (summary["completed"], summary["failed"], summary["duration"]) == (3, 2, 7.0)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (6 + 6 + 3, 7 + 8 + 1)
    rates = ("request_throughput", "output_throughput", "total_token_throughput", "request_goodput")
    assert [summary[name] for name in rates] == [3 / 7, 16 / 7, 31 / 7, 1 / 7]
    assert (summary["max_output_tokens_per_s"], summary["max_concurrent_requests"]) == (2, 3)
    assert summary["busy_time_s"] == 7.0


def test_every_formula_stands_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """`run --help` says what each set means by its names."""
    assert run(["run", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for chosen in DEFINITIONS.values():
        assert not [f for f in chosen.formulas(held_back=True).values() if f not in shown]
