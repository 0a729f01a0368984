"""The two files of each client of a ServeGen folder: when it sends, and how long its requests are.

`chunk-I-trace.csv` has no header: start of the window in s, requests/s, CV of the gaps, pattern of the gaps (Gamma,
Weibull, nothing where the client is idle), its shape and its scale. `chunk-I-dataset.json` holds, for windows of six
hours, one distribution per field, each a text that is a Python dict: value -> probability.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.spec import MAX_TOKENS, WorkloadError
from servetwin.workloads.traces.csv_rows import COUNT, NUMBER, TEXT, Column, CsvColumns, each_batch
from servetwin.workloads.traces.json_rows import parse_document
from servetwin.workloads.traces.rows import IntArray, Rows
from servetwin.workloads.traces.source import Source
from servetwin.workloads.traces.values import Damage, shown

WINDOW_S, LENGTHS_WINDOW_S = 600, 21_600
PATTERNS = ("Gamma", "Weibull")
HEADER = ("t", "rate", "cv", "pattern", "shape", "scale")
COLUMNS = tuple(
    Column(n, k) for n, k in zip(HEADER, (COUNT, NUMBER, NUMBER, TEXT, NUMBER, NUMBER), strict=True)
)
MAX_RATE = 1e6
MAX_LITERAL_CHARACTERS = 1 << 22
"""Of one distribution: ten times the largest published one."""
_LITERAL = re.compile(r"\{[\d\s,:.eE+-]*\}", re.ASCII)
_FILE = re.compile(r"chunk-(\d{1,9})-(trace\.csv|dataset\.json)(?:\.gz|\.zst)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ClientFiles:
    number: int
    trace: Path
    dataset: Path


def client_files(folder: Path) -> list[ClientFiles]:
    """The clients in a folder, by number; none where it is no ServeGen folder. Raises WorkloadError for lone files."""
    found: dict[int, dict[str, Path]] = {}
    try:
        paths = sorted(folder.iterdir())
    except OSError as e:
        raise WorkloadError(f"{folder}: cannot be read: {e}") from e
    for path in paths:
        match = _FILE.fullmatch(path.name)
        if match is None:
            continue
        number, part = int(match[1]), match[2]
        first = found.setdefault(number, {}).setdefault(part, path)
        if first != path:
            raise WorkloadError(f"{path}: {first.name} is the same file of client {number}: keep one of them")
    for number, parts in found.items():
        for part in {"trace.csv", "dataset.json"} - parts.keys():
            raise WorkloadError(f"{folder}: chunk-{number}-{part}: is not there, although client {number} is")
    return [ClientFiles(n, parts["trace.csv"], parts["dataset.json"]) for n, parts in sorted(found.items())]


# ---------------------------------------------------------------- when a client sends


@dataclass(frozen=True, slots=True)
class Window:
    """Ten minutes in which a client is active."""

    start_s: int
    rate_per_s: float
    pattern: str
    """Distribution of the gaps: Gamma or Weibull."""
    shape: float

    @property
    def mean_requests(self) -> float:
        return self.rate_per_s * WINDOW_S


def read_windows(file: Path, rows: Rows) -> tuple[list[Window], int]:
    """The windows in which a client is active, and how many it is idle in. `rows` accounts for damaged ones."""
    source = Source(file)
    source.head  # noqa: B018 - refuses an empty file
    active: list[Window] = []
    idle, free_from_s = 0, 0
    for batch in each_batch(source, rows, COLUMNS, header=HEADER):
        for number, row in zip(batch.numbers.tolist(), _rows_of(batch), strict=True):
            try:
                window = _window(row, free_from_s)
            except Damage as e:
                rows.damaged(number, e)
                continue
            free_from_s = row["t"] + WINDOW_S
            if window is None:
                idle += 1
            else:
                active.append(window)
    return active, idle


def _rows_of(batch: CsvColumns) -> Iterable[dict[str, Any]]:
    columns = [batch.list(name) if name == "pattern" else batch[name].tolist() for name in HEADER]
    return (dict(zip(HEADER, row, strict=True)) for row in zip(*columns, strict=True))


def _window(row: dict[str, Any], free_from_s: int) -> Window | None:
    if row["t"] % WINDOW_S or row["t"] < free_from_s:
        raise Damage("t", row["t"], f"a multiple of {WINDOW_S}, {free_from_s} or more after the row before")
    if not 0 <= row["rate"] <= MAX_RATE:
        raise Damage("rate", row["rate"], f"a number from 0 to {MAX_RATE:g}")
    if row["pattern"] is None:
        return None
    if row["pattern"] not in PATTERNS:
        raise Damage("pattern", row["pattern"], f"{' or '.join(PATTERNS)}, or empty")
    if row["shape"] <= 0:
        raise Damage("shape", row["shape"], "above 0")
    return Window(row["t"], row["rate"], row["pattern"], row["shape"])


# ---------------------------------------------------------------- how long its requests are


class Histogram:
    """A distribution of whole numbers."""

    def __init__(self, probabilities: Mapping[int, float]) -> None:
        self.values: IntArray = np.array(sorted(probabilities), dtype=np.int64)
        self._below: NDArray[np.float64] = np.cumsum([probabilities[v] for v in self.values.tolist()])

    def sample(self, n: int, rng: np.random.Generator) -> IntArray:
        """`n` independent values by the inverse of the cumulative distribution, shape [n]."""
        # A draw of [0, 1) stays below the last sum, so it falls on a value whose probability is not 0.
        places = np.searchsorted(self._below, rng.random(n) * self._below[-1], side="right")
        drawn: IntArray = self.values[np.minimum(places, len(self.values) - 1)]
        return drawn


class LengthHistograms:
    """The distributions of one client, each parsed when it is first asked for."""

    def __init__(self, file: Path) -> None:
        self._path = str(file)
        self._parsed: dict[tuple[int, str], Histogram | None] = {}
        document = parse_document(Source(file))
        if not isinstance(document, dict) or not all(isinstance(f, dict) for f in document.values()):
            raise WorkloadError(f"{file}: must be a JSON object: start of a window -> field -> distribution")
        self._windows: dict[int, dict[str, Any]] = {}
        for key, window in document.items():
            if not re.fullmatch(r"\d{1,12}", key, re.ASCII) or int(key) % LENGTHS_WINDOW_S:
                raise WorkloadError(f"{file}: window {shown(key)}: must be a multiple of {LENGTHS_WINDOW_S}")
            self._windows[int(key)] = window

    def at(self, time_s: int, fields: Iterable[str]) -> dict[str, Histogram] | None:
        """The distributions of the window that `time_s` lies in, of those `fields` that it has.

        Where they are empty, those of the window before, and so on, as ServeGen does; None where there are none.
        """
        for start_s in sorted((s for s in self._windows if s <= time_s), reverse=True):
            found = {f: self._histogram(start_s, f) for f in fields if f in self._windows[start_s]}
            filled = {field: histogram for field, histogram in found.items() if histogram is not None}
            if filled and len(filled) == len(found):
                return filled
        return None

    def _histogram(self, start_s: int, field: str) -> Histogram | None:
        key = (start_s, field)
        if key not in self._parsed:
            try:
                self._parsed[key] = _histogram(self._windows[start_s][field])
            except Damage as e:
                raise WorkloadError(f"{self._path}: window {start_s}, {field}: {e}") from e
        return self._parsed[key]


def _histogram(text: object) -> Histogram | None:
    """None for an empty one. Raises Damage."""
    probabilities = _literal(text)
    for value, probability in probabilities.items():
        if type(value) is not int or not 0 <= value <= MAX_TOKENS:
            raise Damage("value", value, f"a whole number from 0 to {MAX_TOKENS:,}")
        if type(probability) not in (int, float) or not 0 <= probability <= 1:
            raise Damage(f"probability of {value}", probability, "a number from 0 to 1")
    if probabilities and not math.isclose(math.fsum(probabilities.values()), 1, abs_tol=1e-3):
        raise Damage("sum of probabilities", math.fsum(probabilities.values()), "1")
    return Histogram(probabilities) if probabilities else None


def _literal(text: object) -> dict[Any, Any]:
    """A dict of numbers written as Python writes it. Never evaluated: only a flat literal passes."""
    allowed = f"a dict {{value: probability, ...}} of at most {MAX_LITERAL_CHARACTERS:,} characters"
    if (
        not isinstance(text, str)
        or len(text) > MAX_LITERAL_CHARACTERS
        or not _LITERAL.fullmatch(text.strip())
    ):
        raise Damage("distribution", text, allowed)
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError) as e:
        raise Damage("distribution", text, allowed) from e
    if not isinstance(value, dict):
        raise Damage("distribution", text, allowed)
    return value
