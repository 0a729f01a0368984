"""Errors that end a command: usage errors (exit 2) as one line, everything else as it comes (exit 1)."""

from __future__ import annotations

from servetwin.sim.policy_errors import PolicyFailedError, policy_errors_told

__all__ = ["PolicyFailedError", "UsageError", "policy_errors_told"]


class UsageError(ValueError):
    """Something the person who typed the command can mend; the message says what and how."""
