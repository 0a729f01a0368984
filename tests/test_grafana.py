"""examples/grafana.json asks for metrics and labels that the export has, and for nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from exported_runs import mixed_run
from prometheus_client.parser import text_string_to_metric_families

from servetwin.sim.cli import run

BOARD = Path(__file__).resolve().parent.parent / "examples" / "grafana.json"


@pytest.fixture(scope="module")
def labels_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Name of every sample of a real export -> its labels."""
    folder = tmp_path_factory.mktemp("grafana")
    log = mixed_run(folder / "run")
    assert run(["export", "prometheus", str(log.path), "-o", str(folder / "m")]) == 0
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families((folder / "m").read_text()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def panels() -> list[dict[str, Any]]:
    board: dict[str, Any] = json.loads(BOARD.read_text())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    board = json.loads(BOARD.read_text())
    asked = [target["expr"] for panel in panels() for target in panel["targets"]]
    return asked + [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]


def test_every_metric_of_an_expression_is_in_the_export(labels_of: dict[str, set[str]]) -> None:
    used = {name for expression in expressions() for name in re.findall(r"vllm:\w+", expression)}
    assert used <= labels_of.keys()
    shown = {re.sub("_(total|bucket|sum|count)$", "", name) for name in used}
    for name in (
        *(
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "num_preemptions",
            "prompt_tokens",
        ),
        *("generation_tokens", "request_success", "prefix_cache_hits", "time_to_first_token_seconds"),
        *("inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    ):
        assert f"vllm:{name}" in shown


def test_every_label_of_an_expression_is_one_of_its_metric(labels_of: dict[str, set[str]]) -> None:
    for expression in expressions():
        (*names,) = re.findall(r"vllm:\w+", expression)
        known = set.intersection(*(labels_of[name] for name in names))
        used = set(re.findall(r"(\w+)=~", expression))
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            used |= {label.strip() for label in grouped.split(",")}
        used |= set(re.findall(r"label_values\([^,]+, (\w+)\)", expression))
        assert used <= known, expression


def test_legends_name_labels_that_are_left(labels_of: dict[str, set[str]]) -> None:
    for panel in panels():
        for target in panel["targets"]:
            (name, *_) = re.findall(r"vllm:\w+", target["expr"])
            grouped = re.search(r"sum (?:by \(([^)]*)\) )?\(|sum\(", target["expr"])
            left = labels_of[name] if grouped is None else set((grouped[1] or "").split(", "))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= left, target


def test_counters_are_rates_and_histograms_quantiles() -> None:
    """A counter by itself only ever grows; buckets by themselves say nothing."""
    for expression in expressions():
        for name in re.findall(r"vllm:\w+_(?:total|bucket|sum|count)\b", expression):
            assert re.search(rf"(rate|increase)\({name}\{{", expression), expression
        if "histogram_quantile" in expression:
            assert "sum by (le)" in expression


def test_panels_have_units_and_words_and_places_of_their_own() -> None:
    every = json.loads(BOARD.read_text())["panels"]
    assert len({panel["id"] for panel in every}) == len(every) > 15
    cells: set[tuple[int, int]] = set()
    for panel in every:
        at = panel["gridPos"]
        own = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert cells.isdisjoint(own) and at["x"] + at["w"] <= 24
        cells |= own
    for panel in panels():
        unit = panel["fieldConfig"]["defaults"].get("unit") or panel["options"]["yAxis"]["unit"]
        assert unit and panel["title"] and panel["description"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
