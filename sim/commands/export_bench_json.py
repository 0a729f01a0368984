"""`servetwin export bench-json`: a run as a result of `vllm bench serve`."""

from __future__ import annotations

from typing import Annotated

from servetwin.sim.commands.export_flags import CONTENT, FileFlags, RunPath, opened, wrote
from servetwin.sim.commands.flag_kinds import flag, switch

GOODPUT = ("ttft", "tpot", "e2el")


def bench_json(
    run: RunPath,
    /,
    *,
    file: FileFlags,
    metric_percentiles: Annotated[
        str, flag(CONTENT, "Percentiles of each latency, with commas: 50,90,99.9.")
    ] = "99",
    goodput: Annotated[
        tuple[str, ...],
        switch(
            CONTENT,
            "NAME:MS, several times: limits in ms for ttft, tpot or e2el; request_goodput counts requests within all "
            "(default: null).",
        ),
    ] = (),
    metadata: Annotated[
        tuple[str, ...], switch(CONTENT, "KEY=VALUE, several times: keys of the result beside the others.")
    ] = (),
    label: Annotated[str | None, flag(CONTENT, "The result's label (default: null).")] = None,
    detailed: Annotated[
        bool, flag(CONTENT, "The arrays with one entry a request (--no-detailed: scalars only).")
    ] = True,
) -> int:
    """Write it; the help is that of `export.COMMANDS`."""
    from servetwin.sim.export.bench_json import bench_json as pieces
    from servetwin.sim.export.writing import check_file, write

    percentiles, limits, keys = _percentiles(metric_percentiles), _goodput(goodput), _metadata(metadata)
    check_file(file.out, overwrite=file.overwrite)
    log = opened(run)
    result = pieces(
        log,
        percentiles=percentiles,
        goodput_ms=limits or None,
        metadata=keys,
        label=label,
        detailed=detailed,
    )
    write(file.out, result, overwrite=file.overwrite)
    return wrote(file, f"{len(log.requests):,} requests")


def _percentiles(text: str) -> list[float]:
    from servetwin.sim.commands.errors import UsageError

    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= p <= 100 for p in found):
        raise UsageError(
            f"--metric-percentiles {text!r}: must be numbers from 0 to 100 with commas between them"
        )
    return found


def _goodput(words: tuple[str, ...]) -> dict[str, float]:
    from servetwin.sim.commands.errors import UsageError

    limits = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in GOODPUT or not limit > 0:
            raise UsageError(
                f"--goodput {word!r}: must be NAME:MS, NAME one of {', '.join(GOODPUT)}, MS above 0"
            )
        limits[name] = limit
    return limits


def _metadata(words: tuple[str, ...]) -> dict[str, str]:
    from servetwin.sim.commands.errors import UsageError

    for word in words:
        if not word.partition("=")[0] or "=" not in word:
            raise UsageError(f"--metadata {word!r}: must be KEY=VALUE")
    return dict(word.split("=", 1) for word in words)
