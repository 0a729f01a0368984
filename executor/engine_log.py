"""Where the engine's log lines go: the logger "servetwin", on stderr, with vLLM's layout of a line.

The level is SERVETWIN_LOGGING_LEVEL (default INFO). Lines of a child process begin with its name and number.
"""

from __future__ import annotations

import logging
import os

LEVEL_VARIABLE = "SERVETWIN_LOGGING_LEVEL"

logger = logging.getLogger("servetwin")


def log_to_stderr(prefix: str = "") -> None:
    """Puts a handler on the logger, unless this process has one that would see its lines already.

    Raises ValueError when the environment names a level that there is not.
    """
    logger.setLevel(_level())
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    line = f"{prefix}%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
    handler.setFormatter(logging.Formatter(line, datefmt="%m-%d %H:%M:%S"))
    logger.addHandler(handler)


def _level() -> int:
    levels = logging.getLevelNamesMapping()
    name = os.environ.get(LEVEL_VARIABLE, "INFO")
    if name.upper() not in levels:
        raise ValueError(f"{LEVEL_VARIABLE} {name!r} is not known; allowed: {', '.join(levels)}")
    return levels[name.upper()]
