"""The door of the kernels: what is refused and with which words, and how a backend is chosen."""

from __future__ import annotations

import os
import subprocess
import sys
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
        r"block_table: got \[2, 2\] int64, expected \[2, any",
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
    "window": ({"sliding_window": 0}, "sliding_window: got 0, expected 1 or more"),
    "softcap": ({"softcap": 0.0}, "softcap: got 0.0, expected more than 0"),
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
    out = run_python(
        "from servetwin.kernels import triton_paged_attention, triton_reshape_and_cache\n"
        "try: WRITE(backend='triton')\n"
        "except ValueError as e: print(e)\n"
    )
    assert "expected CUDA tensors" in out
