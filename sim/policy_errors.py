"""What becomes of an exception that somebody's own scheduling policy raised: one line with its place."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


class PolicyFailedError(Exception):
    """Somebody's own scheduling policy raised; the message says where."""


@contextmanager
def policy_errors_told(policy: str) -> Iterator[None]:
    """An exception that comes out of the policy `module:Class` becomes one line with its place."""
    try:
        yield
    except Exception as e:
        module = sys.modules.get(policy.partition(":")[0]) if ":" in policy else None
        cause = e.__cause__ if isinstance(e.__cause__, StopIteration) else e
        frames = traceback.extract_tb(cause.__traceback__)
        places = [f for f in frames if f.filename == getattr(module, "__file__", None)]
        if (
            not places
            and module is not None
            and isinstance(e, TypeError)
            and frames[-1].filename.endswith("request_queue.py")
        ):
            raise PolicyFailedError(f"keys of the scheduling policy {policy} cannot be compared: {e}") from e
        if not places:
            raise
        last = places[-1]
        raise PolicyFailedError(
            f"the scheduling policy {policy} raised {type(cause).__name__}: {cause} ({last.filename}, line "
            f"{last.lineno}, in {last.name}); servetwin.sim.testing.check_policy({policy!r}) tries it on small engines"
        ) from e
