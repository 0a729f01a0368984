"""`--vllm-compat`: which rules the scheduler follows."""

from __future__ import annotations

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.rules import Rules


def rules_of(text: str) -> Rules:
    """What `--vllm-compat TEXT` stands for. Raises UsageError."""
    try:
        return Rules.named(text)
    except ValueError as e:
        raise UsageError(f"--vllm-compat {e}") from e
