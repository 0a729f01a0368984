"""A loaded model made fast without a compiler: fused operations in its layers and, on a CPU, packed weights."""

from __future__ import annotations

from servetwin.executor.fused_layers import fuse_layers
from servetwin.executor.model_loader import LoadedModel
from servetwin.executor.packed_linear import pack_linears
from servetwin.executor.packed_model import PackedModel


def eager_model(loaded: LoadedModel) -> PackedModel:
    """Rebuilds the model of `loaded` in place, for running it layer by layer (`compilation.py` has the other way)."""
    fuse_layers(loaded.model)
    if loaded.device.type == "cpu":
        pack_linears(loaded.model)
    return PackedModel(loaded.model)
