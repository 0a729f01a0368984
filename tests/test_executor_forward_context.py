"""The forward context is there inside its block and nowhere else."""

from __future__ import annotations

import pytest

from servetwin.executor.forward_context import ForwardContext, get_forward_context, set_forward_context
from servetwin.executor.input_batch import build_warm_up_batch
from servetwin.executor.model_loader import describe_model
from servetwin.executor.model_runner import ModelRunner
from servetwin.executor.testing import tiny_model


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    loaded = describe_model(tiny_model("llama"), "llama")
    return ModelRunner(loaded, num_blocks=4, block_size=4, max_num_seqs=2, max_model_len=8)


@pytest.fixture
def context(runner: ModelRunner) -> ForwardContext:
    batch = build_warm_up_batch([2], 4, runner.loaded.device)
    return ForwardContext(batch.attention_metadata, runner.kv_caches)


def test_the_context_is_current_inside_the_block_only(context: ForwardContext) -> None:
    with set_forward_context(context):
        assert get_forward_context() is context
    with pytest.raises(RuntimeError, match="outside of a forward pass"):
        get_forward_context()


def test_it_is_left_when_the_forward_raises(context: ForwardContext) -> None:
    with pytest.raises(KeyError), set_forward_context(context):
        raise KeyError
    with set_forward_context(context):
        assert get_forward_context() is context


def test_it_refuses_to_nest_and_survives_the_attempt(context: ForwardContext) -> None:
    with set_forward_context(context):
        with pytest.raises(RuntimeError, match="do not nest"), set_forward_context(context):
            pass
        assert get_forward_context() is context


def test_attention_outside_of_a_forward_pass_says_so(runner: ModelRunner) -> None:
    batch = build_warm_up_batch([2], 4, runner.loaded.device)
    with pytest.raises(RuntimeError, match="outside of a forward pass"):
        runner.loaded.model(input_ids=batch.input_ids.unsqueeze(0), use_cache=False)
