"""`servetwin trace`: look at traces, and make others of them. Each command is a module of its own."""

from __future__ import annotations

from cyclopts import App

from servetwin.sim.commands.help_layout import help_formatter
from servetwin.sim.commands.trace_verdicts import VERDICTS

COMMANDS = {
    "info": (
        "Say what a trace is like: rows, rate, burstiness, lengths, reuse of prefixes, sessions, and its traps.",
        "Every row that cannot be used is dropped, counted by reason, and the first ones are shown; --strict refuses "
        "the trace for the first one. What would mislead a replay is said: coarse clocks, idle ends, cut lengths. "
        "Reuse is unknown, not zero, where a trace does not say what prompts begin with. p50, p90 and p99 are "
        "interpolated linearly between the two nearest values.",
    ),
    "convert": (
        "Write a trace as our JSONL or Parquet, or as Mooncake's JSON lines.",
        "Our own formats (told by the ending of --out) hold every field of every request. What Mooncake's has no place "
        "for is said. Damaged rows are refused; rows without use, such as failed requests, are dropped and counted.",
    ),
    "scale": (
        "Send the same requests faster or slower, by a speed-up or to a rate.",
        "--speed-up says how many times as fast, --rate says how many requests a second. Arrivals, think times and "
        "times of giving up are scaled together; lengths and prefixes stay.",
    ),
    "cut": (
        "Keep a window of time, or the first requests.",
        "Seconds count from the start of the trace, where a foreign one has its first request; `trace info` shows its "
        "rate over time. The window begins at --start, which is in it, and ends before --end. Sessions are cut where "
        "they are.",
    ),
    "merge": (
        "Put several traces on one clock, as if their clients used one engine.",
        "Each starts at second 0 (a foreign trace with its first request; our own formats keep their clock). Request "
        "and session ids that an earlier trace has, too, get @2, @3 ... behind them. "
        "Prefix ids are numbered anew, so that traces share none, unless --shared-prefixes. The flags of reading hold "
        "for all of them whose format has a use for them.",
    ),
    "resample": (
        "Draw more (or fewer) requests like those of a trace.",
        "Requests are drawn with replacement (a bootstrap), each with the gap before it; sessions as a whole. Rate, "
        "gap CV and joint lengths are those of the trace on average; bursts of several gaps are not kept. What is "
        "drawn again gets @2, @3 ... behind its ids, and shares of its prefix only what other requests share, too.",
    ),
    "fit": (
        "Fit a synthetic model to a trace: arrivals, lengths, shared prefixes, sessions.",
        "`trace synth` makes requests of it. What the trace does not say stays unknown in the model, and is said; "
        "--check compares the two.",
        VERDICTS,
    ),
    "synth": (
        "Make requests like those of a trace, from a fitted model or a preset.",
        "The same model, number, rate and seed give the same file; --against compares them with a trace.",
        VERDICTS,
    ),
    "presets": ("List the synthetic workloads that have names.", "`servetwin run NAME` serves one."),
}
"""Name -> what it does, in a line, and what to know of it."""

trace = App(name="trace", help_format="plaintext", help_formatter=help_formatter(), version_flags=[])
for _name, _texts in COMMANDS.items():
    trace.command(f"servetwin.sim.commands.trace_{_name}:{_name}", name=_name, help="\n\n".join(_texts))
