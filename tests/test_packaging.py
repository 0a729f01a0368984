"""What pyproject.toml says of the folders is what lies there."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("sim", "executor", "kernels", "workloads", "dashboard")


def test_every_package_is_installed() -> None:
    """A sub-package that is missing from the list would be missing from the wheel."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {p.parent for folder in FOLDERS for p in (ROOT / folder).rglob("__init__.py")}
    assert set(settings["packages"]) == {f"servetwin.{'.'.join(p.relative_to(ROOT).parts)}" for p in found}


def test_every_package_is_typed_and_kernels_is_empty() -> None:
    """py.typed in each; `kernels/__init__.py` holds nothing, since transformers may import the folder by its name."""
    assert all((ROOT / folder / "py.typed").is_file() for folder in FOLDERS)
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""
