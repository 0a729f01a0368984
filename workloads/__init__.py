"""Requests to serve: specifications, arrival processes, length models, presets and trace readers."""

from servetwin.workloads.arrivals import AllAtOnce, Arrivals, Constant, Gamma, Hyperexponential, Poisson
from servetwin.workloads.lengths import Empirical, Fixed, Lengths, Lognormal, QuantileGrid
from servetwin.workloads.opening import open_workload
from servetwin.workloads.prefixes import SystemPrompts
from servetwin.workloads.presets import PRESETS, Preset, build_preset
from servetwin.workloads.spec import ListWorkload, RequestSpec, Workload, WorkloadError
from servetwin.workloads.synthetic import Synthetic
from servetwin.workloads.traces import Trace, read_trace, to_jsonl, write_jsonl

__all__ = [
    "PRESETS",
    "AllAtOnce",
    "Arrivals",
    "Constant",
    "Empirical",
    "Fixed",
    "Gamma",
    "Hyperexponential",
    "Lengths",
    "ListWorkload",
    "Lognormal",
    "Poisson",
    "Preset",
    "QuantileGrid",
    "RequestSpec",
    "Synthetic",
    "SystemPrompts",
    "Trace",
    "Workload",
    "WorkloadError",
    "build_preset",
    "open_workload",
    "read_trace",
    "to_jsonl",
    "write_jsonl",
]
