"""Figures are functions of the tables: right on small cases, equal to what tokens give, never invented."""

from __future__ import annotations

import json

import numpy as np
import pytest
from engines import engine_config, spec
from hypothesis import given
from hypothesis import strategies as st

from servetwin.sim.columns import SCHEMAS, Columns
from servetwin.sim.config import CacheConfig, EngineConfig, ModelConfig, RunConfig, SchedulerConfig
from servetwin.sim.definitions import DEFINITIONS
from servetwin.sim.events import EventLog, MemorySink
from servetwin.sim.metrics import Distribution, distribution, summarize, timestamps
from servetwin.sim.simulation import simulate
from servetwin.sim.step_rows import in_pieces
from servetwin.sim.steptime.modelled import LinearStepModel, ModelledStepTimer
from servetwin.sim.token_source import TokenSource
from servetwin.workloads import ListWorkload, RequestSpec

S = 1_000_000_000
MS = 1_000_000


class ByTokens:
    """A step model in which every token costs, so that gaps differ."""

    def durations_ns(self, features):  # type: ignore[no-untyped-def]
        return 5 * MS + features.new_tokens * MS


def log_of_a_run(requests: list[RequestSpec]) -> MemorySink:
    """The log of a small engine: 3 seats, blocks of 4 tokens, a pool that is soon too small."""
    engine = EngineConfig(
        model=ModelConfig(max_model_len=40),
        cache=CacheConfig(block_size=4, num_gpu_blocks=12),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16),
    )
    sink, tokens = MemorySink(), TokenSource(100)
    simulate(
        RunConfig(engine=engine, executor="test"),
        ListWorkload(requests),
        ModelledStepTimer(ByTokens(), tokens, "test"),
        EventLog(sink, save_tokens=True),
        tokens=tokens,
        plan_tokens=False,
        log_blocks=True,
    )
    return sink


@st.composite
def workloads(draw: st.DrawFn) -> list[RequestSpec]:
    """Up to 8 requests close in time; some are given up."""
    return [
        RequestSpec(
            request_id=f"r{i}",
            arrival_s=draw(st.integers(0, 50)) / 1000,
            prompt_tokens=draw(st.integers(1, 20)),
            output_tokens=draw(st.integers(1, 15)),
            abort_s=draw(st.none() | st.integers(0, 300).map(lambda ms: ms / 1000)),
        )
        for i in range(draw(st.integers(1, 8)))
    ]


@given(workloads())
def test_pooled_gaps_are_those_of_the_tokens(requests: list[RequestSpec]) -> None:
    """The ITL pool equals the gaps between the tokens of completed requests, which add up to last - first."""
    sink = log_of_a_run(requests)
    done = sink.requests[sink.requests.finish_reason == "length"]
    gaps: list[int] = []
    for row in done.itertuples():
        times = sink.tokens[sink.tokens.request_id == row.request_id].time_s
        assert len(times) == row.num_output_tokens
        gaps += np.rint(np.diff(times) * S).astype(int).tolist()
    pool = distribution(DEFINITIONS["vllm-bench"].itl, timestamps(done), sink)
    written_out = np.repeat(pool.values, np.diff(pool.cumulative, prepend=0)).astype(int).tolist()
    assert written_out == sorted(gaps)


def test_the_pool_is_the_same_however_many_gaps_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long parts are read in pieces, and gaps are joined when they have become many."""
    specs = [spec(f"r{i}", 8, 40 + i, 7 * i) for i in range(6)]
    whole = log_of_a_leaping_run(specs)
    lengths, counts = whole.gap_lengths
    assert counts.sum() == sum(40 + i - 1 for i in range(6)) and len(lengths) > 20
    monkeypatch.setattr("servetwin.sim.step_rows.STEPS_AT_ONCE", 7)
    monkeypatch.setattr("servetwin.sim.tables.MANY_GAPS", 5)
    again = log_of_a_leaping_run(specs)
    assert len([*in_pieces(again.parts("steps")[0])]) > 5
    assert [a.tolist() for a in again.gap_lengths] == [lengths.tolist(), counts.tolist()]
    assert len(again.itl) == len(whole.itl)


def log_of_a_leaping_run(specs: list[RequestSpec]) -> MemorySink:
    """With steps of many lengths."""
    tokens, sink = TokenSource(50), MemorySink()
    simulate(
        RunConfig(engine=engine_config(max_model_len=200), executor="linear"),
        ListWorkload(specs),
        ModelledStepTimer(LinearStepModel(10**9, context_ns=1), tokens, "linear"),
        EventLog(sink, log_blocks=False),
        tokens=tokens,
        plan_tokens=False,
        log_blocks=False,
    )
    return sink


@given(workloads())
def test_books_balance(requests: list[RequestSpec]) -> None:
    """Every request ends once; waits fill the time before first admission; blocks come back."""
    sink = log_of_a_run(requests)
    assert sorted(sink.requests.request_id) == sorted(r.request_id for r in requests)
    summary = summarize(sink)
    assert summary["completed"] + summary["failed"] == len(requests)
    assert sum(summary["servetwin"]["requests"].values()) == len(requests)
    started = sink.requests.dropna(subset=["first_scheduled_s"]).set_index("request_id")
    waits = sink.events[sink.events.kind == "wait"]
    for name, row in started.iterrows():
        mine = waits[(waits.request_id == name) & (waits.time_s < row.first_scheduled_s)]
        assert (mine.until_s - mine.time_s).sum() == pytest.approx(row.first_scheduled_s - row.queued_s)
    assert sink.steps.preemptions.sum() == sink.requests.preemptions.sum()
    usable = sink.steps.used_blocks + sink.steps.cached_free_blocks + sink.steps.free_blocks
    assert set(usable) <= {11}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpy_s(pairs: list[tuple[int, int]], p: float) -> None:
    """Statistics of counted samples equal numpy's of the samples written out."""
    values, counts = np.array(pairs, dtype=float).T
    written_out = np.repeat(values, counts.astype(int))
    d = Distribution.of(values, counts)
    assert d.count == len(written_out)
    assert d.percentile(p) == pytest.approx(np.percentile(written_out, p))
    assert d.mean == pytest.approx(written_out.mean())
    assert d.std == pytest.approx(written_out.std())
    assert d.max == written_out.max()


def log_of(*rows: tuple[object, ...]) -> MemorySink:
    """A log of requests given as (arrival, first token, last token, finish, output tokens, finish reason)."""
    columns = Columns("requests")
    for n, (arrival, first, last, finish, tokens, reason) in enumerate(rows):
        times = [-1 if t is None else round(t * S) for t in (arrival, arrival, arrival, first, last, finish)]  # type: ignore[operator]
        columns.append(f"r{n}", 10, tokens, *times, 0, 0, 0, reason, 0, None, None, times[0])  # type: ignore[arg-type]
    sink = MemorySink()
    sink.write({"requests": columns})
    return sink


@pytest.mark.parametrize(
    ("name", "tpot_ms", "e2e_ms"),
    [
        ("vllm-server", 1000, 5000),
        ("vllm-bench", 1000, 4000),
        ("guidellm", 1000, 5000),
        ("inference-perf", 1000, 4000),
    ],
)
def test_definitions(name: str, tpot_ms: float, e2e_ms: float) -> None:
    """Each set follows its formulas: tokens at 2, 3, 4 s, finish seen at 5 s, send at 0 s."""
    summary = summarize(log_of((0, 2, 4, 5, 3, "length")), name)
    expected = 4000 / 3 if name == "guidellm" else tpot_ms
    assert summary["mean_ttft_ms"] == 2000
    assert summary["mean_tpot_ms"] == pytest.approx(expected)
    assert summary["mean_e2el_ms"] == e2e_ms
    assert summary["servetwin"]["formulas"]["tpot"] == DEFINITIONS[name].formulas()["tpot"]


def test_a_single_token_has_no_time_per_token() -> None:
    """Left out by the client's definition, 0 by the server's."""
    log = log_of((0, 2, 2, 2, 1, "stop"), (0, 1, 3, 3, 2, "stop"))
    assert summarize(log, "vllm-bench")["mean_tpot_ms"] == 2000
    assert summarize(log, "vllm-server")["mean_tpot_ms"] == 1000


def test_no_data_is_null() -> None:
    """Without a completed request there is no latency, rate or peak: null in valid JSON."""
    summary = json.loads(json.dumps(summarize(MemorySink()), allow_nan=False))
    assert summary["completed"] == 0
    for key in ("duration", "request_throughput", "mean_ttft_ms", "p99_itl_ms", "max_output_tokens_per_s"):
        assert summary[key] is None
    assert summary["servetwin"]["kv_peak_used_fraction"] is None


def test_peaks_count_whole_seconds() -> None:
    """A request is present in each second that it touches; first tokens count as output."""
    summary = summarize(
        log_of((0.5, 1, 1, 1.4, 1, "stop"), (1.2, 2, 2, 2, 1, "stop"), (9, 10, 10, 10, 1, "stop"))
    )
    assert summary["max_concurrent_requests"] == 2
    assert summary["max_output_tokens_per_s"] == 1


def test_goodput_needs_all_limits() -> None:
    """Requests within every limit count; without limits there is no goodput."""
    log = log_of((0, 1, 2, 2, 2, "length"), (0, 3, 4, 4, 2, "length"))
    assert summarize(log)["request_goodput"] is None
    assert summarize(log, goodput_ms={"ttft": 1500, "e2el": 3000})["request_goodput"] == 1 / 4
    with pytest.raises(ValueError, match="goodput limit 'itl' is not known; allowed: ttft, tpot, e2el"):
        summarize(log, goodput_ms={"itl": 3})


def test_unknown_definitions_are_refused() -> None:
    """The message names the sets there are."""
    with pytest.raises(ValueError, match="allowed: vllm-server, vllm-bench, guidellm, inference-perf"):
        summarize(MemorySink(), "aiperf")


def test_empty_tables_have_their_columns() -> None:
    """Frames of a log without rows have the right columns."""
    sink = MemorySink()
    for table, schema in SCHEMAS.items():
        assert list(sink.frame(table).columns) == list(schema)
