"""What an executor must not return is refused at the seam, with its name, the field and the value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engines import engine_config, serve, spec

from servetwin.sim.contract import ModelRunnerOutput, SchedulerOutput, StepResult
from servetwin.sim.step_check import StepResultError
from servetwin.sim.steptime.plan_rows import PlanReader


class Broken:
    """Takes 5 ns for a step and answers 7, but for one thing."""

    def __init__(self, **wrong: Any) -> None:
        self._wrong = wrong
        self._reader = PlanReader()

    def run(self, plan: SchedulerOutput) -> Any:
        rows = self._reader.rows(plan)
        ids = [r.request_id for r in rows]
        sampled = [[7] * self._wrong.get("tokens", 1) for _ in rows]
        output = ModelRunnerOutput(
            ids, {r: i for i, r in enumerate(ids)}, sampled[self._wrong.get("lost", 0) :]
        )
        result = StepResult(0, 5 if rows else 0, self._wrong.get("output", output), "broken")
        times = {name: self._wrong[name] for name in ("prepare_ns", "device_ns") if name in self._wrong}
        return self._wrong.get("result", replace(result, **times))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device_ns": -5}, "device_ns -5; allowed: whole ns"),
        ({"prepare_ns": 0.5}, "prepare_ns 0.5; allowed: whole ns"),
        ({"device_ns": float("nan")}, "device_ns nan"),
        ({"device_ns": 0}, "a step of 4 tokens took 0 ns"),
        ({"tokens": 2}, "2 tokens for one request; allowed: 1"),
        ({"lost": 1}, "0 lists of sampled_token_ids for 1 req_ids"),
        ({"output": ModelRunnerOutput([], {}, [])}, "no output for the scheduled request 'a'"),
        ({"result": None}, "returned a NoneType; allowed: a StepResult"),
    ],
)
def test_a_result_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(StepResultError, match=message):
        serve([spec("a", 4, 3)], engine_config(), timer=Broken(**wrong))


def test_a_sound_result_passes() -> None:
    log = serve([spec("a", 4, 3)], engine_config(), timer=Broken())
    assert log.requests.finish_reason.tolist() == ["length"]
