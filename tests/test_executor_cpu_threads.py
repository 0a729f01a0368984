"""Threads of torch: one per physical core that the process may use, unless it was told otherwise."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from servetwin.executor import cpu_threads
from servetwin.executor.cpu_threads import set_threads, usable_cores
from servetwin.executor.step_timer import build_torch_executor
from servetwin.executor.testing import tiny_model, torch_threads
from servetwin.sim.config import ExecutorOptions

HYPER_THREADED = ("0,4", "1,5", "2,6", "3,7") * 2
"""Hardware threads of the core of each processor, as Linux lists them."""

QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"
"""Files of version 1."""


@pytest.fixture(autouse=True)
def threads_restored() -> Iterator[None]:
    with torch_threads(torch.get_num_threads()):
        yield


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("bound_to", "cores"), [(range(8), 4), ({0, 4}, 1), ({0, 1}, 2), ({2, 3, 6}, 2), ({9}, 1)]
)
def test_hardware_threads_of_one_core_count_once(
    bound_to: set[int], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processor 9 is one of which nothing is known."""
    for cpu, siblings in enumerate(HYPER_THREADED):
        write(tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list", siblings)
    monkeypatch.setattr(cpu_threads, "_bound_to", lambda: set(bound_to))
    assert len(cpu_threads._cores(tmp_path)) == cores


@pytest.mark.parametrize(
    ("own", "files", "least"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ("0::/", {}, math.inf),
        ("3:cpuset:/\n2:cpu,cpuacct:/job", {f"cpu/job/{QUOTA}": "50000", f"cpu/job/{PERIOD}": "25000"}, 2),
        ("2:cpu,cpuacct:/elsewhere", {f"cpu/{QUOTA}": "-1", f"cpu/{PERIOD}": "25000"}, math.inf),
    ],
    ids=["container", "of-a-parent", "none", "version-1", "version-1-none"],
)
def test_a_control_group_limits_its_processes(
    own: str, files: dict[str, str], least: float, tmp_path: Path
) -> None:
    """Both versions of control groups, and the limits of the groups around the own one."""
    write(tmp_path / "own", own)
    for name, text in files.items():
        write(tmp_path / name, text)
    assert min(cpu_threads._quotas(tmp_path, tmp_path / "own"), default=math.inf) == least


@pytest.mark.parametrize(("quota", "expected"), [(0.5, 1), (1.5, 2), (math.inf, 4)])
def test_a_share_of_a_core_is_a_thread(quota: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "_cores", lambda: {"0", "1", "2", "3"})
    monkeypatch.setattr(cpu_threads, "_quotas", lambda: iter([quota]))
    assert usable_cores() == expected


def test_this_machine_has_a_core() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_threads_are_as_wanted_else_at_most_one_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process was limited to before (or by OMP_NUM_THREADS) is kept."""
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 2)
    for before, wanted, expected in ((1, 3, 3), (3, None, 2), (1, None, 1)):
        torch.set_num_threads(before)
        set_threads(wanted)
        assert torch.get_num_threads() == expected


def test_more_threads_than_processors_are_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_threads, "_bound_to", lambda: {0, 1})
    set_threads(2)
    assert not caplog.messages
    set_threads(3)
    assert caplog.messages == ["3 threads on 2 processors: they wait for one another"]


def test_more_threads_than_any_machine_has_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"threads\n.*less than or equal to 1024"):
        ExecutorOptions(threads=4000)


def test_the_executor_takes_the_option_and_tells_it_with_the_load(tmp_path: Path) -> None:
    tiny_model("llama", attention="eager").save_pretrained(tmp_path)
    options = ExecutorOptions(model=tmp_path, block_size=4, num_gpu_blocks=70, threads=1)
    described = build_torch_executor(options).describe()
    assert described["threads"] == 1
    assert described["compiled"] is False
    assert described["linear_dtypes"] == ["float32"]
    assert len(described["load_average"]) == 3
