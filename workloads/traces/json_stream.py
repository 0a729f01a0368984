"""Large JSON documents read piece by piece: what is kept of them is what the reader keeps.

Values are decoded by Python's own json as they come, so they may be NaN or Infinity.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from servetwin.workloads.traces.source import CHUNK_CHARACTERS, MAX_LINE_CHARACTERS, Source
from servetwin.workloads.traces.values import Damage

_BLANK = re.compile(r"[ \t\r\n]*")
_OF_NUMBERS = re.compile(r"[-+.0-9eE]*")
_DECODER = json.JSONDecoder()
SHOWN = 40
"""Characters of a damaged text in a message."""


class JsonStream:
    """The JSON texts of a file, one after another. All methods raise Damage for what is not JSON."""

    def __init__(self, source: Source, *, objects_begin_lines: bool = False) -> None:
        """`objects_begin_lines`: the texts are objects below one another, and inside them every line is indented.

        So one that was cut off ends where the next begins.
        """
        self._chunks = source.chunks()
        self._objects_begin_lines = objects_begin_lines
        self._text = ""
        self._at = 0
        """Where the rest begins that has not been taken."""

    def peek(self) -> str:
        """The next character that is not blank; empty at the end of the file."""
        while True:
            self._at = self._past(_BLANK, self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_on():
                return ""

    def value(self) -> Any:
        """The next value, of at most MAX_LINE_CHARACTERS."""
        if self.peek() == "{" and self._objects_begin_lines and self._text[self._at - 1 : self._at] == "\n":
            raise self._damage("JSON (an object that ends before the next one begins)")
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as e:
                if len(self._text) - self._at > MAX_LINE_CHARACTERS or not self._read_on():
                    raise self._damage(f"JSON ({e.msg})") from e
                continue
            except (ValueError, RecursionError) as e:
                raise self._damage(f"JSON ({e})") from e
            # A number may go on in the next piece: of 0.5 the beginning 0. gives 0.
            if self._past(_OF_NUMBERS, end) < len(self._text) or not self._read_on():
                self._at = end
                return value

    def elements(self) -> Iterator[Any]:
        """The values of the list that comes next."""
        self._take("[")
        if self.peek() == "]":
            self._take("]")
            return
        while True:
            yield self.value()
            if self._take(",]") == "]":
                return

    def members(self) -> Iterator[str]:
        """The names of the object that comes next; whoever asks takes the value of each."""
        self._take("{")
        if self.peek() == "}":
            self._take("}")
            return
        while True:
            if self.peek() != '"':
                raise self._damage("JSON (a name in quotes)")
            name: str = self.value()
            self._take(":")
            yield name
            if self._take(",}") == "}":
                return

    def skip(self) -> None:
        """Takes the next value, of any length where it is a list."""
        if self.peek() == "[":
            for _ in self.elements():
                pass
        else:
            self.value()

    def end(self) -> None:
        """Makes sure that nothing follows."""
        if self.peek():
            raise self._damage("the end of the file")

    def to_next_object(self) -> None:
        """Goes on at the next line that begins with a brace, or at the end."""
        while (found := self._text.find("\n{", max(self._at - 1, 0))) < 0:
            self._at = len(self._text)
            if not self._read_on():
                return
        self._at = found + 1

    def _past(self, characters: re.Pattern[str], at: int) -> int:
        """The first place from `at` on without these characters."""
        found = characters.match(self._text, at)
        assert found is not None, "it matches nothing, too"
        return found.end()

    def _take(self, one_of: str) -> str:
        found = self.peek()
        if not found or found not in one_of:
            raise self._damage(f"JSON ({' or '.join(one_of)})")
        self._at += 1
        return found

    def _read_on(self) -> bool:
        """Reads a piece, or as much as there is of a value; False at the end of the file."""
        # The character before tells whether a line begins here.
        kept = max(self._at - 1, 0)
        pieces = [*islice(self._chunks, 1 + (len(self._text) - kept) // CHUNK_CHARACTERS)]
        if not pieces:
            return False
        self._text, self._at = self._text[kept:] + "".join(pieces), self._at - kept
        return True

    def _damage(self, allowed: str) -> Damage:
        return Damage("row", self._text[self._at : self._at + SHOWN], allowed)
