"""Values of sampling parameters as users give them (numpy numbers, tuples, JSON), brought to the types declared.

What is left at its default costs one look at its type: simulations make these parameters by the million.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MAX_INT = 2**63 - 1
"""Parameters travel to the engine as 64-bit numbers."""


def integer(name: str, value: object) -> int:
    """Raises ValueError for what is no whole number: floats and booleans are none."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if not -MAX_INT <= number <= MAX_INT:
        raise ValueError(f"{name} must fit into 64 bits, got {number}")
    return number


def number(name: str, value: object) -> float:
    """Raises ValueError for what is no number."""
    try:
        if isinstance(value, bool | str):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None


def boolean(name: str, value: object) -> bool:
    """Raises ValueError for everything but a boolean (numpy's included)."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def texts(name: str, value: object) -> list[str]:
    """A list of texts; a single one is no list."""
    listed = _listed(name, value, "texts")
    for index, text in enumerate(listed):
        if not isinstance(text, str):
            raise ValueError(f"{name}[{index}] must be a text, got {text!r}")
    return listed


def stop_strings(name: str, value: object) -> list[str]:
    """One text, or several."""
    return [value] if isinstance(value, str) else texts(name, value)


def integers(name: str, value: object) -> list[int]:
    return [integer(f"{name}[{i}]", x) for i, x in enumerate(_listed(name, value, "token ids"))]


def lists_of_integers(name: str, value: object) -> list[list[int]]:
    return [integers(f"{name}[{i}]", x) for i, x in enumerate(_listed(name, value, "lists of token ids"))]


def biases(name: str, value: object) -> dict[int, float]:
    """Token ids may be texts, as keys of JSON objects are."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict of token ids and numbers, got {value!r}")
    return {_key(name, key): number(f"{name}[{key}]", bias) for key, bias in value.items()}


def _key(name: str, key: object) -> int:
    return int(key) if isinstance(key, str) and key.isdecimal() else integer(f"{name}: a token id", key)


def _listed(name: str, value: object, of_what: str) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of {of_what}, got {value!r}")
    return list(value)


Converter = Callable[[str, object], Any]


def or_none(convert: Converter) -> Converter:
    return lambda name, value: None if value is None else convert(name, value)


def or_empty(convert: Converter) -> Converter:
    """None stands for an empty list, as in vLLM."""
    return lambda name, value: [] if value is None else convert(name, value)
