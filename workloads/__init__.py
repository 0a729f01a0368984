"""Requests to serve: specifications, arrival processes, length models, presets and trace readers."""

from servetwin.workloads.spec import ListWorkload, RequestSpec, Workload, WorkloadError

__all__ = ["ListWorkload", "RequestSpec", "Workload", "WorkloadError"]
