"""Which code computes an operation: one function per backend, found by the operation's name.

"cpu" prefers the C++ kernels to plain torch, call by call. "triton" needs an optional package and a device, or Triton's
interpreter, so its modules are imported when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, get_args

from torch import Tensor

from servetwin.kernels import cpu_native, cpu_torch, cpu_torch_layers, reference, reference_layers

Backend = Literal["triton", "cpu", "reference"]

ATTENTION_OPERATIONS = ("paged_attention", "reshape_and_cache")
"""What the modules without `_layers` in their name compute."""
_TRITON_MODULES = {
    "paged_attention": "triton_paged_attention",
    "reshape_and_cache": "triton_reshape_and_cache",
    "copy_blocks": "triton_block_ops",
    "zero_blocks": "triton_block_ops",
    "rms_norm": "triton_rms_norm",
    "rotary_and_cache": "triton_rotary_and_cache",
    "silu_and_mul": "triton_silu_and_mul",
}


def implementation(operation: str, backend: Backend | None, tensor: Tensor) -> Callable[..., Any]:
    """The function that computes `operation`, with the signature of `ops` (less `backend`).

    tensor: the operand whose device and dtype decide, for operations on the cache the cache.
    Raises ValueError for a backend that is unknown or cannot take the tensor, ModuleNotFoundError without triton.
    """
    if tensor.is_meta:
        raise ValueError(f"{operation}: got tensors on meta, which hold no data")
    name = _resolve(backend, tensor)
    module = _triton(operation, tensor) if name == "triton" else _host(operation, name, tensor)
    function: Callable[..., Any] = getattr(module, operation)
    return function


def _resolve(backend: Backend | None, tensor: Tensor) -> Backend:
    if backend is None:
        return "triton" if tensor.is_cuda else "cpu"
    if backend not in get_args(Backend):
        allowed = ", ".join(map(repr, get_args(Backend)))
        raise ValueError(f"backend: got {backend!r}, expected {allowed}, or None to choose by device")
    return backend


def _host(operation: str, backend: Backend, tensor: Tensor) -> ModuleType:
    """The module for the processor: with the backend "cpu" C++ where it is available and covers the call."""
    attends = operation in ATTENTION_OPERATIONS
    if backend == "reference":
        return reference if attends else reference_layers
    if cpu_native.covers(operation, tensor):
        return cpu_native
    return cpu_torch if attends else cpu_torch_layers


def _triton(operation: str, tensor: Tensor) -> ModuleType:
    try:
        launch = import_module("servetwin.kernels.triton_launch")
    except ModuleNotFoundError as e:
        if e.name != "triton":
            raise
        raise ModuleNotFoundError(
            "backend 'triton' needs the package triton: pip install 'servetwin[executor]'", name="triton"
        ) from e
    if not tensor.is_cuda and not launch.INTERPRETED:
        raise ValueError(
            f"backend: got 'triton' with tensors on {tensor.device}, expected CUDA tensors "
            "(or TRITON_INTERPRET=1 set before triton is first imported)"
        )
    return import_module(f"servetwin.kernels.{_TRITON_MODULES[operation]}")
