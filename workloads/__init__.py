"""Requests to serve: specifications, arrival processes, length models, presets and trace readers."""

from servetwin.workloads.arrivals import (
    AllAtOnce,
    Arrivals,
    Constant,
    Gamma,
    Hyperexponential,
    Poisson,
    Weibull,
)
from servetwin.workloads.block_tree import BlockTree
from servetwin.workloads.closed_loop import ClosedLoop, Users, as_workload
from servetwin.workloads.columns import RequestColumns, values_of
from servetwin.workloads.export import write_mooncake, write_trace
from servetwin.workloads.families import SharedPrefixFamilies
from servetwin.workloads.joint_lengths import (
    EmpiricalPairs,
    Independent,
    JointLengths,
    RankCorrelated,
    SplitTotal,
)
from servetwin.workloads.lengths import (
    Exponential,
    Fixed,
    Lengths,
    Lognormal,
    ParetoLognormal,
    QuantileLengths,
    TruncatedNormal,
    Uniform,
    Zipf,
)
from servetwin.workloads.merging import merged
from servetwin.workloads.modulated import MMPP, NegativeBinomialCounts, OnOff
from servetwin.workloads.observed_lengths import Empirical, QuantileGrid
from servetwin.workloads.opening import open_workload
from servetwin.workloads.prefixes import SystemPrompts
from servetwin.workloads.presets import PRESETS, Preset, build_preset
from servetwin.workloads.prompts import LengthsAndPrefixes, Prefixes, PromptModel, Prompts
from servetwin.workloads.resampling import resampled
from servetwin.workloads.schedules import Diurnal, RateSteps, Spike, Spikes
from servetwin.workloads.spec import ArgumentError, ListWorkload, RequestSpec, Workload, WorkloadError
from servetwin.workloads.statistics import TraceFigures, trace_figures
from servetwin.workloads.superposition import Superposition
from servetwin.workloads.synthetic import Synthetic
from servetwin.workloads.traces import ReadOptions, Tolerance, Trace, read_trace, to_jsonl, write_jsonl
from servetwin.workloads.transform import cut, first_of, scaled, scaled_to_rate, ticks_spread
from servetwin.workloads.vllm_arrivals import BenchServe, RampUp
from servetwin.workloads.vllm_datasets import PrefixRepetitionDataset, RandomDataset

__all__ = [
    "MMPP",
    "PRESETS",
    "AllAtOnce",
    "ArgumentError",
    "Arrivals",
    "BenchServe",
    "BlockTree",
    "ClosedLoop",
    "Constant",
    "Diurnal",
    "Empirical",
    "EmpiricalPairs",
    "Exponential",
    "Fixed",
    "Gamma",
    "Hyperexponential",
    "Independent",
    "JointLengths",
    "Lengths",
    "LengthsAndPrefixes",
    "ListWorkload",
    "Lognormal",
    "NegativeBinomialCounts",
    "OnOff",
    "ParetoLognormal",
    "Poisson",
    "PrefixRepetitionDataset",
    "Prefixes",
    "Preset",
    "PromptModel",
    "Prompts",
    "QuantileGrid",
    "QuantileLengths",
    "RampUp",
    "RandomDataset",
    "RankCorrelated",
    "RateSteps",
    "ReadOptions",
    "RequestColumns",
    "RequestSpec",
    "SharedPrefixFamilies",
    "Spike",
    "Spikes",
    "SplitTotal",
    "Superposition",
    "Synthetic",
    "SystemPrompts",
    "Tolerance",
    "Trace",
    "TraceFigures",
    "TruncatedNormal",
    "Uniform",
    "Users",
    "Weibull",
    "Workload",
    "WorkloadError",
    "Zipf",
    "as_workload",
    "build_preset",
    "cut",
    "first_of",
    "merged",
    "open_workload",
    "read_trace",
    "resampled",
    "scaled",
    "scaled_to_rate",
    "ticks_spread",
    "to_jsonl",
    "trace_figures",
    "values_of",
    "write_jsonl",
    "write_mooncake",
    "write_trace",
]
