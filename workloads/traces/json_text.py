"""JSON as tools write it: with NaN and Infinity, which the standard does not have and Python's own json writes."""

from __future__ import annotations

import json
from typing import Any

import orjson

CONSTANTS = ("NaN", "Infinity")


def parse_json(text: str) -> Any:
    """The value of a JSON text; NaN and Infinity become floats that are not finite, which no field that is read takes.

    Raises json.JSONDecodeError for everything else that is not JSON.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        if not any(constant in text for constant in CONSTANTS):
            raise
        return _lenient(text)


def _lenient(text: str) -> Any:
    try:
        value = json.loads(text)
        # What Python's json takes beyond the constants, such as halves of characters, orjson does not write.
        orjson.dumps(value)
    except json.JSONDecodeError:
        raise
    except (ValueError, TypeError, RecursionError) as e:
        raise json.JSONDecodeError(str(e), text, 0) from e
    return value
