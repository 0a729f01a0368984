"""All figures of a trace together, as `servetwin trace info` shows them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from servetwin.workloads.statistics.arrivals import ArrivalFigures, arrival_figures
from servetwin.workloads.statistics.lengths import correlation
from servetwin.workloads.statistics.prefix_reuse import PrefixFigures, prefix_figures
from servetwin.workloads.statistics.sessions import SessionFigures, session_figures
from servetwin.workloads.statistics.summary import Summary
from servetwin.workloads.statistics.ticks import Ticks, find_crowded_ticks
from servetwin.workloads.statistics.warnings import arrival_warnings, length_warnings, row_warnings
from servetwin.workloads.traces.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFigures:
    """What a trace is like. None stands where the trace does not say it, or where a figure is not defined."""

    trace: Trace
    arrivals: ArrivalFigures | None
    """Of all requests; None without arrival times of any span."""
    ticks: Ticks | None
    prompt_tokens: Summary
    output_tokens: Summary
    length_correlation: float | None
    """Pearson's, of prompt and output tokens."""
    prefix: PrefixFigures | None
    """None: the trace says nothing of what prompts begin with, so reuse is unknown (not zero)."""
    sessions: SessionFigures | None
    """None: no request belongs to a session."""
    warnings: tuple[str, ...] = field(default=())
    """What a replay of this trace would suffer from."""

    def to_json(self) -> dict[str, Any]:
        """As `servetwin trace info --json` prints it."""
        return {
            "format": self.trace.format,
            "path": self.trace.path,
            **self.trace.counts(),
            "first_dropped": [asdict(offence) for offence in self.trace.offences],
            "arrivals": self.trace.arrivals,
            **self._arrivals_json(),
            "prompt_tokens": self.prompt_tokens.to_json(),
            "output_tokens": self.output_tokens.to_json(),
            "length_correlation": self.length_correlation,
            "prefix": self._prefix_json(),
            "sessions": 0 if self.sessions is None else self.sessions.sessions,
            "session_figures": None if self.sessions is None else self.sessions.to_json(),
            "about": self.trace.about,
            "notes": list(self.trace.notes),
            "warnings": list(self.warnings),
        }

    def _arrivals_json(self) -> dict[str, Any]:
        a = self.arrivals
        return {
            "span_s": None if a is None else a.span_s,
            "rate_per_s": None if a is None else a.rate_per_s,
            "gap_cv": None if a is None else a.gap_cv,
            "dispersion_1s": None if a is None else a.dispersion_1s,
            "peak_to_mean_minute": None if a is None else a.peak_to_mean_minute,
            "rate_profile": None if a is None else {"bin_s": a.bin_s, "requests": list(a.requests_per_bin)},
            "ticks": None if self.ticks is None else asdict(self.ticks),
        }

    def _prefix_json(self) -> dict[str, Any]:
        """The key that others rely on is there even where nothing is known."""
        return {"block_hit_percent_infinite": None} if self.prefix is None else self.prefix.to_json()


def trace_figures(trace: Trace) -> TraceFigures:
    """Everything that is known of a trace. Time and memory grow with the rows and their prefix ids, no faster."""
    requests = trace.requests
    timed = trace.arrivals != "none"
    arrivals = arrival_figures(requests.arrival_s) if timed else None
    ticks = find_crowded_ticks(requests) if timed else None
    prompt, output = requests.prompt_tokens, requests.output_tokens
    return TraceFigures(
        trace=trace,
        arrivals=arrivals,
        ticks=ticks,
        prompt_tokens=Summary.of(prompt),
        output_tokens=Summary.of(output),
        length_correlation=correlation(prompt, output),
        prefix=prefix_figures(requests),
        sessions=session_figures(requests, timed=timed),
        warnings=(
            *row_warnings(trace),
            *arrival_warnings(trace.arrivals, arrivals, ticks, len(requests)),
            *length_warnings("prompts", prompt),
            *length_warnings("outputs", output),
        ),
    )
