"""What replacing parts of a transformers model takes: knowing a part for certain, and joining its projections."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def transformers_class(module: nn.Module) -> str | None:
    """Name of a class of transformers' modelling code; None for every other class, subclasses of those too."""
    cls = type(module)
    return cls.__name__ if cls.__module__.startswith("transformers.models.") else None


def join_linears(linears: Sequence[nn.Module]) -> nn.Linear | None:
    """One layer that gives the outputs of all of them, one after the other.

    None when they are not plain linear layers of one input, or when only some have a bias.
    """
    plain = [linear for linear in linears if type(linear) is nn.Linear]
    biases = [linear.bias for linear in plain if linear.bias is not None]
    if len(plain) < len(linears) or len(biases) not in (0, len(plain)):
        return None
    if len({(linear.in_features, linear.weight.dtype) for linear in plain}) > 1:
        return None
    weight = torch.cat([linear.weight.detach() for linear in plain])
    joined = nn.Linear(plain[0].in_features, len(weight), bias=bool(biases), device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        joined.bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=False)
    return joined
