"""Faults of the report, of runs started in the dashboard and of its pages on several runs (see mutations.py)."""

from __future__ import annotations

from mutation import Mutation

LIVE, COMPARED, CAPACITY = "test_live_runs.py", "test_dashboard_compare.py", "test_dashboard_capacity.py"

REPORT = (
    Mutation(
        "a run's own words are HTML",
        0,
        "dashboard/report_page.py",
        'f"<li>{escape(line)}</li>"',
        'f"<li>{line}</li>"',
        ("test_report.py::test_what_a_run_brings_along_is_text",),
    ),
    Mutation(
        "the same run gives other bytes each time",
        0,
        "dashboard/report_page.py",
        "gzip.compress(content, 9, mtime=0)",
        "gzip.compress(content, 9, mtime=__import__('time').time_ns() % 2**32)",
        ("test_report.py::test_nothing_in_the_page_comes_from_elsewhere",),
    ),
    Mutation(
        "an existing file is replaced unasked",
        0,
        "sim/commands/report.py",
        "if out.exists() and not overwrite:",
        "if False:",
        ("test_report.py::test_the_command_writes_whole_files_and_refuses_others",),
    ),
    Mutation(
        "a run outlives the server that started it",
        0,
        "dashboard/leash.py",
        "kill_at_s is None and not listener.is_alive():",
        "kill_at_s is None and not listener:",
        (f"{LIVE}::test_no_run_outlives_who_started_it[15]",),
    ),
    Mutation(
        "lost time is caught up",
        0,
        "sim/commands/pace.py",
        "self._due_s = max(self._due_s, time.monotonic() - NAP_S) + passed_s",
        "self._due_s = self._due_s + passed_s",
        ("test_pace.py::test_simulated_time_is_held_back_and_lost_time_is_not_caught_up",),
    ),
    Mutation(
        "changes of requests have the wrong sign",
        0,
        "dashboard/compared.py",
        "at_shares(second - first)",
        "at_shares(first - second)",
        (f"{COMPARED}::test_the_differences_are_those_of_the_logs",),
    ),
    Mutation(
        "points that others equal or beat stay on the frontier",
        0,
        "dashboard/capacity.py",
        "        if np.isfinite(a[place]) and b[place] < best:\n            best = b[place]\n",
        "        if np.isfinite(a[place]) and b[place] <= best:\n            best = b[place]\n",
        (f"{CAPACITY}::test_the_frontier_is_what_nobody_beats",),
    ),
)
