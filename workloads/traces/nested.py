"""Files in which one line, or one JSON document, holds several requests.

Every request is counted as a row. Where a line holds them, its number is theirs: that is what a person finds in the
file. Where a document of many lines does, they are numbered through the whole file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from servetwin.workloads.traces.json_rows import parse_object
from servetwin.workloads.traces.rows import Rows
from servetwin.workloads.traces.source import MAX_LINE_CHARACTERS
from servetwin.workloads.traces.values import Damage, Fields

NO_REQUESTS = "no requests"
"""Why a line is dropped whose list of requests is empty."""


class NestedRows:
    """Gives requests of documents their row numbers as they come, through the whole file; messages name both.

    A document from which no request can be read is one row.
    """

    def __init__(self, rows: Rows, document: str) -> None:
        """`document`: what holds the requests, for messages."""
        self._rows = rows
        self._document = document
        self._number = 0

    @contextmanager
    def row(self, document: int) -> Iterator[int]:
        """Reading of the next request, of this document; gives its row number. Otherwise as `Rows.row`."""
        self._number += 1
        with self._rows.row(self._number):
            try:
                yield self._number
            except Damage as e:
                raise _DamageInDocument(f"{self._document} {document}", e) from e

    def damaged(self, document: int, damage: Damage) -> None:
        """A document that no request can be read from."""
        with self.row(document):
            raise damage

    def skip(self, document: int, reason: str) -> None:
        """A document without requests."""
        self._number += 1
        self._rows.skip(self._number, reason)


class _DamageInDocument(Damage):
    def __init__(self, document: str, damage: Damage) -> None:
        Exception.__init__(self, f"{document}: {damage}")
        self.field = damage.field


def each_holder(
    texts: Iterable[tuple[int, str]], rows: Rows | NestedRows, read: Callable[[int, Fields], None]
) -> None:
    """Calls `read` with the number and the fields of each JSON object among `texts`.

    `read` takes its requests through `rows`; Damage that it raises outside of them is of the whole line.
    """
    for number, text in texts:
        try:
            read(number, Fields(parse_object(text)))
        except Damage as e:
            rows.damaged(number, e)


def documents(lines: Iterable[str], longest: int = MAX_LINE_CHARACTERS) -> Iterator[tuple[int, str]]:
    """JSON objects below one another, each on one line or pretty printed, counted from 1.

    A pretty printed object begins with an opening and ends with a closing brace at the start of a line; inside of it
    every line is indented. So one that was cut off ends where the next begins, or when it has `longest` characters.
    """
    return enumerate(_documents(lines, longest), start=1)


def _documents(lines: Iterable[str], longest: int) -> Iterator[str]:
    unfinished: list[str] = []
    characters = 0
    for line in lines:
        begins, ends = line.startswith("{"), line.rstrip() == "}"
        characters += len(line)
        if unfinished and not begins:
            unfinished.append(line)
            if ends or characters > longest:
                yield "\n".join(unfinished)
                unfinished = []
        elif line.strip():
            if unfinished:
                yield "\n".join(unfinished)
            unfinished = []
            if begins and not line.rstrip().endswith("}"):
                unfinished, characters = [line], len(line)
            else:
                yield line
    if unfinished:
        yield "\n".join(unfinished)


def list_of(row: Fields, name: str) -> list[Any]:
    """The entries of a list, whatever they are. Raises Damage."""
    value = row.get(name)[1]
    if not isinstance(value, list):
        raise Damage(name, value, "a list of JSON objects")
    return value


def fields_of(name: str, entry: object) -> Fields:
    """An entry of the list `name`. Raises Damage."""
    if not isinstance(entry, dict):
        raise Damage(name, entry, "a list of JSON objects")
    return Fields(entry)
