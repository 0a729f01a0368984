"""`servetwin export`: a run in the formats of other tools. Each format is a command of its own."""

from __future__ import annotations

from cyclopts import App

from servetwin.sim.commands.help_layout import help_formatter

COMMANDS = {
    "bench-json": (
        "A result file of `vllm bench serve --save-result --save-detailed`.",
        "Keys and units are those of vLLM 0.22.0: scalars ending in _ms are milliseconds; ttfts, itls and start_times "
        "are seconds. completed = ended by length or stop, failed = the rest; totals, rates and statistics are those "
        "of completed requests; duration = last finish of one - first arrival; std divides by n; percentiles are "
        "linear; the itls of a request add up to its last - first token (with drafts: one gap a verification). "
        "Texts are empty.",
    ),
    "prometheus": (
        "Metrics in Prometheus' text format, under the names of vLLM 0.22.0.",
        "Names, labels and buckets are vLLM's; with several replicas the label engine is the replica. Queue time = "
        "first scheduled - queued; TTFT and E2E count from the sending. Histograms of requests hold those that ended "
        "by length or stop; aborted ones are in request_success only, refused ones nowhere. What vLLM has and no run "
        "of ours knows is listed in a comment: caches of other engines and of multi-modal inputs, LoRA, accepted "
        "tokens by position, idle times and reuse gaps of blocks, estimates of FLOPs and bytes.",
    ),
    "perfetto": (
        "A trace for Perfetto (ui.perfetto.dev) and chrome://tracing, as Chrome's JSON.",
        "Times are in microseconds of simulated time. A process for each engine: its steps (with asynchronous "
        "scheduling host, worker and device on tracks of their own), requests, KV blocks and tokens as counters, "
        "evictions. A track for each request: queued, prefill, decode, preempted, with an arrow from each preemption "
        "to the resume. A name ending in .gz is compressed, and opens as well.",
    ),
    "csv": (
        "The tables of a run as CSV files: requests, steps, events, blocks, gaps between outputs, tokens.",
        "A name ending in .csv takes one table, any other is a folder for all of them. Columns are those of the run "
        "folder, steps one row each; times are seconds of simulated time, null is empty.",
    ),
}
"""Name -> what it writes, in a line, and what to know of it."""

export = App(name="export", help_format="plaintext", help_formatter=help_formatter(), version_flags=[])
for _name, _texts in COMMANDS.items():
    _function = _name.replace("-", "_")
    export.command(
        f"servetwin.sim.commands.export_{_function}:{_function}", name=_name, help="\n\n".join(_texts)
    )
