"""What a report says: its targets, met or missed, and its rows as tables of plain text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_checks.report import ALL_OF_IT, ALL_THAT_FOLLOWS, Row

CHECKING = ("correctness", "steps")
"""The parts that check something: all of one, and the graphs of the other."""


@dataclass(frozen=True)
class Target:
    """A figure that every row it is about must reach; the worst one decides."""

    name: str
    part: str
    figure: str
    limit: float
    at_least: bool
    applies: Callable[[Row], bool]

    def judge(self, rows: Iterable[Row], left_out: Iterable[Row]) -> Row:
        """`result` is met, missed, incomplete (a row it is about has no figure, and no other misses), or not measured.

        `rows` counts those that have the figure, `missing` those that failed or were left out, the rest of a part that
        was cut off as one.
        """
        about = [row for row in rows if row["part"] == self.part and self.applies(row)]
        values = [row[self.figure] for row in about if self.figure in row]
        missing = len(about) - len(values) + sum(self._concerns(row) for row in left_out)
        verdict: Row = {"target": self.name, "limit": self.limit, "rows": len(values), "missing": missing}
        if values:
            verdict["worst"] = min(values) if self.at_least else max(values)
        return verdict | {"result": self._result(verdict.get("worst"), missing)}

    def _concerns(self, left_out: Row) -> bool:
        """Whether what was left out may hold a row that the target is about."""
        whole = left_out["name"] in (ALL_OF_IT, ALL_THAT_FOLLOWS)
        return left_out["part"] == self.part and (whole or self.applies(left_out))

    def _result(self, worst: float | None, missing: int) -> str:
        if worst is not None and (worst < self.limit if self.at_least else worst > self.limit):
            return "missed"
        if missing:
            return "incomplete"
        return "not measured" if worst is None else "met"


def _ours(row: Row) -> bool:
    return "peer" not in row


TARGETS = (
    Target(
        "decode, batch >= 32, context >= 1k: % of copy", "decode", "percent_of_copy", 70, True,
        lambda row: _ours(row) and row.get("batch", 0) >= 32 and row.get("context", 0) >= 1024,
    ),
    Target(
        "decode, batch 1 to 4, context 8k: % of copy", "decode", "percent_of_copy", 40, True,
        lambda row: _ours(row) and row.get("batch", 99) <= 4 and row.get("context") == 8192,
    ),
    Target(
        "prefill, 4k and more: % of matmul", "prefill", "percent_of_matmul", 45, True,
        lambda row: _ours(row) and row.get("chunk", 0) + row.get("context", 0) >= 4096,
    ),
    Target(
        "cache write: % of copy", "prefill", "percent_of_copy", 60, True,
        lambda row: row.get("tokens", 0) >= 4096,
    ),
    Target(
        "forward pass of a decode step, Llama-3.1-8B from graphs: x bound", "steps", "ratio", 1.15, False,
        lambda row: row.get("model") == "Llama-3.1-8B" and row.get("mode") == "graphs",
    ),
)  # fmt: skip
"""Of the issue that the kernels were built for; of a GPU only."""
CHECK_COLUMNS = ("part", "name", "difference", "limit", "ok")
COLUMNS = {
    "decode": ("name", "us", "gb_per_s", "percent_of_copy"),
    "steps": ("name", "graph_tokens", "prepare_us", "device_us", "forward_us", "bound_us", "ratio"),
    "prefill": ("name", "us", "tflop_per_s", "percent_of_matmul", "gb_per_s", "percent_of_copy"),
    "profile": ("name", "graph_tokens", "device_us", "device_us_p90", "prepare_us"),
}


def failures(content: Row) -> list[Row]:
    """What differs from its definition, what failed in any part, and parts that crashed or hung.

    Kernels of torch that ours stand beside may fail.
    """
    wrong = [row for row in content["rows"] if _ours(row) and ("error" in row or row.get("ok") is False)]
    return wrong + [row for row in content["left_out"] if row.get("failed")]


def not_run(content: Row, parts: Iterable[str]) -> list[str]:
    """The checks of these parts that have neither passed nor failed, but those that this device has no use for."""
    missing = []
    for part in CHECKING:
        if part in parts:
            names = content["checks"].get(part) or [ALL_OF_IT]
            settled = {row["name"] for row in content["rows"] if row["part"] == part}
            settled |= {
                row["name"]
                for row in content["left_out"]
                if row["part"] == part and row.get("applies") is False
            }
            missing += [f"{part}: {name}" for name in names if name not in settled]
    return missing


def show(content: Row) -> str:
    """The whole report as text."""
    rows = content["rows"]
    lines = [f"device: {content['device']} ({content['device_type']}), torch {content['versions']['torch']}"]
    lines += ["", "correctness", *_table([row for row in rows if "ok" in row], CHECK_COLUMNS)]
    for part, columns in COLUMNS.items():
        measured = [row for row in rows if row["part"] == part and not {"error", "ok"} & row.keys()]
        lines += ["", part, *_table(measured, columns)]
    for title, key, columns in (
        ("errors", "rows", ("part", "name", "error")),
        ("left out", "left_out", ("part", "name", "reason")),
        ("targets", "targets", ("target", "limit", "worst", "rows", "missing", "result")),
    ):
        listed = [row for row in content.get(key, []) if key != "rows" or "error" in row]
        lines += ["", title, *_table(listed, columns)]
    return "\n".join(lines)


def _table(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Numbers to the right, text to the left, nothing where a row has no such value."""
    if not rows:
        return ["  none"]
    cells = [list(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    numeric = [any(isinstance(row.get(column), int | float) for row in rows) for column in columns]
    return [
        "  " + "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    ]  # fmt: skip


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
