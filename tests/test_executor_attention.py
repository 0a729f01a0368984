"""Attention as transformers and a compiler see it."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from servetwin.executor.attention import ATTENTION_NAME, paged_attention_forward


def test_it_is_registered_under_our_name() -> None:
    assert ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] is paged_attention_forward


def test_a_compiler_cannot_read_before_it_writes() -> None:
    """In the traced graph attention depends on the K/V write, though both reach the cache by other ways."""
    layer = SimpleNamespace(layer_idx=3)

    def layer_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return paged_attention_forward(layer, query, key, value, None, 0.25, sliding_window=8)[0]  # type: ignore[arg-type]

    query, key = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    graph = make_fx(layer_attention, tracing_mode="fake")(query, key, key.clone()).graph
    nodes = {str(node.target): node for node in graph.nodes if "servetwin" in str(node.target)}
    write, attend = nodes["servetwin.write_kv.default"], nodes["servetwin.attend.default"]
    assert write in attend.all_input_nodes
    assert attend.args[2:] == (3, 0.25, 8, None)
    output = next(node for node in graph.nodes if node.op == "output")
    assert output.all_input_nodes[0].meta["val"].shape == (1, 5, 4, 16)
