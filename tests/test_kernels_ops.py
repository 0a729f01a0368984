"""The door of the kernels: what is refused and with which words, and how a backend is chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from servetwin.kernels import ops


def attention_arguments(**changed: Any) -> dict[str, Any]:
    """A valid call, 3 rows of 2 requests, with some arguments replaced."""
    cache = torch.zeros(6, 4, 2, 16)
    valid = {
        "query": torch.zeros(3, 4, 16),
        "key_cache": cache,
        "value_cache": cache.clone(),
        "block_table": torch.tensor([[3, 1], [2, 5]], dtype=torch.int32),
        "seq_lens": torch.tensor([3, 7], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 2, 3], dtype=torch.int32),
        "scale": 0.25,
    }
    return valid | changed


REFUSED = {
    "query-rank": ({"query": torch.zeros(3, 64)}, r"query: got \[3, 64\] float32, expected 3 dimensions"),
    "query-dtype": ({"query": torch.zeros(3, 4, 16, dtype=torch.int32)}, "query: got .* int32, expected"),
    "query-heads": (
        {"query": torch.zeros(3, 5, 16)},
        "query: got 5 heads, expected a multiple of the 2 kv_heads",
    ),
    "head-dim": (
        {"query": torch.zeros(3, 4, 8)},
        r"key_cache: got \[6, 4, 2, 16\] float32, expected the head dim",
    ),
    "mixed-dtypes": (
        {"query": torch.zeros(3, 4, 16, dtype=torch.float16)},
        "key_cache: got .* dtype of query",
    ),
    "value-shape": (
        {"value_cache": torch.zeros(5, 4, 2, 16)},
        "value_cache: got .* expected the shape and dtype",
    ),
    "table-dtype": (
        {"block_table": torch.zeros(2, 2).long()},
        r"block_table: got \[2, 2\] int64, expected \[any, any",
    ),
    "lengths": (
        {"seq_lens": torch.zeros(3, dtype=torch.int32)},
        r"seq_lens: got \[3\] int32, expected \[2\] int32",
    ),
    "starts": (
        {"query_start_loc": torch.zeros(2, dtype=torch.int32)},
        r"query_start_loc: got \[2\].* \[3\] int32",
    ),
    "device": (
        {"seq_lens": torch.zeros(2, dtype=torch.int32, device="meta")},
        "seq_lens: .* on meta, expected .*cpu",
    ),
    "window": ({"sliding_window": 0}, "sliding_window: got 0, expected a whole number, 1 or more"),
    "window-flag": ({"sliding_window": True}, "sliding_window: got True, expected a whole number"),
    "window-float": ({"sliding_window": 3.0}, "sliding_window: got 3.0, expected a whole number"),
    "softcap": ({"softcap": 0.0}, "softcap: got 0.0, expected a number from 1e-30 to 1e\\+30"),
    "softcap-inf": ({"softcap": float("inf")}, "softcap: got inf, expected a number from"),
    "softcap-tiny": ({"softcap": 1e-46}, "softcap: got 1e-46, expected a number from"),
    "scale-negative": ({"scale": -0.25}, "scale: got -0.25, expected a number above 0, at most 1e"),
    "scale-nan": ({"scale": float("nan")}, "scale: got nan, expected a number above 0, at most 1e"),
    "scale-huge": ({"scale": 10**400}, "scale: got a?.*, expected a number above 0, at most 1e"),
    "no-tensor": ({"block_table": None}, "block_table: got NoneType, expected a tensor"),
    "list": ({"seq_lens": [3, 7]}, "seq_lens: got list, expected a tensor"),
    "table-rank": (
        {"block_table": torch.tensor(0, dtype=torch.int32)},
        r"block_table: got \[\] int32, expected \[any, any\] int32",
    ),
    "no-dim": (
        {"query": torch.zeros(3, 4, 0), "key_cache": torch.zeros(6, 4, 2, 0)},
        r"key_cache: got \[6, 4, 2, 0\] float32, expected .*the last one not 0",
    ),
    "backend": ({"backend": "cuda"}, "backend: got 'cuda', expected 'triton', 'cpu', 'reference'"),
}


@pytest.mark.parametrize(("changed", "message"), REFUSED.values(), ids=REFUSED)
def test_attention_refuses_wrong_arguments(changed: dict[str, Any], message: str) -> None:
    """One error that names the argument, what came and what is expected."""
    with pytest.raises(ValueError, match=message):
        ops.paged_attention(**attention_arguments(**changed))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("query_start_loc", [0, 3, 2], "query_start_loc: got rows 3 to 2 for request 1"),
        ("query_start_loc", [0, 2, 4], "query_start_loc: got rows 2 to 4 for request 1.* 3 rows of query"),
        ("seq_lens", [3, 9], "seq_lens: got 9 for request 1, expected 0 to 8"),
    ],
)
def test_host_backends_check_values(backend: str, name: str, values: list[int], message: str) -> None:
    """The backends that read the metadata on the host also check that it is possible."""
    changed = {name: torch.tensor(values, dtype=torch.int32), "backend": backend}
    with pytest.raises(ValueError, match=message):
        ops.paged_attention(**attention_arguments(**changed))


@pytest.mark.parametrize(
    ("backend", "dtype"), [("cpu", torch.float32), ("cpu", torch.float16), ("reference", torch.float32)]
)
@pytest.mark.parametrize("block", [-1, 6])
def test_host_backends_check_the_blocks_that_they_read(backend: str, dtype: torch.dtype, block: int) -> None:
    """Compiled, plain torch and reference; those of a request without rows are not read."""
    arguments = attention_arguments(backend=backend)
    for name in ("query", "key_cache", "value_cache"):
        arguments[name] = arguments[name].to(dtype)
    arguments["query_start_loc"] = torch.tensor([0, 3, 3], dtype=torch.int32)
    arguments["block_table"] = torch.tensor([[3, 1], [block, block]], dtype=torch.int32)
    ops.paged_attention(**arguments)
    arguments["block_table"] = torch.tensor([[block, 1], [99, -99]], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"block_table: got block {block}\\b.* expected .*5"):
        ops.paged_attention(**arguments)


def test_a_window_longer_than_any_context_is_none() -> None:
    arguments = attention_arguments(query=torch.ones(3, 4, 16))
    without = ops.paged_attention(**arguments)
    assert torch.equal(ops.paged_attention(**arguments, sliding_window=2**64 + 2), without)


def test_results_lie_where_the_operands_do() -> None:
    """Whatever the default device is."""
    with torch.device("meta"):
        assert ops.paged_attention(**attention_arguments_on_the_cpu()).device.type == "cpu"
        assert ops.silu_and_mul(torch.ones(2, 4, device="cpu")).device.type == "cpu"


def test_tensors_without_data_are_refused() -> None:
    with pytest.raises(ValueError, match="silu_and_mul: got tensors on meta, which hold no data"):
        ops.silu_and_mul(torch.ones(2, 4, device="meta"))


def attention_arguments_on_the_cpu() -> dict[str, Any]:
    with torch.device("cpu"):
        return attention_arguments()


def write_arguments(**changed: Any) -> dict[str, Any]:
    cache = torch.zeros(6, 4, 2, 16)
    valid = {
        "key": torch.zeros(3, 2, 16),
        "value": torch.zeros(3, 2, 16),
        "key_cache": cache,
        "value_cache": cache.clone(),
        "slot_mapping": torch.tensor([0, 1, 2]),
    }
    return valid | changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"value": torch.zeros(2, 2, 16)}, "value: got .* expected the shape and dtype of key"),
        (
            {"key": torch.zeros(3, 4, 16), "value": torch.zeros(3, 4, 16)},
            "key: got 4 heads, expected the 2 kv_heads",
        ),
        ({"slot_mapping": torch.tensor([0, 1])}, r"slot_mapping: got \[2\] int64, expected \[3\] int64"),
        (
            {"slot_mapping": torch.zeros(3, dtype=torch.int32)},
            "slot_mapping: got .* int32, expected .* int64",
        ),
    ],
)
def test_cache_write_refuses_wrong_arguments(changed: dict[str, Any], message: str) -> None:
    """One error that names the argument, what came and what is expected."""
    with pytest.raises(ValueError, match=message):
        ops.reshape_and_cache(**write_arguments(**changed))


def block_arguments(**changed: Any) -> dict[str, Any]:
    cache = torch.zeros(6, 4, 2, 16)
    return {"key_cache": cache, "value_cache": cache.clone()} | changed


def rotary_arguments(**changed: Any) -> dict[str, Any]:
    angles = torch.zeros(3, 8)
    return write_arguments() | {"query": torch.zeros(3, 4, 16), "cos": angles, "sin": angles} | changed


def norm_arguments(**changed: Any) -> dict[str, Any]:
    return {"x": torch.zeros(3, 8), "weight": torch.zeros(8), "eps": 1e-6} | changed


LAYERS_REFUSED = {
    "copy-columns": (
        ops.copy_blocks,
        block_arguments(block_mapping=torch.zeros(2, 3).long()),
        r"block_mapping: got \[2, 3\] int64, expected \[any, 2\] int64",
    ),
    "copy-caches": (
        ops.copy_blocks,
        block_arguments(block_mapping=torch.zeros(2, 2).long(), value_cache=torch.zeros(6, 4, 2, 8)),
        "value_cache: got .* expected the shape and dtype of key_cache",
    ),
    "zero-dtype": (
        ops.zero_blocks,
        block_arguments(block_ids=torch.zeros(2, dtype=torch.int32)),
        r"block_ids: got \[2\] int32, expected \[any\] int64",
    ),
    "zero-cache-dtype": (
        ops.zero_blocks,
        block_arguments(block_ids=torch.zeros(2).long(), key_cache=torch.zeros(6, 4, 2, 16).int()),
        "key_cache: got .* int32, expected 4 dimensions of float32, float16, bfloat16 or float8_e4m3fn",
    ),
    "norm-dtype": (
        ops.rms_norm,
        norm_arguments(x=torch.zeros(3, 8).long()),
        r"x: got \[3, 8\] int64, expected rows of at least one float32",
    ),
    "norm-weight": (
        ops.rms_norm,
        norm_arguments(weight=torch.zeros(9)),
        r"weight: got \[9\] float32, expected \[8\] float32",
    ),
    "norm-residual": (
        ops.rms_norm,
        norm_arguments(residual=torch.zeros(2, 8)),
        "residual: got .* expected the shape and dtype of x",
    ),
    "rotary-odd": (
        ops.rotary_and_cache,
        rotary_arguments(cos=torch.zeros(3, 7), sin=torch.zeros(3, 7)),
        "cos: got 7 dimensions, expected an even number from 2 to the head dim, 16",
    ),
    "rotary-wide": (
        ops.rotary_and_cache,
        rotary_arguments(cos=torch.zeros(3, 18), sin=torch.zeros(3, 18)),
        "cos: got 18 dimensions, expected an even number from 2 to the head dim, 16",
    ),
    "rotary-angles": (
        ops.rotary_and_cache,
        rotary_arguments(cos=torch.zeros(2, 8)),
        r"cos: got \[2, 8\] float32, expected \[3, any\] float32",
    ),
    "rotary-key": (
        ops.rotary_and_cache,
        rotary_arguments(query=torch.zeros(3, 4, 32)),
        "key: got .* expected the tokens, head dim and dtype of query",
    ),
    "rotary-scale": (
        ops.rotary_and_cache,
        rotary_arguments(key_scale=torch.ones(1)),
        "key_scale: got a scale, expected None with caches of float32",
    ),
    "silu-rank": (ops.silu_and_mul, {"gate_up": torch.zeros(8)}, "gate_up: got .* expected 2 dimensions"),
    "silu-odd": (
        ops.silu_and_mul,
        {"gate_up": torch.zeros(2, 7)},
        "gate_up: got 7 columns, expected an even",
    ),
    "backend": (
        ops.silu_and_mul,
        {"gate_up": torch.zeros(2, 8), "backend": "cuda"},
        "backend: got 'cuda', expected 'triton', 'cpu', 'reference'",
    ),
}


@pytest.mark.parametrize(("operation", "arguments", "message"), LAYERS_REFUSED.values(), ids=LAYERS_REFUSED)
def test_layers_refuse_wrong_arguments(
    operation: Callable[..., Any], arguments: dict[str, Any], message: str
) -> None:
    """One error that names the argument, what came and what is expected."""
    with pytest.raises(ValueError, match=message):
        operation(**arguments)


def float8_cache() -> dict[str, Any]:
    cache = torch.zeros(6, 4, 2, 16).to(torch.float8_e4m3fn)
    return {"key_cache": cache, "value_cache": cache.clone()}


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"value_scale": torch.ones(1)}, "key_scale: got None, expected a float32 tensor of one element"),
        (
            {"key_scale": torch.ones(1), "value_scale": torch.ones(2)},
            r"value_scale: got \[2\] float32, expected a float32 tensor of one element",
        ),
        (
            {"key_scale": torch.ones(1).half(), "value_scale": torch.ones(1)},
            r"key_scale: got \[1\] float16, expected a float32 tensor of one element",
        ),
        (
            {"key_scale": torch.ones(1, device="meta"), "value_scale": torch.ones(1)},
            "key_scale: got a tensor on meta, expected all tensors on cpu",
        ),
    ],
)
@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        (ops.paged_attention, attention_arguments),
        (ops.reshape_and_cache, write_arguments),
        (ops.rotary_and_cache, rotary_arguments),
    ],
    ids=["paged_attention", "reshape_and_cache", "rotary_and_cache"],
)
def test_float8_caches_need_both_scales(
    operation: Callable[..., Any],
    arguments: Callable[..., dict[str, Any]],
    scales: dict[str, Any],
    message: str,
) -> None:
    """A forgotten scale is an error, never silently 1."""
    with pytest.raises(ValueError, match=message):
        operation(**arguments(**float8_cache(), **scales))


def test_cpu_tensors_take_the_cpu_backend_by_default() -> None:
    """Constant values come back whatever the weights, query heads grouped by kv head in order."""
    values = torch.ones(6, 4, 2, 16)
    values[:, :, 1] = 2.0
    output = ops.paged_attention(**attention_arguments(value_cache=values))
    assert torch.equal(output, torch.tensor([1.0, 1.0, 2.0, 2.0])[:, None].expand(3, 4, 16))


def run_python(code: str) -> str:
    """The output of a fresh interpreter in which triton compiles rather than interprets."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    prelude = "import sys, torch\nfrom servetwin.kernels import ops\n"
    call = (
        "ops.reshape_and_cache(*torch.zeros(2, 1, 1, 8), *torch.zeros(2, 1, 1, 1, 8), torch.zeros(1).long(), "
    )
    code = prelude + code.replace("WRITE(", call)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_missing_triton_is_named_with_its_extra() -> None:
    """Without the optional package the torch backends work and the error says what to install."""
    out = run_python(
        "sys.modules['triton'] = None\n"
        "WRITE()\n"
        "try: WRITE(backend='triton')\n"
        "except ModuleNotFoundError as e: print(e)\n"
    )
    assert "pip install 'servetwin[executor]'" in out


def test_kernel_modules_import_without_gpu_or_interpreter() -> None:
    """The kernels import anywhere; a launch on CPU tensors is refused in our words."""
    pytest.importorskip("triton")
    modules = sorted(p.stem for p in (Path(ops.__file__).parent).glob("triton_*.py"))
    assert len(modules) >= 8
    out = run_python(
        f"from servetwin.kernels import {', '.join(modules)}\n"
        "try: WRITE(backend='triton')\n"
        "except ValueError as e: print(e)\n"
    )
    assert "expected CUDA tensors" in out
