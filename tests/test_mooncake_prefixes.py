"""The simulated prefix cache on traces that name their prefixes, against figures counted from the traces."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import engine_config

from servetwin.sim.config import RunConfig
from servetwin.sim.events import EventLog, MemorySink
from servetwin.sim.simulation import simulate
from servetwin.sim.steptime.modelled import ConstantStepModel, ModelledStepTimer
from servetwin.sim.token_source import TokenSource
from servetwin.workloads import ListWorkload, read_trace

CONVERSATION = "conversation_trace_rows00001-05000.jsonl.gz"
SYNTHETIC = "synthetic_trace_rows0001-2000.jsonl.gz"


@pytest.mark.parametrize(
    ("name", "block_size", "of_ids", "of_tokens"),
    [
        (CONVERSATION, 512, 33.30, 33.92),
        (SYNTHETIC, 512, 32.74, 33.60),
        pytest.param(CONVERSATION, 16, None, 33.94, marks=pytest.mark.full),
        pytest.param(SYNTHETIC, 16, None, 33.63, marks=pytest.mark.full),
    ],
)
def test_an_unlimited_pool_hits_what_the_trace_repeats(
    shared_data: Path, name: str, block_size: int, of_ids: float | None, of_tokens: float
) -> None:
    """Percent of all ids (512 tokens each) and of all prompt tokens; an id of 512 tokens is 32 blocks of 16.

    Steps take next to no time, so that every prompt is there before the next one comes.
    """
    requests = read_trace(shared_data / "traces" / "mooncake" / name).requests
    # One token each: what is answered is in no later prompt.
    requests = requests.with_column("output_tokens", [1] * len(requests))
    config = engine_config(
        block_size=block_size,
        usable_blocks=int(requests.prompt_tokens.sum()) // block_size + 2 * len(requests),
        max_model_len=200_000,
        max_num_seqs=256,
        max_num_batched_tokens=4_000_000,
        caching=True,
    )
    tokens, log = TokenSource(32_000), MemorySink()
    simulate(
        RunConfig(engine=config, executor="constant"),
        ListWorkload(requests),
        ModelledStepTimer(ConstantStepModel(1), tokens, "constant"),
        EventLog(log, log_blocks=False),
        tokens=tokens,
        plan_tokens=False,
        log_blocks=False,
    )
    hits = int(log.requests.cached_tokens.sum())
    assert 100 * hits / int(requests.prompt_tokens.sum()) == pytest.approx(of_tokens, abs=0.005)
    if of_ids is not None:
        ids = sum(map(len, requests.values("prefix_ids")))
        assert 100 * hits / block_size / ids == pytest.approx(of_ids, abs=0.006)
