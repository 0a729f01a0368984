"""Sentences about what in a trace would mislead whoever replays it."""

from __future__ import annotations

from collections.abc import Iterator

from servetwin.workloads.statistics.arrivals import ArrivalFigures
from servetwin.workloads.statistics.lengths import Tokens, find_cap, find_usual
from servetwin.workloads.statistics.ticks import Ticks
from servetwin.workloads.traces.trace import ArrivalTimes, Trace
from servetwin.workloads.wording import counted

MANY_DROPPED = 0.1
"""Of the rows: from so many dropped ones on, what is left may not be like the whole."""


def row_warnings(trace: Trace) -> Iterator[str]:
    """About rows that could not be used."""
    dropped = sum(count for reason, count in trace.rows_dropped.items() if reason not in trace.unwanted)
    if dropped > MANY_DROPPED * trace.rows_read:
        yield (
            f"{dropped:,} of {counted(trace.rows_read, 'row')} dropped ({100 * dropped / trace.rows_read:.0f} %): "
            "rate, lengths and reuse are of the rest"
        )


def arrival_warnings(
    recorded: ArrivalTimes, arrivals: ArrivalFigures | None, ticks: Ticks | None, requests: int
) -> Iterator[str]:
    """About the times of a trace."""
    if recorded == "none":
        yield "no arrival times: the file has lengths only, all requests stand at 0 s until a rate is given"
    elif arrivals is None and requests > 1:
        yield "all requests arrive at one time"
    if recorded == "first turns":
        yield (
            "only first turns have arrival times: later turns stand at the start of their session and are sent when "
            "the turn before has ended, so rate, gaps and dispersion here count them all at that start"
        )
    yield from replay_warnings(arrivals, ticks)


def replay_warnings(arrivals: ArrivalFigures | None, ticks: Ticks | None) -> Iterator[str]:
    """About what a replay of the recorded times shows that is not the service's doing."""
    if ticks is not None:
        yield (
            f"arrivals are quantised: {ticks.requests:,} requests stand at {ticks.instants:,} instants, "
            f"{ticks.tick_s:.6g} s apart, {ticks.requests / ticks.instants:.1f} at each; gap CV, dispersion "
            "and peaks of the queue are artefacts of that: trace convert --jitter-ticks spreads them"
        )
    if arrivals is not None:
        yield from _idle_warnings(arrivals)


def _idle_warnings(arrivals: ArrivalFigures) -> Iterator[str]:
    head_s, tail_s, span_s = arrivals.idle_head_s, arrivals.idle_tail_s, arrivals.span_s
    if head_s:
        yield (
            f"idle head: the first {head_s:,.6g} s ({100 * head_s / span_s:.0f} % of the span) have hardly any "
            f"requests, so a slice from row 1 measures idleness: trace cut --start {head_s:.6g}"
        )
    if tail_s:
        yield (
            f"idle tail: the last {tail_s:,.6g} s ({100 * tail_s / span_s:.0f} % of the span) have hardly any "
            f"requests: trace cut --end {span_s - tail_s:.6g}"
        )


def length_warnings(what: str, tokens: Tokens) -> Iterator[str]:
    """About the lengths of `what`: prompts or outputs."""
    total = len(tokens)
    cap, usual = find_cap(tokens), find_usual(tokens)
    if cap is not None:
        where = (
            f"{cap.high_tokens:,}"
            if cap.low_tokens == cap.high_tokens
            else f"{cap.low_tokens:,} to {cap.high_tokens:,}"
        )
        yield (
            f"{what} look cut: {cap.requests:,} requests ({100 * cap.requests / total:.1f} %) stand at the largest "
            f"length, {where} tokens; longer ones are not in this trace"
        )
    if usual is not None and usual.requests == total:
        yield f"all {what} have {usual.tokens:,} tokens"
    elif usual is not None and (cap is None or usual.tokens < cap.low_tokens):
        yield (
            f"one length is common: {100 * usual.requests / total:.1f} % of {what} have {usual.tokens:,} tokens"
        )
    if what == "outputs" and (ones := int((tokens == 1).sum())):
        yield f"{counted(ones, 'output')} of one token: such requests have no time per output token (TPOT)"
