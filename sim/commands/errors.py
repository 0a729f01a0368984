"""Errors that end a command: usage errors (exit 2) as one line, everything else as it comes (exit 1)."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(ValueError):
    """Something the person who typed the command can mend; the message says what and how."""


class PolicyFailedError(Exception):
    """Somebody's own scheduling policy raised; the message says where."""


@contextmanager
def policy_errors_told(policy: str) -> Iterator[None]:
    """An exception that comes out of the policy `module:Class` becomes one line with its place."""
    try:
        yield
    except Exception as e:
        module = sys.modules.get(policy.partition(":")[0]) if ":" in policy else None
        places = [
            f
            for f in traceback.extract_tb(e.__traceback__)
            if f.filename == getattr(module, "__file__", None)
        ]
        if not places:
            raise
        last = places[-1]
        raise PolicyFailedError(
            f"the scheduling policy {policy} raised {type(e).__name__}: {e} ({last.filename}, line {last.lineno}, in "
            f"{last.name}); servetwin.sim.testing.check_policy({policy!r}) tries it on small engines"
        ) from e
