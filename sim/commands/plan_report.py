"""The answer of `servetwin plan` for people."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isfinite
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from servetwin.sim.cluster.config import DEFAULT_ROUTER
from servetwin.sim.commands.run_fields import plain
from servetwin.sim.planning.answer import Plan, Row, curve
from servetwin.sim.planning.capacity import Capacity, nearest
from servetwin.sim.planning.pressure import BUDGET
from servetwin.sim.planning.probing import Measured
from servetwin.sim.planning.slo import METRICS, Slo

ALL_AT_ONCE = "all at once"


def probe_line(run: Measured) -> str:
    """One run, in one line."""
    slo_values = ", ".join(f"{n.upper()} {_ms(v)}" for n, v in run.values.items() if v is not None)
    if run.rate == inf:
        served = run.steady.saturated_rate
        told = "too few had to wait to tell what can be served"
        if served is not None:
            told = f"{_rate(served)} served while others wait"
        return f"{ALL_AT_ONCE}, seed {run.seed}: {told}"
    ended = f", {run.ended_early}" if run.ended_early else ""
    good = "good" if run.outcome.margin >= 0 else "too much"
    return f"{_rate(run.rate)}, seed {run.seed}: {good}; {run.verdict}{ended}; {slo_values} ms"


def report(found: Plan) -> Iterator[RenderableType]:
    """Table of the configurations, then the best one at length."""
    yield _table(found)
    best = found.best
    if best is None:
        yield from _infeasible(found)
        return
    assert best.capacity is not None
    yield ""
    yield Text("\n".join(_told(found, best, best.capacity)))
    yield ""
    yield _curve_table(best.capacity)
    yield Text("\n".join(_footnotes(found, best, best.capacity)), style="dim")
    yield ""
    if best.capacity.replicas > 1:
        yield Text(f"{best.capacity.replicas} of these, behind a router ({router_of(best.capacity)}):")
    yield Text(best.line, no_wrap=True, overflow="ignore")


def router_of(capacity: Capacity) -> str:
    """Who spreads the requests."""
    return str(capacity.spec["router"] or DEFAULT_ROUTER)


def _table(found: Plan) -> Table:
    """One row a configuration; columns that would be the same for every small question are left out."""
    table = _narrow_table(
        found.question.slo.words(), "GPU-h/M, $/M: for a million output tokens at that load"
    )
    cells = [_cells(row) for row in found.rows]
    is_alone = {"replicas": "1", "GPUs": "1", "$/M": "", "$/h": ""}
    shown = [t for t in TITLES if t not in is_alone or any(c[t] not in (is_alone[t], "") for c in cells)]
    for name in found.question.vary:
        table.add_column(name, no_wrap=True)
    for title in shown:
        table.add_column(title, justify="left" if title == "bound by" else "right", no_wrap=True)
    for row, cell in zip(found.rows, cells, strict=True):
        chosen = [str(plain(value)) for value in row.settings.values()]
        style = "bold" if row is found.best and len(found.rows) > 1 else None
        table.add_row(*chosen, *(cell[title] for title in shown), style=style)
    return table


def _narrow_table(title: str, caption: str | None = None) -> Table:
    """Columns with one space between them: many fit into 80."""
    return Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0),
        pad_edge=False,
    )


TITLES = ("req/s", "replicas", "GPUs", "headroom", "GPU-h/M", "$/M", "$/h", "runs", "bound by")


def _cells(row: Row) -> dict[str, str]:
    """Title -> what stands there."""
    capacity, cost = row.capacity, row.cost
    if capacity is None:
        return dict.fromkeys(TITLES, "") | {"bound by": "does not fit"}
    cells = {
        "req/s": "none" if capacity.rate is None else _number(capacity.rate),
        "replicas": str(capacity.replicas),
        "GPUs": f"{capacity.gpus:.4g}",
        "headroom": "" if capacity.headroom is None else f"{100 * capacity.headroom:.0f} %",
        "runs": str(capacity.simulations),
        "bound by": capacity.binding,
    }
    if cost is None:
        return dict.fromkeys(TITLES, "") | cells
    per_s = cost.output_tokens_per_s
    return cells | {
        "GPU-h/M": _or_blank(cost.gpu_hours_per_million(per_s)),
        "$/M": _or_blank(cost.usd_per_million(per_s)),
        "$/h": _or_blank(cost.usd_per_hour),
    }


def _told(found: Plan, row: Row, capacity: Capacity) -> Iterator[str]:
    limit, question = capacity.limit, found.question
    assert capacity.rate is not None
    chosen = ", ".join(f"{name} {plain(value)}" for name, value in row.settings.items())
    if chosen:
        yield f"best          {chosen} ({_criterion(found)})"
    if question.target_rate is not None:
        yield f"replicas      {capacity.replicas} for {_rate(capacity.rate)}"
    else:
        yield f"load          {_rate(capacity.rate)}{_bounds(capacity)}"
    if capacity.knee is not None and capacity.headroom is not None:
        yield (
            f"headroom      {100 * capacity.headroom:.0f} % to the knee: {_rate(capacity.knee)} are served when all "
            "come at once"
        )
    else:
        yield (
            "headroom      not known: with all requests at once nobody waits long enough to tell what is served then "
            "(more of them: --num-prompts)"
        )
    yield f"bound by      {capacity.binding}: {capacity.reason}"
    if limit is not None and not limit.is_monotone:
        rates = ", ".join(_number(rate) for rate in limit.good_above)
        yield (
            f"not monotone  here: {rates} requests/s are good, though {_rate(limit.upper or 0.0)} are not; the answer "
            "is the end of the first good stretch"
        )
    if limit is not None and not limit.converged:
        yield (
            f"not settled   after {capacity.simulations} runs: the limit lies between {_number(capacity.rate)} and "
            f"{_number(limit.upper or inf)} (--max-simulations)"
        )
    yield f"step times    {_error(found)}"


def _criterion(found: Plan) -> str:
    return "most requests per USD" if found.by_price else "most requests/s per GPU"


def _bounds(capacity: Capacity) -> str:
    limit = capacity.limit
    if limit is None or limit.upper is None:
        return ""
    said = f"; {_number(limit.upper)} are too many"
    if limit.interval is not None:
        said += f"; 95 % interval {_number(limit.interval[0])} to {_number(limit.interval[1])}"
    return said


def _error(found: Plan) -> str:
    if found.error is None:
        return "no test of them is known, so their error is not propagated (--step-time-error PERCENT)"
    if found.question.target_rate is not None:
        return f"may be {100 * found.error:.0f} % off, which is propagated to a largest load only (no --target-rate)"
    slow, fast = (_number(rate) if rate is not None else "none" for rate in found.rate_interval)
    return (
        f"may be {100 * found.error:.0f} % off: {slow} requests/s if all were that much longer, {fast} if shorter "
        f"({found.error_simulations} more runs)"
    )


def _curve_table(capacity: Capacity) -> Table:
    slo, rows = capacity.slo, curve(capacity)
    table = _narrow_table(
        f"P{slo.percentile:g} in ms against the load (95 % interval)",
        "in %: share of requests within all limits; redo %: tokens that were computed again; waits: what most of the "
        "waiting was for; LIMIT: the answer; over: too much; KNEE: the first load beyond what can be served; cut: not "
        "all had an answer",
    )
    preempted = any(row["preemptions"] for row in rows)
    several = len({row["replicas"] for row in rows}) > 1
    if several:
        table.add_column("repl.", justify="right", no_wrap=True)
    table.add_column("req/s", justify="right", no_wrap=True)
    for name in METRICS:
        table.add_column(name.upper(), justify="right", no_wrap=True)
    if slo.limits_ms:
        table.add_column("in %", justify="right", no_wrap=True)
    if preempted:
        table.add_column("redo %", justify="right", no_wrap=True)
    table.add_column("waits", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        cells = [str(row["replicas"])] if several else []
        cells += [_number(row["rate"]), *(_latency(row, name, slo) for name in METRICS)]
        if slo.limits_ms:
            cells.append("" if row["attained"] is None else f"{100 * row['attained']:.1f}")
        if preempted:
            cells.append(f"{100 * (row['recomputed_fraction'] or 0):.1f}")
        mark = {"limit": " LIMIT", "knee": " KNEE", None: "" if row["good"] else " over"}[row["mark"]]
        waits_for = {None: "-", BUDGET: "tokens"}.get(row["waits_for"], row["waits_for"])
        table.add_row(*cells, waits_for, row["verdict"] + mark)
    return table


def _latency(row: dict[str, Any], name: str, slo: Slo) -> str:
    value, between = row[f"{name}_ms"], row[f"{name}_ms_interval"]
    if value is None:
        return "cut"
    shown = _ms(value)
    if between is None or name not in slo.limits_ms:
        return shown
    low, high = map(_ms, between)
    return shown if low == high == shown else f"{shown} ({low}-{high})"


def _footnotes(found: Plan, row: Row, capacity: Capacity) -> Iterator[str]:
    run = capacity.at_limit
    if run is not None:
        window = run.steady.window
        settled = "" if run.steady.has_settled else " (no steady part was found: the second half of the run)"
        yield (
            f"measured at the limit: requests sent from {window.start_ns / 1e9:.4g} s to {window.end_ns / 1e9:.4g} s "
            f"of the run{settled}, {run.requests:,} requests in all"
        )
        for note in run.notes:
            yield told_note(note)
    for note in capacity.notes:
        yield f"note: {note}"
    for text in row.unsaid:
        yield f"not in the line below: {text}"


def told_note(note: str) -> str:
    """As a line of its own."""
    return note if note.startswith(("assumed: ", "note: ")) else f"note: {note}"


def _infeasible(found: Plan) -> Iterator[RenderableType]:
    lines = []
    for row in found.rows:
        chosen = ", ".join(f"{name} {plain(value)}" for name, value in row.settings.items())
        where = f"{chosen}: " if chosen else ""
        if row.capacity is None:
            lines.append(f"{where}{row.problem}")
            continue
        point = nearest(row.capacity)
        values = ", ".join(
            f"{name.upper()} {'unknown' if (v := point[f'{name}_ms']) is None else _ms(v) + ' ms'} against {limit:g} ms"
            for name, limit in row.capacity.slo.limits_ms.items()
        )
        of = f" with {point['replicas']} replicas" if point["replicas"] > 1 else ""
        lines.append(
            f"{where}not feasible; nearest{' that is' if point['good'] else ''}: {_rate(point['rate'])}{of}: "
            f"{values or 'the queue grows without bound'}; bound by {row.capacity.binding}"
        )
    yield Text("\n".join(lines))


def _rate(value: float) -> str:
    return f"{_number(value)} requests/s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _ms(value: float) -> str:
    """Three digits or more; thousands of ms as k where they are many."""
    if not isfinite(value):
        return "inf"
    if value >= 10_000:
        return f"{value / 1000:,.1f}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _or_blank(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
