"""Collects the rows of a trace and keeps account of them: read = emitted + dropped by named reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.columns import REQUEST_FIELDS, RequestColumns, column_array, concatenated
from servetwin.workloads.spec import RequestSpec, WorkloadError
from servetwin.workloads.traces.options import Tolerance
from servetwin.workloads.traces.values import Damage, Useless

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 32_768
OFFENCES_SHOWN = 5
"""Rows that are kept as examples of each reason."""

EPOCH_FROM_S, RELATIVE_BELOW_S = 1e9, 1e8
"""Times from the first on (September 2001) are since 1970; below the second (three years) they are since a start."""

ZERO_PROMPT, ZERO_OUTPUT = "zero prompt tokens", "zero output tokens"
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Offence:
    """A row that was dropped."""

    row: int
    """1-based data row (a header is not one)."""
    reason: str
    detail: str
    """Field, value and what is allowed, where the row is damaged; else the reason again."""


class Rows:
    """What a reader fills.

    A damaged row is refused or dropped as `tolerance` says; what is emitted holds the invariants of RequestSpec.
    Times are either all `arrival_ns`, of a foreign clock (made relative to the earliest at the end), or all
    `arrival_s`, which stand as they are.
    """

    def __init__(self, path: str, tolerance: Tolerance) -> None:
        self.path = path
        self.tolerance = tolerance
        self.read = 0
        self.dropped: Counter[str] = Counter()
        self.unwanted: set[str] = set()
        """Reasons that are wishes of the user."""
        self.offences: list[Offence] = []
        self._shown: Counter[str] = Counter()
        self._pieces: list[Mapping[str, pa.Array]] = []
        self._columns: dict[str, list[Any]] = {}
        self._pending = 0

    # ------------------------------------------------------------ one row

    @contextmanager
    def row(self, number: int) -> Iterator[None]:
        """Reading of one row; what it raises as Damage or Useless is accounted for."""
        self.read += 1
        try:
            yield
        except Damage as e:
            self.read -= 1
            self.damaged(number, e)
        except Useless as e:
            self._drop(number, e.reason, e.reason, Tolerance.STRICT)
        except WorkloadError as e:
            self._drop(number, "damaged: request", str(e), Tolerance.NORMAL)

    def damaged(self, number: int, damage: Damage) -> None:
        """A row that cannot be what it says."""
        self.read += 1
        self._drop(number, f"damaged: {damage.field}", str(damage), Tolerance.NORMAL)

    def add(self, number: int, *, prompt_tokens: int, output_tokens: int, **columns: Any) -> None:
        """Emits a request. Raises Useless for one without tokens; other columns as RequestSpec has them."""
        if prompt_tokens == 0:
            raise Useless(ZERO_PROMPT)
        if output_tokens == 0:
            raise Useless(ZERO_OUTPUT)
        columns |= {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "source_row": number}
        self._append(columns)

    def add_request(self, spec: RequestSpec) -> None:
        """Emits a request as it is, its source row included."""
        self._append({name: getattr(spec, name) for name in REQUEST_FIELDS})

    def not_asked_for(self, numbers: Sequence[int], reason: str) -> None:
        """Rows, counted as read, that the user wanted left out: counted, and no offence in a strict reading."""
        for number in numbers[: OFFENCES_SHOWN - self._shown[reason]]:
            self._show(number, reason, reason)
        if numbers:
            self.dropped[reason] += len(numbers)
            self.unwanted.add(reason)

    def skip(self, number: int, reason: str) -> None:
        """A row that is read and not emitted, for the named reason."""
        with self.row(number):
            raise Useless(reason)

    # ------------------------------------------------------------ many rows

    def extend(
        self,
        numbers: IntArray,
        *,
        prompt_tokens: IntArray,
        output_tokens: IntArray,
        useless: Mapping[str, BoolArray] | None = None,
        **columns: NDArray[Any] | list[Any],
    ) -> None:
        """Emits requests with these row numbers, but for those that are without use for one of the named reasons."""
        self.read += len(numbers)
        reasons = dict(useless or {}) | {ZERO_PROMPT: prompt_tokens == 0, ZERO_OUTPUT: output_tokens == 0}
        kept = np.ones(len(numbers), dtype=np.bool_)
        for reason, where in reasons.items():
            for number in numbers[kept & where].tolist():
                self._drop(number, reason, reason, Tolerance.STRICT)
            kept &= ~where
        columns |= {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "source_row": numbers}
        self._flush()
        if kept.any():
            self._pieces.append({name: _array(name, values, kept) for name, values in columns.items()})

    # ------------------------------------------------------------ the end

    def requests(self) -> RequestColumns:
        """All that was emitted, in order of arrival (ties as in the file)."""
        self._flush()
        table = concatenated(self._pieces)
        self._pieces = []
        if not table.num_rows:
            raise WorkloadError(f"{self.path}: {self._nothing()}")
        if "arrival_ns" in table.column_names:
            self._check_one_origin(table["arrival_ns"].to_numpy() / 1e9)
            table = _with_relative_times(table)
        return RequestColumns(table).in_order_of_arrival()

    def _check_one_origin(self, times_s: NDArray[np.float64]) -> None:
        """Times since 1970 among times since some start would make a run of decades out of one of minutes."""
        since_a_start, since_1970 = times_s[times_s < RELATIVE_BELOW_S], times_s[times_s >= EPOCH_FROM_S]
        if since_a_start.size and since_1970.size:
            found = " and ".join(map(_range, (since_a_start, since_1970)))
            raise WorkloadError(f"{self.path}: has times of two origins: {found}")

    def _nothing(self) -> str:
        if not self.read:
            return "has a header but no rows"
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        # What would mend one of them, such as another unit or block size, may mend all.
        first = next((f"; row {o.row}: {o.detail}" for o in self.offences if o.detail != o.reason), "")
        return f"none of its {self.read} rows can be used ({reasons}){first}"

    def _append(self, columns: dict[str, Any]) -> None:
        for name, value in columns.items():
            if value is None:
                continue
            column = self._columns.setdefault(name, [])
            column += [None] * (self._pending - len(column))
            column.append(value)
        self._pending += 1
        if self._pending == BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        for column in self._columns.values():
            column += [None] * (self._pending - len(column))
        self._pieces.append({name: _array(name, values) for name, values in self._columns.items()})
        self._columns, self._pending = {}, 0

    def _drop(self, number: int, reason: str, detail: str, refused_from: Tolerance) -> None:
        if self.tolerance >= refused_from:
            raise WorkloadError(f"{self.path}: row {number}: {detail}")
        self.dropped[reason] += 1
        if self._shown[reason] < OFFENCES_SHOWN:
            self._show(number, reason, detail)

    def _show(self, number: int, reason: str, detail: str) -> None:
        self._shown[reason] += 1
        self.offences.append(Offence(number, reason, detail))


def _array(name: str, values: NDArray[Any] | list[Any], kept: BoolArray | None = None) -> pa.Array:
    import pyarrow as pa

    array = pa.array(values, type=pa.int64()) if name == "arrival_ns" else column_array(name, values)
    return array if kept is None or kept.all() else array.filter(pa.array(kept))


def _range(times_s: NDArray[np.float64]) -> str:
    return f"arrival from {times_s.min():,.9g} to {times_s.max():,.9g} s ({times_s.size} rows)"


def _with_relative_times(table: pa.Table) -> pa.Table:
    """`arrival_s` in the place of `arrival_ns`: correctly rounded, so that rounding back to ns is exact for 26 days."""
    import pyarrow as pa

    ns = table["arrival_ns"].to_numpy()
    place = table.column_names.index("arrival_ns")
    return table.set_column(place, "arrival_s", pa.array((ns - ns.min()) / 1_000_000_000))
