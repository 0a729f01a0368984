"""`servetwin export prometheus`: vLLM's names, labels and buckets, accepted by parsers, with the numbers of the log."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from exported_runs import mixed_rows, mixed_run
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from servetwin.sim.cli import run
from servetwin.sim.export.vllm_metrics import NOT_MODELLED
from servetwin.sim.runs import Run, read_run

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
ENGINE = {"model_name": "servetwin", "engine": "0"}

VLLM = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc engine_sleep_state
cache_config_info prefix_cache_queries prefix_cache_hits external_prefix_cache_queries external_prefix_cache_hits
mm_cache_queries mm_cache_hits num_preemptions prompt_tokens generation_tokens prompt_tokens_cached
prompt_tokens_by_source request_success iteration_tokens_total time_to_first_token_seconds
inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds
request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
request_prompt_tokens request_generation_tokens request_max_num_generation_tokens request_params_max_tokens
request_prefill_kv_computed_tokens request_params_n kv_block_lifetime_seconds kv_block_idle_before_evict_seconds
kv_block_reuse_gap_seconds lora_requests_info spec_decode_num_drafts spec_decode_num_draft_tokens
spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos estimated_flops_per_gpu
estimated_read_bytes_per_gpu estimated_write_bytes_per_gpu
"""
"""The metrics of 0.22.0, typed from its documentation and code."""
BUCKETS = {
    "time_to_first_token_seconds": (
        ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
    ),
    "inter_token_latency_seconds": ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80",
    "request_time_per_output_token_seconds": ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80",
    "request_queue_time_seconds": ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    "e2e_request_latency_seconds": ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "request_params_n": "1 2 5 10 20",
    "request_prompt_tokens": "1 2 5 10 20 50 100 200",
    "request_prefill_kv_computed_tokens": "1 2 5 10 20 50 100 200",
    "kv_block_lifetime_seconds": ".001 .002 .005 .01 .02 .05 .1 .2 .5 1 2 5 10 20 30 60 120 300 600 1200 1800",
}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """With its tokens, so that everything can be counted again."""
    return mixed_run(tmp_path_factory.mktemp("prometheus") / "run", "--save-tokens")


def text_of(log: Run, tmp_path: Path, *flags: str) -> str:
    out = tmp_path / "metrics.prom"
    assert run(["export", "prometheus", str(log.path), "-o", str(out), "--overwrite", *flags]) == 0
    return out.read_text()


def values_of(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """(name of the sample, labels) -> value; no sample stands twice."""
    samples = [sample for family in parse_text(text) for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def value(text: str, name: str, **labels: str) -> float:
    return values_of(text)[f"vllm:{name}", frozenset((ENGINE | labels).items())]


def buckets_of(text: str, name: str, engine: str = "0") -> dict[float, float]:
    """Upper bound -> samples up to it."""
    return {
        float(dict(labels)["le"]): count
        for (sample, labels), count in values_of(text).items()
        if sample == f"vllm:{name}_bucket" and dict(labels)["engine"] == engine
    }


def check_histogram(text: str, name: str, samples: Floats, engine: str = "0") -> None:
    """That it holds exactly these samples."""
    buckets = buckets_of(text, name, engine)
    # Times are whole nanoseconds, so that a sample on a bound is within.
    assert buckets == {bound: int((np.round(samples, 9) <= bound).sum()) for bound in buckets}
    assert value(text, f"{name}_count", engine=engine) == len(samples)
    assert value(text, f"{name}_sum", engine=engine) == pytest.approx(samples.sum(), abs=1e-7)


# ---------------------------------------------------------------- names and form


def promtool_complaints(families: list[Metric]) -> list[str]:
    """What `promtool check metrics` would say of names and shapes, and what a scrape would choke on."""
    said = []
    for family in families:
        name, reserved = family.name, ("_total", "_sum", "_count", "_bucket", "_info")
        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", name):
            said.append(f"{name}: no legal name")
        if not family.documentation:
            said.append(f"{name}: no help")
        if family.type == "unknown":
            said.append(f"{name}: no type")
        for sample in family.samples:
            suffix = sample.name.removeprefix(name)
            allowed = {
                "counter": ("_total",),
                "gauge": ("",),
                "histogram": ("_bucket", "_sum", "_count"),
            }[family.type]
            if suffix not in allowed:
                said.append(f"{sample.name}: not of a {family.type}")
            if any(not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", label) for label in sample.labels):
                said.append(f"{sample.name}: illegal label")
        if family.type == "gauge" and name.endswith(reserved) and not name.endswith("_info"):
            said.append(f"{name}: a gauge with the suffix of something else")
        if family.type == "histogram":
            said += _histogram_complaints(family)
    return said


def _histogram_complaints(family: Metric) -> list[str]:
    said = []
    series: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = {}
    counts = {}
    for sample in family.samples:
        labels = {name: text for name, text in sample.labels.items() if name != "le"}
        key = frozenset(labels.items())
        if sample.name.endswith("_bucket"):
            series.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_count"):
            counts[key] = sample.value
    for key, buckets in series.items():
        bounds, totals = zip(*buckets, strict=True)
        if sorted(bounds) != list(bounds) or bounds[-1] != float("inf"):
            said.append(f"{family.name}: bounds {bounds}")
        if sorted(totals) != list(totals) or totals[-1] != counts[key]:
            said.append(f"{family.name}: buckets {totals} of {counts[key]}")
    return said


def without_created(text: str) -> list[Metric]:
    """In the text format when counters began is a metric of its own, as the Python client writes it."""
    return [family for family in parse_text(text) if not family.name.endswith("_created")]


@pytest.mark.parametrize(
    "flags", [[], ["--legacy-metric-names", "--low-latency-buckets", "--kv-cache-metrics"]]
)
def test_parsers_and_rules_accept_it(log: Run, tmp_path: Path, flags: list[str]) -> None:
    families = without_created(text_of(log, tmp_path, *flags))
    assert promtool_complaints(families) == []
    assert len(families) == (29 if not flags else 36)
    openmetrics = [*parse_openmetrics(text_of(log, tmp_path, *flags, "--format", "openmetrics"))]
    assert [f.name for f in openmetrics] == [
        f.name.removesuffix("_total") if f.type == "counter" else f.name for f in families
    ]
    samples = {(s.name, frozenset(s.labels.items())): s.value for f in openmetrics for s in f.samples}
    assert samples == values_of(text_of(log, tmp_path, *flags))


def test_every_metric_of_vllm_is_there_or_listed_as_missing(log: Run, tmp_path: Path) -> None:
    """Those of drafts are in runs that have some."""
    text = text_of(log, tmp_path, "--kv-cache-metrics")
    comment = re.search(r"^# .*not modelled: (.*)$", text, re.MULTILINE)
    assert comment is not None and comment[1].split(", ") == [*NOT_MODELLED]
    drafting = {"spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"}
    there = {family.name.removeprefix("vllm:") for family in without_created(text)}
    assert there.isdisjoint(name.removeprefix("vllm:") for name in NOT_MODELLED)
    expected = there | {name.removeprefix("vllm:") for name in NOT_MODELLED} | drafting
    assert expected == set(VLLM.split())
    assert "vllm:kv_block_lifetime_seconds" in text_of(log, tmp_path).splitlines()[0]


def test_buckets_are_those_of_vllm(log: Run, tmp_path: Path) -> None:
    text = text_of(log, tmp_path, "--kv-cache-metrics")
    for name, bounds in BUCKETS.items():
        assert [*buckets_of(text, name)] == [*map(float, bounds.split()), np.inf], name
    finer = text_of(log, tmp_path, "--low-latency-buckets")
    assert [*buckets_of(finer, "inter_token_latency_seconds")][:7] == [
        0.0005,
        0.001,
        0.002,
        0.003,
        0.005,
        0.0075,
        0.01,
    ]
    assert [*buckets_of(finer, "request_queue_time_seconds")][11:13] == [0.2, 0.3]


check_samples, one_value = check_histogram, value

# ---------------------------------------------------------------- numbers


def recount(log: Run, text: str, until_s: float = np.inf, engine: str = "0") -> None:
    """Every counter and histogram against the tables of tokens, requests, events and steps, as of an instant."""
    here = log.requests.replica == int(engine)
    table = log.requests[here & (log.requests.finish_reason != "refused")].set_index("request_id")
    taken = log.tokens[(log.tokens.replica == int(engine)) & log.tokens.request_id.isin(table.index)]
    # Tokens of attempts that were lost with a replica came before the first one that counts.
    taken = taken[taken.time_s >= table.first_token_s[taken.request_id].to_numpy() - 1e-9]
    tokens = {name: t.time_s.to_numpy() for name, t in taken.groupby("request_id")}

    def check_histogram(text: str, name: str, samples: Floats) -> None:
        check_samples(text, name, samples, engine)

    def value(text: str, name: str, **labels: str) -> float:
        return one_value(text, name, engine=engine, **labels)

    seen = {name: times[times <= until_s + 1e-9] for name, times in tokens.items()}
    seen = {name: times for name, times in seen.items() if len(times)}
    begun = table.loc[[*seen]]
    ended = table[table.finish_s <= until_s + 1e-9]
    done = ended[ended.finish_reason == "length"]
    times = {name: tokens[name] for name in done.index}

    check_histogram(
        text, "time_to_first_token_seconds", np.array([t[0] - table.arrival_s[i] for i, t in seen.items()])
    )
    check_histogram(
        text,
        "inter_token_latency_seconds",
        np.concatenate([np.zeros(0), *(np.diff(t) for t in seen.values())]),
    )
    check_histogram(text, "e2e_request_latency_seconds", (done.finish_s - done.arrival_s).to_numpy())
    check_histogram(text, "request_queue_time_seconds", (done.first_scheduled_s - done.queued_s).to_numpy())
    check_histogram(
        text,
        "request_prefill_time_seconds",
        np.array([t[0] - done.first_scheduled_s[i] for i, t in times.items()]),
    )
    check_histogram(text, "request_decode_time_seconds", np.array([t[-1] - t[0] for t in times.values()]))
    check_histogram(
        text,
        "request_inference_time_seconds",
        np.array([t[-1] - done.first_scheduled_s[i] for i, t in times.items()]),
    )
    per_token = np.array([(t[-1] - t[0]) / max(len(t) - 1, 1) for t in times.values()])
    check_histogram(text, "request_time_per_output_token_seconds", per_token)
    check_histogram(text, "request_prompt_tokens", done.num_prompt_tokens.to_numpy(dtype=np.float64))
    lengths = np.array([len(t) for t in times.values()], dtype=np.float64)
    check_histogram(text, "request_generation_tokens", lengths)
    check_histogram(text, "request_max_num_generation_tokens", lengths)
    # Answers here end when they are as long as was asked for.
    check_histogram(text, "request_params_max_tokens", lengths)
    check_histogram(text, "request_params_n", np.ones(len(done)))
    computed = (done.num_prompt_tokens - done.cached_tokens).to_numpy(dtype=np.float64)
    check_histogram(text, "request_prefill_kv_computed_tokens", computed)

    per_step: dict[float, int] = {}
    for name, instants in seen.items():
        for place, instant in enumerate(np.round(instants, 9)):
            prompt = int(table.num_prompt_tokens[name]) if place == 0 else 0
            per_step[instant] = per_step.get(instant, 0) + 1 + prompt
    check_histogram(text, "iteration_tokens_total", np.array([*per_step.values()], dtype=np.float64))

    assert value(text, "prompt_tokens_total") == begun.num_prompt_tokens.sum()
    assert value(text, "prompt_tokens_cached_total") == begun.cached_tokens.sum()
    hit, whole = begun.cached_tokens.sum(), begun.num_prompt_tokens.sum()
    sources = {"local_compute": whole - hit, "local_cache_hit": hit, "external_kv_transfer": 0}
    for source, count in sources.items():
        assert value(text, "prompt_tokens_by_source_total", source=source) == count
    assert value(text, "generation_tokens_total") == sum(map(len, seen.values()))
    reasons = ended.finish_reason.value_counts()
    for reason in ("stop", "length", "abort", "error", "repetition"):
        assert value(text, "request_success_total", finished_reason=reason) == reasons.get(reason, 0)
    preempted = log.events[
        (log.events.replica == int(engine))
        & (log.events.kind == "preempted")
        & (log.events.time_s <= until_s)
    ]
    assert value(text, "num_preemptions_total") == len(preempted)
    steps = log.steps[(log.steps.replica == int(engine)) & (log.steps.start_s <= until_s)]
    assert value(text, "prefix_cache_queries_total") == steps.prefix_query_tokens.sum()
    assert value(text, "prefix_cache_hits_total") == steps.prefix_hit_tokens.sum()


def test_numbers_at_the_end_are_those_of_the_tables(log: Run, tmp_path: Path) -> None:
    text = text_of(log, tmp_path)
    recount(log, text)
    assert value(text, "num_preemptions_total") > 5 and value(text, "prompt_tokens_cached_total") > 500
    assert value(text, "request_success_total", finished_reason="abort") > 1
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value(text, name) == 0


CLUSTER_LOAD = [
    *(
        "--dataset-name",
        "random",
        "--random-input-len",
        "150",
        "--random-output-len",
        "60",
        "--num-prompts",
        "80",
    ),
    *(
        "--request-rate",
        "14",
        "--num-gpu-blocks-override",
        "80",
        "--max-num-seqs",
        "16",
        "--max-model-len",
        "400",
    ),
]


FAILURE = ["--replicas", "2", "--replica-failure", "0@1.5-2.2"]


@pytest.mark.parametrize(
    "cluster",
    [
        pytest.param(["--replicas", "2"], marks=pytest.mark.full),
        [*FAILURE, "--on-failure", "reroute"],
        pytest.param([*FAILURE, "--on-failure", "retry"], marks=pytest.mark.full),
        pytest.param([*FAILURE, "--on-failure", "lost"], marks=pytest.mark.full),
        ["--prefill-replicas", "1", "--decode-replicas", "1", "--kv-transfer-latency-s", "0.05"],
    ],
)
def test_every_replica_is_an_engine(tmp_path: Path, cluster: list[str]) -> None:
    """A request counts where it ended; what was lost with a replica, and tokens thrown away, nowhere."""
    folder = tmp_path / "run"
    constant = ["--executor", "constant", "--step-time-s", "0.0123", "--save-tokens", "--out", str(folder)]
    assert run(["run", *CLUSTER_LOAD, *constant, *cluster]) == 0
    log = read_run(folder)
    text = text_of(log, tmp_path)
    assert log.requests.preemptions.sum() > 3
    if "reroute" in cluster or "retry" in cluster:
        assert len(log.tokens) > log.requests.num_output_tokens.sum() + 10
    for engine in ("0", "1"):
        recount(log, text, engine=engine)
        recount(log, text_of(log, tmp_path, "--at-s", "2.0001"), 2.0001, engine)
    assert promtool_complaints(without_created(text)) == []


@pytest.mark.parametrize("place", [0.05, 0.4, 0.8])
def test_numbers_at_any_instant_are_those_until_then(log: Run, tmp_path: Path, place: float) -> None:
    """In the middle of a step, where nobody's clock is in doubt."""
    row = log.steps.iloc[int(place * len(log.steps))]
    until_s = float(row.start_s + row.end_s) / 2
    text = text_of(log, tmp_path, "--at-s", repr(until_s))
    recount(log, text, until_s)
    last = log.steps[log.steps.start_s <= until_s].iloc[-1]
    usable = last.used_blocks + last.cached_free_blocks + last.free_blocks
    assert usable == 44
    assert value(text, "kv_cache_usage_perc") == pytest.approx(last.used_blocks / usable)
    assert value(text, "num_requests_running") == last.running > 0
    assert value(text, "num_requests_waiting") == last.waiting
    assert value(text, "num_requests_waiting_by_reason", reason="capacity") == last.waiting
    assert value(text, "num_requests_waiting_by_reason", reason="deferred") == 0
    for state, on in (("awake", 1), ("weights_offloaded", 0), ("discard_all", 0)):
        assert value(text, "engine_sleep_state", sleep_state=state) == on


def test_nothing_has_happened_before_the_beginning(log: Run, tmp_path: Path) -> None:
    found = values_of(text_of(log, tmp_path, "--at-s", "0"))
    moving = {
        key: v
        for key, v in found.items()
        if not key[0].endswith(("_created", "cache_config_info", "sleep_state"))
    }
    assert set(moving.values()) == {0.0} and len(moving) > 100


def test_the_cache_and_the_model_are_labels(log: Run, tmp_path: Path) -> None:
    labels = {"engine": "0", "block_size": "16", "num_gpu_blocks": "45", "enable_prefix_caching": "True"}
    assert values_of(text_of(log, tmp_path))["vllm:cache_config_info", frozenset(labels.items())] == 1


def test_old_names_are_second_names(log: Run, tmp_path: Path) -> None:
    instant = ["--at-s", "3.1"]
    plain, text = text_of(log, tmp_path, *instant), text_of(log, tmp_path, *instant, "--legacy-metric-names")
    assert set(values_of(plain).items()) < set(values_of(text).items())
    for old, new in (
        ("gpu_cache_usage_perc", "kv_cache_usage_perc"),
        ("gpu_prefix_cache_hits_total", "prefix_cache_hits_total"),
        ("gpu_prefix_cache_queries_total", "prefix_cache_queries_total"),
        ("time_per_output_token_seconds_sum", "inter_token_latency_seconds_sum"),
    ):
        assert value(text, old) == value(text, new) > 0
    assert buckets_of(text, "time_per_output_token_seconds") == buckets_of(
        text, "inter_token_latency_seconds"
    )
    assert value(text, "num_requests_swapped") == value(text, "cpu_cache_usage_perc") == 0


def test_block_lifetimes_go_from_one_allocation_to_the_next(log: Run, tmp_path: Path) -> None:
    """Against the table of blocks, row by row."""
    lifetimes, since = [], dict[int, float]()
    reused: set[int] = set()
    for row in log.blocks.itertuples():
        if row.block_id in since and row.block_id not in reused:
            lifetimes.append(row.from_s - since[row.block_id])
        if row.block_id not in reused:
            since[row.block_id] = row.from_s
        (reused.add if row.ended == "reused" else reused.discard)(row.block_id)
    assert len(lifetimes) > 50 and (log.blocks.ended == "reused").any()
    check_histogram(
        text_of(log, tmp_path, "--kv-cache-metrics"), "kv_block_lifetime_seconds", np.array(lifetimes)
    )


def test_drafts_are_counted_and_tokens_are_those_that_were_taken(tmp_path: Path) -> None:
    drafts = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    log = mixed_run(tmp_path / "run", *drafts, "--draft-acceptance-rate", "0.7", "--save-tokens")
    text = text_of(log, tmp_path)
    summary = log.summary
    assert value(text, "spec_decode_num_drafts_total") == summary["spec_decode_num_drafts"] > 50
    assert value(text, "spec_decode_num_draft_tokens_total") == summary["spec_decode_draft_tokens"]
    assert value(text, "spec_decode_num_accepted_tokens_total") == summary["spec_decode_accepted_tokens"]
    assert value(text, "generation_tokens_total") == len(log.tokens)
    gaps = [np.diff(np.unique(t.time_s)) for _, t in log.tokens.groupby("request_id")]
    check_histogram(text, "inter_token_latency_seconds", np.concatenate(gaps))


def test_a_leapt_run_gives_the_same_numbers(log: Run, tmp_path: Path) -> None:
    """Without its tokens, steps are leapt over."""
    leapt = mixed_run(tmp_path / "leapt")
    assert leapt.summary["servetwin"]["leapt_steps"] > 0 == log.summary["servetwin"]["leapt_steps"]
    created = re.compile(r"_created\{.*")
    texts = [[created.sub("", line) for line in text_of(one, tmp_path).splitlines()] for one in (log, leapt)]
    assert texts[0] == texts[1]


def test_stop_is_a_reason_and_what_was_asked_for_comes_from_the_workload(tmp_path: Path) -> None:
    rows = mixed_rows(8)
    rows[0] |= {
        "output_tokens": 50,
        "output_token_ids": [5, 6, 7],
        "stop_token_ids": [7],
        "ignore_eos": False,
    }
    rows = [row for row in rows if "abort_s" not in row and row["prompt_tokens"] < 900]
    log = mixed_run(tmp_path / "run", rows=rows)
    text = text_of(log, tmp_path)
    assert value(text, "request_success_total", finished_reason="stop") == 1
    assert value(text, "request_params_max_tokens_sum") == sum(row["output_tokens"] for row in rows)
    assert value(text, "request_generation_tokens_sum") == value(text, "request_params_max_tokens_sum") - 47


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--at-s", "-1"], "--at-s -1.0: must be 0 or more"),
        (["--at-s", "nan"], "--at-s nan: must be 0 or more"),
        (["--format", "json"], "--format"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    log: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert run(["export", "prometheus", str(log.path), "-o", str(tmp_path / "m"), *flags]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not [*tmp_path.iterdir()]


def test_block_lifetimes_need_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = mixed_run(tmp_path / "run", "--no-log-blocks")
    assert run(["export", "prometheus", str(log.path), "-o", "-", "--kv-cache-metrics"]) == 2
    assert "has no blocks/, which --kv-cache-metrics needs" in capsys.readouterr().err


def test_a_run_without_a_step_has_all_metrics(tmp_path: Path) -> None:
    """The only request was refused."""
    log = mixed_run(tmp_path / "run", rows=mixed_rows()[7:8])
    assert log.requests.finish_reason.tolist() == ["refused"] and not len(log.steps)
    text = text_of(log, tmp_path)
    assert len(without_created(text)) == 29
    assert value(text, "num_requests_running") == value(text, "e2e_request_latency_seconds_count") == 0
