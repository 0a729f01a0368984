"""Faults of the dashboard, each with the tests that notice it (see mutations.py)."""

from __future__ import annotations

from mutation import Mutation

PAGES = "test_dashboard_pages.py"

DASHBOARD = (
    Mutation(
        "cached blocks count as held",
        0,
        "dashboard/residencies.py",
        "(self.begin <= time_s) & (time_s < self.released)",
        "(self.begin <= time_s) & (time_s < self.until)",
        (f"{PAGES}::test_block_map_and_pool_agree_with_the_steps[a]",),
    ),
    Mutation(
        "a block is drawn as cached when it is gone",
        0,
        "dashboard/block_map.py",
        "_paint(state, row[cached], released[cached], until[cached]",
        "_paint(state, row[cached], released[cached], until[cached] + 1",
        (f"{PAGES}::test_block_map_and_pool_agree_with_the_steps[a]",),
    ),
    Mutation(
        "contents that are there count as evicted",
        0,
        "dashboard/hit_loss.py",
        "there = _latest_before(res.until[order], first) > res.begin[order]",
        "there = _latest_before(res.begin[order], first) > res.begin[order]",
        (f"{PAGES}::test_hit_loss",),
    ),
    Mutation(
        "the first of two steps that begin together is left out",
        0,
        "dashboard/step_view.py",
        'int(starts.searchsorted(starts[at - 1], side="left")) if at else 0',
        "max(at - 1, 0)",
        (f"{PAGES}::test_asynchronous_runs_have_lanes",),
    ),
    Mutation(
        "a replica counts in the instants of its own steps only",
        0,
        "dashboard/step_view.py",
        ".ffill().fillna(0)",
        ".fillna(0)",
        (f"{PAGES}::test_replicas_are_added_up",),
    ),
    Mutation(
        "a limit that is just kept is missed",
        0,
        "dashboard/slo.py",
        "missed = values > limit_ms * NS_PER_MS",
        "missed = values >= limit_ms * NS_PER_MS",
        (f"{PAGES}::test_a_limit_that_is_just_kept_is_kept",),
    ),
    Mutation(
        "thinning loses the peak",
        0,
        "dashboard/charts/thinning.py",
        "starts + whole.argmax(axis=1)]",
        "starts]",
        ("test_dashboard.py::test_thinning_without_tsdownsample_keeps_extremes",),
    ),
    Mutation(
        "between two requests a distribution slopes",
        0,
        "dashboard/charts/latency.py",
        'PALETTE[n % len(PALETTE)], "shape": "hv"',
        'PALETTE[n % len(PALETTE)], "shape": "linear"',
        (f"{PAGES}::test_distributions_are_those_of_the_requests",),
    ),
)
