"""How many threads torch computes with.

Two hardware threads of one core share its arithmetic units, so that a second thread per core slows matrix products
down; and a container may be given less time than it sees processors for.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

log = logging.getLogger(__name__)

CPUS = Path("/sys/devices/system/cpu")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def set_threads(wanted: int | None) -> None:
    """Sets torch's threads, for the whole process: as wanted, else as many as there are cores for this process.

    Never more than torch has by itself then, which follows OMP_NUM_THREADS and what the process has set before.
    """
    if wanted is not None and wanted > len(_bound_to()):
        log.warning("%d threads on %d processors: they wait for one another", wanted, len(_bound_to()))
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()) if wanted is None else wanted)


def usable_cores() -> int:
    """Physical cores that this process may run on, or as many as its share of processor time amounts to if less."""
    return max(1, math.ceil(min([len(_cores()), *_quotas()])))


def _cores(cpus: Path = CPUS) -> set[str]:
    """One name for each physical core among the processors that the process is bound to."""
    return {_core_name(cpus, cpu) for cpu in _bound_to()}


def _bound_to() -> set[int]:
    # Only some systems, Linux among them, bind processes.
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _core_name(cpus: Path, cpu: int) -> str:
    """The list of a core's hardware threads, which is the same for all of them."""
    siblings = cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    return siblings.read_text().strip() if siblings.is_file() else str(cpu)


def _quotas(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> Iterator[float]:
    """Processors' worth of time that each control group of this process allows, from its own upwards."""
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        # Version 2 has one hierarchy, which names no controllers; version 1 has one per set of them.
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root
        group = top / path.lstrip("/")
        yield from (_quota(folder) for folder in (group, *group.parents) if folder.is_relative_to(top))


def _quota(group: Path) -> float:
    """Of one group: `cpu.max` of version 2, else the two files of version 1; infinite where there is no limit."""
    if (group / "cpu.max").is_file():
        quota, period = (group / "cpu.max").read_text().split()
    elif (group / "cpu.cfs_quota_us").is_file():
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    else:
        return math.inf
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)
