"""Planted faults of comparisons and exports, each with the tests that notice it (see mutations.py)."""

from __future__ import annotations

from mutation import Mutation

EXPORTS = (
    Mutation(
        "a request that completed in one run only is in a pair",
        0,
        "sim/pairing.py",
        "done = done_a & done_b",
        "done = done_a | done_b",
        ("test_compare.py::test_what_cannot_be_paired_is_counted_and_said",),
    ),
    Mutation(
        "every resample is drawn anew",
        0,
        "sim/planning/bootstrap.py",
        "rng = np.random.default_rng(self.seed)",
        "rng = np.random.default_rng()",
        ("test_compare.py::test_the_same_seed_gives_the_same_intervals_and_wrong_sizes_are_refused",),
    ),
    Mutation(
        "what is just as large as its limit is beyond it",
        0,
        "sim/planning/thresholds.py",
        "return change > self.limit + ROUNDING * max(self.limit, 1.0)",
        "return change >= self.limit - ROUNDING * max(self.limit, 1.0)",
        ("test_compare.py::test_limits_that_are_exceeded_end_with_exit_code_4",),
    ),
    Mutation(
        "a preempted request gets a token in every step",
        0,
        "sim/token_times.py",
        "kept[slice(*within)] = False",
        "kept[slice(*within)] = True",
        (
            "test_token_times.py::test_outputs_of_a_run_with_preemptions",
            "test_export_bench_json.py::test_arrays_are_those_of_the_tokens_in_seconds",
        ),
    ),
    Mutation(
        "failed requests have output tokens in a benchmark's result",
        0,
        "sim/export/bench_json.py",
        "np.where(done, requests.num_output_tokens, 0).astype(np.int64)",
        "requests.num_output_tokens.to_numpy(dtype=np.int64)",
        ("test_export_bench_json.py::test_arrays_are_those_of_the_tokens_in_seconds",),
    ),
    Mutation(
        "a sample on a bound is above it",
        0,
        "sim/export/series.py",
        "np.searchsorted(edges, values[order])",
        'np.searchsorted(edges, values[order], side="right")',
        ("test_export_prometheus.py::test_numbers_at_the_end_are_those_of_the_tables",),
    ),
    Mutation(
        "tokens of an attempt that was lost with its replica are counted",
        0,
        "sim/export/engine_metrics.py",
        "    if len(lost):\n",
        "    if False:\n",
        ("test_export_prometheus.py::test_every_replica_is_an_engine[cluster1]",),
    ),
    Mutation(
        "a request that was resumed never decodes again",
        0,
        "sim/export/perfetto_requests.py",
        'if PHASES[kind] == "prefill":',
        'if kind == "scheduled":',
        ("test_export_perfetto.py::test_phases_of_one_request",),
    ),
    Mutation(
        "metadata with the name of an array is written beside it",
        0,
        "sim/export/bench_json.py",
        "*drafting, *ARRAYS}",
        "*drafting}",
        ("test_export_bench_json.py::test_bad_input_is_one_line_and_writes_nothing",),
    ),
)
