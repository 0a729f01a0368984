"""Profiles that come with the package: measured on the hardware that each of them names."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

DATA = Path(str(files("servetwin.sim.steptime"))) / "data"


def shipped_profiles() -> dict[str, Path]:
    """Name -> file."""
    return {file.stem: file for file in sorted(DATA.glob("*.json"))}


def names_profile(name: str) -> bool:
    """A file or folder that exists, or a shipped profile."""
    return Path(name).exists() or name in shipped_profiles()
