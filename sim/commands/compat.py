"""`--vllm-compat` and its switches: which rules the scheduler follows."""

from __future__ import annotations

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flags import EngineFlags
from servetwin.sim.rules import CORRECTIONS, Rules

MODES = {"exact": Rules.exact, "safe": Rules.safe}
RELEASES = ("0.22", "0.22.0")


def rules(flags: EngineFlags) -> Rules:
    """The rules of the release and mode, with the switches that were given on their own. Raises UsageError."""
    given = {name: getattr(flags, name) for name in CORRECTIONS if getattr(flags, name) is not None}
    return rules_of(flags.vllm_compat).model_copy(update=given)


def rules_of(text: str) -> Rules:
    """What `--vllm-compat TEXT` stands for. Raises UsageError."""
    first, _, second = text.partition(":")
    if text in MODES:
        return MODES[text]()
    if first in RELEASES and (not second or second in MODES):
        return MODES[second or "exact"]()
    raise UsageError(
        f"--vllm-compat {text!r} is not known; allowed: exact, safe, 0.22, 0.22:exact, 0.22:safe "
        "(0.22.0 is the only release whose rules are here)"
    )
