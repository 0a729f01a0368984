"""Reads per-kernel times measured inside vLLM: folders of CSV tables in LLMServingSim's layout.

    attention.csv      prefill_chunk, kv_prefill, n_decode, kv_decode, time_us: one layer's attention call
    dense.csv          layer, tokens, time_us: one operator of one layer
    per_sequence.csv   layer (lm_head, sampler), sequences, time_us
    skew.csv[.gz]      optional: decode rows of unequal KV lengths
    meta.yaml          optional: card, model, versions, date, tensor_parallel_size (or tp_degrees, if of one number)

`kv_decode` is the length of every decode sequence. Tables may lack rows; what they hold must be positive and finite.
Source of the layout: casys-kaist/LLMServingSim, profiler bundles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
ATTENTION_AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


class TableError(ValueError):
    """A table that cannot be used; the message names file, row and field."""


@dataclass(frozen=True)
class KernelTables:
    """The tables of one folder, as they stand there."""

    path: str
    attention: pd.DataFrame
    """Columns `ATTENTION_AXES` (tokens, tokens, sequences, tokens) and `time_us` of one layer's call."""
    dense: Mapping[str, pd.DataFrame]
    """Operator -> columns `tokens`, `time_us`, by tokens."""
    per_sequence: Mapping[str, pd.DataFrame]
    """Operator -> columns `sequences`, `time_us`, by sequences."""
    skew: pd.DataFrame | None = None
    about: dict[str, Any] = field(default_factory=dict)
    """Card, model, versions and date, where the folder says them."""


def is_table_folder(path: str | Path) -> bool:
    """Whether there are tables of this layout."""
    return (Path(path) / "attention.csv").is_file() or (Path(path) / "attention.csv.gz").is_file()


def read_tables(folder: str | Path) -> KernelTables:
    """Raises TableError, OSError."""
    folder = Path(folder)
    attention = _read(folder, "attention", ATTENTION_AXES)
    dense, sequences = _read(folder, "dense", ("tokens",), "layer"), None
    if _file(folder, "per_sequence") is not None:
        sequences = _read(folder, "per_sequence", ("sequences",), "layer")
    return KernelTables(
        path=str(folder),
        attention=attention,
        dense=_by_layer(dense, "tokens"),
        per_sequence={} if sequences is None else _by_layer(sequences, "sequences"),
        skew=_read_skew(folder),
        about=_read_meta(folder),
    )


def _file(folder: Path, name: str) -> Path | None:
    candidates = (folder / f"{name}.csv", folder / f"{name}.csv.gz")
    return next((path for path in candidates if path.is_file()), None)


def _read(folder: Path, name: str, axes: tuple[str, ...], key: str | None = None) -> pd.DataFrame:
    path = _file(folder, name)
    if path is None:
        raise TableError(f"{folder}: there is no {name}.csv")
    frame = _csv(path)
    wanted = [*axes, "time_us"]
    for column in [*([key] if key else []), *wanted]:
        if column not in frame.columns:
            raise TableError(
                f"{path}: there is no column {column!r}; columns are {', '.join(map(str, frame.columns))}"
            )
    for column in wanted:
        frame[column] = _numbers(path, frame, column, above_zero=column == "time_us")
    if frame.empty:
        raise TableError(f"{path}: there are no rows")
    columns = [*([key] if key else []), *axes]
    # Measured more than once: the median, as for repetitions of one measurement.
    return frame.groupby(columns, sort=False)[["time_us"]].median().reset_index()


def _csv(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        return pd.read_csv(path)
    except (ValueError, UnicodeDecodeError) as e:
        raise TableError(f"{path}: is not a CSV table ({str(e).splitlines()[0]})") from e


def _numbers(path: Path, frame: pd.DataFrame, column: str, *, above_zero: bool) -> Floats:
    import pandas as pd

    numbers = pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=np.float64)
    bad = ~np.isfinite(numbers) | (numbers <= 0 if above_zero else numbers < 0)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        allowed = "above 0" if above_zero else "0 or more"
        raise TableError(
            f"{path}, row {row + 1}: {column} {frame[column].iloc[row]!r} must be a number, {allowed}"
        )
    return numbers


def _by_layer(frame: pd.DataFrame, axis: str) -> dict[str, pd.DataFrame]:
    return {
        str(layer): rows[[axis, "time_us"]].sort_values(axis).reset_index(drop=True)
        for layer, rows in frame.groupby("layer", sort=False)
    }


def _read_skew(folder: Path) -> pd.DataFrame | None:
    path = _file(folder, "skew")
    if path is None:
        return None
    frame = _csv(path)
    for column in ("n", "ratio", "pc", "alpha"):
        if column not in frame.columns:
            raise TableError(f"{path}: there is no column {column!r}")
    # Where mean and longest take the same time, alpha is not defined.
    defined = np.isfinite(frame[["n", "ratio", "pc", "alpha"]].to_numpy(dtype=np.float64)).all(axis=1)
    usable: pd.DataFrame = frame.loc[defined].reset_index(drop=True)
    return usable


def _read_meta(folder: Path) -> dict[str, Any]:
    import yaml

    path = folder / "meta.yaml"
    if not path.is_file():
        return {}
    try:
        meta = yaml.safe_load(path.read_text())
    except yaml.YAMLError as e:
        raise TableError(f"{path}: is not YAML ({str(e).splitlines()[0]})") from e
    if not isinstance(meta, dict):
        raise TableError(f"{path}: must be a mapping")
    names = (
        "gpu",
        "hardware",
        "model",
        "architecture",
        "vllm_version",
        "cuda_version",
        "profiled_at",
        "variant",
    )
    found: dict[str, Any] = {name: str(meta[name]) for name in names if name in meta}
    cards = _measured_cards(path, meta)
    return found if cards == 1 else found | {"tensor_parallel_size": cards}


def _measured_cards(path: Path, meta: dict[str, Any]) -> int:
    """Cards that shared the measured layers. Degrees of a whole bundle do not say which one this folder is: one."""
    degrees = meta.get("tp_degrees")
    only = degrees[0] if isinstance(degrees, list) and len(degrees) == 1 else 1
    cards = meta.get("tensor_parallel_size", only)
    if not isinstance(cards, int) or isinstance(cards, bool) or cards < 1:
        raise TableError(f"{path}: tensor_parallel_size {cards!r} must be a whole number, 1 or more")
    return cards
