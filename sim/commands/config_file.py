"""Flags from a file (`--config FILE`) and from the environment: what the command line leaves open.

A flag is looked for on the command line, then in the environment, then in the file; what is found nowhere has its
default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from servetwin.sim.commands.errors import UsageError

if TYPE_CHECKING:
    from cyclopts import App, ArgumentCollection

FLAG = "--config"
PREFIX = "SERVETWIN_"
Source = Callable[["App", tuple[str, ...], "ArgumentCollection"], None]

ConfigFile = Annotated[
    Path | None,
    Parameter(
        FLAG,
        group=Group("Flags from elsewhere", sort_key=-1),
        help="A file of flags, one key each, as in `max_num_seqs: 64`: YAML (.yaml, .yml), TOML (.toml) or JSON "
        "(.json). The command line comes first, then the environment (SERVETWIN_RUN_MAX_NUM_SEQS=64 for run), then "
        "the file.",
    ),
]


def flag_sources(argv: Sequence[str]) -> list[Source]:
    """Where cyclopts looks for flags that this command line leaves open. Raises UsageError."""
    from cyclopts.config import Env

    sources: list[Source] = [Env(PREFIX, show=False)]
    path = _named(argv)
    if path is not None:
        sources.append(_file(path))
    return sources


def _named(argv: Sequence[str]) -> Path | None:
    """The file of the last `--config`."""
    path = None
    for word, following in zip(argv, [*argv[1:], None], strict=True):
        if word == "--":
            break
        if word == FLAG and following is not None:
            path = Path(following)
        elif word.startswith(f"{FLAG}="):
            path = Path(word.removeprefix(f"{FLAG}="))
    return path


def _file(path: Path) -> Source:
    from cyclopts.config import Dict

    return Dict(data=_flags(path), source=str(path), use_commands_as_keys=False)


def _flags(path: Path) -> dict[str, Any]:
    """The keys of the file, spelled as flags are."""
    try:
        found = _read(path)
    except OSError as e:
        raise UsageError(f"{FLAG} {path}: {e.strerror}") from e
    except ValueError as e:
        raise UsageError(f"{FLAG} {path}: {e}") from e
    if not isinstance(found, dict):
        raise UsageError(f"{FLAG} {path}: must hold keys with values, one for each flag")
    flags = {str(key).replace("_", "-"): value for key, value in found.items()}
    for name, value in flags.items():
        if isinstance(value, dict) or value is None:
            raise UsageError(f"{FLAG} {path}: {name}: must be a value or a list of values, got {value!r}")
    if FLAG.removeprefix("--") in flags:
        raise UsageError(f"{FLAG} {path}: names a file of flags itself")
    return flags


def _read(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".toml":
        import tomllib

        return tomllib.loads(path.read_text(encoding="utf-8"))
    if suffix == ".json":
        import json

        return json.loads(path.read_text(encoding="utf-8"))
    if suffix in (".yaml", ".yml"):
        import yaml

        try:
            return yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as e:
            raise ValueError(str(e)) from e
    raise ValueError(f"ends in {suffix!r}: must be .yaml, .yml, .toml or .json")
