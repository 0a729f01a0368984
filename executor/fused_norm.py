"""RMS norms as one kernel, also together with the addition before them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from servetwin.executor.module_tools import transformers_class
from servetwin.kernels import ops

PLAIN_NORMS = (
    "LlamaRMSNorm",
    "MistralRMSNorm",
    "Phi3RMSNorm",
    "Qwen2RMSNorm",
    "Qwen3MoeRMSNorm",
    "Qwen3RMSNorm",
)
"""Classes of transformers that multiply by the weight, after rounding to the model's type."""
OFFSET_NORMS = ("Gemma2RMSNorm", "Gemma3RMSNorm")
"""Those that multiply by 1 + weight, before rounding."""


class FusedRMSNorm(nn.Module):
    """`ops.rms_norm` with the weight `[hidden]` of a model."""

    def __init__(self, weight: nn.Parameter, eps: float, weight_offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.weight_offset = weight, eps, weight_offset

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x `[..., hidden]`."""
        normed: Any = ops.rms_norm(x, self.weight, eps=self.eps, weight_offset=self.weight_offset)
        output: Tensor = normed
        return output

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum), all `[..., hidden]`."""
        both: Any = ops.rms_norm(
            x, self.weight, eps=self.eps, residual=residual, weight_offset=self.weight_offset
        )
        normed, total = both
        return normed, total


def fused_norm(module: nn.Module) -> FusedRMSNorm | None:
    """What computes the same as `module`; None when it is no norm that is known here."""
    # Any: torch's type information takes every attribute of a module for a tensor or a module.
    norm: Any = module
    name = transformers_class(module)
    if name in PLAIN_NORMS:
        return FusedRMSNorm(norm.weight, norm.variance_epsilon, 0.0)
    if name in OFFSET_NORMS:
        return FusedRMSNorm(norm.weight, norm.eps, 1.0)
    return None
