"""From the choices of the Live page to the command line that it starts, which anybody could type."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from servetwin.dashboard.leash import SERVETWIN
from servetwin.sim.runs import RunFolderError

CONSTANT, WALL_CLOCK = "constant", "live"
PRESETS_TIMEOUT_S = 60


@dataclass(frozen=True, kw_only=True)
class LiveChoices:
    """What was chosen; None and empty texts leave a flag out, so that `servetwin run` decides."""

    workload: str
    """A preset, or a path to a trace or a run folder."""
    executor: str
    """As `--executor` takes it, or `live` for the wall clock."""
    out: Path
    step_time_s: float = 0.02
    """Of the executor constant."""
    model: str = ""
    gpu: str = ""
    num_prompts: int | None = None
    request_rate: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_gpu_blocks: int | None = None
    pace: float | None = None
    """Simulated seconds per second."""
    seed: int = 0
    more: str = ""
    """Other flags of `servetwin run`, as typed in a shell."""


def arguments(chosen: LiveChoices) -> list[str]:
    """The command line behind `servetwin`. Raises ValueError for `more` with an open quotation mark."""
    live = chosen.executor == WALL_CLOCK
    flags = {
        "--executor": None if live else chosen.executor,
        "--step-time-s": chosen.step_time_s if chosen.executor == CONSTANT else None,
        "--model": chosen.model or None,
        "--gpu": chosen.gpu or None,
        "--num-prompts": chosen.num_prompts,
        "--request-rate": chosen.request_rate,
        "--max-num-seqs": chosen.max_num_seqs,
        "--max-num-batched-tokens": chosen.max_num_batched_tokens,
        "--num-gpu-blocks-override": chosen.num_gpu_blocks,
        "--pace": None if live else chosen.pace,
        "--seed": chosen.seed,
        "--out": chosen.out,
    }
    words = [word for flag, value in flags.items() if value is not None for word in (flag, f"{value}")]
    try:
        more = shlex.split(chosen.more)
    except ValueError as e:
        raise ValueError(f"more flags {chosen.more!r}: {e}") from e
    return ["run", chosen.workload, *(["--live"] if live else []), *words, *more]


def as_typed(words: list[str]) -> str:
    """The command for a shell."""
    return shlex.join(["servetwin", *words])


def presets() -> dict[str, str]:
    """Names of the synthetic workloads, and what they are. Raises RunFolderError when they cannot be had."""
    command = [*SERVETWIN, "trace", "presets", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PRESETS_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as e:
        raise RunFolderError(f"the presets cannot be listed: {e}") from e
    return {preset["name"]: preset["description"] for preset in json.loads(done.stdout)["presets"]}


def free_folder(folders: Sequence[Path], taken: Collection[Path] = ()) -> Path:
    """Where a new run may be written: beside the runs that are shown, under a name that nobody has.

    `taken`: folders of runs that have been started and may not have come to write anything.
    """
    first = folders[0] if folders else Path("runs")
    base = first.parent if (first / "run.json").exists() else first
    number = 1
    while (base / f"live-{number}").exists() or base / f"live-{number}" in taken:
        number += 1
    return base / f"live-{number}"
