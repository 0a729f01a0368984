"""Parts that are reached by name: executors, dashboards, policies, and anyone's own `module:attribute`.

`sim` never imports the executor, the dashboard or Ray: it finds them here, through entry points, the way it
would find somebody else's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from servetwin.sim.config import ModelConfig
from servetwin.sim.contract import StepTimer


class PluginError(ValueError):
    """A name that leads nowhere, or to something that a missing extra needs; the message says which."""


class Executor(StepTimer, Protocol):
    """A step timer that also knows its model and its memory. Built by calling its factory with ExecutorOptions.

    Optional: `supports_async_scheduling = False` for one that needs the output of a step to be known to the scheduler
    before the next is run (asynchronous scheduling is then off).
    """

    model_config: ModelConfig
    num_gpu_blocks: int

    def describe(self) -> dict[str, Any]:
        """Hardware, versions and settings for `run.json`."""
        ...

    def close(self) -> None: ...


EXTRA_OF = {
    "torch": "executor",
    "triton": "executor",
    "transformers": "executor",
    "safetensors": "executor",
    "tokenizers": "executor",
    "msgspec": "executor",
    "zmq": "executor",
    "glassllm": "models",
    "streamlit": "dashboard",
    "plotly": "dashboard",
    "tsdownsample": "dashboard",
    "ray": "ray",
}


def load(group: str, name: str) -> Any:
    """The object behind a built-in name of the entry-point `group`, or behind `module:attribute`."""
    if ":" in name:
        return load_attribute(name)
    for point in entry_points(group=group, name=name):
        with _missing_modules_explained(name):
            return point.load()
    known = ", ".join(sorted(p.name for p in entry_points(group=group)))
    raise PluginError(f"{name!r} is not known; allowed: {known or 'nothing'}, or module:attribute")


def load_attribute(name: str) -> Any:
    """The object behind `module:attribute`; raises PluginError."""
    module, _, attribute = name.partition(":")
    with _missing_modules_explained(name), _current_folder_importable():
        return _attribute(import_module(module), attribute, name)


@contextmanager
def _missing_modules_explained(name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as e:
        missing = (e.name or "").partition(".")[0]
        extra = EXTRA_OF.get(missing)
        hint = f": pip install 'servetwin[{extra}]'" if extra else ""
        raise PluginError(f"{name!r} needs the module {e.name!r}, which is not installed{hint}") from e


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """For somebody's own module beside their data; behind everything installed, and only while it is imported."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _attribute(module: Any, path: str, name: str) -> Any:
    found = module
    for part in path.split("."):
        if not hasattr(found, part):
            raise PluginError(f"{name!r}: module {module.__name__} has no attribute {path!r}")
        found = getattr(found, part)
    return found
