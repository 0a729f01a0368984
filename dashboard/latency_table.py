"""The table of latencies with their formulas, as several pages show it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import streamlit as st

from servetwin.dashboard.figures import Latency
from servetwin.dashboard.words import NO_DATA
from servetwin.sim.metrics import statistics_ms


def latency_table(latencies: Mapping[str, Latency], metric_defs: str) -> None:
    """Statistics in ms with the formulas below."""
    st.subheader("Latencies (ms)")
    table = pd.DataFrame({one.label: statistics_ms(one.distribution) for one in latencies.values()}).T
    known = table.astype(np.float64)
    st.dataframe(known.astype(object).where(known.notna(), NO_DATA).map(_cell), key="latencies")
    lines = [f"- **{one.label}**: {one.formula}" for one in latencies.values()]
    st.caption(f"{metric_defs}, completed requests, percentiles linear:\n\n" + "\n".join(lines))


def _cell(value: object) -> str:
    return value if isinstance(value, str) else f"{value:,.6g}"
