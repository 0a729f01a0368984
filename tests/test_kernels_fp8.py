"""Keys and values stored as float8: written divided by their scale, read back times it, on every backend.

Triton's interpreter rounds float32 to float8 wrongly near powers of two, so what Triton writes here is exact in float8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_batches import FP8, MIXED, Requests, make_batch
from torch import Tensor

from servetwin.kernels import ops

SCALES = (0.02, 0.5)


@pytest.fixture(params=["reference", "cpu", "triton"])
def backend(request: pytest.FixtureRequest) -> ops.Backend:
    if request.param == "triton":
        pytest.importorskip("triton")
    backend: ops.Backend = request.param
    return backend


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("requests", [MIXED, ((1, 40), (1, 0), (1, 15))], ids=["mixed", "decode"])
def test_attention_over_float8(backend: ops.Backend, dtype: torch.dtype, requests: Requests) -> None:
    """The float64 result over stored * scale, whatever the dtype of the query."""
    make_batch(requests, dtype=dtype, scales=SCALES).check(backend)


def test_window_and_softcap_over_float8(backend: ops.Backend) -> None:
    """Keys are scaled before the cap, not after."""
    batch = make_batch(scales=(0.05, 3.0), sliding_window=7, softcap=2.0, query_factor=5.0)
    batch.check(backend, tolerance=1e-5)


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_each_scale_counts(backend: ops.Backend, name: str) -> None:
    """No scale is skipped (vLLM #42580, #36914; sglang #18882)."""
    batch = make_batch(((3, 9),), scales=SCALES)
    changed = dataclasses.replace(batch, **{name: torch.tensor(1.0)})
    assert not torch.allclose(batch.attend(backend), changed.attend(backend), atol=1e-2)
    changed.check(backend, tolerance=1e-4)


# ---------------------------------------------------------------- cache write


def float8_caches(blocks: int = 3, block_size: int = 4) -> tuple[Tensor, Tensor]:
    """Caches whose slots all hold NaN."""
    cache = torch.full((blocks, block_size, 2, 16), torch.nan).to(FP8)
    return cache, cache.clone()


def scales() -> dict[str, Tensor]:
    return {"key_scale": torch.tensor([0.25]), "value_scale": torch.tensor(8.0)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_write_divides_by_the_scale(backend: ops.Backend, dtype: torch.dtype) -> None:
    """Each token lands in its slot as token / scale, and nowhere else."""
    rng = torch.Generator().manual_seed(0)
    stored_key, stored_value = torch.randn(2, 3, 2, 16, generator=rng).to(FP8)
    key_cache, value_cache = float8_caches()
    key, value = (stored_key.float() * 0.25).to(dtype), (stored_value.float() * 8).to(dtype)
    slots = torch.tensor([9, -1, 0])
    ops.reshape_and_cache(key, value, key_cache, value_cache, slots, **scales(), backend=backend)
    for cache, stored in ((key_cache, stored_key), (value_cache, stored_value)):
        assert torch.equal(cache[2, 1].float(), stored[0].float())
        assert torch.equal(cache[0, 0].float(), stored[2].float())
        assert int(cache.float().isnan().sum()) == cache.numel() - 2 * 32


def test_write_clamps_to_the_range(backend: ops.Backend) -> None:
    """Values beyond +-448 scales become +-448 scales, never NaN: float8_e4m3fn has no infinity."""
    key_cache, value_cache = float8_caches()
    key = torch.full((1, 2, 16), 1e6)
    ops.reshape_and_cache(key, -key, key_cache, value_cache, torch.tensor([5]), **scales(), backend=backend)
    assert key_cache[1, 1].float().eq(448).all()
    assert value_cache[1, 1].float().eq(-448).all()


@pytest.mark.parametrize("torch_backend", ["reference", "cpu"])
def test_write_rounds_to_the_nearest(torch_backend: ops.Backend) -> None:
    """Between two float8 values the nearer one is stored, as torch casts."""
    key = torch.linspace(-500, 500, 12 * 32).view(12, 2, 16)
    key_cache, value_cache = float8_caches()
    scale = {"key_scale": torch.ones(1), "value_scale": torch.ones(1)}
    ops.reshape_and_cache(key, key, key_cache, value_cache, torch.arange(12), **scale, backend=torch_backend)
    assert torch.equal(key_cache.flatten(0, 1).float(), key.clamp(-448, 448).to(FP8).float())


def test_written_then_read(backend: ops.Backend) -> None:
    """What the write divides by, the read multiplies with: attention to one token gives its value."""
    key_cache, value_cache = float8_caches()
    key, value = torch.ones(1, 2, 16), torch.tensor([3.0, -5.0])[:, None].expand(2, 16)[None]
    ops.reshape_and_cache(key, value, key_cache, value_cache, torch.tensor([4]), **scales(), backend=backend)
    output = ops.paged_attention(
        *(torch.ones(1, 4, 16), key_cache, value_cache),
        block_table=torch.tensor([[1]], dtype=torch.int32),
        seq_lens=torch.tensor([1], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        scale=1.0,
        **scales(),
        backend=backend,
    )
    assert torch.equal(output[0, :, 0], torch.tensor([3.0, 3.0, -5.0, -5.0]))


# ---------------------------------------------------------------- arguments


def write(**changed: Any) -> None:
    key_cache, value_cache = float8_caches()
    valid = {"key_cache": key_cache, "value_cache": value_cache, **scales()}
    ops.reshape_and_cache(
        torch.ones(1, 2, 16), torch.ones(1, 2, 16), slot_mapping=torch.zeros(1).long(), **(valid | changed)
    )


def attend(**changed: Any) -> None:
    ops.paged_attention(**(make_batch(((1, 3),), scales=SCALES).__dict__ | {"scale": 1.0} | changed))


@pytest.mark.parametrize("call", [write, attend])
@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (None, "got None, expected a float32 tensor of one element"),
        (torch.ones(2), r"got \[2\] float32, expected a float32 tensor of one element"),
        (torch.ones(1, dtype=torch.float64), "float64, expected a float32 tensor of one element"),
        (torch.ones(1, device="meta"), "on meta, expected all tensors on cpu"),
    ],
)
def test_float8_needs_both_scales(
    call: Callable[..., None], name: str, scale: Tensor | None, message: str
) -> None:
    """A scale is never taken for 1.0 in silence (sglang #20705)."""
    with pytest.raises(ValueError, match=f"{name}: .*{message}"):
        call(**{name: scale})


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_other_caches_take_no_scale(name: str) -> None:
    """A scale that nothing would apply is refused."""
    batch = make_batch(((1, 3),))
    with pytest.raises(ValueError, match=f"{name}: got a scale, expected None with caches of float32"):
        ops.paged_attention(**(batch.__dict__ | {"scale": 1.0, name: torch.ones(1)}))


def test_gpus_that_cannot_convert_float8_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before compute capability 8.9 the error is ours, not the compiler's."""
    pytest.importorskip("triton")
    from servetwin.kernels import triton_fp8

    monkeypatch.setattr(triton_fp8, "target_arch", lambda: 80)
    with pytest.raises(ValueError, match=r"float8_e4m3fn on a GPU of compute capability 8\.0, expected 8\.9"):
        write(backend="triton")
    with pytest.raises(ValueError, match=r"compute capability 8\.0"):
        attend(backend="triton")
