"""Gated MLPs with one projection for gate and up, and SiLU times up as one kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from servetwin.executor.module_tools import join_linears, transformers_class
from servetwin.kernels import ops

SPLIT_MLPS = ("Gemma2MLP", "Gemma3MLP", "LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "Qwen3MoeMLP")
"""Classes of transformers that compute down_proj(act_fn(gate_proj(x)) * up_proj(x))."""
JOINED_MLPS = ("Phi3MLP",)
"""The same with gate and up, in this order, in gate_up_proj already."""


class FusedMLP(nn.Module):
    """down(act(gate) * up) of x `[..., hidden]`, where gate_up gives gate and up side by side."""

    def __init__(self, gate_up_proj: nn.Module, down_proj: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = gate_up_proj, down_proj, activation
        self._is_silu = isinstance(activation, nn.SiLU | SiLUActivation)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x)
        if self._is_silu:
            activated = ops.silu_and_mul(gate_up.flatten(0, -2)).view(*x.shape[:-1], -1)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            activated = self.act_fn(gate) * up
        output: Tensor = self.down_proj(activated)
        return output


def fused_mlp(module: nn.Module) -> FusedMLP | None:
    """What computes the same as `module`; None when it is no MLP that is known here."""
    mlp: Any = module
    name = transformers_class(module)
    if name in JOINED_MLPS:
        return FusedMLP(mlp.gate_up_proj, mlp.down_proj, mlp.activation_fn)
    if name in SPLIT_MLPS and (gate_up := join_linears([mlp.gate_proj, mlp.up_proj])) is not None:
        return FusedMLP(gate_up, mlp.down_proj, mlp.act_fn)
    return None
