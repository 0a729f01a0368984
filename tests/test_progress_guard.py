"""A livelock ends with an error that names it; a slow stretch does not."""

from __future__ import annotations

import pytest

from servetwin.sim.decide import decide
from servetwin.sim.progress_guard import StalledError
from servetwin.sim.scenario import Scenario


def two_prompts(**config: object) -> Scenario:
    """Two prompts that fit the pool one at a time, with equal priority and arrival."""
    prompts = {"r0": 25, "r1": 28}
    return Scenario.model_validate(
        {
            "config": {
                "block_size": 4,
                "num_gpu_blocks": 11,
                "max_model_len": 40,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 9,
                "long_prefill_token_threshold": 4,
                "enable_prefix_caching": False,
                **config,
            },
            "model": {"seed": 1, "vocab_size": 100},
            "requests": [
                {"id": name, "prompt_segments": [["p", name, 0, n]], "max_tokens": 3, "arrival_step": 0}
                for name, n in prompts.items()
            ],
        }
    )


def test_requests_that_preempt_each_other_for_ever_are_named() -> None:
    """Priority ties without the full-sequence gate: 0.22.0 picks the first maximum, which is each one in turn."""
    with pytest.raises(StalledError, match=r"livelock at step \d+: .*preempted again and again: r0, r1"):
        list(decide(two_prompts(policy="priority", scheduler_reserve_full_isl=False)))


@pytest.mark.parametrize("config", [{"policy": "priority"}, {"scheduler_reserve_full_isl": False}])
def test_the_gate_or_fcfs_avoids_it(config: dict[str, object]) -> None:
    """With either, both requests get their three tokens."""
    outputs = [o for line in decide(two_prompts(**config)) for o in line["outputs"]]
    assert [len([1 for o in outputs if o[0] == name]) for name in ("r0", "r1")] == [3, 3]


def test_a_long_prompt_is_no_livelock() -> None:
    """Many steps without an output are fine while they compute something new."""
    scenario = two_prompts(
        num_gpu_blocks=20_000,
        max_model_len=70_000,
        max_num_batched_tokens=1000,
        long_prefill_token_threshold=0,
    )
    request = scenario.requests[0].model_copy(update={"prompt_segments": (("p", "x", 0, 60_000),)})
    lines = list(decide(scenario.model_copy(update={"requests": (request,)})))
    assert sum(len(o[1]) for line in lines for o in line["outputs"]) == 3
