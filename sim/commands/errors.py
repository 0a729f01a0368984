"""Errors that end a command, as one line: wrong usage (exit 2), what cannot be (exit 3), everything else (exit 1)."""

from __future__ import annotations

from servetwin.sim.infeasible import InfeasibleError
from servetwin.sim.policy_errors import PolicyFailedError, policy_errors_told

__all__ = ["InfeasibleError", "PolicyFailedError", "UsageError", "policy_errors_told"]


class UsageError(ValueError):
    """Something the person who typed the command can mend; the message says what and how."""
