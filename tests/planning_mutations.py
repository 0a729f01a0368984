"""One-line faults of planning, each with the tests that notice it."""

from __future__ import annotations

from mutation import Mutation

SEARCH, STEADY = "sim/planning/search.py", "sim/planning/steady.py"

PLANNING = (
    Mutation(
        "the search does not look below its answer",
        0,
        SEARCH,
        "if (rate := self._gap(low.rate * BELOW, low.rate)) is not None:",
        "if False:",
        ("test_plan_search.py::test_a_wide_dip_below_the_answer_is_never_missed",),
    ),
    Mutation(
        "the luck of a seed is not taken off",
        0,
        SEARCH,
        "        self._luck.update(zip(self._seeds, map(float, luck), strict=True))\n",
        "",
        ("test_plan_search.py::test_a_seed_that_was_lucky_elsewhere_counts_less",),
    ),
    Mutation(
        "a ceiling is believed without a try",
        0,
        SEARCH,
        "            elif high == self._ceiling and high not in self._points:\n",
        "            elif False:\n",
        ("test_plan_search.py::test_a_ceiling_that_is_none_is_passed",),
    ),
    Mutation(
        "who has no answer is left out of a percentile",
        0,
        "sim/planning/slo.py",
        "np.where(answered, metric.of(times), np.inf)",
        "np.where(answered, metric.of(times), np.nan)",
        ("test_plan_steady.py::test_report_68_a_saturated_run_says_so",),
    ),
    Mutation(
        "start-up dilutes the rate",
        0,
        STEADY,
        "    return float((inside > inside.min()).sum() / (inside.max() - inside.min()) * NS_PER_S)\n",
        "    return float(len(inside) / (inside.max() - window.start_ns) * NS_PER_S)\n",
        ("test_plan_steady.py::test_report_66_start_up_does_not_dilute_the_rate",),
    ),
    Mutation(
        "warm-up is not cut",
        0,
        STEADY,
        "    begin = start + span * (0.5 if cut is None else cut)\n",
        "    begin = start\n",
        ("test_plan_steady.py::test_the_window_leaves_out_the_start_and_the_end",),
    ),
    Mutation(
        "an overloaded probe goes on to its end",
        0,
        "sim/planning/saturation.py",
        "            raise SaturatedError(self._ended, now_ns, served)\n",
        "            return\n",
        (
            "test_plan_steady.py::test_a_hopeless_run_is_ended_early",
            "test_plan_capacity.py::test_a_saturated_probe_costs_no_more_than_twice_a_stable_one",
        ),
    ),
    Mutation(
        "slower steps have the limits of faster ones",
        0,
        "sim/planning/capacity.py",
        "limit / factor for name, limit in capacity.slo.limits_ms.items()",
        "limit * factor for name, limit in capacity.slo.limits_ms.items()",
        ("test_plan_capacity.py::test_slower_steps_are_the_same_runs_in_slow_motion",),
    ),
    Mutation(
        "one replica too many is kept",
        0,
        "sim/planning/capacity.py",
        "        while n - bad > 1:\n",
        "        while False:\n",
        ("test_plan_command.py::test_the_fewest_replicas_for_a_load",),
    ),
)
