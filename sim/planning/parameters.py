"""What a sweep varies: a field and its values, or a field and a range to draw from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.run_fields import is_whole, kinds_of, parsed, plain, takes_none
from servetwin.sim.planning.spec import WORKLOAD

LOG = ":log"
RANGE = ".."
_CLOSING = {"{": "}", "[": "]", "(": ")"}


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    name: str
    """The field."""
    values: tuple[Any, ...]

    def at(self, u: float) -> Any:
        """The value at a place of [0, 1): every value has an equal part."""
        return self.values[min(int(u * len(self.values)), len(self.values) - 1)]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "values": [plain(value) for value in self.values]}


@dataclass(frozen=True)
class Range:
    """Any value from `low` to `high`, both included."""

    name: str
    low: float
    high: float
    log: bool = False
    """Equal parts of the range are equal ratios, not equal differences."""
    whole: bool = False
    """Whole numbers only."""

    def at(self, u: float) -> float:
        """The value at a place of [0, 1); whole numbers have equal parts of it (of its logarithm)."""
        # A whole number stands for the numbers from itself up to the next.
        low, high = self.low, self.high + (1 if self.whole else 0)
        value = low * (high / low) ** u if self.log else low + (high - low) * u
        return min(math.floor(value), int(self.high)) if self.whole else min(value, self.high)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "low": self.low, "high": self.high, "log": self.log}


Parameter = Choice | Range


def read_parameters(texts: Iterable[str]) -> tuple[Parameter, ...]:
    """From `NAME=V1,V2` and `NAME=LOW..HIGH[:log]`. Raises UsageError."""
    return _distinct([_read(text) for text in texts])


def parameters_of(values: Mapping[str, Sequence[Any] | str]) -> tuple[Parameter, ...]:
    """From field -> values, or a text as on the command line. Raises UsageError."""
    return _distinct(
        [
            _read(f"{name}={given}") if isinstance(given, str) else _choice(name, f"{name}={given!r}", given)
            for name, given in values.items()
        ]
    )


def _distinct(parameters: list[Parameter]) -> tuple[Parameter, ...]:
    names = [parameter.name for parameter in parameters]
    for name in (name for name in names if names.count(name) > 1):
        raise UsageError(f"--param {name} is given {names.count(name)} times: give all its values at once")
    return tuple(parameters)


def _read(text: str) -> Parameter:
    name, equals, values = text.partition("=")
    if not (name and equals and values):
        raise UsageError(
            f"--param {text!r} must be NAME=V1,V2 or NAME=LOW..HIGH, for example max_num_seqs=64,128"
        )
    name = name.strip().removeprefix("--").replace("-", "_")
    if RANGE in values and name != WORKLOAD and {int, float} & kinds_of(name):
        return _range(name, text, values)
    return _choice(name, text, [_value(name, value) for value in _split(values)])


def _choice(name: str, text: str, values: Sequence[Any]) -> Choice:
    if not len(values):
        raise UsageError(f"--param {text}: must have a value")
    read = tuple(str(value) if name == WORKLOAD else parsed(name, value) for value in values)
    for value in (value for value in read if read.count(value) > 1):
        raise UsageError(f"--param {text}: {plain(value)} stands there {read.count(value)} times")
    return Choice(name, read)


def _value(name: str, text: str) -> Any:
    """`none` is a value of its own where the field may be without one."""
    return None if name != WORKLOAD and text == "none" and takes_none(name) else text


def _range(name: str, text: str, values: str) -> Range:
    log = values.endswith(LOG)
    low, _, high = values.removesuffix(LOG).partition(RANGE)
    bounds = [parsed(name, bound) for bound in (low, high)]
    if not (math.isfinite(bounds[0]) and math.isfinite(bounds[1]) and bounds[0] < bounds[1]):
        raise UsageError(f"--param {text}: LOW must be below HIGH, and both finite")
    if log and bounds[0] <= 0:
        raise UsageError(f"--param {text}: LOW must be above 0 with {LOG}")
    return Range(name, bounds[0], bounds[1], log, is_whole(name))


def _split(text: str) -> list[str]:
    """At commas, but for those inside brackets and quotes: a value may be JSON."""
    return ["".join(part).strip() for part in _parts(text)]


def _parts(text: str) -> Iterator[list[str]]:
    part: list[str] = []
    open_: list[str] = []
    quoted = False
    for letter in text:
        if letter == '"':
            quoted = not quoted
        elif not quoted and letter in _CLOSING:
            open_.append(_CLOSING[letter])
        elif not quoted and open_ and letter == open_[-1]:
            open_.pop()
        if letter == "," and not quoted and not open_:
            yield part
            part = []
        else:
            part.append(letter)
    yield part
