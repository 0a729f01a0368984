"""Times of kernels on a device, and the two rates that they are held against: copying memory, multiplying matrices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]

ROUNDS = 7
TOY_ROUNDS = 2
LEAD_BYTES = 2**30
"""Cleared ahead of a measurement: 0.2 ms and more of work, in which the host launches what is measured."""


def seconds_per_call(calls: Sequence[Call], device: torch.device, *, toy: bool = False) -> float:
    """Median time of one call. Several calls that do the same on other memory keep caches from being warm.

    On a GPU all of them are captured in one CUDA graph, so that the host's launches do not count.
    """
    for call in calls:
        call()
    rounds = TOY_ROUNDS if toy else ROUNDS
    timed = _time_on_gpu if device.type == "cuda" else _time_on_cpu
    return timed(calls, rounds) / len(calls)


def _time_on_cpu(calls: Sequence[Call], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        for call in calls:
            call()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def _time_on_gpu(calls: Sequence[Call], rounds: int) -> float:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    lead = torch.empty(LEAD_BYTES, dtype=torch.uint8, device="cuda")
    new_event: Any = torch.cuda.Event
    marks = [new_event(enable_timing=True) for _ in range(2)]
    return statistics.median(time_replay(graph.replay, lead.zero_, *marks) for _ in range(rounds))


def time_replay(replay: Call, busy: Call, start: Any, end: Any) -> float:
    """Seconds between two events around one replay, on a device that is given both while it works.

    The host needs longer to launch a graph than the device to run a short one. So it launches while the device is
    `busy` with something else, and then with a replay that leaves caches as the measured one does.
    """
    busy()
    replay()
    start.record()
    replay()
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms / 1e3


def copy_rate(device: torch.device, *, toy: bool) -> float:
    """Bytes per second read and written by copying a large tensor."""
    source = torch.ones(2**22 if toy else 2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_per_call([lambda: target.copy_(source)] * 3, device, toy=toy)


def matmul_rate(device: torch.device, dtype: torch.dtype, *, toy: bool) -> float:
    """Floating-point operations per second of a large square matrix product."""
    size = 256 if toy else 8192
    a: Tensor = torch.randn(size, size, dtype=dtype, device=device)
    b: Tensor = torch.randn(size, size, dtype=dtype, device=device)
    return 2 * size**3 / seconds_per_call([lambda: a @ b] * 3, device, toy=toy)
