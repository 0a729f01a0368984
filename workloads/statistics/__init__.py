"""What a trace is like, in figures: arrivals, lengths, reuse of prefixes, sessions, and what to beware of."""

from servetwin.workloads.statistics.figures import TraceFigures, trace_figures

__all__ = ["TraceFigures", "trace_figures"]
