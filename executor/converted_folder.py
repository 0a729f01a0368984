"""Writing a model folder so that it is there as a whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path


def write_folder(out: Path, files: Sequence[str], write: Callable[[Path], None]) -> Path:
    """Lets `write` fill a temporary folder, moves it to `out` and gives that back; a complete `out` is kept as it is.

    `out` is complete when it holds all `files`. Raises ValueError for an `out` that exists and is something else.
    """
    if _is_complete(out, files):
        return out
    if out.exists():
        raise ValueError(
            f"{str(out)!r} exists and is not a converted model: remove it or choose another folder"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        write(temporary)
        _move_into_place(temporary, out, files)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _is_complete(folder: Path, files: Sequence[str]) -> bool:
    return all((folder / name).is_file() for name in files)


def _move_into_place(temporary: Path, out: Path, files: Sequence[str]) -> None:
    temporary.chmod(0o755)
    for path in temporary.iterdir():
        path.chmod(0o644)
    try:
        temporary.rename(out)
    except OSError:
        # Somebody else may have converted the same model meanwhile.
        if not _is_complete(out, files):
            raise
