"""`servetwin run`: a workload through the engine in simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from servetwin.sim.commands.flags import EngineFlags, whole_number

RUN = Group("Run", sort_key=0)
LOAD = Group("Load", sort_key=1)
SAMPLING = Group("Sampling (executor torch)", sort_key=5)


def run(
    workload: Annotated[
        str,
        Parameter(help="A trace file, our JSONL (one request a line), or a preset: chat, code (synthetic)."),
    ],
    /,
    *,
    executor: Annotated[
        str | None,
        Parameter(
            group=RUN,
            help="Required. torch: a real model, measured. constant: every step takes --step-time-s. "
            "module:attribute: your own, called with ExecutorOptions (the current folder is searched, too).",
        ),
    ] = None,
    step_time_s: Annotated[
        float | None,
        Parameter(group=RUN, help="Seconds that every step takes; executor constant only, above 0."),
    ] = None,
    out: Annotated[
        Path | None, Parameter(group=RUN, help="Folder to write the run to (default: nothing is written).")
    ] = None,
    overwrite: Annotated[
        bool, Parameter(group=RUN, negative=(), help="Replace the run in the folder of --out.")
    ] = False,
    save_tokens: Annotated[
        bool, Parameter(group=RUN, negative=(), help="Write tokens/: every output token with its time.")
    ] = False,
    save_plans: Annotated[
        bool,
        Parameter(group=RUN, negative=(), help="Write plans.jsonl.zst: every plan, for `servetwin execute`."),
    ] = False,
    log_blocks: Annotated[
        bool | None,
        Parameter(
            group=RUN, help="Write blocks/: the life of every KV block (default: below 50,000 requests)."
        ),
    ] = None,
    metric_defs: Annotated[
        str,
        Parameter(group=RUN, help="Whose definitions: vllm-bench, vllm-server, guidellm or inference-perf."),
    ] = "vllm-bench",
    json: Annotated[
        bool, Parameter(group=RUN, negative=(), help="Print the summary as one JSON object.")
    ] = False,
    seed: Annotated[
        int, Parameter(group=RUN, help="Root of every random stream: workload, token ids, sampling.")
    ] = 0,
    num_prompts: Annotated[
        int | None,
        Parameter(
            group=LOAD,
            converter=whole_number,
            help="Only the first N requests (default: all; a preset: 1,000).",
        ),
    ] = None,
    request_rate: Annotated[
        float | None,
        Parameter(group=LOAD, help="Requests/s of a preset instead of its own; traces keep theirs."),
    ] = None,
    ignore_eos: Annotated[
        bool,
        Parameter(group=LOAD, help="Generate exactly output_tokens tokens; a request's own ignore_eos wins."),
    ] = True,
    temperature: Annotated[float, Parameter(group=SAMPLING, help="0 is greedy.")] = 0.0,
    top_k: Annotated[
        int, Parameter(group=SAMPLING, help="Draw from the k most likely tokens; 0 is off.")
    ] = 0,
    top_p: Annotated[
        float, Parameter(group=SAMPLING, help="Draw from the most likely tokens with this probability.")
    ] = 1.0,
    engine: EngineFlags = EngineFlags(),  # noqa: B008 - frozen, and its defaults are what --help shows
) -> int:
    """Serve a workload in simulated time.

    Requests arrive, the scheduler (vLLM 0.22.0 V1, synchronous) decides, the executor runs what it decided, and the
    time that took moves the simulated clock; idle time is skipped. Results go to stdout, progress to stderr.
    """
    from servetwin.sim.commands.errors import UsageError
    from servetwin.sim.commands.running import RunRequest, carry_out

    if executor is None:
        raise UsageError(
            "--executor is missing: torch (with --model), constant (with --step-time-s), or module:attribute"
        )

    return carry_out(
        RunRequest(
            workload=workload,
            executor=executor,
            engine=engine,
            step_time_s=step_time_s,
            out=out,
            overwrite=overwrite,
            save_tokens=save_tokens,
            save_plans=save_plans,
            log_blocks=log_blocks,
            metric_defs=metric_defs,
            json=json,
            seed=seed,
            num_prompts=num_prompts,
            request_rate=request_rate,
            ignore_eos=ignore_eos,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
    )
