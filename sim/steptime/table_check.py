"""How well fitted tables foretell rows that they were not fitted to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.steptime.attention_times import REGIMES, AttentionTimes, regimes
from servetwin.sim.steptime.errors import Errors
from servetwin.sim.steptime.kernel_model import ONCE, TIMES_A_LAYER
from servetwin.sim.steptime.kernel_tables import ATTENTION_AXES, KernelTables, TableError
from servetwin.sim.steptime.staircase import Staircase

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
PHASES = 4
EVERY_FOURTH = "every 4th row"
"""The worst of the four places to begin at."""


@dataclass(frozen=True)
class TableCheck:
    """One way of leaving rows out."""

    name: str
    what: str
    errors: Errors
    physical: Errors | None = None
    """Of the physical model alone, which a fit without interpolation would be."""

    def to_json(self) -> dict[str, Any]:
        return {
            "check": self.name,
            "of": self.what,
            **self.errors.to_json(),
            "physical_mape_percent": None if self.physical is None else self.physical.mape,
        }


def check_tables(tables: KernelTables) -> list[TableCheck]:
    """Every fourth row left out (worst of four phases), whole lines of chunk sizes left out, dense operators."""
    return [*_attention(tables.attention), *_dense(tables)]


def _attention(rows: pd.DataFrame) -> Iterator[TableCheck]:
    place = np.arange(len(rows)) % PHASES
    phases = [_left_out(rows, place == phase) for phase in range(PHASES)]
    worst = max((p for p in phases if p), key=lambda p: _mape(p, lambda kind: True), default=None)
    if worst is None:
        return
    yield _checked(EVERY_FOURTH, "attention", worst, lambda kind: True)
    for regime in REGIMES:
        yield from _if_any(_regime_check(phases, regime))
    sizes = np.unique(rows["prefill_chunk"])
    lines = [_left_out(rows, (rows["prefill_chunk"] == size).to_numpy()) for size in sizes[2:-1]]
    for size, line in zip(sizes[2:-1], lines, strict=True):
        if line is not None:
            yield _checked(f"chunks of {size:g} tokens", "attention", line, lambda kind: True)


@dataclass(frozen=True)
class _LeftOut:
    kinds: NDArray[np.str_]
    measured: Floats
    foretold: Floats
    physical: Floats


def _left_out(rows: pd.DataFrame, left_out: Bools) -> _LeftOut | None:
    """The rows left out, foretold by a fit to the others; None where that fit is impossible."""
    points = rows.loc[left_out, list(ATTENTION_AXES)].to_numpy(dtype=np.float64)
    if not len(points):
        return None
    try:
        times = AttentionTimes(rows[~left_out])
    except TableError:
        return None
    measured = rows.loc[left_out, "time_us"].to_numpy(dtype=np.float64)
    return _LeftOut(regimes(points), measured, times(*points.T), times.physical_us(points))


def _mape(rows: _LeftOut, chosen: Callable[[str], bool]) -> float:
    where = np.array([chosen(kind) for kind in rows.kinds])
    return float(np.abs(rows.foretold[where] / rows.measured[where] - 1).mean()) if where.any() else 0.0


def _regime_check(phases: list[_LeftOut | None], regime: str) -> TableCheck | None:
    def chosen(kind: str) -> bool:
        return kind == regime

    some = [p for p in phases if p is not None and (p.kinds == regime).any()]
    if not some:
        return None
    worst = max(some, key=lambda p: _mape(p, chosen))
    return _checked(EVERY_FOURTH, f"{regime} attention", worst, chosen)


def _checked(name: str, what: str, rows: _LeftOut, chosen: Callable[[str], bool]) -> TableCheck:
    where = np.array([chosen(kind) for kind in rows.kinds])
    errors = Errors.of(rows.foretold[where], rows.measured[where])
    assert errors is not None, "chosen where there are rows"
    return TableCheck(name, what, errors, Errors.of(rows.physical[where], rows.measured[where]))


def _if_any(check: TableCheck | None) -> Iterator[TableCheck]:
    if check is not None:
        yield check


def _dense(tables: KernelTables) -> Iterator[TableCheck]:
    """Operators one by one, and all of a layer together: what a step is made of."""
    phases = [_dense_phase(tables, phase) for phase in range(PHASES)]
    for what in ("dense, each", "dense, all of a layer"):
        errors = [phase[what] for phase in phases if what in phase]
        if errors:
            worst = max(errors, key=lambda e: e.mape)
            yield TableCheck(EVERY_FOURTH, what, worst)


def _dense_phase(tables: KernelTables, phase: int) -> dict[str, Errors]:
    each: list[tuple[Floats, Floats]] = []
    together: dict[float, list[float]] = {}
    for name, rows in tables.dense.items():
        tokens, times = (rows[c].to_numpy(dtype=np.float64) for c in ("tokens", "time_us"))
        left_out = np.arange(len(rows)) % PHASES == phase
        if left_out.all() or not left_out.any():
            continue
        foretold = Staircase(tokens[~left_out], times[~left_out])(tokens[left_out])
        each.append((foretold, times[left_out]))
        if name not in ONCE:
            calls = TIMES_A_LAYER.get(name, 1)
            for count, ours, theirs in zip(tokens[left_out], foretold, times[left_out], strict=True):
                pair = together.setdefault(float(count), [0.0, 0.0])
                pair[0] += calls * ours
                pair[1] += calls * theirs
    return _both(each, together)


def _both(each: list[tuple[Floats, Floats]], together: dict[float, list[float]]) -> dict[str, Errors]:
    found = {}
    if each:
        found["dense, each"] = Errors.of(*(np.concatenate(part) for part in zip(*each, strict=True)))
    if together:
        sums = np.array(list(together.values()))
        found["dense, all of a layer"] = Errors.of(sums[:, 0], sums[:, 1])
    return {what: errors for what, errors in found.items() if errors is not None}
