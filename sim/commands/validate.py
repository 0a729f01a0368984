"""`servetwin validate`: a measured run simulated again, and how far apart the two are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from servetwin.sim.commands.flag_kinds import count, flag, numbers, switch
from servetwin.sim.commands.flags import (
    CACHE,
    MODEL,
    SCHEDULER,
    CaptureSizes,
    EnforceEager,
    MaxCaptureSize,
    MaxModelLen,
)

COMPARISON = Group("Comparison", sort_key=0)
LIVE = Group("Live", sort_key=1)
LIVE_FLAGS = ("loads", "live_runs", "seconds", "out", "load_format", "dtype", "threads", "seed")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ValidateFlags:
    """What is compared with what. Settings of the engine that are not given are read from the measured run."""

    profile: Annotated[
        Path,
        flag(COMPARISON, "Step times: a profile of `servetwin fit`, or a folder of per-kernel tables."),
    ]
    model: Annotated[Path, flag(MODEL, "Folder with the model's config.json.")]
    workload: Annotated[
        Path | None,
        flag(
            COMPARISON,
            "What the run was fed with, joined row by row: says what prompts share (default: a run folder's own, else "
            "every prompt is its own).",
        ),
    ] = None
    calibrate: Annotated[
        Literal["none", "first-half"],
        flag(
            COMPARISON,
            "first-half: fit one factor (of the dense operators; with a profile of whole steps, of all times on the "
            "device) to the mean time per token of the first half of the requests, and judge by the second half.",
        ),
    ] = "none"
    save_profile: Annotated[
        Path | None,
        flag(
            COMPARISON,
            "Write the profile with the calibrated factor to this file, for `run --executor FILE`.",
        ),
    ] = None
    again: Annotated[
        Path | None,
        flag(
            COMPARISON,
            "A second measured run of the same load, to see beside each error how far the engine is from itself.",
        ),
    ] = None
    noise_runs: Annotated[
        int,
        count(
            COMPARISON,
            "Simulations with noise on every step, as like steps of the run differ from each other (3 % where it "
            "does not say its steps): how much of each error is chance.",
        ),
    ] = 3
    max_ttft_error: Annotated[
        float, flag(COMPARISON, "Largest error of the mean TTFT that passes, in percent.")
    ] = 8.0
    max_tpot_error: Annotated[float, flag(COMPARISON, "The same for the mean TPOT.")] = 5.0
    max_e2e_error: Annotated[float, flag(COMPARISON, "The same for the mean E2E.")] = 5.0
    json: Annotated[bool, switch(COMPARISON, "Print one JSON object.")] = False
    live: Annotated[
        bool,
        switch(
            LIVE,
            "RUN is a workload (a file or a preset): it is served live at several loads, then simulated and compared.",
        ),
    ] = False
    loads: Annotated[
        tuple[float, ...],
        numbers(LIVE, "Loads in percent of the capacity that the profile foretells."),
    ] = (30, 60, 90)
    live_runs: Annotated[
        int, count(LIVE, "Live runs of each load; 2: their difference stands beside each error.")
    ] = 2
    seconds: Annotated[float, flag(LIVE, "Length of each.")] = 60.0
    out: Annotated[
        Path | None, flag(LIVE, "Folder to keep the runs in (default: they are thrown away).", "--out", "-o")
    ] = None
    load_format: Annotated[
        Literal["auto", "dummy"],
        flag(LIVE, "dummy: random weights for the configuration in the model folder."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        flag(LIVE, "Data type of weights, activations and KV cache."),
    ] = "auto"
    threads: Annotated[
        int | None, count(LIVE, "CPU threads that torch computes with (default: as in the profile).")
    ] = None
    seed: Annotated[int, count(LIVE, "Of a preset's draws, of random weights and of token ids.")] = 0
    tensor_parallel_size: Annotated[
        int | None,
        count(
            MODEL,
            "Cards that the measured engine ran on (default: as the run says, else 1). With a profile of fewer cards "
            "step times are an estimate.",
        ),
    ] = None
    gpu: Annotated[
        str | None,
        flag(MODEL, "With several cards: the one whose link counts (default: the one of the profile)."),
    ] = None
    enforce_eager: EnforceEager = False
    cudagraph_capture_sizes: CaptureSizes = None
    max_cudagraph_capture_size: MaxCaptureSize = None
    max_model_len: MaxModelLen = None
    num_gpu_blocks_override: Annotated[
        int | None, count(CACHE, "Blocks in the pool of the measured run.")
    ] = None
    block_size: Annotated[int | None, count(CACHE, "Tokens per KV block.")] = None
    enable_prefix_caching: Annotated[bool | None, flag(CACHE, "Reuse blocks of equal prefixes.")] = None
    max_num_seqs: Annotated[int | None, count(SCHEDULER, "Requests that run at once.")] = None
    max_num_batched_tokens: Annotated[int | None, count(SCHEDULER, "Tokens per step.")] = None
    async_scheduling: Annotated[
        bool | None, flag(SCHEDULER, "Two steps in flight (default: as the run says, else on).")
    ] = None


def validate(
    run: Annotated[
        str,
        Parameter(
            help="A run folder (`run --live`), a folder with requests.jsonl, or a result of `vllm bench serve "
            "--save-detailed`; with --live a workload."
        ),
    ],
    /,
    *,
    flags: ValidateFlags,
) -> int:
    """Simulate a measured run again and compare: latencies, throughput, the curves of the queue, and how sure that is.

    Of a run folder also step by step: the time of each measured batch, foretold, beside the spread of like ones; how
    long the plans of both agree, and why they part. TTFT = first token - queued; TPOT = (last - first token) / (output
    tokens - 1); ITL = gaps between outputs; E2E = last token - queued; queue = first scheduled - queued. Errors are
    simulated / measured - 1. Exit code 4: an error is beyond its threshold.
    """
    if flags.live:
        from servetwin.sim.commands.validate_live import carry_out as serve_and_compare

        return serve_and_compare(run, flags)
    from servetwin.sim.commands.validating import carry_out

    return carry_out(Path(run), flags)
