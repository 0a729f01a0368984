"""Whole numbers as people type them for vLLM: 32k, 25.6k, 2M."""

from __future__ import annotations

import re

_SUFFIXES: dict[str, int] = {
    "": 1,
    **{letter: 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{letter: 1024**power for power, letter in enumerate("KMGT", start=1)},
}
_NUMBER = re.compile(r"(-?\d+)(?:\.(\d+))?([kmgtKMGT]?)", re.ASCII)


def human_readable_int(text: str) -> int:
    """An integer as vLLM's parser takes it: 32k = 32,000; 32K = 32,768; 25.6k is legal, 25.6K is not.

    `_` and `,` between digits are passed over. Raises ValueError with what is allowed.
    """
    match = _NUMBER.fullmatch(text.replace("_", "").replace(",", ""))
    if match is None:
        raise ValueError(f"{text!r} is not a whole number (suffixes k m g t are decimal, K M G T binary)")
    whole, fraction, suffix = match.groups()
    if fraction is None:
        return int(whole) * _SUFFIXES[suffix]
    if suffix not in ("k", "m", "g", "t"):
        raise ValueError(
            f"{text!r} is not a whole number; a decimal point goes only with the suffixes k m g t"
        )
    return round(float(f"{whole}.{fraction}") * _SUFFIXES[suffix])
