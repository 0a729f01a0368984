"""Formats in which a request may or may not say how long its answer is."""

from __future__ import annotations

from servetwin.workloads.traces.trace import Reading
from servetwin.workloads.traces.values import Fields, Useless

NO_OUTPUT_LENGTH = "no output length"
"""Why a request is dropped that does not say how long its answer is, where `output_tokens` does not either."""


class OutputLengths:
    """The output tokens of requests: their own, or those that were asked for in their place."""

    def __init__(self, reading: Reading, *names: str) -> None:
        """`names`: the fields that may hold them, the first that is there counts."""
        self._reading = reading
        self._names = names
        self._asked_for = 0

    def of(self, request: Fields) -> int:
        """Of one request. Raises Damage, Useless."""
        if request.has(*self._names):
            return request.count(*self._names)
        tokens = self._reading.options.output_tokens
        if tokens is None:
            raise Useless(NO_OUTPUT_LENGTH)
        self._asked_for += 1
        return tokens

    def check(self) -> None:
        """Notes that what was asked for took no effect; to be called when all is read."""
        tokens = self._reading.options.output_tokens
        if tokens is not None and not self._asked_for:
            self._reading.notes.append(
                f"every request says its own output length: the {tokens:,} of --trace-output-tokens is not used"
            )
