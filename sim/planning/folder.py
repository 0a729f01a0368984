"""The folder of a sweep: what it is, the runs that have ended, and their table.

sweep.json        what makes this sweep another than others
runs/             one record a finished run (elsewhere with a store of its own)
results.parquet   one row a run
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from servetwin.sim.planning.definition import SweepDefinition, differences
from servetwin.sim.planning.named_files import FileDigests
from servetwin.sim.run_files import TEMPORARY, RunFolderError, write_json, writing

SWEEP, RUNS = "sweep.json", "runs"


def check_folder(folder: Path, definition: SweepDefinition, known: FileDigests, *, resume: bool) -> None:
    """Raises RunFolderError when the sweep cannot be written there; changes nothing."""
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"--out {folder} is a file; a sweep needs a folder of its own")
    # What a killed process was writing is no content.
    if not folder.exists() or all(file.suffix == TEMPORARY for file in folder.iterdir()):
        return
    if not (folder / SWEEP).is_file():
        raise RunFolderError(f"--out {folder} is not empty and holds no sweep; choose another folder")
    if not resume:
        raise RunFolderError(
            f"--out {folder} holds a sweep; --resume goes on with it, or choose another folder"
        )
    if different := differences(_read(folder / SWEEP), definition.to_json(known)):
        more = f" (and {len(different) - 3} more)" if len(different) > 3 else ""
        raise RunFolderError(f"--out {folder} holds another sweep: {'; '.join(different[:3])}{more}")


def begin(folder: Path, definition: SweepDefinition, known: FileDigests) -> None:
    """Makes the folder that `check_folder` let pass, and says in it what the sweep is."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not (folder / SWEEP).exists():
        write_json(folder / SWEEP, definition.to_json(known))


def _read(file: Path) -> dict[str, Any]:
    try:
        data = orjson.loads(file.read_bytes())
    except (orjson.JSONDecodeError, OSError) as e:
        raise RunFolderError(f"{file}: damaged: {e}") from e
    if not isinstance(data, dict):
        raise RunFolderError(f"{file}: damaged: not a JSON object")
    return data
