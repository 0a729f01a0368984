"""What cannot be done with what is there."""

from __future__ import annotations


class InfeasibleError(Exception):
    """The question was well formed, and the answer is no; the message has the numbers. Commands exit with 3."""
