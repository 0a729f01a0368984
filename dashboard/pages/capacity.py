"""What the engine can take and what it costs: answers of `servetwin plan`, tables of `servetwin sweep`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from servetwin.dashboard.capacity import (
    configurations,
    failures,
    frontier,
    lower_is_better,
    read_plan,
    results_of,
    setting_text,
    with_cost,
)
from servetwin.dashboard.charts import capacity as charts
from servetwin.dashboard.state import State, keep
from servetwin.dashboard.words import percent, quantity
from servetwin.sim.metric_names import RUN_FIGURES
from servetwin.sim.planning.results import RESULTS, Results, by_point, read_results

FOUND_TTL_S = 5.0
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
PREFERRED = ("p99_ttft_ms", "output_throughput")
UNITS = {**RUN_FIGURES, "usd_per_hour": "USD/h", "usd_per_million_output_tokens": "USD"}
UNITS |= {"request_rate": "requests/s", "max_request_rate": "requests/s"}
UNITS |= {"gpu_hours_per_million_requests": "GPU h"}
UNITS = {name: unit for name, unit in UNITS.items() if unit != "1"}


@st.cache_data(ttl=FOUND_TTL_S, show_spinner=False)
def _found(folders: tuple[Path, ...]) -> list[Path]:
    return results_of(folders)


def page(state: State) -> None:
    found = {str(path): path for path in _found(state.folders)}
    if not found:
        st.info(
            "No results are in these folders. `servetwin sweep WORKLOAD --param max_num_seqs=64,128 --out DIR` writes "
            "a table of runs, `servetwin plan WORKLOAD --ttft 500 --json > DIR/plan.json` an answer; then "
            "`servetwin dash DIR`."
        )
        return
    keep("results", "results")
    if st.session_state.get("results") not in found:
        st.session_state["results"] = next(iter(found))
    chosen = found[st.selectbox("Results", [*found], key="results")]
    if chosen.name == RESULTS:
        _sweep(read_results(chosen))
    else:
        _plan(read_plan(chosen))


# ---------------------------------------------------------------- sweep


def _sweep(results: Results) -> None:
    about = results.about
    state = "" if results.complete else f" of {about['num_runs']:,}: the sweep goes on, or was broken off"
    st.caption(
        f"{about['workload']}: {len(results.frame):,} runs{state}; {about['method']}, means over seeds"
    )
    failed = failures(results)
    if len(failed):
        st.warning(f"{len(failed)} runs failed: they are in no figure")
        st.dataframe(failed, key="failed_runs", hide_index=True)
    price = st.number_input("Price (USD per GPU and hour)", 0.0, value=1.0, key="usd_per_gpu_hour")
    points = with_cost(by_point(results), price)
    names = [
        n
        for n in (*results.figures, "usd_per_hour", "usd_per_million_output_tokens")
        if points[n].notna().any()
    ]
    _frontier(results, points, names)
    _along(results, names)
    st.subheader("Points")
    shown = [*results.parameters, "runs", "failed_runs", *dict.fromkeys((*PREFERRED, *names))]
    st.dataframe(points[[n for n in shown if n in points]], key="points", hide_index=True)


def _frontier(results: Results, points: Any, names: list[str]) -> None:
    st.subheader("Frontier")
    left, right = st.columns(2)
    defaults = [names.index(name) if name in names else 0 for name in PREFERRED]
    x = left.selectbox("Across", names, index=defaults[0], key="frontier_x")
    y = right.selectbox("Up", names, index=defaults[1], key="frontier_y")
    best = frontier(points[x], points[y], x_lower=lower_is_better(x), y_lower=lower_is_better(y))
    labels = [setting_text({p: row[p] for p in results.parameters}) for _, row in points.iterrows()]
    st.plotly_chart(charts.points_and_frontier(points, x, y, labels, best, UNITS), key="frontier")
    words = [f"{name}: {'lower' if lower_is_better(name) else 'higher'} is better" for name in (x, y)]
    st.caption(f"On the line: points that no other one beats in both. {'; '.join(words)}.")


def _along(results: Results, names: list[str]) -> None:
    st.subheader("Along a parameter")
    parameters = [*results.parameters]
    if not parameters:
        return
    left, middle, right = st.columns(3)
    parameter = left.selectbox("Parameter", parameters, key="along_parameter")
    figures = [name for name in names if name in results.figures]
    start = figures.index(PREFERRED[0]) if PREFERRED[0] in figures else 0
    figure = middle.selectbox("Figure", figures, index=start, key="along_figure")
    others = [p for p in parameters if p != parameter]
    by = right.selectbox(
        "A line for each", [None, *others], format_func=lambda p: p or "nothing", key="along_by"
    )
    done = results.frame[results.frame["state"] == "done"]
    st.plotly_chart(charts.along_parameter(done, parameter, figure, by, UNITS), key="along")


# ---------------------------------------------------------------- plan


def _plan(plan: Mapping[str, Any]) -> None:
    _answer(plan)
    table = configurations(plan)
    labels = [setting_text(row["settings"]) for row in plan["configurations"]]
    if len(labels) > 1:
        st.subheader("Configurations")
        rates = [row.get("max_request_rate") for row in plan["configurations"]]
        st.plotly_chart(charts.rates_of(labels, rates, plan.get("target_rate")), key="plan_rates")
        priced = (
            "usd_per_million_output_tokens" if table.usd_per_million_output_tokens.notna().any() else "gpus"
        )
        if table[priced].notna().any():
            st.subheader("Rate against cost")
            best = frontier(
                table[priced].tolist(), table.max_request_rate.tolist(), x_lower=True, y_lower=False
            )
            figure = charts.points_and_frontier(table, priced, "max_request_rate", labels, best, UNITS)
            st.plotly_chart(figure, key="plan_cost")
    st.dataframe(table.dropna(axis=1, how="all"), key="configurations", hide_index=True)
    _curve(plan, labels)
    for text in plan.get("assumed", ()):
        st.caption(f"Assumed: {text}")


def _answer(plan: Mapping[str, Any]) -> None:
    slo = plan["slo"]
    limits = ", ".join(
        f"{label} {slo[name]:g} ms" for name, label in METRICS.items() if slo.get(name) is not None
    )
    within = f"p{slo['percentile']:g}" if slo.get("percentile") is not None else "every limit"
    st.caption(
        f"Limits: {limits or 'none but a queue that does not grow'} ({within}); {plan['simulations']} simulations"
    )
    if not plan["feasible"]:
        st.error(f"Not feasible. The nearest feasible point: {plan.get('nearest') or 'none was found'}")
        return
    cost = plan.get("cost") or {}
    figures = {
        "Largest rate": quantity(plan["max_request_rate"], " requests/s"),
        "Headroom to the knee": percent(plan.get("headroom")),
        "Replicas": quantity(plan.get("replicas"), ""),
        "Binding": str(plan.get("binding") or "nothing"),
        "Cost": quantity(cost.get("usd_per_hour"), " USD/h"),
        "Output tokens": quantity(cost.get("usd_per_million_output_tokens"), " USD per million"),
    }
    for column, (label, value) in zip([*st.columns(3), *st.columns(3)], figures.items(), strict=True):
        column.metric(label, value)
    st.caption(
        f"Headroom = knee / largest rate - 1; {plan.get('binding_reason') or 'nothing was waited for'}"
    )
    if plan.get("vllm_serve"):
        st.code(plan["vllm_serve"], language="bash", wrap_lines=True)


def _curve(plan: Mapping[str, Any], labels: list[str]) -> None:
    searched = {
        label: row for label, row in zip(labels, plan["configurations"], strict=True) if row.get("curve")
    }
    if not searched:
        return
    st.subheader("Latency against load")
    left, right = st.columns(2)
    label = left.selectbox("Configuration", [*searched], key="plan_configuration")
    metric = right.selectbox("Latency", [*METRICS], format_func=METRICS.__getitem__, key="plan_metric")
    row = searched[label]
    at = f"p{p:g} " if (p := plan["slo"].get("percentile")) is not None else ""
    figure = charts.load_curve(row, metric, f"{at}{METRICS[metric]}", plan["slo"].get(metric))
    st.plotly_chart(figure, key="plan_curve")
    st.caption("Bars: 95 % intervals over seeds, or over resamples of the only run at a rate.")
    for note in row.get("notes", ()):
        st.caption(f"Note: {note}")
