"""Hypothesis strategies for engines that are short of everything, and for requests that compete on them.

Sizes are drawn so that most stories have preemptions.
"""

from __future__ import annotations

from hypothesis import strategies as st

from servetwin.sim.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from servetwin.sim.rules import Rules
from servetwin.sim.testing.arrival import EOS_TOKEN_ID, Arrival
from servetwin.sim.units import NS_PER_S

LONGEST_MODEL_LEN = 40


@st.composite
def engine_configs(draw: st.DrawFn) -> EngineConfig:
    """Small pools, few seats, tight budgets; synchronous and asynchronous, with and without prefix caching."""
    block_size = draw(st.integers(1, 4))
    usable_blocks = draw(st.integers(6, 16))
    max_model_len = min(usable_blocks * block_size, LONGEST_MODEL_LEN)
    chunked = draw(st.sampled_from([True, True, False]))
    seats = draw(st.integers(1, 5))
    least_budget = seats if chunked else max(seats, max_model_len)
    return EngineConfig(
        model=ModelConfig(max_model_len=max_model_len, eos_token_id=EOS_TOKEN_ID),
        cache=CacheConfig(
            block_size=block_size,
            num_gpu_blocks=usable_blocks + 1,
            enable_prefix_caching=draw(st.booleans()),
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=least_budget + draw(st.sampled_from([60, 0, 3, 10])),
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=draw(st.sampled_from([0, 0, 0, 1, 5])),
            scheduler_reserve_full_isl=draw(st.sampled_from([True, True, False])),
            async_scheduling=draw(st.booleans()),
        ),
        rules=draw(st.sampled_from([Rules.exact(), Rules.safe()])),
    )


@st.composite
def arrivals(draw: st.DrawFn, max_model_len: int) -> Arrival:
    """Any request that the context window holds: common prefixes, priorities with ties, two clients (None is one)."""
    part = draw(st.sampled_from([1, 2, 3]))
    prompt_tokens = draw(st.integers(1, max((max_model_len - 1) // part, 1)))
    return Arrival(
        prompt_tokens=prompt_tokens,
        max_tokens=draw(st.integers(1, 25)),
        priority=draw(st.integers(0, 2)),
        client_id=draw(st.sampled_from([None, "a"])),
        shared_tokens=draw(st.sampled_from([0, prompt_tokens // 2, prompt_tokens * 3 // 4, prompt_tokens])),
        predicted_output_tokens=draw(st.sampled_from([None, None, 1, 30])),
        eos_after=draw(st.sampled_from([None, None, None, 1, 3])),
    )


def gaps_ns(config: EngineConfig) -> st.SearchStrategy[int]:
    """Times between two arrivals.

    Never 0 without the full-sequence gate: vLLM 0.22.0 lets requests of equal priority and arrival preempt each
    other for ever there, which would be held against the policy.
    """
    some = [1, NS_PER_S // 1000, NS_PER_S]
    return st.sampled_from([0, *some] if config.scheduler.scheduler_reserve_full_isl else some)
