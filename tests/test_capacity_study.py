"""The worked study of examples/, at small scale."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

STUDY = Path(__file__).parents[1] / "examples" / "capacity_study.py"
SMALL: dict[str, Any] = {"seeds": 1, "num_prompts": 120, "max_simulations": 4, "tolerance": 0.1}


@pytest.fixture(scope="module")
def study() -> dict[str, Any]:
    return runpy.run_path(str(STUDY))


def test_one_engine_and_its_seats(study: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    answer = study["which_seats"](**SMALL)
    rates = dict(zip(answer.configurations.max_num_seqs, answer.configurations.max_request_rate, strict=True))
    assert rates[32] < rates[128]
    assert answer.rows[0].capacity.binding == "seats"
    study["show"]("How many at once", answer)
    shown = capsys.readouterr().out
    assert "max_num_seqs" in shown and f"vllm serve {study['MODEL']}" in shown
    assert "nothing was measured" in " ".join(answer.rows[0].capacity.at_limit.notes)


@pytest.mark.full
def test_the_card_follows_the_prices(study: dict[str, Any]) -> None:
    answer = study["which_card"]({"H100": 2.5, "A100-80GB": 1.5, "L40S": 0.0}, **SMALL)
    assert answer.best.settings == {"gpu": "L40S"}
    replicas = dict(zip(answer.configurations.gpu, answer.configurations.replicas, strict=True))
    assert 1 <= replicas["H100"] < replicas["L40S"]
    assert "--max-model-len 16384" in answer.best.line
