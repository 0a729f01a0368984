"""Our scheduler takes the recorded decisions of vLLM 0.22.0, field for field."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from servetwin.sim.decide import decide
from servetwin.sim.scenario import read_scenario

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(p.name.removesuffix(".scenario.json") for p in GOLDEN.glob("*.scenario.json"))


def test_the_scenarios_are_there() -> None:
    """Synchronous scenarios without speculative decoding: s01-s13, s15-s18, s21-s24."""
    numbers = [int(n[1:3]) for n in NAMES]
    assert numbers == [*range(1, 14), *range(15, 19), *range(21, 25)]


@pytest.mark.parametrize("name", NAMES)
def test_decisions_equal_the_recorded_ones(name: str) -> None:
    """Every line of `decide` equals the recorded line, field order included."""
    with gzip.open(GOLDEN / f"{name}.expected.jsonl.gz", "rt") as f:
        expected = [json.loads(line) for line in f]
    lines = list(decide(read_scenario(GOLDEN / f"{name}.scenario.json")))
    for ours, theirs in zip(lines, expected, strict=False):
        assert json.dumps(ours) == json.dumps(theirs), f"step {theirs['step']}"
    assert len(lines) == len(expected)
