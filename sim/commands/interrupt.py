"""Ctrl-C and SIGTERM end a run between two steps, so that its folder stays whole."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

PATIENCE_S = 8
"""A step that takes longer than this after the signal is broken off."""


class StopRequest:
    """While active, a signal only asks for the end; further ones change nothing, patience running out forces it.

    Use as a context manager in the main thread; call `raise_if_asked` between steps.
    """

    def __init__(self) -> None:
        self._asked = False
        self._old: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.alarm(0)
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal itself returned

    def raise_if_asked(self) -> None:
        """Raises KeyboardInterrupt once the end has been asked for."""
        if self._asked:
            signal.alarm(0)
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGALRM:
            raise KeyboardInterrupt
        if not self._asked:
            self._asked = True
            signal.alarm(PATIENCE_S)
