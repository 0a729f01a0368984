"""Routing by prefix on rows of a real trace that names its prefixes."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import engine_config

from servetwin.sim.cluster.config import ClusterConfig
from servetwin.sim.cluster.fleet import ReplicaParts, simulate_cluster
from servetwin.sim.config import RunConfig
from servetwin.sim.events import MemorySink
from servetwin.sim.steptime.modelled import LinearStepModel, ModelledStepTimer
from servetwin.sim.token_source import TokenSource
from servetwin.workloads import ListWorkload, RequestSpec, read_trace

CONVERSATION = "conversation_trace_rows00001-05000.jsonl.gz"


def served(requests: list[RequestSpec], router: str) -> MemorySink:
    """Eight replicas of 512,000 tokens of KV each; a step takes 8 ms and 30 us for each prompt token."""
    config = engine_config(
        block_size=512,
        usable_blocks=1000,
        max_model_len=131_072,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        caching=True,
    )
    tokens, log = TokenSource(32_000), MemorySink()
    timer = ModelledStepTimer(LinearStepModel(8_000_000, 30_000, 100_000), tokens, "linear")
    simulate_cluster(
        RunConfig(engine=config, executor="linear", cluster=ClusterConfig(replicas=8, router=router)),
        ListWorkload(requests),
        ReplicaParts(config, timer.another),
        log,
        tokens=tokens,
        log_blocks=False,
    )
    return log


def hit_rate(log: MemorySink) -> float:
    """Of all prompt tokens."""
    return float(log.requests.cached_tokens.sum() / log.requests.num_prompt_tokens.sum())


@pytest.mark.parametrize("count", [1000, pytest.param(5000, marks=pytest.mark.full)])
def test_prefix_affinity_raises_the_hit_rate_over_round_robin(shared_data: Path, count: int) -> None:
    """More than twice as much is found in the caches, the load stays even, and first tokens come no later."""
    requests = [*read_trace(shared_data / "traces" / "mooncake" / CONVERSATION).requests[:count]]
    even, near = served(requests, "round_robin"), served(requests, "prefix_affinity")
    assert (near.requests.finish_reason == "length").all()
    assert hit_rate(near) > 2 * hit_rate(even)
    assert near.requests.replica.value_counts().max() < 1.3 * count / 8
    ttft = [(log.requests.first_token_s - log.requests.arrival_s).mean() for log in (even, near)]
    assert ttft[1] < 1.05 * ttft[0]
