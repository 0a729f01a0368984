"""Two schedulers written apart, the product's and a naive one, decide alike on recorded and on drawn scenarios."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from naive_scheduler import NoEndError
from naive_scheduler import decide as naive_decide
from scenario_strategies import scenarios

from servetwin.sim.decide import decide
from servetwin.sim.progress_guard import StalledError
from servetwin.sim.scenario import Scenario, ScenarioError

Json = dict[str, Any]
GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(p.name.removesuffix(".scenario.json") for p in GOLDEN.glob("*.scenario.json"))
LINES_AT_MOST = 600
"""Compared per drawn scenario: most end before, some never do (requests that preempt one another for ever)."""


def as_text(lines: Iterable[Json]) -> list[str]:
    return [json.dumps(line, separators=(",", ":")) for line in lines]


def assert_naive_decides_as_recorded(folder: Path, name: str) -> None:
    scenario = json.loads((folder / f"{name}.scenario.json").read_text())
    with gzip.open(folder / f"{name}.expected.jsonl.gz", "rt") as f:
        expected = f.read().splitlines()
    assert as_text(naive_decide(scenario)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_naive_model_decides_as_recorded(name: str) -> None:
    """The naive model is worth comparing with: it takes the recorded decisions byte for byte."""
    assert_naive_decides_as_recorded(GOLDEN, name)


def test_the_naive_model_decides_as_recorded_beyond_the_shipped_scenarios(shared_data: Path) -> None:
    """Speculative decoding, asynchronous scheduling and the V2 runner's reports too."""
    for folder in (shared_data / "golden", shared_data / "golden" / "extra"):
        names = sorted(p.name.removesuffix(".scenario.json") for p in folder.glob("*.scenario.json"))
        assert names
        for name in set(names) - set(NAMES):
            assert_naive_decides_as_recorded(folder, name)


def naive_outcome(scenario: Json) -> tuple[list[str], bool]:
    """The first lines, and whether they are all."""
    try:
        return as_text(naive_decide(scenario, LINES_AT_MOST)), True
    except NoEndError as e:
        return as_text(e.lines), False


def product_outcome(scenario: Json) -> tuple[list[str], bool]:
    """The same of the product, which gives up on a livelock with an error."""
    lines: list[Json] = []
    try:
        for line in islice(decide(Scenario.model_validate(scenario)), LINES_AT_MOST + 1):
            lines.append(line)  # noqa: PERF402 (the lines before an error are wanted)
    except (StalledError, ScenarioError):
        return as_text(lines), False
    return as_text(lines[:LINES_AT_MOST]), len(lines) <= LINES_AT_MOST


@given(scenarios() | scenarios(extended=True))
def test_product_decides_as_the_naive_model(scenario: Json) -> None:
    """Line for line; what does not end in one does not end in the other."""
    expected, expected_end = naive_outcome(scenario)
    lines, end = product_outcome(scenario)
    assert end == expected_end
    assert lines == (expected if end else expected[: len(lines)])


def traits(scenario: Json, lines: list[Json]) -> set[str]:
    """What a scenario brings about."""
    planned = [line for line in lines if "sched" in line]
    updated = [line for line in lines if "outputs" in line]
    aborted = [row for line in lines for row in line["aborted_before"] + line.get("aborted_during", [])]
    found = {
        "hits": any(line["prefix"]["hits"] for line in planned),
        "preemption": any(line["preempted"] for line in planned),
        "hits of a resumed request": any(line["prefix"]["preempted_hits"] for line in planned),
        "refund": any(line["unscheduled"] for line in planned),
        "a starved running request": any(
            set(line["all_token_lens"]) & set(line["cached"]) for line in planned
        ),
        "abort during a step": any(line.get("aborted_during") for line in lines),
        "stop": any(row[2] == "stop" for line in updated for row in line["outputs"]),
        "clock": scenario.get("time_mode") == "clock",
        "drafts": any("spec_tokens" in line for line in planned),
        "in flight": any(line["updated_step"] is None for line in lines),
    }
    return {name for name, is_so in found.items() if is_so} | {f"abort {status}" for _, status in aborted}


def test_the_drawn_scenarios_are_worth_drawing() -> None:
    """A sensible share of them does each thing that a scheduler can get wrong."""
    counts: Counter[str] = Counter()

    @settings(max_examples=300, derandomize=True, database=None)
    @given(scenarios(extended=True))
    def draw(scenario: Json) -> None:
        lines = [json.loads(line) for line in naive_outcome(scenario)[0]]
        counts.update(traits(scenario, lines))

    draw()
    at_least = {
        "hits": 50,
        "preemption": 80,
        "hits of a resumed request": 25,
        "refund": 8,
        "a starved running request": 8,
        "abort during a step": 40,
        "abort WAITING": 40,
        "abort RUNNING": 40,
        "abort PREEMPTED": 4,
        "stop": 60,
        "clock": 40,
        "drafts": 60,
        "in flight": 80,
    }
    assert {name: counts[name] for name in at_least if counts[name] < at_least[name]} == {}
