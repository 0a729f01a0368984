"""Linear layers for CPUs, with weights in the layout that oneDNN's matrix products read.

torch's own linear layer lays its weight out anew in every call, which is most of the work when a decode batch brings
a few rows only. Here it is done once, when the model is loaded. The layout depends on the number of rows it is made
for, but is the same for 16 rows and for 2,048 (measured with AVX2, torch 2.13), and fewer rows lose nothing by it.

bfloat16 weights are packed as they are where the processor multiplies bfloat16, and elsewhere as float32: the values
are those of bfloat16, the products are exact, and the result is rounded to bfloat16 once, as torch does it, at several
times the speed. It costs twice the memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from servetwin.executor.cpu_features import cpu_has_bfloat16

PACKED_FOR_ROWS = 64


class PackedLinear(nn.Module):
    """`x [..., in] @ weight.T + bias`, given and returned in the type of x; the weight is for inference only.

    weight  [out, in], bias [out] or None, both on the CPU
    dtype   to compute in

    Raises RuntimeError where oneDNN is missing or does not compute in that type.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        # Plain attributes: such a tensor has no memory that torch could save or move with the module.
        self._weight = _pack(weight.detach().to(dtype).contiguous())
        self._bias = None if bias is None else bias.detach().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return _linear(x.to(self.dtype), self._weight, self._bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self._bias is not None}, dtype={self.dtype}"


def pack_linears(model: nn.Module) -> int:
    """Replaces the linear layers of `model` (on a CPU) by packed ones where this machine can; returns how many.

    The weights of replaced layers are freed, unless somebody else holds them, as an embedding does that is tied to the
    head.
    """
    replaced = 0
    dtypes: dict[torch.dtype, torch.dtype | None] = {}
    child: Any
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = _weight(child)
            if weight is None:
                continue
            if weight.dtype not in dtypes:
                dtypes[weight.dtype] = packing_dtype(weight.dtype)
            dtype = dtypes[weight.dtype]
            if dtype is not None:
                setattr(parent, name, PackedLinear(weight, child.bias, dtype))
                replaced += 1
    return replaced


def linear_dtypes(model: nn.Module) -> list[str]:
    """The types in which the linear layers of `model` hold their weights and compute."""
    packed = {m.dtype for m in model.modules() if isinstance(m, PackedLinear)}
    plain = {weight.dtype for m in model.modules() if (weight := _weight(m)) is not None}
    return sorted(str(dtype).removeprefix("torch.") for dtype in packed | plain)


def packing_dtype(of_weights: torch.dtype) -> torch.dtype | None:
    """The type in which packed weights of this type compute on this machine; None: they cannot be packed."""
    native = of_weights == torch.bfloat16 and cpu_has_bfloat16()
    for dtype in (torch.bfloat16, torch.float32) if native else (torch.float32,):
        if _works(dtype):
            return dtype
    return None


def _works(dtype: torch.dtype) -> bool:
    """Tried out, since the operators are internal to torch, and what they accept depends on the processor."""
    try:
        PackedLinear(torch.zeros(16, 16), torch.zeros(16), dtype)(torch.zeros(1, 16))
    except (AttributeError, RuntimeError):
        return False
    return True


def _weight(module: Any) -> Tensor | None:
    """`[out, in]` of a linear layer, None of anything else. Subclasses may compute in a way of their own."""
    if type(module) is nn.Linear:
        return module.weight
    if type(module) is Conv1D:  # GPT-2's, [in, out]
        weight: Tensor = module.weight
        return weight.t()
    return None


def _pack(weight: Tensor) -> Tensor:
    operators: Any = torch.ops.mkldnn
    packed: Tensor = operators._reorder_linear_weight(weight, PACKED_FOR_ROWS)
    return packed


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    operators: Any = torch.ops.mkldnn
    product: Tensor = operators._linear_pointwise(x, packed, bias, "none", [], "")
    return product
