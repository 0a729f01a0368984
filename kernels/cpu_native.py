"""The C++ kernels for CPUs (`native/`): float32 or bfloat16 storage, float32 arithmetic, one parallel region a call.

Optional: without a compiler, or with SERVETWIN_CPU_KERNELS=torch, `available()` is False and the plain torch path
(`cpu_torch`, `cpu_torch_layers`) does the work. SERVETWIN_CPU_KERNELS=avx512, avx2 or sse2 asks for these instructions
instead of the widest that the processor has. Both are read at first use, which compiles if the cache is empty.

The functions have the signatures of `ops` (less `backend`) and use `torch.get_num_threads()` threads. Results do not
depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from servetwin.kernels import cpu_native_build as build
from servetwin.kernels import cpu_torch, cpu_torch_layers
from servetwin.kernels.host_metadata import check_slots, request_spans

log = logging.getLogger(__name__)

SWITCH = "SERVETWIN_CPU_KERNELS"
OPERATIONS = ("paged_attention", "reshape_and_cache", "rms_norm", "rotary_and_cache", "silu_and_mul")
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


# ---------------------------------------------------------------- the library


@dataclass(frozen=True)
class _Native:
    library: ctypes.CDLL | None
    status: str


@functools.cache
def _native() -> _Native:
    wanted = os.environ.get(SWITCH, "")
    if wanted == "torch":
        return _Native(None, f"off: {SWITCH}=torch")
    instruction_set = _choose(wanted)
    try:
        compiler = build.find_compiler(os.environ)
        library = build.load(instruction_set, compiler, build.cache_folder(os.environ))
        _declare(library)
    except build.NativeBuildError as e:
        log.warning("CPU kernels in plain torch: %s", e)
        return _Native(None, f"off: {e}")
    return _Native(library, f"{instruction_set.name}, compiled with {compiler.version}")


def _declare(library: ctypes.CDLL) -> None:
    for name in (f"{op}_{dtype}" for op in OPERATIONS for dtype in DTYPES.values()):
        function = getattr(library, name, None)
        if function is None:
            raise build.NativeBuildError(f"the compiled library has no function {name}")
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        function.restype = ctypes.c_int64


def _choose(wanted: str) -> build.InstructionSet:
    offered = {candidate.name: candidate for candidate in build.instruction_sets()}
    if wanted and wanted not in offered:
        raise ValueError(f"{SWITCH}: got {wanted!r}, expected torch, {', '.join(offered)} or nothing")
    return offered[wanted] if wanted else next(iter(offered.values()))


def available() -> bool:
    """Whether the C++ kernels can be used. The first call may compile them (seconds); a failure is logged once.

    Raises ValueError when SERVETWIN_CPU_KERNELS names what this processor does not have.
    """
    return _native().library is not None


def status() -> str:
    """What runs, or why nothing does: "avx2, compiled with g++ 12.2", "off: no C++ compiler: ..."."""
    return _native().status


def covers(operation: str, tensor: Tensor) -> bool:
    """Whether `operation` of `ops` runs here for this operand (the cache, or the activations of a layer operation)."""
    return (
        operation in OPERATIONS
        # Others, such as the fake tensors of a tracer, may have no memory.
        and type(tensor) in (Tensor, Parameter)
        and tensor.device.type == "cpu"
        and tensor.dtype in DTYPES
        and tensor.stride(-1) == 1
        and available()
    )


def _call(operation: str, dtype: torch.dtype, arguments: ctypes.Structure) -> int:
    """Runs the C++ function; gives its fault number, 0 for none."""
    function = getattr(_native().library, f"{operation}_{DTYPES[dtype]}")
    fault: int = function(ctypes.byref(arguments), torch.get_num_threads())
    return fault


def _structure(pointers: str, integers: str, floats: str = "") -> list[tuple[str, Any]]:
    """Fields of a structure, given by name; every struct in `native/` has its pointers first and its floats last."""
    kinds = ((pointers, ctypes.c_void_p), (integers, ctypes.c_int64), (floats, ctypes.c_float))
    return [(name, kind) for names, kind in kinds for name in names.split()]


def _inner_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


# ---------------------------------------------------------------- attention

_METADATA_FAULT, _BLOCK_FAULT = 1, 2


class AttentionArguments(ctypes.Structure):
    """`Attention` in native/attention.cpp."""

    _fields_ = _structure(
        "query keys values block_table seq_lens query_start_loc output",
        "query_token query_head key_block key_slot key_head value_block value_slot value_head table_request "
        "requests tokens blocks max_blocks block_size heads kv_heads dim window",
        "scale softcap",
    )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Paged causal attention; arguments as in `ops.paged_attention`.

    Raises ValueError for lengths, offsets or block ids that leave the tensors.
    """
    if value_cache.stride(-1) != 1:
        where = key_cache, value_cache, block_table, seq_lens, query_start_loc
        return cpu_torch.paged_attention(
            query, *where, scale=scale, sliding_window=sliding_window, softcap=softcap
        )
    query, block_table = _inner_contiguous(query), _inner_contiguous(block_table)
    seq_lens, query_start_loc = seq_lens.contiguous(), query_start_loc.contiguous()
    output = query.new_zeros(query.shape)
    tensors = (query, key_cache, value_cache, block_table, seq_lens, query_start_loc, output)
    arguments = AttentionArguments(
        *(tensor.data_ptr() for tensor in tensors),
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        len(seq_lens),
        query.shape[0],
        key_cache.shape[0],
        block_table.shape[1],
        key_cache.shape[1],
        query.shape[1],
        *key_cache.shape[2:],
        sliding_window or 0,
        scale,
        softcap or 0.0,
    )
    if fault := _call("paged_attention", query.dtype, arguments):
        _raise_attention_fault(fault, query, key_cache, block_table, seq_lens, query_start_loc)
    return output


def _raise_attention_fault(
    fault: int,
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
) -> NoReturn:
    blocks, block_size = key_cache.shape[:2]
    if fault == _METADATA_FAULT:
        max_seq_len = block_table.shape[1] * block_size
        request_spans(seq_lens, query_start_loc, num_tokens=query.shape[0], max_seq_len=max_seq_len)
    if fault == _BLOCK_FAULT:
        columns = torch.arange(block_table.shape[1], device=block_table.device)
        # A request without rows is not read.
        used = (columns * block_size < seq_lens[:, None]) & (query_start_loc.diff() > 0)[:, None]
        wrong = used & ((block_table < 0) | (block_table >= blocks))
        request, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_table: got block {int(block_table[request, column])} for request {request}, expected 0 to "
            f"{blocks - 1}"
        )
    raise MemoryError("paged_attention: no memory for partial results")


# ---------------------------------------------------------------- cache writes


class CacheWriteArguments(ctypes.Structure):
    """`CacheWrite` in native/cache_write.cpp."""

    _fields_ = _structure(
        "keys values key_cache value_cache slot_mapping",
        "key_token key_head value_token value_head key_cache_block key_cache_slot key_cache_head "
        "value_cache_block value_cache_slot value_cache_head tokens blocks block_size kv_heads dim",
    )


class RotaryArguments(ctypes.Structure):
    """`Rotary` in native/cache_write.cpp."""

    _fields_ = [
        ("write", CacheWriteArguments),
        *_structure("queries cos sin output", "query_token query_head heads rotary_dim"),
    ]


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Cache write; arguments as in `ops.reshape_and_cache`. Raises ValueError for a slot beyond the cache."""
    if value_cache.stride(-1) != 1:
        cpu_torch.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
        return
    key, value, slot_mapping = _inner_contiguous(key), _inner_contiguous(value), slot_mapping.contiguous()
    arguments = _write_arguments(key, value, key_cache, value_cache, slot_mapping)
    if _call("reshape_and_cache", key.dtype, arguments):
        check_slots(slot_mapping, key_cache.shape[0] * key_cache.shape[1])


def rotary_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Rotary embedding and cache write; arguments as in `ops.rotary_and_cache`.

    Raises ValueError for a slot beyond the cache.
    """
    if value_cache.stride(-1) != 1:
        return cpu_torch_layers.rotary_and_cache(
            query, key, value, cos, sin, key_cache, value_cache, slot_mapping
        )
    query, key, value = _inner_contiguous(query), _inner_contiguous(key), _inner_contiguous(value)
    cos, sin, slot_mapping = cos.contiguous(), sin.contiguous(), slot_mapping.contiguous()
    output = query.new_empty(query.shape)
    arguments = RotaryArguments(
        _write_arguments(key, value, key_cache, value_cache, slot_mapping),
        *(tensor.data_ptr() for tensor in (query, cos, sin, output)),
        *query.stride()[:2],
        query.shape[1],
        cos.shape[1],
    )
    if _call("rotary_and_cache", query.dtype, arguments):
        check_slots(slot_mapping, key_cache.shape[0] * key_cache.shape[1])
    return output


def _write_arguments(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> CacheWriteArguments:
    return CacheWriteArguments(
        *(tensor.data_ptr() for tensor in (key, value, key_cache, value_cache, slot_mapping)),
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        len(slot_mapping),
        *key_cache.shape,
    )


# ---------------------------------------------------------------- layers


class NormArguments(ctypes.Structure):
    """`Norm` in native/layers.cpp."""

    _fields_ = _structure(
        "x residual weight output total",
        "x_outer x_inner residual_outer residual_inner outer inner hidden",
        "eps weight_offset",
    )


class GateArguments(ctypes.Structure):
    """`Gate` in native/layers.cpp."""

    _fields_ = _structure("gate_up output", "token_stride tokens columns")


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, residual: Tensor | None = None, weight_offset: float = 0.0
) -> Tensor | tuple[Tensor, Tensor]:
    """Root mean square norm; arguments as in `ops.rms_norm`."""
    rows, weight = _as_rows(x), weight.contiguous()
    residual_rows = rows if residual is None else _as_rows(residual)
    output = x.new_empty(x.shape)
    total = None if residual is None else x.new_empty(x.shape)
    arguments = NormArguments(
        rows.data_ptr(),
        None if residual is None else residual_rows.data_ptr(),
        weight.data_ptr(),
        output.data_ptr(),
        None if total is None else total.data_ptr(),
        *rows.stride()[:2],
        *residual_rows.stride()[:2],
        *rows.shape,
        eps,
        weight_offset,
    )
    _call("rms_norm", x.dtype, arguments)
    return output if total is None else (output, total)


def _as_rows(x: Tensor) -> Tensor:
    """[..., hidden] as [outer, inner, hidden] with a contiguous last dimension; a view where x has at most three."""
    if x.ndim != 3:
        x = x[None] if x.ndim == 2 else x.reshape(1, -1, x.shape[-1])
    return _inner_contiguous(x)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Gated activation; arguments as in `ops.silu_and_mul`."""
    gate_up = _inner_contiguous(gate_up)
    tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty((tokens, columns))
    arguments = GateArguments(gate_up.data_ptr(), output.data_ptr(), gate_up.stride(0), tokens, columns)
    _call("silu_and_mul", gate_up.dtype, arguments)
    return output
