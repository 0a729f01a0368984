"""Azure LLM inference traces of 2023, 2024 and 2025: csv with TIMESTAMP, ContextTokens, GeneratedTokens.

2023: naive times with 7 fraction digits. 2024: the offset +00:00, up to 6 fraction digits, none at all where
the fraction is zero. 2025 (multimodal): a `T`, milliseconds, `Z`, and a column NumImages, whose tokens are counted in
ContextTokens. Naive times are taken as UTC. Source: github.com/Azure/AzurePublicDataset.
"""

from __future__ import annotations

from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.traces.csv_rows import COUNT, DATE, Column, each_batch
from servetwin.workloads.traces.source import Head
from servetwin.workloads.traces.trace import Reading, TraceFormat

COLUMNS = (Column("TIMESTAMP", DATE), Column("ContextTokens", COUNT), Column("GeneratedTokens", COUNT))
HEADERS = ("TIMESTAMP,ContextTokens,GeneratedTokens", "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens")


def _read(reading: Reading) -> None:
    header = ",".join(reading.source.head.columns)
    if header not in HEADERS:
        raise WorkloadError(
            f"{reading.source.path}: header {header!r}: must be {' or '.join(map(repr, HEADERS))}"
        )
    for batch in each_batch(reading.source, reading.rows, COLUMNS):
        reading.rows.extend(
            batch.numbers,
            arrival_ns=batch["TIMESTAMP"],
            prompt_tokens=batch["ContextTokens"],
            output_tokens=batch["GeneratedTokens"],
        )


def _matches(head: Head) -> bool:
    return head.columns[:1] == ("TIMESTAMP",)


FORMAT = TraceFormat(
    name="azure",
    looks_like=f"csv with the header {HEADERS[0]}, 2025 with NumImages",
    matches=_matches,
    read=_read,
)
