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
    """s01-s24 synchronous, s14, s19 and s20 with drafts; x01-x05 asynchronous (x04 with drafts) and for runner V2."""
    assert [name[:3] for name in NAMES] == [f"s{i:02}" for i in range(1, 25)] + [
        f"x{i:02}" for i in range(1, 6)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_decisions_equal_the_recorded_ones(name: str) -> None:
    """Every line of `decide` equals the recorded line, field order included."""
    with gzip.open(GOLDEN / f"{name}.expected.jsonl.gz", "rt") as f:
        expected = [json.loads(line) for line in f]
    lines = list(decide(read_scenario(GOLDEN / f"{name}.scenario.json")))
    for ours, theirs in zip(lines, expected, strict=False):
        assert json.dumps(ours) == json.dumps(theirs), f"step {theirs['step']}"
    assert len(lines) == len(expected)
