"""What a report says: its targets, met or missed, and its rows as tables of plain text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A figure that every row it is about must reach; the worst one decides."""

    name: str
    part: str
    figure: str
    limit: float
    at_least: bool
    applies: Callable[[Row], bool]

    def judge(self, rows: Iterable[Row]) -> Row:
        """`result` is met, missed, or not measured."""
        worst = min if self.at_least else max
        found = [row for row in rows if row["part"] == self.part and self.figure in row and self.applies(row)]
        verdict: Row = {"target": self.name, "limit": self.limit, "rows": len(found)}
        if not found:
            return verdict | {"result": "not measured"}
        value = worst(row[self.figure] for row in found)
        met = value >= self.limit if self.at_least else value <= self.limit
        return verdict | {"worst": value, "result": "met" if met else "missed"}


def _ours(row: Row) -> bool:
    return "peer" not in row


TARGETS = (
    Target(
        "decode, batch >= 32, context >= 1k: % of copy", "decode", "percent_of_copy", 70, True,
        lambda row: _ours(row) and row.get("batch", 0) >= 32 and row["context"] >= 1024,
    ),
    Target(
        "decode, batch 1 to 4, context 8k: % of copy", "decode", "percent_of_copy", 40, True,
        lambda row: _ours(row) and row.get("batch", 99) <= 4 and row["context"] == 8192,
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
        lambda row: row["model"] == "Llama-3.1-8B" and row["mode"] == "graphs",
    ),
)  # fmt: skip
"""Of the issue that the kernels were built for; of a GPU only."""
COLUMNS = {
    "correctness": ("name", "difference", "limit", "ok"),
    "decode": ("name", "us", "gb_per_s", "percent_of_copy"),
    "steps": ("name", "graph_tokens", "prepare_us", "device_us", "forward_us", "bound_us", "ratio"),
    "prefill": ("name", "us", "tflop_per_s", "percent_of_matmul", "gb_per_s", "percent_of_copy"),
    "profile": ("name", "graph_tokens", "device_us", "device_us_p90", "prepare_us"),
}


def failures(rows: Iterable[Row]) -> list[Row]:
    """Rows of the part `correctness` that differ or that did not run."""
    return [row for row in rows if row["part"] == "correctness" and row.get("ok") is not True]


def show(content: dict[str, Any]) -> str:
    """The whole report as text."""
    rows = content.get("rows", [])
    lines = [f"device: {content['device']} ({content['device_type']}), torch {content['versions']['torch']}"]
    for part, columns in COLUMNS.items():
        measured = [row for row in rows if row["part"] == part and "error" not in row]
        lines += ["", part, *_table(measured, columns)]
    for title, key, columns in (
        ("errors", "rows", ("part", "name", "error")),
        ("left out", "left_out", ("part", "name", "reason")),
        ("targets", "targets", ("target", "limit", "worst", "rows", "result")),
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
